"""The machine's state, as every poll and heartbeat carries it."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pynvml

from comfyfleet.agent.gpu import Gpu, GpuFigures, chosen_gpu
from comfyfleet.comfy.backend import Device
from comfyfleet.kernel.errors import FleetError
from comfyfleet.wire.messages import Reading

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0  # heartbeats may come twice a second; the figures don't change that fast
BACKEND_FRESH_SECONDS = 10.0  # a ComfyUI answers in the thread that also feeds its GPU
SAMPLE_SECONDS_MAX = 1.0
GPU_RETRY_SECONDS = 60.0  # where there is no driver, looking for one is not free
ReadDevices: TypeAlias = Callable[[], Awaitable[Sequence[Device]]]


class Machine:
    """Reads in a thread of its own: a driver in trouble and a dead mount block for minutes."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        *,
        devices: ReadDevices | None = None,
        nvml: Any = pynvml,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`devices`: the backend's own figures, for where no driver tells.

        With a backend on another machine, give `nvml=None`: this machine's GPU is not its.
        """
        which = chosen_gpu(environ)
        self._gpu = Gpu(nvml, which) if nvml is not None and which is not None else None
        self._folder = folder
        self._devices = devices
        self._monotonic = monotonic
        self._gpu_retry_at = float("-inf")
        self._latest = Reading()
        self._fresh_until = float("-inf")
        self._ask_backend_at = float("-inf")
        self._backend_figures: dict[str, object] = {}
        self._sampling: asyncio.Future[Reading] | None = None
        psutil.cpu_percent(None)  # the first answer is always 0: it measures since the last call

    async def read(self) -> Reading:
        """Never raises, and waits a second at most; then the last figures are told again."""
        if self._monotonic() < self._fresh_until:
            return self._latest
        sampling = self._sampling = self._sampling or _in_thread(self._sample)
        await asyncio.wait([sampling], timeout=SAMPLE_SECONDS_MAX)
        if not sampling.done():
            return self._latest
        if self._sampling is sampling:
            self._sampling = None
        reading = sampling.result()
        if reading.gpu_memory_total_bytes is None:
            reading = reading.model_copy(update=await self._told_by_backend())
        self._latest, self._fresh_until = reading, self._monotonic() + FRESH_SECONDS
        return reading

    def _sample(self) -> Reading:
        gpu = self._read_gpu() or GpuFigures()
        memory = _tried(psutil.virtual_memory)
        disk = _tried(lambda: psutil.disk_usage(str(self._folder)))
        return Reading(
            gpu_name=gpu.name,
            gpu_load_percent=gpu.load_percent,
            gpu_memory_used_bytes=gpu.memory_used_bytes,
            gpu_memory_total_bytes=gpu.memory_total_bytes,
            gpu_temperature_celsius=gpu.temperature_celsius,
            cpu_percent=_tried(lambda: psutil.cpu_percent(None)),
            memory_used_bytes=memory and memory.total - memory.available,
            memory_total_bytes=memory and memory.total,
            disk_free_bytes=disk and disk.free,
        )

    def _read_gpu(self) -> GpuFigures | None:
        if self._gpu is None or self._monotonic() < self._gpu_retry_at:
            return None
        figures = self._gpu.read()
        if figures is None:
            self._gpu_retry_at = self._monotonic() + GPU_RETRY_SECONDS
        return figures

    async def _told_by_backend(self) -> dict[str, object]:
        if self._devices is None or self._monotonic() < self._ask_backend_at:
            return self._backend_figures
        self._ask_backend_at = self._monotonic() + BACKEND_FRESH_SECONDS
        try:
            devices = await asyncio.wait_for(self._devices(), SAMPLE_SECONDS_MAX)
        except (FleetError, TimeoutError):
            # A backend that is down is noticed, and said, by those who run jobs on it.
            self._backend_figures = {}
        else:
            self._backend_figures = figures_of(devices)
        return self._backend_figures


def figures_of(devices: Sequence[Device]) -> dict[str, object]:
    """What a ComfyUI says of its first GPU; a CPU's memory is the machine's, and read there."""
    gpus = [device for device in devices if device.kind != "cpu" and device.memory_bytes > 0]
    if not gpus:
        return {}
    return {
        "gpu_name": gpus[0].name,
        "gpu_memory_total_bytes": gpus[0].memory_bytes,
        "gpu_memory_used_bytes": max(0, gpus[0].memory_bytes - gpus[0].memory_free_bytes),
    }


def _tried(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError, ValueError):
        return None


def _in_thread(sample: Callable[[], Reading]) -> asyncio.Future[Reading]:
    """A daemon: one that hangs must not keep the process from ending, as a pool's thread would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Reading] = loop.create_future()

    def settle(reading: Reading) -> None:
        if not future.done():
            future.set_result(reading)

    def work() -> None:
        reading = Reading()
        try:
            reading = sample()
        except Exception:
            # Figures are never worth a worker.
            logger.exception("the machine's state can't be read")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, reading)

    threading.Thread(target=work, name="machine-reading", daemon=True).start()
    return future
