"""Lays out the ComfyUIs of a worker process (GPUs, ports, folders, names), and decides how many
share a GPU, based on samples. The decision functions are pure.

While there is a backlog and free GPU memory, one more ComfyUI is tried. It stays if the GPU then
finishes more jobs per minute. Otherwise, it is removed. One is also removed if a run ran out of
memory, or if there are too few jobs.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from comfyfleet.errors import InvalidInput
from comfyfleet.worker.managed_process import fill_command
from comfyfleet.worker.settings import WORKER_ID_CHARACTERS_MAX, WorkerSettings

PER_GPU_DEFAULT_MAX = 8


@dataclass(frozen=True, slots=True)
class PackRules:
    """The limits and thresholds for deciding how many ComfyUIs share a GPU. `most` is the maximum
    number."""

    most: int = PER_GPU_DEFAULT_MAX
    sample_seconds: float = 5.0
    # A measurement lasts at least this many seconds and this many finished jobs.
    window_seconds: float = 120.0
    window_jobs: int = 24
    # A measurement shows a backlog if jobs waited on every ComfyUI in this share of its samples.
    backlog_share: float = 0.8
    # A trial ends after this many measurements that had too little backlog or were interrupted.
    trial_windows_max: int = 3
    gain_min: float = 0.1
    memory_margin: float = 0.1
    spare_seconds: float = 300.0
    start_seconds_max: float = 600.0
    # Seconds until a size is tried again after it brought no gain or needed too much memory. After
    # a run ran out of memory, `memory_retry_seconds` applies.
    retry_seconds: float = 1800.0
    memory_retry_seconds: float = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A snapshot of a GPU's state.

    `ready` counts ComfyUIs that accept jobs. Of these, `full` have a job waiting behind the running
    one, and `idle` have none. `leaving` counts those that are stopping. `finished` and
    `out_of_memory` are totals since the start.
    """

    at: float
    ready: int
    leaving: int
    full: int
    idle: int
    finished: int
    out_of_memory: int
    memory_used: int | None
    memory_total: int | None


class PackMove(StrEnum):
    ADD = "add"
    REMOVE = "remove"
    KEEP = "keep"


class MoveReason(StrEnum):
    BACKLOG = "backlog"
    GAIN = "gain"
    NO_GAIN = "no_gain"
    NO_MEMORY = "no_memory"
    OUT_OF_MEMORY = "out_of_memory"
    SPARE = "spare"
    NOT_STARTED = "not_started"


class PackDecision(NamedTuple):
    """A decision about a GPU. `size` is the new number of ComfyUIs. Rates are in jobs per
    minute."""

    move: PackMove
    reason: MoveReason
    size: int
    rate: float | None = None
    rate_before: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True, slots=True)
class ThroughputWindow:
    """A throughput measurement, with its start time and the number of jobs that were finished
    before it."""

    since: float
    finished: int
    samples: int = 0
    full_samples: int = 0
    memory_used_max: int | None = None

    def with_sample(self, sample: GpuSample) -> "ThroughputWindow":
        figures = (self.memory_used_max, sample.memory_used)
        used = [figure for figure in figures if figure is not None]
        return replace(
            self,
            samples=self.samples + 1,
            full_samples=self.full_samples + (0 < sample.ready == sample.full),
            memory_used_max=max(used, default=None),
        )

    def is_over(self, sample: GpuSample, rules: PackRules) -> bool:
        return (
            sample.at - self.since >= rules.window_seconds
            and sample.finished - self.finished >= rules.window_jobs
        )

    def rate(self, sample: GpuSample) -> float:
        return 60.0 * (sample.finished - self.finished) / max(sample.at - self.since, 1e-9)


@dataclass(frozen=True, slots=True)
class PackSize:
    """The number of ComfyUIs that a GPU should have, and the state of the measurements.

    While the newest ComfyUI is on trial, `rate_before` is the number of jobs per minute without it.
    `trial_windows` counts the trial's measurements that had too little backlog or were interrupted.
    `barred` maps sizes that must not be tried to the time when they can be tried again.
    """

    target: int = 1
    rate_before: float | None = None
    trial_windows: int = 0
    window: ThroughputWindow | None = None
    spare_since: float | None = None
    unsettled_since: float | None = None
    out_of_memory: int = 0
    barred: Mapping[int, float] = field(default_factory=dict)

    def resized(self, target: int, *, rate_before: float | None = None) -> "PackSize":
        """Returns the state after a change of size, which restarts all measurements."""
        return PackSize(
            target, rate_before, 0, out_of_memory=self.out_of_memory, barred=dict(self.barred)
        )

    def barring(self, size: int, until: float) -> "PackSize":
        until = max(until, self.barred.get(size, until))
        return replace(self, barred={**self.barred, size: until})

    def is_barred(self, size: int, at: float) -> bool:
        return self.barred.get(size, float("-inf")) > at


