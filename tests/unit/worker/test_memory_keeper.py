"""When a ComfyUI that keeps memory is asked to free it, and when it is restarted."""

from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from comfyfleet.comfy.backend import Device
from comfyfleet.worker import memory_keeper
from comfyfleet.worker.memory_keeper import (
    MemoryKeeper,
    MemoryState,
    read_memory,
)

GB = 1024**3
PLENTY = MemoryState(50 * GB, 100 * GB, 40 * GB)
SHORT = MemoryState(5 * GB, 100 * GB, 80 * GB)
SHORT_BY_OTHERS = MemoryState(5 * GB, 100 * GB, 2 * GB)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_keeper, "FREED_SECONDS", 0)


class Scene:
    """`after`: the memory once ComfyUI was asked to free it."""

    def __init__(self, before: MemoryState, after: MemoryState, *, gpu_kept: int = 0) -> None:
        self.before, self.after, self.gpu_kept = before, after, gpu_kept
        self.is_needed = False
        self.freed = self.restarted = 0
        self.keeper = MemoryKeeper(
            share=0.1,
            read=self.read,
            devices=self.devices,
            free=self.free,
            is_needed=lambda: self.is_needed,
            restart=self.restart,
        )

    async def read(self) -> MemoryState:
        return self.after if self.freed else self.before

    async def devices(self) -> Sequence[Device]:
        return [Device("a GPU", "cuda", 24 * GB, 20 * GB, self.gpu_kept)]

    async def free(self) -> None:
        self.freed += 1
        self.keeper.note_freed()

    def restart(self, reason: str) -> None:
        self.restarted += 1

    async def jobs(self, number: int) -> "Scene":
        for _ in range(number):
            await self.keeper.look()
        return self


async def test_with_enough_memory_nothing_happens() -> None:
    scene = await Scene(PLENTY, PLENTY).jobs(50)
    assert (scene.freed, scene.restarted) == (0, 0)


async def test_it_is_asked_first_and_not_restarted_if_that_helps() -> None:
    scene = await Scene(SHORT, PLENTY).jobs(50)
    assert (scene.freed, scene.restarted) == (1, 0)


async def test_it_is_restarted_if_asking_does_not_help_and_not_again_for_twenty_jobs() -> None:
    scene = await Scene(SHORT, SHORT).jobs(1)
    assert (scene.freed, scene.restarted) == (1, 1)
    await scene.jobs(19)
    assert scene.restarted == 1
    await scene.jobs(1)
    assert scene.restarted == scene.keeper.restarts == 2


async def test_what_other_programs_use_is_no_reason_to_restart_it() -> None:
    scene = await Scene(SHORT_BY_OTHERS, SHORT_BY_OTHERS).jobs(50)
    assert scene.restarted == 0


async def test_nothing_happens_while_the_next_job_needs_the_loaded_model() -> None:
    scene = Scene(SHORT, SHORT)
    scene.is_needed = True
    await scene.jobs(50)
    assert (scene.freed, scene.restarted) == (0, 0)
    scene.is_needed = False
    await scene.jobs(1)
    assert (scene.freed, scene.restarted) == (1, 1)


async def test_gpu_memory_that_stays_allocated_after_it_was_freed_needs_a_restart() -> None:
    scene = Scene(PLENTY, PLENTY, gpu_kept=10 * GB)
    await scene.jobs(5)
    assert scene.restarted == 0, "a loaded model is no leak"
    await scene.free()
    await scene.jobs(1)
    assert scene.restarted == 1


async def test_a_limit_of_zero_switches_it_off() -> None:
    scene = Scene(SHORT, SHORT)
    scene.keeper._share = 0
    await scene.jobs(50)
    assert (scene.freed, scene.restarted) == (0, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(tmp_path: Path, version: int) -> None:
    folder = tmp_path if version == 2 else tmp_path / "memory"
    folder.mkdir(exist_ok=True)
    limit, usage = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("memory.max", "memory.current"),
    }[version]
    total = min(GB, psutil.virtual_memory().total // 2)
    (folder / limit).write_text(f"{total}\n")
    (folder / usage).write_text(f"{total - 1000}\n")
    cached = "total_inactive_file" if version == 1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{cached} 500\n")
    assert read_memory(7, tmp_path) == MemoryState(1500, total, 7)


def test_without_a_container_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(0, tmp_path).total == psutil.virtual_memory().total
