"""A pack of workers beside servers that are as small as can be."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.worker.test_owned_comfyui import SERVER
from tests.support.server.ports import first_of_free_ports
from tests.support.workers.memory_plane import Plane, eventually
from tests.support.workers.prompts import steps
from tests.support.workers.workers import settings_for

from comfyfleet.engine import serve_in_thread
from comfyfleet.errors import InvalidInput, WorkerRevoked
from comfyfleet.log_context import current_ids
from comfyfleet.worker import managed_process, shutdown
from comfyfleet.worker.pack import BarredSizes, PackGpu, WorkerPack, plan_gpus
from comfyfleet.worker.pack_plan import GpuSlots, PackRules, PackSettings, PackSlot, lay_out_pack
from comfyfleet.worker.settings import WorkerSettings

SECONDS_MAX = 30.0
ALONE = {"AWS_EC2_METADATA_DISABLED": "true"}
# Kept to the end: a process that is collected while it runs is complained of, in any later test.
LEFT: list[object] = []


class Box:
    """A machine whose packs serve at the same ports, and the pids of all that they have started."""

    def __init__(self, plane: Plane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        script, self._pids = folder / "server.py", folder / "pids"
        script.write_text(SERVER)
        self.command = f"{sys.executable} {script} {{port}} {self._pids}"
        self.url = f"http://127.0.0.1:{first_of_free_ports(8)}"

    def settings(self, command: str | None = None) -> WorkerSettings:
        return settings_for(
            self.plane,
            self.url,
            self.folder / "state",
            worker_id="gpu",
            comfyui_command=command or self.command,
        )

    @property
    def living(self) -> set[int]:
        pids = self._pids.read_text().split() if self._pids.exists() else ()
        return {int(pid) for pid in pids if _lives(int(pid))}

    @contextlib.asynccontextmanager
    async def pack(
        self, per_gpu: int | None = 2, command: str | None = None
    ) -> AsyncIterator[tuple[WorkerPack, "asyncio.Task[None]"]]:
        settings = self.settings(command)
        (places,) = lay_out_pack(settings, PackSettings(per_gpu=per_gpu))
        rules = PackRules(sample_seconds=0.05) if per_gpu is None else None
        pack = WorkerPack([PackGpu(places, rules)], ALONE, settings.state)
        self.plane.polls.clear()
        work = asyncio.create_task(pack.work())
        try:
            yield pack, work
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def until_polled_by(self, *names: str) -> None:
        await eventually(lambda: {each.worker_id for each in self.plane.polls} == set(names))


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.fixture
def box(plane: Plane, tmp_path: Path) -> Iterator[Box]:
    box = Box(plane, tmp_path)
    yield box
    for pid in box.living:
        os.kill(pid, signal.SIGKILL)


@contextlib.asynccontextmanager
async def killed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What a worker does at its end is not done within, as if it had been killed."""

    async def leave(owned: object) -> None:
        LEFT.append(owned)

    with monkeypatch.context() as patched:
        patched.setattr(managed_process.ManagedProcess, "stop", leave)
        yield


async def test_places_that_are_gone_are_emptied_and_living_ones_are_owned_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with killed(monkeypatch), box.pack(3):
        await box.until_polled_by("gpu-1", "gpu-2", "gpu-3")
    before = box.living
    assert len(before) == 3
    async with box.pack(2) as (pack, work):
        await box.until_polled_by("gpu-1", "gpu-2")
        assert len(box.living) == 2
        assert box.living < before
        pack.stop.ask("shutdown", 5)
        await asyncio.wait_for(work, SECONDS_MAX)
    assert not box.living


