"""Workers that stop: asked to, told to by their machine, or killed; and those that come back."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import pytest
from tests.integration.worker.test_overlap import depth
from tests.support.workers.memory_plane import SECRET, Plane, eventually
from tests.support.workers.plane_server import Served
from tests.support.workers.prompts import picture, steps
from tests.support.workers.workers import settings_for

from comfyfleet.engine.serve import Served as Engine
from comfyfleet.worker.factory import open_worker
from comfyfleet.worker.platform import NoMachine, NoProtection, Notice, Platform

COMFYFLEET = Path(sys.executable).parent / "comfyfleet"
STOP_SECONDS_MAX = 40
# Two for those who don't answer; the rest is for a slow machine.
SECOND_SIGNAL_SECONDS_MAX = 8
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(plane: Plane, engine: Engine, tmp_path: Path) -> Iterator[Start]:
    """The command, as a process with a state of its own."""
    children: list[subprocess.Popen[str]] = []

    def start(*more: str) -> "subprocess.Popen[str]":
        arguments = ("--control", plane.url, "--fleet", "gpus", "--stage", "production")
        backend = ("--backend", engine.url, "--worker-id", "gpu-1", "--state", str(tmp_path))
        environ = {
            "COMFYFLEET_FLEET_SECRET": SECRET,
            "COMFYFLEET_HEARTBEAT_SECONDS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        child = subprocess.Popen(
            [COMFYFLEET, "worker", *arguments, *backend, *more],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


async def ended(child: "subprocess.Popen[str]") -> tuple[int, str]:
    _, said = await asyncio.to_thread(child.communicate, timeout=STOP_SECONDS_MAX)
    return child.returncode, said


async def told(child: "subprocess.Popen[str]", what: str) -> None:
    """Until a line of its log says so."""
    assert child.stderr is not None
    async with asyncio.timeout(STOP_SECONDS_MAX):
        while what not in (line := await asyncio.to_thread(child.stderr.readline)):
            assert line, "it ended without a word of it"


async def test_sigterm_finishes_what_runs_hands_back_what_waits_and_deregisters(
    plane: Plane, engine: Engine, tmp_path: Path, start: Start
) -> None:
    plane.requeues_again = False
    first, second = plane.add(steps(40, 50)), plane.add(steps(1, 1))
    child = start()
    await eventually(lambda: first.started and depth(engine) == 2)
    child.send_signal(signal.SIGTERM)
    code, said = await ended(child)
    assert code == 0
    assert first.result.outputs
    assert second.requeue.reason == "shutdown"
    assert plane.keys == {}
    assert not (tmp_path / "worker.json").exists()
    assert [json.loads(line)["message"] for line in said.splitlines()][-1] == "stopped"
    assert SECRET not in said
    assert "expires=" not in said, "a signed URL was logged"


async def test_what_does_not_fit_into_the_time_left_is_handed_back(
    plane: Plane, engine: Engine, start: Start
) -> None:
    plane.requeues_again = False
    job = plane.add(steps(1000, 50))
    child = start("--grace-seconds", "1")
    await eventually(lambda: job.started)
    child.send_signal(signal.SIGTERM)
    assert (await ended(child))[0] == 0
    assert job.requeue.reason == "shutdown"
    assert depth(engine) == 0


@pytest.mark.slow
async def test_a_control_plane_that_is_away_does_not_keep_it_from_stopping(
    served: Served, plane: Plane, engine: Engine, start: Start
) -> None:
    job = plane.add(steps(1000, 50))
    child = start("--grace-seconds", "1")
    await eventually(lambda: job.started)
    served.down()
    child.send_signal(signal.SIGTERM)
    assert (await ended(child))[0] == 0
    assert depth(engine) == 0


async def test_a_second_signal_means_now_though_nobody_answers(
    served: Served, plane: Plane, engine: Engine, start: Start
) -> None:
    job = plane.add(steps(1000, 50))
    child = start("--grace-seconds", "600")
    await eventually(lambda: job.started)
    plane.delays |= {"requeue": 600, "deregister": 600}
    child.send_signal(signal.SIGTERM)
    # Signals are not queued: a second one that comes before the first was seen is the same one.
    await told(child, "stopping")
    child.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert (await ended(child))[0] == 0
    assert time.monotonic() - began < SECOND_SIGNAL_SECONDS_MAX
    assert depth(engine) == 0


async def test_a_worker_that_is_revoked_stops_its_run_and_never_comes_back(
    plane: Plane, engine: Engine, tmp_path: Path, start: Start
) -> None:
    job = plane.add(steps(1000, 50))
    child = start()
    await eventually(lambda: job.started)
    plane.revoked.add("gpu-1")
    code, _ = await ended(child)
    assert code == 77
    assert depth(engine) == 0
    assert job.word is None, "a revoked worker has nothing to say"
    assert len(plane.registers) == 1
    code, _ = await ended(start())
    assert (code, len(plane.registers)) == (77, 1)
    (tmp_path / "worker.json").unlink()
    code, _ = await ended(start())
    assert (code, len(plane.registers)) == (77, 1)


async def test_a_running_worker_goes_on_with_the_new_key_that_it_is_told(
    plane: Plane, tmp_path: Path, start: Start
) -> None:
    job = plane.add(steps(60, 50))
    child = start()
    await eventually(lambda: job.started)
    old = plane.keys_used[-1]
    plane.rotate("f" * 64)
    await eventually(lambda: plane.keys_used[-1] != old)
    del plane.keys[old]
    await eventually(lambda: job.word is not None)
    assert job.result.outputs
    assert len(plane.registers) == 1, "it had no need to join again"
    assert json.loads((tmp_path / "worker.json").read_text())["key"] == "f" * 64
    child.send_signal(signal.SIGTERM)
    assert (await ended(child))[0] == 0


async def test_a_wrong_secret_is_said_in_one_line(
    plane: Plane, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.workers.memory_plane.SECRET", "another one")
    code, said = await ended(start())
    assert code == 1
    assert said.splitlines()[-1].startswith("error: register failed with status 401")


@pytest.mark.slow
async def test_a_worker_that_is_shut_out_leaves_nothing_running(
    plane: Plane, engine: Engine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.add(steps(1000, 50))
    child = start()
    await eventually(lambda: job.started)
    monkeypatch.setattr("tests.support.workers.memory_plane.SECRET", "another one")
    plane.keys.clear()
    assert (await ended(child))[0] == 1
    assert depth(engine) == 0


async def test_a_killed_worker_comes_back_and_goes_on_with_what_still_runs(
    plane: Plane, engine: Engine, tmp_path: Path, start: Start
) -> None:
    jobs = [plane.add(steps(60, 50)), plane.add(steps(2, 50))]
    child = start()
    await eventually(lambda: jobs[0].started and depth(engine) == 2)
    child.kill()
    await ended(child)
    assert oct((tmp_path / "worker.json").stat().st_mode)[-3:] == "600"
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "leases").iterdir())
    start()
    await eventually(lambda: all(job.word for job in jobs))
    assert len(plane.registers) == 1
    assert [job.leases for job in jobs] == [1, 1]
    assert all(job.result.outputs for job in jobs)
    assert len(engine.engine.history.page()) == 2, "a prompt was run again"


async def test_a_killed_worker_delivers_a_run_that_ended_meanwhile(
    plane: Plane, engine: Engine, start: Start
) -> None:
    job = plane.add(steps(10, 50))
    child = start()
    await eventually(lambda: job.started)
    child.kill()
    await ended(child)
    await eventually(lambda: depth(engine) == 0)
    start()
    await eventually(lambda: job.word)
    assert job.result.outputs
    assert len(engine.engine.history.page()) == 1


async def test_a_killed_worker_whose_lease_is_lost_cancels_what_still_runs(
    plane: Plane, engine: Engine, start: Start
) -> None:
    job = plane.add(steps(1000, 50))
    child = start()
    await eventually(lambda: job.started)
    child.kill()
    await ended(child)
    plane.lose(job)
    after = plane.add(picture())
    start()
    await eventually(lambda: after.word)
    assert depth(engine) == 0
    assert job.words == []


async def test_it_owns_a_comfyui_and_starts_it_again_when_it_dies(
    plane: Plane, tmp_path: Path, unused_tcp_port: int
) -> None:
    port, pids = str(unused_tcp_port), tmp_path / "pids"
    script = tmp_path / "comfyui.sh"
    script.write_text(f"#!/bin/sh\necho $$ >> {pids}\nexec {COMFYFLEET} engine --port {port}\n")
    script.chmod(0o755)
    url = f"http://127.0.0.1:{port}"
    settings = settings_for(
        plane, url, tmp_path / "state", comfyui_command=str(script), max_retries=1
    )
    first = plane.add(picture())
    async with open_worker(settings, {}) as worker:
        work = asyncio.create_task(worker.work())
        await eventually(lambda: first.word)
        second = plane.add(steps(40, 50))
        await eventually(lambda: second.started)
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
        await eventually(lambda: second.status == "ended", seconds=40)
        worker.stop.ask("shutdown", 5)
        await work
    assert second.result.outputs
    # On a busy machine the worker may lease it before ComfyUI is back, and requeue it.
    assert second.leases >= 2
    assert len(pids.read_text().split()) == 2


@dataclass(frozen=True)
class Told:
    kind: Literal["spot", "rebalance"]
    at: datetime | None


class Once:
    """A machine that is told once, when the test says so."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[Told] = asyncio.Queue()

    async def notices(self) -> AsyncIterator[Notice]:
        while True:
            yield await self.coming.get()


