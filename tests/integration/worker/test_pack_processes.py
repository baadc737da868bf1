"""Two ComfyUIs of one worker process: real processes, of which one dies, or the worker does."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.support.server.ports import first_of_free_ports
from tests.support.server.processes import COMFYFLEET, Process
from tests.support.workers.memory_plane import SECRET, Dispatch, Plane
from tests.support.workers.prompts import steps

HAPPEN_SECONDS_MAX = 60.0


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + HAPPEN_SECONDS_MAX
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """What was started and still lives is ended afterwards."""
    yield tmp_path / "state"
    for note in (tmp_path / "state").glob("*/comfyui.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):
            os.killpg(pid_in(note), signal.SIGKILL)


def pid_in(note: Path) -> int:
    return int(json.loads(note.read_text())["pid"])


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextlib.contextmanager
def pack(plane: Plane, state: Path, port: int) -> Iterator[Process]:
    """Returns when both of its workers ask for jobs; none is given one to hold beside what it runs."""
    plane.prefetches = False
    plane.polls.clear()
    process = Process(
        "pack",
        *("worker", "--control", plane.url, "--fleet", "gpus", "--worker-id", "gpu"),
        *("--state", str(state), "--backend", f"http://127.0.0.1:{port}", "--per-gpu", "2"),
        *("--comfyui-command", f"{COMFYFLEET} engine --port {{port}} --data {{folder}}"),
        folder=state.parent,
        environ={"COMFYFLEET_FLEET_SECRET": SECRET},
    )
    try:
        until(lambda: {each.worker_id for each in plane.polls} == {"gpu-1", "gpu-2"})
        yield process
    finally:
        process.kill()


def engines(state: Path) -> dict[str, int]:
    """The pids of the engines by the worker that has started them."""
    return {f"gpu-{note.parent.name}": pid_in(note) for note in state.glob("*/comfyui.json")}


def run_by_both(plane: Plane, jobs: list[Dispatch]) -> bool:
    return {each.worker_id for each in jobs if each.started and not each.word} == {"gpu-1", "gpu-2"}


@pytest.mark.slow
def test_one_engine_is_killed_and_healed_while_the_other_goes_on(plane: Plane, state: Path) -> None:
    with pack(plane, state, first_of_free_ports(2)) as process:
        jobs = [plane.add(steps(30, 50)), plane.add(steps(30, 50))]
        until(lambda: run_by_both(plane, jobs))
        before = engines(state)
        killed, other = jobs if jobs[0].worker_id == "gpu-2" else jobs[::-1]
        os.kill(before["gpu-2"], signal.SIGKILL)
        until(lambda: all(each.status == "ended" for each in jobs))
        until(lambda: engines(state)["gpu-2"] != before["gpu-2"])
        after = [plane.add(steps(20, 50)), plane.add(steps(20, 50))]
        until(lambda: run_by_both(plane, after))
        assert engines(state)["gpu-1"] == before["gpu-1"]
        alive = engines(state)
        # Drained, the one hands back nothing of the other's.
        plane.draining.add("gpu-1")
        third = [plane.add(steps(1, 1)) for _ in range(3)]
        until(lambda: all(each.word for each in [*after, *third]))
        assert {each.worker_id for each in third} == {"gpu-2"}
        process.terminate()
        assert process.wait() == 0
    assert (other.leases, killed.leases) == (1, 2)
    assert all(each.result.outputs for each in [*jobs, *after, *third])
    assert not any(lives(pid) for pid in alive.values())
    assert plane.keys == {}
    assert {register.worker_id for register in plane.registers} == {"gpu-1", "gpu-2"}


@pytest.mark.slow
def test_a_killed_worker_owns_its_engines_again_and_their_runs(plane: Plane, state: Path) -> None:
    port = first_of_free_ports(2)
    with pack(plane, state, port) as process:
        jobs = [plane.add(steps(40, 100)), plane.add(steps(40, 100))]
        until(lambda: run_by_both(plane, jobs))
        before = engines(state)
        process.kill()
    assert all(lives(pid) for pid in before.values())
    with pack(plane, state, port) as process:
        until(lambda: all(each.word for each in jobs))
        assert engines(state) == before
        process.terminate()
        assert process.wait() == 0
    assert [each.leases for each in jobs] == [1, 1]
    assert all(each.result.outputs for each in jobs)
    assert not any(lives(pid) for pid in before.values())
