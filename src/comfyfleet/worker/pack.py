"""Runs several workers in one process, each with its own ComfyUI, and exports metrics for
Prometheus."""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from comfyfleet.errors import WorkerRevoked
from comfyfleet.log_context import bind_ids
from comfyfleet.worker.factory import PROCESS_FILE, open_managed_process, open_platform, open_worker
from comfyfleet.worker.machine import (
    ReadMemory,
    command_memory_reader,
    driver_memory_reader,
    first_visible_gpu,
    require_memory_reading,
)
from comfyfleet.worker.managed_process import ManagedProcess
from comfyfleet.worker.pack_plan import (
    SLOT_NAME,
    GpuSample,
    GpuSlots,
    MoveReason,
    PackDecision,
    PackMove,
    PackRules,
    PackSettings,
    PackSize,
    PackSlot,
    decide_pack_size,
    lay_out_pack,
    make_folders,
)
from comfyfleet.worker.settings import WorkerSettings, safe_name
from comfyfleet.worker.shutdown import StopRequest
from comfyfleet.worker.worker import JobCounts, Worker

logger = logging.getLogger(__name__)

# Maximum seconds that a removed worker has to finish its jobs.
LEAVE_SECONDS_MAX = 1800.0
MOVE_TEXTS = {
    PackMove.ADD: "starting another ComfyUI on GPU %s, because %s",
    PackMove.REMOVE: "stopping one ComfyUI on GPU %s, because %s",
    PackMove.KEEP: "keeping the number of ComfyUIs on GPU %s, because %s",
}
REASON_TEXTS = {
    MoveReason.BACKLOG: "jobs are waiting on all of them",
    MoveReason.GAIN: "the newest one increased the throughput",
    MoveReason.NO_GAIN: "the newest one didn't increase the throughput enough",
    MoveReason.NO_MEMORY: "the GPU's memory isn't sufficient for another one",
    MoveReason.OUT_OF_MEMORY: "a run ran out of memory",
    MoveReason.SPARE: "not all of them have been needed recently",
    MoveReason.NOT_STARTED: "at least one didn't become ready in time",
}


@dataclass(eq=False)
class PackMember:
    """One worker of the pack. `worker` is set once it has been built."""

    slot: PackSlot
    worker: Worker | None = None
    is_leaving: bool = False

    @property
    def is_ready(self) -> bool:
        return self.worker is not None and self.worker.is_ready and not self.is_leaving

    @property
    def waiting(self) -> int:
        return 0 if self.worker is None else self.worker.waiting


@dataclass(frozen=True, eq=False)
class PackGpu:
    """A GPU's slots, and the rules that decide how many of them are used. Without rules, all slots
    are used."""

    places: GpuSlots
    rules: PackRules | None = None
    read_memory: ReadMemory | None = None
    counts: JobCounts = field(default_factory=JobCounts)


async def plan_gpus(
    settings: WorkerSettings, pack: PackSettings, environ: Mapping[str, str]
) -> list[PackGpu]:
    """Returns the layout of the pack. Raises InvalidInput if the settings have no valid layout, or
    if their rules require a GPU memory reading that isn't available."""
    chosen = first_visible_gpu(environ)
    layout = lay_out_pack(settings, pack, "0" if chosen is None else str(chosen))
    if not pack.is_auto:
        return [PackGpu(slots) for slots in layout]
    gpus = []
    for slots in layout:
        if pack.memory_command is None:
            read = driver_memory_reader(settings.state.parent, {**environ, **slots.environ})
        else:
            read = command_memory_reader(pack.memory_command, slots.gpu)
        await require_memory_reading(read, slots.gpu, pack.memory_command)
        gpus.append(PackGpu(slots, PackRules(most=pack.most), read))
    return gpus