@contextlib.asynccontextmanager
async def on_spot(plane: Plane, engine: Engine, state: Path) -> AsyncIterator[tuple[Once, object]]:
    once = Once()
    platform = Platform(NoMachine(), once, NoProtection())
    async with open_worker(settings_for(plane, engine.url, state), {}, platform) as worker:
        work = asyncio.create_task(worker.work())
        yield once, work
        await asyncio.wait_for(work, STOP_SECONDS_MAX)


async def test_a_spot_notice_is_a_deadline(plane: Plane, engine: Engine, tmp_path: Path) -> None:
    plane.requeues_again = False
    job, waiting = plane.add(steps(1000, 50)), plane.add(steps(1, 1))
    async with on_spot(plane, engine, tmp_path) as (once, _):
        await eventually(lambda: job.started and depth(engine) == 2)
        once.coming.put_nowait(Told("spot", datetime.now(UTC) + timedelta(seconds=2)))
        await eventually(lambda: waiting.word)
        assert not job.word
    assert (job.requeue.reason, waiting.requeue.reason) == ("spot", "spot")
    assert plane.keys == {}


async def test_a_spot_notice_that_comes_too_late_still_hands_jobs_back(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.requeues_again = False
    job = plane.add(steps(1000, 50))
    async with on_spot(plane, engine, tmp_path) as (once, _):
        await eventually(lambda: job.started)
        once.coming.put_nowait(Told("spot", datetime.now(UTC) - timedelta(seconds=5)))
    assert job.requeue.reason == "spot"


async def test_rebalance_advice_lets_a_run_end(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.requeues_again = False
    job, waiting = plane.add(steps(40, 50)), plane.add(steps(1, 1))
    async with on_spot(plane, engine, tmp_path) as (once, _):
        await eventually(lambda: job.started and depth(engine) == 2)
        once.coming.put_nowait(Told("rebalance", None))
    assert job.result.outputs
    assert waiting.requeue.reason == "rebalance"
