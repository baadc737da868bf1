"""Three minutes of chaos: a deployment loses nothing, whatever fails around it."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from tests.chaos.driver import LOADED
from tests.chaos.mutations import MUTATIONS
from tests.chaos.world import RUN_MARK, processes_with

ROOT = Path(__file__).parents[2]
SEED, MINUTES, RUN_SECONDS_MAX = 1, 3, 1500
PROCESSES_MIN, KINDS_MIN, END_SECONDS_MAX = 10, 2, 90


def driver(*arguments: str, report: Path, run_id: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.chaos", "--report", str(report), *arguments]
    environ = {**os.environ, RUN_MARK: run_id}
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, start_new_session=True, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_is_paid_twice(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run_id = uuid.uuid4().hex
    arguments = ("--seed", str(SEED), "--minutes", str(MINUTES))
    with driver(*arguments, report=report, run_id=run_id) as run:
        try:
            _, problems = run.communicate(timeout=RUN_SECONDS_MAX)
        finally:
            run.send_signal(signal.SIGTERM)
    assert run.returncode == 0, problems
    assert processes_with(RUN_MARK, run_id) == []
    found = json.loads(report.read_text())
    assert found["facts"]["jobs"] > 100
    # On a busy machine, a single restart of a control plane can take a minute.
    assert len({fault["kind"] for fault in found["faults"]}) >= KINDS_MIN
    assert not any(found["violations"].values())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    run_id = uuid.uuid4().hex
    with driver("--minutes", "5", report=tmp_path / "report.json", run_id=run_id) as run:
        assert run.stderr is not None
        assert any(line.startswith(LOADED) for line in run.stderr)
        assert len(processes_with(RUN_MARK, run_id)) > PROCESSES_MIN
        run.send_signal(number)
        run.stderr.read()  # until the last process has closed it
        is_killed = number == signal.SIGKILL
        assert run.wait(END_SECONDS_MAX) == (-signal.SIGKILL if is_killed else 130)
    assert processes_with(RUN_MARK, run_id) == []


def test_every_mutation_fits_the_code() -> None:
    """A guard that was moved has to be moved in the list of mutations, too."""
    for name, mutation in MUTATIONS.items():
        for change in mutation.changes:
            path = ROOT.joinpath("src", *change.module.split(".")).with_suffix(".py")
            assert path.read_text("utf-8").count(change.old) == 1, name
    assert os.environ.get("CHAOS_MUTATION") is None