class BarredSizes:
    """A file that stores which numbers of ComfyUIs must not be tried on a GPU, and until when.

    Without it, a restarted worker would have to run out of memory again to find out. All calls
    block. In memory, times are monotonic. In the file, they are seconds since 1970.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, now: float) -> dict[int, float]:
        ahead = time.time() - now
        try:
            saved = json.loads(self._path.read_bytes())
            return {int(size): float(until) - ahead for size, until in saved.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def write(self, barred: Mapping[int, float], now: float) -> None:
        """Writes the sizes. Errors such as a full disk are ignored, because the sizes also stay in
        memory."""
        ahead = time.time() - now
        until = {size: until + ahead for size, until in barred.items() if until > now}
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(until))


class WorkerPack:
    """Runs several workers.

    Each has its own name, key, leases and models. To the control plane they are separate workers,
    and each is repaired, drained and revoked independently.
    """

    def __init__(self, gpus: Sequence[PackGpu], environ: Mapping[str, str], state: Path) -> None:
        """`state` is the parent of all workers' state folders."""
        # Not logged, because each worker logs its own request.
        self.stop = StopRequest(self._stop_all, is_logged=False)
        # Number of decisions by GPU, move and reason.
        self.decisions: Counter[tuple[str, PackMove, MoveReason]] = Counter()
        self._gpus = gpus
        self._environ = environ
        self._state = state
        self._members: dict[PackGpu, list[PackMember]] = {gpu: [] for gpu in gpus}
        self._work: set[asyncio.Task[None]] = set()
        self._problem: Exception | None = None
        # Whether a worker stopped without an error and not because of a decision to remove it.
        self._has_stopped_normally = False

    async def work(self) -> None:
        """Runs until stopped or until no worker remains. Raises an error that ended a worker, if
        any.

        WorkerRevoked is raised only if all workers ended without a stop request and no other worker
        stopped normally.
        """
        sizing: list[asyncio.Task[None]] = []
        try:
            await self._stop_left_over()
            for gpu in self._gpus:
                for slot in await asyncio.to_thread(_first_slots, gpu):
                    self._start(gpu, slot)
                if gpu.rules is not None:
                    resizing = asyncio.create_task(self._resize(gpu, gpu.rules))
                    resizing.add_done_callback(_log_failure)
                    sizing.append(resizing)
            while self._work:
                await asyncio.wait(self._work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*sizing, *self._work):
                task.cancel()
            await asyncio.gather(*sizing, *self._work, return_exceptions=True)
        is_normal = self.stop.asked or self._has_stopped_normally
        if self._problem is None or (isinstance(self._problem, WorkerRevoked) and is_normal):
            return
        raise self._problem

    @property
    def members(self) -> dict[str, list[PackMember]]:
        """The members on each GPU, ordered by number."""
        return {
            gpu.places.gpu: sorted(members, key=lambda member: member.slot.number)
            for gpu, members in self._members.items()
        }

    @property
    def counts(self) -> dict[str, JobCounts]:
        return {gpu.places.gpu: gpu.counts for gpu in self._gpus}

    # Workers

    def _start(self, gpu: PackGpu, slot: PackSlot) -> None:
        member = PackMember(slot)
        self._members[gpu].append(member)
        work = asyncio.create_task(self._run_worker(gpu, member))
        self._work.add(work)
        work.add_done_callback(self._work.discard)

    async def _run_worker(self, gpu: PackGpu, member: PackMember) -> None:
        settings = member.slot.settings
        environ = {**self._environ, **gpu.places.environ}
        try:
            with self._log_worker_id(settings.worker_id):
                await asyncio.to_thread(make_folders, member.slot)
                async with (
                    open_platform(settings, environ) as platform,
                    open_worker(settings, environ, platform, gpu.counts) as worker,
                ):
                    member.worker = worker
                    if self.stop.asked:
                        self._stop_worker(worker)
                    elif member.is_leaving:
                        worker.stop.ask("shutdown", 0)
                    await worker.work()
                    self._has_stopped_normally |= not member.is_leaving
        except WorkerRevoked as error:
            # The other workers continue.
            self._problem = self._problem or error
        except Exception as error:  # noqa: BLE001  raised again once the other workers have stopped
            self._problem = error
            self.stop.ask("shutdown", 0)
        finally:
            self._members[gpu].remove(member)

    def _log_worker_id(self, worker_id: str) -> AbstractContextManager[None]:
        """Adds the worker's id to its log lines if there are several workers."""
        is_one = sum(len(gpu.places.slots) for gpu in self._gpus) == 1
        return nullcontext() if is_one else bind_ids(worker_id=worker_id)

    def _stop_all(self) -> None:
        for members in self._members.values():
            for member in members:
                if member.worker is not None:
                    self._stop_worker(member.worker)

    def _stop_worker(self, worker: Worker) -> None:
        worker.stop.ask(self.stop.reason or "shutdown", self.stop.seconds_left)
        worker.stop.hurry_until = min(worker.stop.hurry_until, self.stop.hurry_until)

    async def _stop_left_over(self) -> None:
        """Stops ComfyUIs that a killed worker left behind in slots that no longer exist."""
        slots = [slot for gpu in self._gpus for slot in gpu.places.slots]
        known = {slot.settings.state / PROCESS_FILE for slot in slots}
        for note in await asyncio.to_thread(_process_files, self._state):
            # Any command works here, because the process isn't restarted.
            process = ManagedProcess("comfyui", note)
            if note not in known and process.take_up():
                logger.warning(
                    "stopping a ComfyUI of an earlier worker, because its slot no longer exists"
                )
                await process.stop()

    # Resizing

    async def _resize(self, gpu: PackGpu, rules: PackRules) -> None:
        note = BarredSizes(self._state / f"barred-{safe_name(gpu.places.gpu)}.json")
        barred = await asyncio.to_thread(note.read, _now())
        size = PackSize(target=max(1, len(self._members[gpu])), barred=barred)
        while not self._is_over(gpu):
            await asyncio.sleep(rules.sample_seconds)
            before = size.barred
            size, decision = decide_pack_size(size, await self._sample(gpu), rules)
            if size.barred != before:
                await asyncio.to_thread(note.write, size.barred, _now())
            if decision is not None and not self._is_over(gpu):
                self._act(gpu, decision)

    def _is_over(self, gpu: PackGpu) -> bool:
        """Checks whether the pack must no longer be resized, because a stop was requested, or
        because a worker was revoked, failed or received a notice."""
        leaving = (
            member.worker is not None and member.worker.stop.asked and not member.is_leaving
            for member in self._members[gpu]
        )
        return self.stop.asked or self._problem is not None or any(leaving)

    async def _sample(self, gpu: PackGpu) -> GpuSample:
        memory = None if gpu.read_memory is None else await gpu.read_memory()
        ready = [member for member in self._members[gpu] if member.is_ready]
        return GpuSample(
            at=_now(),
            ready=len(ready),
            leaving=sum(member.is_leaving for member in self._members[gpu]),
            full=sum(member.waiting > 0 for member in ready),
            idle=sum(member.worker is not None and member.worker.is_idle for member in ready),
            finished=gpu.counts.finished,
            out_of_memory=gpu.counts.out_of_memory,
            memory_used=None if memory is None else memory.used,
            memory_total=None if memory is None else memory.total,
        )

    def _act(self, gpu: PackGpu, decision: PackDecision) -> None:
        self.decisions[gpu.places.gpu, decision.move, decision.reason] += 1
        figures = {name: value for name, value in decision._asdict().items() if value is not None}
        logger.warning(
            MOVE_TEXTS[decision.move],
            gpu.places.gpu,
            REASON_TEXTS[decision.reason],
            extra={**figures, "gpu": gpu.places.gpu},
        )
        if decision.move is PackMove.ADD:
            self._start(gpu, _free_slot(gpu, self._members[gpu]))
        elif decision.move is PackMove.REMOVE:
            self._remove(gpu)

    def _remove(self, gpu: PackGpu) -> None:
        """Stops the least busy worker, preferring workers that are not ready."""
        staying = [member for member in self._members[gpu] if not member.is_leaving]
        member = min(staying, key=lambda m: (m.is_ready, m.waiting, -m.slot.number))
        member.is_leaving = True
        if member.worker is not None:
            member.worker.stop.ask("shutdown", LEAVE_SECONDS_MAX)