async def test_auto_goes_on_with_as_many_as_live(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    async with box.pack(None):
        await box.until_polled_by("gpu-1")
    assert not box.living
    async with killed(monkeypatch), box.pack(3):
        await box.until_polled_by("gpu-1", "gpu-2", "gpu-3")
    before = box.living
    async with box.pack(None) as (pack, _):
        await box.until_polled_by("gpu-1", "gpu-2", "gpu-3")
        assert box.living == before
        assert len(pack.members["0"]) == 3
    assert not box.living


async def test_one_that_is_revoked_leaves_the_others_and_the_last_one_tells_it(box: Box) -> None:
    async with box.pack() as (_, work):
        await box.until_polled_by("gpu-1", "gpu-2")
        box.plane.revoked.add("gpu-2")
        await eventually(lambda: len(box.living) == 1)
        assert not work.done()
        box.plane.revoked.add("gpu-1")
        with pytest.raises(WorkerRevoked):
            await asyncio.wait_for(work, SECONDS_MAX)
    assert not box.living


async def test_a_stop_that_was_asked_for_is_no_revocation_though_one_was_revoked(box: Box) -> None:
    async with box.pack() as (pack, work):
        await box.until_polled_by("gpu-1", "gpu-2")
        box.plane.revoked.add("gpu-2")
        await eventually(lambda: len(box.living) == 1)
        pack.stop.ask("shutdown", 5)
        await asyncio.wait_for(work, SECONDS_MAX)
    assert not box.living


async def test_a_notice_to_the_last_one_is_no_revocation_of_all(box: Box) -> None:
    async with box.pack() as (pack, work):
        await box.until_polled_by("gpu-1", "gpu-2")
        box.plane.revoked.add("gpu-2")
        await eventually(lambda: len(pack.members["0"]) == 1)
        (left,) = pack.members["0"]
        assert left.worker is not None
        left.worker.stop.ask("spot", 5)
        await asyncio.wait_for(work, SECONDS_MAX)


async def test_one_that_can_not_be_started_ends_all_and_says_why(box: Box) -> None:
    async with box.pack(2, "/nowhere/comfyui {port}") as (_, work):
        with pytest.raises(InvalidInput, match="/nowhere/comfyui can't be started"):
            await asyncio.wait_for(work, SECONDS_MAX)


async def test_a_second_signal_hurries_all_of_them(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managed_process, "STOP_SECONDS_MAX", 600.0)
    monkeypatch.setattr(shutdown, "HURRY_SECONDS", 0.1)
    async with box.pack(2, f"sh -c 'trap \"\" TERM; exec {box.command}'") as (pack, work):
        await box.until_polled_by("gpu-1", "gpu-2")
        pack.stop.ask("shutdown", 5)
        await eventually(lambda: not box.plane.keys)
        assert len(box.living) == 2
        pack.stop.ask("shutdown", 0)
        await asyncio.wait_for(work, SECONDS_MAX)
    assert not box.living


async def test_each_line_of_the_log_says_whose_it_is(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen: set[object] = set()

    def note(_: logging.LogRecord) -> bool:
        seen.add(current_ids().get("worker_id"))
        return True

    caplog.handler.addFilter(note)
    async with box.pack():
        await box.until_polled_by("gpu-1", "gpu-2")
    assert {"gpu-1", "gpu-2"} <= seen


async def test_a_started_comfyui_is_told_its_gpu_and_none_of_our_keys(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMFYFLEET_FLEET_SECRET", "secret")
    monkeypatch.setenv("COMFY_CLOUD_API_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "/models")
    (gpu,) = await plan_gpus(box.settings(), PackSettings(gpus=("3",)), {})
    pack = WorkerPack([gpu], ALONE, box.folder / "state")
    work = asyncio.create_task(pack.work())
    await box.until_polled_by("gpu")
    (pid,) = box.living
    environ = psutil.Process(pid).environ()
    pack.stop.ask("shutdown", 0)
    await asyncio.wait_for(work, SECONDS_MAX)
    assert "secret" not in environ.values()
    assert (environ["CUDA_VISIBLE_DEVICES"], environ["HF_HOME"]) == ("3", "/models")


async def test_auto_is_refused_where_nobody_tells_the_memory(box: Box) -> None:
    auto = PackSettings(per_gpu=None)
    with pytest.raises(InvalidInput, match="requires the memory usage"):
        await plan_gpus(box.settings(), auto, {"CUDA_VISIBLE_DEVICES": ""})
    for wrong in ("false", "echo 7", "echo 9 8", "/nowhere"):
        silent = PackSettings(per_gpu=None, memory_command=wrong)
        with pytest.raises(InvalidInput, match="does not report the memory of GPU 0"):
            await plan_gpus(box.settings(), silent, {})
    told = PackSettings(per_gpu=None, gpus=("2",), memory_command="echo {gpu} 80")
    (gpu,) = await plan_gpus(box.settings(), told, {})
    assert gpu.read_memory is not None
    assert await gpu.read_memory() == (2, 80)


def test_what_ran_out_of_memory_is_remembered_by_the_next_worker(tmp_path: Path) -> None:
    path = tmp_path / "state" / "barred-0.json"
    assert BarredSizes(path).read(1000.0) == {}
    BarredSizes(path).write({2: 900.0, 3: 4600.0}, 1000.0)
    # Another process, another beginning of its clock: an hour is left.
    assert BarredSizes(path).read(50.0) == {3: pytest.approx(3650.0, abs=5)}
    path.write_text("[]")
    assert BarredSizes(path).read(0.0) == {}


async def test_each_tells_its_own_models_and_is_given_jobs_beside_the_other(
    plane: Plane, tmp_path: Path
) -> None:
    plane.prefetches = False
    with serve_in_thread() as one, serve_in_thread() as two:
        engines = {"gpu-1": one.url, "gpu-2": two.url}
        slots = tuple(
            PackSlot(number, settings_for(plane, url, tmp_path / name, worker_id=name))
            for number, (name, url) in enumerate(engines.items(), 1)
        )
        pack = WorkerPack([PackGpu(GpuSlots("0", {}, slots))], ALONE, tmp_path)
        work = asyncio.create_task(pack.work())
        await eventually(lambda: {each.worker_id for each in plane.polls} == set(engines))
        jobs = [plane.add(steps(4, 50), model_key=key) for key in ("cat", "dog")]
        await eventually(lambda: all(each.status == "ended" for each in jobs))
        await eventually(lambda: pack.counts["0"].finished == 2)
        told = {job.worker_id: (job.more["model_key"],) for job in jobs}
        assert set(told) == set(engines)
        await eventually(
            lambda: {each.worker_id: each.models_loaded for each in plane.polls} == told
        )
        pack.stop.ask("shutdown", 5)
        await asyncio.wait_for(work, SECONDS_MAX)
