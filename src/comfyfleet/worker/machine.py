"""Reads the machine's metrics for polls and heartbeats, and the memory of its GPUs.

The metrics come from NVML, an operator's command or the backend. Missing metrics are left out.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import psutil
import pynvml

from comfyfleet.api.worker import Reading
from comfyfleet.comfy.backend import Device
from comfyfleet.errors import FleetError, InvalidInput
from comfyfleet.worker.managed_process import fill_command

T = TypeVar("T")
UUID_STARTS = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class GpuFigures:
    name: str | None = None
    load_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None


def first_visible_gpu(environ: Mapping[str, str]) -> int | str | None:
    """Returns the first GPU in CUDA_VISIBLE_DEVICES as an index or a UUID, or None if no GPU may be
    used.

    CUDA orders GPUs by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID, while NVML always orders them
    by bus. If a machine's GPUs differ, only a UUID means the same to both.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return 0
    first = text.split(",")[0].strip()
    if first.startswith(UUID_STARTS):
        return first
    return int(first) if first.isascii() and first.isdigit() else None


def visible_gpus(environ: Mapping[str, str], nvml: Any) -> tuple[str, ...]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs that the driver reports if it isn't
    set. Returns an empty tuple if the driver reports none."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(gpu.strip() for gpu in named.split(",") if gpu.strip())
    return tuple(map(str, range(_count(nvml) or 0)))


def unknown_gpus(gpus: Sequence[str], nvml: Any) -> tuple[str, ...]:
    """Returns the members of `gpus` whose index exceeds the driver's count, or an empty tuple if
    the count is unknown."""
    count = _count(nvml)
    if count is None:
        return ()
    return tuple(gpu for gpu in gpus if gpu.isdigit() and int(gpu) >= count)


def _count(nvml: Any) -> int | None:
    with contextlib.suppress(nvml.NVMLError, OSError):
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    return None