def _log_failure(resizing: "asyncio.Task[None]") -> None:
    if not resizing.cancelled() and (error := resizing.exception()) is not None:
        logger.error("resizing failed; the number of ComfyUIs will stay the same", exc_info=error)


def _now() -> float:
    return time.monotonic()


def _first_slots(gpu: PackGpu) -> list[PackSlot]:
    """Returns the slots to use at the start: all slots if their number is fixed. Otherwise, returns
    the slots whose ComfyUI is still running, or the first slot if no ComfyUI is running."""
    slots = list(gpu.places.slots)
    if gpu.rules is None:
        return slots
    running = [slot for slot in slots if _has_process(slot)]
    return running or slots[:1]


def _has_process(slot: PackSlot) -> bool:
    owned = open_managed_process(slot.settings)
    return owned is not None and owned.take_up()


def _free_slot(gpu: PackGpu, members: Sequence[PackMember]) -> PackSlot:
    used_numbers = {member.slot.number for member in members}
    return next(slot for slot in gpu.places.slots if slot.number not in used_numbers)


def _process_files(state: Path) -> list[Path]:
    own = [path for path in state.glob("*") if SLOT_NAME.fullmatch(path.name)]
    return [folder / PROCESS_FILE for folder in (state, *own)]


PREFIX = "comfyfleet_worker"


class PackMetrics(Collector):
    def __init__(self, pack: WorkerPack) -> None:
        self._pack = pack

    def collect(self) -> Iterator[Metric]:
        backends = GaugeMetricFamily(
            f"{PREFIX}_backends", "ComfyUIs by state: ready, leaving, away", labels=("gpu", "state")
        )
        for gpu, members in self._pack.members.items():
            leaving = sum(member.is_leaving for member in members)
            ready = sum(member.is_ready for member in members)
            backends.add_metric((gpu, "ready"), ready)
            backends.add_metric((gpu, "leaving"), leaving)
            backends.add_metric((gpu, "away"), len(members) - ready - leaving)
        yield backends
        finished = CounterMetricFamily(f"{PREFIX}_jobs_finished", "Jobs delivered", labels=("gpu",))
        short = CounterMetricFamily(
            f"{PREFIX}_out_of_memory", "Runs that ran out of memory", labels=("gpu",)
        )
        for gpu, counts in self._pack.counts.items():
            finished.add_metric((gpu,), counts.finished)
            short.add_metric((gpu,), counts.out_of_memory)
        yield from (finished, short)
        decisions = CounterMetricFamily(
            f"{PREFIX}_pack_decisions",
            "Changes of how many ComfyUIs share a GPU, and why",
            labels=("gpu", "decision", "reason"),
        )
        for (gpu, move, reason), count in list(self._pack.decisions.items()):
            decisions.add_metric((gpu, move.value, reason.value), count)
        yield decisions


@contextlib.contextmanager
def serve_metrics(pack: WorkerPack, host: str, port: int) -> Iterator[int]:
    """Serves the metrics and yields the port. Raises OSError if the port is in use."""
    registry = CollectorRegistry()
    registry.register(PackMetrics(pack))
    server, thread = start_http_server(port, host, registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
