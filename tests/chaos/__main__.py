"""Runs a deployment under load and seeded faults, and audits it afterwards.

    python -m tests.chaos --seed 1 --minutes 3
    python -m tests.chaos --seed 1 --minutes 1 --mutate unique-dispatch
    python -m tests.chaos --mutate all

Exits with 0 if nothing was violated; with `--mutate`, if a check noticed that the guard was missing.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

from tests.chaos import mutations
from tests.chaos.guardian import INTERRUPTED, run_guarded

HOOK = Path(__file__).with_name("hook")
GUARDED, NOT_CAUGHT = "CHAOS_GUARDED", "NOT CAUGHT"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="everything random follows from it")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long the load lasts")
    parser.add_argument("--no-faults", action="store_true", help="load only")
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas")
    parser.add_argument("--mutate", default="", help="a guard to remove, or all")
    parser.add_argument("--report", type=Path, help="file for the report as JSON")
    parser.add_argument("--keep", type=Path, help="folder to which the logs are copied")
    options = parser.parse_args()
    if GUARDED not in os.environ:
        command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:]]
        return run_guarded(command, {**os.environ, GUARDED: "1"})
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        return run(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all processes of the run are ended\n")
        return INTERRUPTED


def run(options: argparse.Namespace) -> int:
    if options.mutate == "all":
        return _mutate_all(options, list(mutations.MUTATIONS))
    # Forked processes inherit what the hook changes in the process that forks them.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HOOK), str(Path.cwd())])
    os.environ["CHAOS_MUTATION"] = options.mutate
    os.environ.setdefault("CHAOS_RUN", uuid.uuid4().hex)
    folder = Path(tempfile.mkdtemp(prefix="run-"))
    os.environ["CHAOS_TYPES"] = str(folder)
    from tests.chaos.driver import Plan, drive

    try:
        plan = Plan(
            options.seed,
            options.minutes,
            mutation=options.mutate,
            has_faults=not options.no_faults,
            only=tuple(filter(None, options.only.split(","))),
        )
        report = asyncio.run(drive(plan, folder))
        if options.report:
            report.save(options.report)
        sys.stdout.write(report.text() + "\n")
        if options.mutate:
            return int(not mutations.caught_by(options.mutate, report.violations))
        return int(bool(report.violation_count or report.problems))
    finally:
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for log in folder.glob("*.log"):
                shutil.copy(log, options.keep)
        shutil.rmtree(folder, ignore_errors=True)


def _mutate_all(options: argparse.Namespace, names: list[str]) -> int:
    """Runs each in a process of its own, because a mutation stays in the process that forks."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="comfyfleet-chaos-") as folder:
        report = Path(folder, "report.json")
        for name in names:
            command = [sys.executable, "-m", "tests.chaos", "--seed", str(options.seed)]
            command += ["--minutes", str(options.minutes), "--mutate", name]
            report.unlink(missing_ok=True)
            environ = {name: value for name, value in os.environ.items() if name != GUARDED}
            subprocess.run([*command, "--report", str(report)], env=environ, check=False)
            checks = mutations.caught_by(name, _violations(report))
            lines.append((name, "; ".join(checks) or NOT_CAUGHT))
    sys.stdout.write("guard              check that noticed its absence\n")
    sys.stdout.write("".join(f"{name:18} {checks}\n" for name, checks in lines))
    return int(any(checks == NOT_CAUGHT for _, checks in lines))


def _violations(report: Path) -> dict[str, list[str]]:
    """Returns the violations by check; none if the run broke off."""
    if not report.exists():
        return {}
    return dict(json.loads(report.read_text("utf-8"))["violations"])


if __name__ == "__main__":
    sys.exit(main())
