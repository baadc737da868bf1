"""The GPU as NVIDIA's driver sees it, through NVML; every figure that can't be read is left out."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
UUID_STARTS = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class GpuFigures:
    name: str | None = None
    load_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None


def chosen_gpu(environ: Mapping[str, str]) -> int | str | None:
    """The first of CUDA_VISIBLE_DEVICES, as an index or a UUID; None: no GPU may be used.

    CUDA counts by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID, NVML always by bus; where GPUs of
    one machine differ, a UUID is the only name that both read alike.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return 0
    first = text.split(",")[0].strip()
    if first.startswith(UUID_STARTS):
        return first
    return int(first) if first.isascii() and first.isdigit() else None


def all_gpus(environ: Mapping[str, str], nvml: Any) -> tuple[str, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, else all that the driver knows; none: nobody tells."""
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(each.strip() for each in named.split(",") if each.strip())
    return tuple(map(str, range(_count(nvml) or 0)))


def unknown_gpus(gpus: Sequence[str], nvml: Any) -> tuple[str, ...]:
    """Those of `gpus` whose index is beyond what the driver knows; none where nobody tells."""
    count = _count(nvml)
    if count is None:
        return ()
    return tuple(each for each in gpus if each.isdigit() and int(each) >= count)


def _count(nvml: Any) -> int | None:
    with contextlib.suppress(nvml.NVMLError, OSError):
        nvml.nvmlInit()
        try:
            return int(nvml.nvmlDeviceGetCount())
        finally:
            nvml.nvmlShutdown()
    return None


class Gpu:
    """One GPU. `nvml` is the module pynvml; all calls may block, so they belong in a thread."""

    def __init__(self, nvml: Any, which: int | str) -> None:
        self._nvml = nvml
        self._which = which
        self._handle: Any = None

    def read(self) -> GpuFigures | None:
        """None: no driver, or not this GPU. What was wrong once is tried anew at the next call."""
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
        """CUDA also takes the first characters of one."""
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
        """A GPU that fell off its bus comes back, if at all, only to those who open it anew."""
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
        # OSError: a library that is there and can't be loaded.
        return contextlib.suppress(self._nvml.NVMLError, OSError)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
