"""`--per-gpu auto` with engines that share a GPU: one more brings more jobs a minute once, not twice."""

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.backends.gpu_engine import NODE, memory_command
from tests.support.backends.prompts import node
from tests.support.server.ports import first_of_free_ports
from tests.support.workers.memory_plane import Plane, eventually
from tests.support.workers.prompts import failing_on_gpu
from tests.support.workers.workers import settings_for

from comfyfleet.worker.machine import command_memory_reader
from comfyfleet.worker.pack import PackGpu, WorkerPack, serve_metrics
from comfyfleet.worker.pack_plan import PackRules, PackSettings, lay_out_pack

RULES = PackRules(
    most=4,
    sample_seconds=0.1,
    window_seconds=2.0,
    window_jobs=8,
    spare_seconds=600.0,
    retry_seconds=600.0,
)
ROOT = Path(__file__).parents[3]
ALONE = {"AWS_EC2_METADATA_DISABLED": "true"}
QUEUED_MIN = 8
GROW_SECONDS_MAX = 120.0


@contextlib.asynccontextmanager
async def packing(plane: Plane, folder: Path, *, total: int) -> AsyncIterator[WorkerPack]:
    """On a GPU whose memory has room for so many engines."""
    gpu = folder / "gpu"
    gpu.mkdir()
    engine = f"env PYTHONPATH={ROOT} {sys.executable} -m tests.support.backends.gpu_engine {{port}} {gpu}"
    url = f"http://127.0.0.1:{first_of_free_ports(4)}"
    base = settings_for(plane, url, folder / "state", worker_id="gpu", comfyui_command=engine)
    (places,) = lay_out_pack(base, PackSettings(per_gpu=None))
    command = memory_command(gpu, each=10, total=10 * total)
    pack = WorkerPack(
        [PackGpu(places, RULES, command_memory_reader(command, "0"))], ALONE, base.state
    )
    work = asyncio.create_task(pack.work())
    try:
        yield pack
        pack.stop.ask("shutdown", 5)
        await work
    finally:
        pack.stop.ask("shutdown", 0)
        await asyncio.gather(work, return_exceptions=True)
    assert list(gpu.glob("*.engine")) == [], "engines were left behind"


async def keep_queued(plane: Plane) -> None:
    for number in range(100_000):
        await eventually(lambda: _queued(plane) < QUEUED_MIN)
        prompt = {
            "1": node(NODE, number=number),
            "9": node("SaveImage", images=["1", 0], filename_prefix="made"),
        }
        plane.add(prompt)


def _queued(plane: Plane) -> int:
    return sum(each.status == "queued" for each in plane.dispatches.values())


def decided(pack: WorkerPack) -> dict[tuple[str, str], int]:
    return {(move.value, reason.value): n for (_, move, reason), n in pack.decisions.items()}


@pytest.mark.slow
async def test_it_grows_to_two_not_to_three_and_shrinks_when_memory_runs_out(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plane.requeues_again = False
    async with packing(plane, tmp_path, total=10) as pack:
        feeding = asyncio.create_task(keep_queued(plane))
        await eventually(lambda: ("remove", "no_gain") in decided(pack), GROW_SECONDS_MAX)
        assert decided(pack) == {
            ("add", "backlog"): 2,
            ("keep", "gain"): 1,
            ("remove", "no_gain"): 1,
        }
        await eventually(lambda: len(pack.members["0"]) == 2, 30)
        feeding.cancel()
        plane.add(failing_on_gpu("CUDA error: out of memory"))
        await eventually(lambda: ("remove", "out_of_memory") in decided(pack), 30)
        await eventually(lambda: len(pack.members["0"]) == 1, 30)
        with serve_metrics(pack, "127.0.0.1", 0) as port:
            async with httpx.AsyncClient() as client:
                told = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    label = 'decision="remove",gpu="0",reason="out_of_memory"'
    assert f"comfyfleet_worker_pack_decisions_total{{{label}}} 1.0" in told
    assert 'comfyfleet_worker_backends{gpu="0",state="ready"} 1.0' in told
    lines = [line for line in caplog.messages if "on GPU 0" in line]
    assert lines == [
        "starting another ComfyUI on GPU 0, because jobs are waiting on all of them",
        "keeping the number of ComfyUIs on GPU 0, because the newest one increased the throughput",
        "starting another ComfyUI on GPU 0, because jobs are waiting on all of them",
        "stopping one ComfyUI on GPU 0, because "
        "the newest one didn't increase the throughput enough",
        "stopping one ComfyUI on GPU 0, because a run ran out of memory",
    ]
    # Whoever went has ended what it ran.
    run = [each for each in plane.dispatches.values() if each.leases]
    assert all(each.leases == 1 for each in run)


@pytest.mark.slow
async def test_it_stays_at_one_where_the_memory_has_no_room(plane: Plane, tmp_path: Path) -> None:
    async with packing(plane, tmp_path, total=2) as pack:
        feeding = asyncio.create_task(keep_queued(plane))
        await eventually(lambda: decided(pack), GROW_SECONDS_MAX)
        feeding.cancel()
    assert decided(pack) == {("keep", "no_memory"): 1}
