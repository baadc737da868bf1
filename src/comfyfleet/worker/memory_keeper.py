"""Keeps a growing ComfyUI from using up a machine's memory. It frees memory between jobs, and
restarts ComfyUI if that doesn't help.

Freeing drops models and cached results, so the next job has to load its models again. It never
happens while the next job needs the loaded model.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from comfyfleet.comfy.backend import Device
from comfyfleet.errors import FleetError

logger = logging.getLogger(__name__)

# Seconds to wait after a request to free memory, because ComfyUI frees it a moment later, between
# two prompts.
FREED_SECONDS = 2.0
JOBS_PER_RESTART = 20
# A ComfyUI that reserves more than this share of a GPU's memory without a loaded model didn't free
# its memory.
GPU_SHARE_KEPT_MAX = 0.1
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryState:
    """Memory in bytes. `free` and `total` are those of the machine or of the container, whichever
    has the smaller free share. `of_process` is the memory of ComfyUI's processes.
    """

    free: int
    total: int
    of_process: int = 0

    @property
    def free_share(self) -> float:
        return self.free / self.total if self.total else 1.0

    def is_short(self, share: float) -> bool:
        return self.free_share < share

    def would_help(self, share: float) -> bool:
        """Checks whether restarting ComfyUI can free enough memory. A restart doesn't help if other
        programs use most of it."""
        return self.of_process >= share * self.total


def read_memory(of_process: int = 0, root: Path = CGROUPS) -> MemoryState:
    """Reads the memory of the machine and of the container, and returns the one with the smaller
    free share. This call blocks."""
    machine = psutil.virtual_memory()
    states = [MemoryState(machine.available, machine.total, of_process)]
    if (limit := _cgroup_memory(root)) is not None:
        free, total = limit
        states.append(MemoryState(free, total, of_process))
    return min(states, key=lambda state: state.free_share)


def _cgroup_memory(root: Path) -> tuple[int, int] | None:
    """Returns the free and total bytes of this process's control group (version 2 or 1), or None if
    the group has no memory limit."""
    names = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit_name, usage_name, cache_name in names:
        with contextlib.suppress(OSError, ValueError):
            limit = int((root / limit_name).read_text())
            usage = int((root / usage_name).read_text())
            stat = (root / usage_name).with_name("memory.stat").read_text()
            cached = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
            # Cached files don't count as used, because the system drops them when memory runs out.
            used = max(0, usage - int(cached.get(cache_name, 0)))
            if limit < psutil.virtual_memory().total:
                return max(0, limit - used), limit
    return None


class MemoryKeeper:
    """Watches the memory of an owned ComfyUI process.

    `is_needed` returns whether the next job needs a loaded model. `restart` is called if freeing
    memory doesn't help. It must wait for running jobs itself.
    """

    def __init__(
        self,
        *,
        share: float,
        read: Callable[[], Awaitable[MemoryState]],
        devices: Callable[[], Awaitable[Sequence[Device]]],
        free: Callable[[], Awaitable[None]],
        is_needed: Callable[[], bool],
        restart: Callable[[str], None],
    ) -> None:
        self.restarts = 0
        self._share = share
        self._read = read
        self._devices = devices
        self._free = free
        self._is_needed = is_needed
        self._restart = restart
        # Jobs since the last restart. The initial value allows an immediate restart.
        self._jobs = JOBS_PER_RESTART
        self._was_freed = False
        self._turn = asyncio.Lock()

    def note_freed(self) -> None:
        """Notes that ComfyUI received a request to free memory for another reason, such as a run
        that ran out of memory."""
        self._was_freed = True

    async def look(self) -> None:
        """Checks the memory and frees some if necessary. The worker calls this between jobs."""
        self._jobs += 1
        if self._share <= 0 or self._turn.locked():
            return
        async with self._turn:
            await self._look()

    async def _look(self) -> None:
        state = await self._read()
        is_stuck = self._was_freed and await self._keeps_gpu()
        if not (state.is_short(self._share) or is_stuck) or self._is_needed():
            self._was_freed = False
            return
        if not is_stuck:
            await self._free()
            await asyncio.sleep(FREED_SECONDS)
            state = await self._read()
            is_stuck = await self._keeps_gpu()
        self._was_freed = False
        is_short = state.is_short(self._share) and state.would_help(self._share)
        if (is_short or is_stuck) and self._jobs >= JOBS_PER_RESTART and not self._is_needed():
            self._jobs = 0
            self.restarts += 1
            reason = "GPU memory is still allocated" if is_stuck else "too little memory is free"
            logger.warning(
                "restarting ComfyUI: %s after a request to free memory",
                reason,
                extra={"free": state.free, "total": state.total, "comfyui": state.of_process},
            )
            self._restart(reason)

    async def _keeps_gpu(self) -> bool:
        """Checks whether ComfyUI still reserves a large share of a GPU's memory."""
        try:
            devices = await self._devices()
        except FleetError:
            return False
        return any(
            device.reserved_bytes > GPU_SHARE_KEPT_MAX * device.memory_bytes > 0
            for device in devices
            if device.kind != "cpu"
        )