class NvmlGpu:
    """One GPU. `nvml` is the module pynvml. All calls may block, so they must run in a thread."""

    def __init__(self, nvml: Any, which: int | str) -> None:
        self._nvml = nvml
        self._which = which
        self._handle: Any = None

    def read(self) -> GpuFigures | None:
        """Returns the GPU's metrics, or None if the driver or the GPU isn't available. After a
        failure, the next call tries again.
        """
        handle = self._handle or self._open()
        if handle is None:
            return None
        self._handle = handle
        nvml = self._nvml
        load = self._figure(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu))
        memory = self._figure(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        if load is None and memory is None:
            self._close()
            return None
        return GpuFigures(
            name=self._figure(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            load_percent=load,
            memory_used_bytes=memory and int(memory.used),
            memory_total_bytes=memory and int(memory.total),
            temperature_celsius=self._figure(
                lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
            ),
        )

    def _open(self) -> Any:
        with self._quietly():
            self._nvml.nvmlInit()
            with self._closing_on_error():
                if isinstance(self._which, str):
                    return self._by_uuid(self._which)
                return self._nvml.nvmlDeviceGetHandleByIndex(self._which)
        return None

    def _by_uuid(self, uuid: str) -> Any:
        """Finds a GPU by its UUID or a prefix of it. CUDA accepts both."""
        nvml = self._nvml
        if uuid.startswith("GPU-"):
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(uuid):
                    return handle
        return nvml.nvmlDeviceGetHandleByUUID(uuid)

    def _figure(self, read: Callable[[], T]) -> T | None:
        with self._quietly():
            return read()
        return None

    def _close(self) -> None:
        """Closes NVML. A GPU that fell off the bus reappears only after NVML is reopened."""
        self._handle = None
        with self._quietly():
            self._nvml.nvmlShutdown()

    @contextlib.contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError:
            self._close()
            raise

    def _quietly(self) -> contextlib.suppress:
        # OSError means that the library exists but can't be loaded.
        return contextlib.suppress(self._nvml.NVMLError, OSError)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


logger = logging.getLogger(__name__)

# A reading is reused for this many seconds. Heartbeats may be sent more often.
FRESH_SECONDS = 1.0
# The backend's own metrics are reused for longer, because requests for them slow down its GPU.
BACKEND_FRESH_SECONDS = 10.0
SAMPLE_SECONDS_MAX = 1.0
GPU_RETRY_SECONDS = 60.0  # long, because looking for a missing driver takes time
ReadDevices: TypeAlias = Callable[[], Awaitable[Sequence[Device]]]


class MachineMonitor:
    """Reads the machine's state in a separate thread, because a failing driver or a dead mount may
    block for minutes."""

    def __init__(
        self,
        folder: Path,
        environ: Mapping[str, str],
        *,
        devices: ReadDevices | None = None,
        nvml: Any = pynvml,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`devices` reads the backend's own GPU metrics, which are used if no driver is available.

        For a backend on another machine, pass `nvml=None`, because this machine's GPU isn't the
        backend's.
        """
        which = first_visible_gpu(environ)
        self._gpu = NvmlGpu(nvml, which) if nvml is not None and which is not None else None
        self._folder = folder
        self._devices = devices
        self._monotonic = monotonic
        self._gpu_retry_at = float("-inf")
        self._latest = Reading()
        self._fresh_until = float("-inf")
        self._ask_backend_at = float("-inf")
        self._backend_figures: dict[str, object] = {}
        self._sampling: asyncio.Future[Reading] | None = None
        # Each call measures the usage since the previous call. The first result is always 0 and is
        # discarded.
        psutil.cpu_percent(None)

    async def read(self) -> Reading:
        """Returns the current reading, or the previous one if it takes longer than a second. Never
        raises."""
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
            reading = reading.model_copy(update=await self._read_backend_figures())
        self._latest, self._fresh_until = reading, self._monotonic() + FRESH_SECONDS
        return reading

    def _sample(self) -> Reading:
        gpu = self._read_gpu() or GpuFigures()
        memory = _or_none(psutil.virtual_memory)
        disk = _or_none(lambda: psutil.disk_usage(str(self._folder)))
        return Reading(
            gpu_name=gpu.name,
            gpu_load_percent=gpu.load_percent,
            gpu_memory_used_bytes=gpu.memory_used_bytes,
            gpu_memory_total_bytes=gpu.memory_total_bytes,
            gpu_temperature_celsius=gpu.temperature_celsius,
            cpu_percent=_or_none(lambda: psutil.cpu_percent(None)),
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

    async def _read_backend_figures(self) -> dict[str, object]:
        if self._devices is None or self._monotonic() < self._ask_backend_at:
            return self._backend_figures
        self._ask_backend_at = self._monotonic() + BACKEND_FRESH_SECONDS
        try:
            async with asyncio.timeout(SAMPLE_SECONDS_MAX):
                devices = await self._devices()
        except (FleetError, TimeoutError):
            # Nothing is logged here, because other code detects and logs that the backend is down.
            self._backend_figures = {}
        else:
            self._backend_figures = gpu_figures_of(devices)
        return self._backend_figures


def gpu_figures_of(devices: Sequence[Device]) -> dict[str, object]:
    """Returns the metrics of ComfyUI's first GPU. CPU devices are skipped, because their memory is
    already part of the machine's metrics."""
    gpus = [device for device in devices if device.kind != "cpu" and device.memory_bytes > 0]
    if not gpus:
        return {}
    return {
        "gpu_name": gpus[0].name,
        "gpu_memory_total_bytes": gpus[0].memory_bytes,
        "gpu_memory_used_bytes": max(0, gpus[0].memory_bytes - gpus[0].memory_free_bytes),
    }


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (psutil.Error, OSError, RuntimeError, ValueError):
        return None


def _in_thread(sample: Callable[[], Reading]) -> asyncio.Future[Reading]:
    """Runs `sample` in a daemon thread. A hung read in a thread pool would keep the process from
    ending."""
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
            # An unreadable machine must never stop a worker.
            logger.exception("the machine's state can't be read")
        # The event loop may have been closed in the meantime.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, reading)

    threading.Thread(target=work, name="machine-reading", daemon=True).start()
    return future


COMMAND_SECONDS_MAX = 10.0
ANSWER_BYTES_MAX = 10_000


class GpuMemory(NamedTuple):
    used: int
    total: int


ReadMemory: TypeAlias = Callable[[], Awaitable[GpuMemory | None]]


def driver_memory_reader(
    folder: Path, environ: Mapping[str, str], nvml: Any = pynvml
) -> ReadMemory:
    """Returns a function that reads the memory of the GPU selected by `environ`. `folder` can be
    any folder on this machine."""
    machine = MachineMonitor(folder, environ, nvml=nvml)

    async def read() -> GpuMemory | None:
        reading = await machine.read()
        used, total = reading.gpu_memory_used_bytes, reading.gpu_memory_total_bytes
        return None if used is None or total is None else GpuMemory(used, total)

    return read


def command_memory_reader(command: str, gpu: str) -> ReadMemory:
    """Returns a function that reads a GPU's memory by running a command, which must print the used
    and total bytes. `{gpu}` in the command is replaced with the GPU."""
    arguments = fill_command("--gpu-memory-command", command, {"gpu": gpu})

    async def read() -> GpuMemory | None:
        return parse_memory(await _output(arguments))

    return read


def parse_memory(text: str) -> GpuMemory | None:
    """Parses the used and total bytes from the first two words of the text. Returns None if they
    aren't valid."""
    words = text.split()
    if len(words) < 2 or not all(word.isascii() and word.isdigit() for word in words[:2]):
        return None
    used, total = int(words[0]), int(words[1])
    return GpuMemory(used, total) if used <= total > 0 else None


async def require_memory_reading(read: ReadMemory, gpu: str, command: str | None) -> None:
    """Raises InvalidInput if the GPU's memory can't be read."""
    if await read() is not None:
        return
    if command is not None:
        raise InvalidInput(
            f"--gpu-memory-command does not report the memory of GPU {gpu}",
            hint="The command must print the used and the total bytes, and exit with code 0.",
        )
    raise InvalidInput(
        f"--per-gpu auto requires the memory usage of GPU {gpu}, but NVIDIA's driver doesn't "
        "report it",
        hint="Set --per-gpu to a number, or --gpu-memory-command to a command that prints used and "
        "total bytes.",
    )


async def _output(arguments: list[str]) -> str:
    """Returns the command's output, or an empty string if it fails or takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError:
        return ""
    try:
        async with asyncio.timeout(COMMAND_SECONDS_MAX):
            printed, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return printed[:ANSWER_BYTES_MAX].decode(errors="replace") if process.returncode == 0 else ""
