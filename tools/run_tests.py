"""Runs the tests, and decides whether they passed.

    python tools/run_tests.py          runs the tests, then CPU-time tests, then browser tests
    python tools/run_tests.py --all    includes slow tests

Thousands of tests with real processes share one machine, so a few may fail because of its load. Up
to five failed tests are run once more, alone, and are listed at the very end. Unit tests and the
contract tests of the queue, jobs, graphs and pipelines are never run again, because they are meant
to find races. Tests that measure CPU time run alone. A test above its limit is measured up to three
times, and is listed with its values.
Every collected test must have an outcome, so that an aborted run can't pass.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
RERUNS_MAX = 5
SOME_FAILED = 1  # pytest's status if tests failed; any other value except 0 means an aborted run
NEVER_RERUN = (
    "tests/unit/",
    "tests/contract/queue/",
    "tests/contract/jobs/",
    "tests/contract/graphs/",
    "tests/contract/pipelines/",
)
# Many tests wait for processes, so four concurrent tests keep two cores busy. The tests start in
# folder order, so that acceptance tests, which take longest, come first.
PARALLEL = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "--durations=30"]
# These tests measure time, which would include the time in which other tests occupy the core.
STALLS = "tests/security/stalls"
ALONE = ["-n", "0", "--durations=10", STALLS]
# A browser keeps a core busy, so only two run at the same time, and no other tests run with them.
BROWSERS = ["-n", "2", "--dist", "loadfile", "--durations=10", "tests/browser"]


@dataclass(frozen=True)
class Run:
    """One run of pytest: its exit status, the collected tests, and their outcomes.

    `measured_again` has the values of the tests whose first measurement was above their limit.
    """

    status: int
    collected: frozenset[str]
    outcomes: dict[str, str]
    measured_again: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return sorted(test for test, outcome in self.outcomes.items() if outcome == "failed")

    @property
    def without_outcome(self) -> list[str]:
        return sorted(self.collected - self.outcomes.keys())

    def count(self, outcome: str) -> int:
        return sum(value == outcome for value in self.outcomes.values())


def run_pytest(arguments: Sequence[str], *, folder: Path = ROOT) -> Run:
    with tempfile.TemporaryDirectory(prefix="comfyfleet-outcomes-") as scratch:
        record_path = Path(scratch, "outcomes.json")
        search_path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "OUTCOMES": str(record_path),
            "PYTHONPATH": os.pathsep.join(filter(None, search_path)),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", *arguments]
        status = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        if not record_path.exists():
            return Run(status, frozenset(), {})
        record = json.loads(record_path.read_text(encoding="utf-8"))
        return Run(
            status, frozenset(record["collected"]), record["outcomes"], record["measured_again"]
        )


def problem_of(run: Run) -> str:
    """Returns why a run's failed tests are not enough to judge it, or an empty string."""
    if run.status not in (0, SOME_FAILED):
        return f"pytest was aborted with exit status {run.status}"
    if not run.collected:
        return "no test was collected"
    if run.without_outcome:
        names = ", ".join(run.without_outcome[:RERUNS_MAX])
        return f"{len(run.without_outcome)} tests have no outcome, among them {names}"
    if (run.status == 0) != (not run.failed):
        return f"pytest's exit status is {run.status}, but {len(run.failed)} tests failed"
    return ""


def refusal_of(failed: Sequence[str]) -> str:
    """Returns why failed tests must not be run again, or an empty string."""
    if len(failed) > RERUNS_MAX:
        return f"{len(failed)} tests failed; up to {RERUNS_MAX} failed tests would be run again"
    for test in failed:
        if test.startswith(NEVER_RERUN):
            return f"{test} failed, and tests in its folder are never run again"
    return ""


class Gate:
    """Runs suites one after the other, and records the tests that needed a second run."""

    def __init__(self, folder: Path = ROOT) -> None:
        self._folder = folder
        self.needed_rerun: list[str] = []
        self.measured_again: dict[str, str] = {}
        self.lines: list[str] = []

    def passes(self, name: str, arguments: Sequence[str], options: Sequence[str]) -> bool:
        started = time.monotonic()
        run = run_pytest([*arguments, *options], folder=self._folder)
        self.measured_again |= run.measured_again
        reason = problem_of(run) or refusal_of(run.failed)
        if run.failed and not reason:
            print("\nRunning the failed tests once more, alone:", flush=True)
            again = run_pytest([*options, *run.failed], folder=self._folder)
            reason = problem_of(again) or "; ".join(f"{test} failed twice" for test in again.failed)
            if not reason and again.count("skipped"):
                reason = "a test that had failed was skipped in the second run"
            if not reason and again.collected != frozenset(run.failed):
                reason = "the second run did not collect the tests that had failed"
            if not reason:
                self.needed_rerun += run.failed
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        self.lines.append(
            f"{name}: {run.count('passed')} passed, {run.count('failed')} failed,"
            f" {run.count('skipped')} skipped of {len(run.collected)} in {minutes}:{seconds:02}"
            + (f" — {reason}" if reason else "")
        )
        return not reason

    def report(self) -> None:
        print("\n" + "\n".join(self.lines))
        if self.measured_again:
            print("Measured again, because the first measurement was above the limit:")
            print("\n".join(f"  {test}: {values}" for test, values in self.measured_again.items()))
        if self.needed_rerun:
            print("Passed only in the second run. Each has a race, in the test or in the code:")
            print("\n".join(f"  {test}" for test in self.needed_rerun))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="include slow tests")
    options = parser.parse_args()
    marks = ["-m", ""] if options.all else []
    # `make check` runs tests/tidy.
    separate_folders = ["tests/tidy", "tests/browser", STALLS]
    parallel_options = [*PARALLEL, *(f"--ignore={folder}" for folder in separate_folders)]
    gate = Gate()
    is_green = gate.passes("tests", parallel_options, marks)
    is_green = is_green and gate.passes("stalls", ALONE, marks)
    is_green = is_green and gate.passes("browsers", BROWSERS, marks)
    gate.report()
    return 0 if is_green else 1


if __name__ == "__main__":
    sys.exit(main())
