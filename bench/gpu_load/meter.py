"""Measures how busy the GPU is, by NVML if it is available, every 100 ms."""

import statistics
import threading
import time
from typing import NamedTuple

import pynvml

from comfyfleet.worker.machine import NvmlGpu

EVERY_SECONDS = 0.1


class Sample(NamedTuple):
    at: float  # seconds since 1970
    percent: float
    memory_bytes: int


class GpuMeter:
    """Samples the GPU in a thread inside the `with` block."""

    def __init__(self, index: int) -> None:
        self._gpu = NvmlGpu(pynvml, index)
        self._samples: list[Sample] = []
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "GpuMeter":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._has_ended.wait(EVERY_SECONDS):
            read = self._gpu.read()
            if read is None:
                return  # no measurements without a driver or this GPU
            self._samples.append(
                Sample(time.time(), read.load_percent or 0.0, read.memory_used_bytes or 0)
            )

    def between(self, start: float, end: float) -> tuple[float, int] | None:
        """Returns the mean utilization and the highest memory use, or None if there are no
        samples."""
        samples = [sample for sample in self._samples if start <= sample.at <= end]
        if not samples:
            return None
        percent = statistics.fmean(sample.percent for sample in samples)
        return percent, max(sample.memory_bytes for sample in samples)