def decide_pack_size(
    size: PackSize, sample: GpuSample, rules: PackRules
) -> tuple[PackSize, PackDecision | None]:
    """Returns the next state and the decision, if any."""
    if sample.out_of_memory > size.out_of_memory:
        return _out_of_memory(replace(size, out_of_memory=sample.out_of_memory), sample, rules)
    if sample.leaving or sample.ready != size.target:
        return _unsettled(size, sample, rules)
    spare_since = (
        None if not sample.idle else sample.at if size.spare_since is None else size.spare_since
    )
    window = (size.window or ThroughputWindow(sample.at, sample.finished)).with_sample(sample)
    size = replace(size, spare_since=spare_since, unsettled_since=None, window=window)
    if (
        size.target > 1
        and spare_since is not None
        and sample.at - spare_since >= rules.spare_seconds
    ):
        return _removed(size, MoveReason.SPARE)
    if window.is_over(sample, rules):
        return _decide_by_window(size, window, sample, rules)
    return size, None


def _out_of_memory(
    size: PackSize, sample: GpuSample, rules: PackRules
) -> tuple[PackSize, PackDecision | None]:
    """Removes one ComfyUI after a run ran out of memory, unless one is already stopping or only one
    is left."""
    barred = size.barring(size.target + (size.target == 1), sample.at + rules.memory_retry_seconds)
    if sample.leaving or size.target == 1:
        return replace(barred, window=None), None
    return _removed(barred, MoveReason.OUT_OF_MEMORY)


def _unsettled(
    size: PackSize, sample: GpuSample, rules: PackRules
) -> tuple[PackSize, PackDecision | None]:
    """Discards the measurement while a ComfyUI starts, stops or fails. A trial that is interrupted
    several times, for example by crashes or restarts to free memory, ends without a gain."""
    since = sample.at if size.unsettled_since is None else size.unsettled_since
    is_interrupted = size.rate_before is not None and size.window is not None
    size = replace(
        size,
        window=None,
        spare_since=None,
        unsettled_since=since,
        trial_windows=size.trial_windows + is_interrupted,
    )
    is_over = size.trial_windows >= rules.trial_windows_max
    if size.rate_before is not None and is_over and not sample.leaving:
        barred = size.barring(size.target, sample.at + rules.retry_seconds)
        return _removed(barred, MoveReason.NO_GAIN, before=size.rate_before)
    is_late = sample.at - since >= rules.start_seconds_max
    if is_late and not sample.leaving and sample.ready < size.target and size.target > 1:
        barred = size.barring(size.target, sample.at + rules.retry_seconds)
        return _removed(barred, MoveReason.NOT_STARTED)
    return size, None


def _decide_by_window(
    size: PackSize, window: ThroughputWindow, sample: GpuSample, rules: PackRules
) -> tuple[PackSize, PackDecision | None]:
    rate, again = window.rate(sample), replace(size, window=None)
    has_backlog = window.full_samples >= rules.backlog_share * window.samples
    if size.rate_before is not None:
        return _decide_trial(again, size.rate_before, rate, sample, rules, has_backlog=has_backlog)
    if not has_backlog:
        # The GPU keeps up with all jobs, so the rate doesn't show how fast it could be.
        return again, None
    more = size.target + 1
    if more > rules.most or size.is_barred(more, sample.at):
        return again, None
    used, total = window.memory_used_max, sample.memory_total
    if not has_room(used, total, size.target, rules.memory_margin):
        barred = again.barring(more, sample.at + rules.retry_seconds)
        decision = PackDecision(
            PackMove.KEEP, MoveReason.NO_MEMORY, size.target, rate, None, used, total
        )
        return barred, decision
    decision = PackDecision(PackMove.ADD, MoveReason.BACKLOG, more, rate, None, used, total)
    return again.resized(more, rate_before=rate), decision


def _decide_trial(
    size: PackSize,
    before: float,
    rate: float,
    sample: GpuSample,
    rules: PackRules,
    *,
    has_backlog: bool,
) -> tuple[PackSize, PackDecision | None]:
    """Decides whether to keep the newest ComfyUI. A gain counts even without a backlog. If there is
    neither a gain nor a backlog, the trial continues for a limited number of measurements, because
    a gain may still show later."""
    if rate >= before * (1 + rules.gain_min):
        decision = PackDecision(PackMove.KEEP, MoveReason.GAIN, size.target, rate, before)
        return replace(size, rate_before=None, trial_windows=0), decision
    trial_windows = size.trial_windows + 1
    if not has_backlog and trial_windows < rules.trial_windows_max:
        return replace(size, trial_windows=trial_windows), None
    barred = size.barring(size.target, sample.at + rules.retry_seconds)
    return _removed(barred, MoveReason.NO_GAIN, rate, before)


def has_room(used: int | None, total: int | None, size: int, margin: float) -> bool:
    """Checks whether there is enough memory for another ComfyUI, based on the average use of the
    existing ones and a margin.
    """
    if used is None or total is None or size < 1:
        return False
    return used + used / size * (1 + margin) <= total


def _removed(
    size: PackSize, reason: MoveReason, rate: float | None = None, before: float | None = None
) -> tuple[PackSize, PackDecision]:
    fewer = size.resized(size.target - 1)
    return fewer, PackDecision(PackMove.REMOVE, reason, fewer.target, rate, before)


OPTION = "--comfyui-command"
PORT_MAX = 65535
FOLDERS = ("input", "output", "temp", "user")
# Matches the name of a worker's own folder inside the common state folder.
SLOT_NAME = re.compile(r"(gpu\d+-)?\d+")
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class PackSettings:
    """The settings of a pack. `per_gpu` is the number of ComfyUIs on each GPU. None means that the
    number is chosen by measuring the throughput.

    `gpus` contains CUDA's indexes or UUIDs of GPUs. If it is empty, the environment selects the
    GPU. `memory_command` prints a GPU's used and total bytes.
    """

    per_gpu: int | None = 1
    gpus: tuple[str, ...] = ()
    memory_command: str | None = None

    @property
    def is_auto(self) -> bool:
        return self.per_gpu is None

    @property
    def most(self) -> int:
        return PER_GPU_DEFAULT_MAX if self.per_gpu is None else self.per_gpu

    @property
    def is_one(self) -> bool:
        return self.per_gpu == 1 and len(self.gpus) <= 1


@dataclass(frozen=True)
class PackSlot:
    """The settings for one ComfyUI and its worker.

    `folder` is where that ComfyUI stores its files, if the command contains `{folder}`.
    """

    number: int  # the slot's number on its GPU, starting at 1
    settings: WorkerSettings
    folder: Path | None = None


@dataclass(frozen=True)
class GpuSlots:
    """All slots on one GPU. `environ` contains the variables that select this GPU."""

    gpu: str
    environ: Mapping[str, str]
    slots: tuple[PackSlot, ...]


def lay_out_pack(
    base: WorkerSettings, pack: PackSettings, default_gpu: str = "0"
) -> list[GpuSlots]:
    """Returns the slots of each GPU. The first slot uses the backend address of `base`, and the
    other slots use the ports after it.
    """
    if base.comfyui_command is None:
        return [GpuSlots(default_gpu, {}, (PackSlot(1, base),))]
    _check_command(base.comfyui_command, pack)
    gpus = pack.gpus or (default_gpu,)
    return [
        GpuSlots(
            gpu,
            _gpu_environ(gpu) if pack.gpus else {},
            tuple(_slot(base, pack, gpus, place, number) for number in range(1, pack.most + 1)),
        )
        for place, gpu in enumerate(gpus)
    ]


def _slot(
    base: WorkerSettings, pack: PackSettings, gpus: tuple[str, ...], place: int, number: int
) -> PackSlot:
    name = "" if pack.is_one else f"{number}" if not pack.gpus else f"gpu{place}-{number}"
    state = base.state / name if name else base.state
    url, port = _with_port_offset(base.backend_url or "", place * pack.most + number - 1)
    folder = state / "comfyui"
    values = {"port": str(port), "gpu": gpus[place], "folder": str(folder)}
    command = base.comfyui_command or ""
    own = folder if "{folder}" in command else None
    settings = replace(
        base,
        worker_id=_member_id(base.worker_id, name),
        state=state,
        backend_url=url,
        comfyui_command=shlex.join(fill_command(OPTION, command, values)),
        comfyui_environ=_gpu_environ(gpus[place]) if pack.gpus else {},
        backend_folder=base.backend_folder or own,
        cache_bytes=base.cache_bytes // (pack.most * len(gpus)),
    )
    return PackSlot(number, settings, own)


def _member_id(worker_id: str, name: str) -> str:
    return f"{worker_id[: WORKER_ID_CHARACTERS_MAX - len(name) - 1]}-{name}" if name else worker_id


def _with_port_offset(url: str, offset: int) -> tuple[str, int]:
    parts = urlsplit(url)
    first = parts.port or (443 if parts.scheme == "https" else 80)
    port = first + offset
    if port > PORT_MAX:
        raise InvalidInput(f"port {port} doesn't exist. Use a lower port in --backend.")
    if not offset:
        return url, port
    place = parts.netloc.removesuffix(f":{parts.port}")
    return parts._replace(netloc=f"{place}:{port}").geturl(), port


def _gpu_environ(gpu: str) -> dict[str, str]:
    # Makes CUDA number GPUs in bus order, like NVML. By default, CUDA numbers them by speed.
    return {**dict.fromkeys(GPU_VARIABLES, gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _check_command(command: str, pack: PackSettings) -> None:
    if not pack.is_one and "{port}" not in command:
        raise InvalidInput(
            "each ComfyUI needs its own port, but --comfyui-command doesn't contain {port}",
            hint='Use a command such as "python main.py --port {port} --temp-directory {folder}".',
        )


def make_folders(slot: PackSlot) -> None:
    """Creates the slot's folders, because ComfyUI expects some of them when it starts."""
    if slot.folder is not None:
        for name in FOLDERS:
            (slot.folder / name).mkdir(parents=True, exist_ok=True)
