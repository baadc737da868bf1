"""Runs one lease, from its assets to its result, with heartbeats, until the control plane has
accepted the final report."""

import asyncio
import contextlib
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

import httpx

from comfyfleet.api.values import Asset
from comfyfleet.api.worker import (
    Complete,
    Fail,
    Job,
    ModelChange,
    Requeue,
    RequeueReason,
)
from comfyfleet.comfy import Backend
from comfyfleet.comfy.backend import Cancellation, Uploaded
from comfyfleet.comfy.events import Cancelled, End, Failed, NodeDone, Preview, Started
from comfyfleet.errors import (
    CancelUnconfirmed,
    FleetError,
    LeaseLost,
    OutcomeUnknown,
    PromptRefused,
    Refused,
    RunFailed,
    RunLost,
    RunTimedOut,
    ServerUnavailable,
    Unauthenticated,
    Unavailable,
    UnexpectedAnswer,
)
from comfyfleet.media import SNIFF_BYTES
from comfyfleet.transport.retry import RetryPolicy
from comfyfleet.worker.control_client import REPORT_ENDPOINTS, ControlClient, FinalReport
from comfyfleet.worker.failures import (
    BackendCondition,
    BackendFault,
    LeaseOutcome,
    failed_outcome,
    job_error,
    outcome_of_error,
)
from comfyfleet.worker.files import LiveOutputs, OutputDelivery, OutputUploads, UploadGate
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.input_cache import InputCache
from comfyfleet.worker.job_files import (
    BackendFiles,
    changed_inputs,
    choose_values,
    fill_prompt,
    flat_name,
    input_name,
    is_unlisted,
    job_folder,
    with_output_folder,
)
from comfyfleet.worker.journal import Journal, JournalEntry
from comfyfleet.worker.platform import AssetProvider
from comfyfleet.worker.run_progress import advance_progress, begin_progress
from comfyfleet.worker.run_record import LastReport, RecordTurns, RunRecord, record_of
from comfyfleet.worker.secrets import JobSecrets, hide
from comfyfleet.worker.settings import prompt_id_of

LOADED_MODELS_MAX = 8


class LoadedModels:
    """The models used since the backend was started or last freed its memory."""

    def __init__(self) -> None:
        self.keys: tuple[str, ...] = ()  # models of leased jobs, most recently used first
        self.set_key: str | None = None
        self._started_keys: tuple[str, ...] = ()  # models of started runs, newest first

    def used(self, job: Job) -> None:
        if job.model_key is not None:
            self.keys = _with_first(job.model_key, self.keys)
            self.set_key = job.model_set

    def began(self, job: Job) -> ModelChange | None:
        """Returns whether the job's model was already loaded, was switched to or is new. Returns
        None if the job has no model."""
        key, before = job.model_key, self._started_keys
        if key is None:
            return None
        self._started_keys = _with_first(key, before)
        if key in before:
            return "same" if key == before[0] else "switched"
        return "first"

    def is_loaded(self, job: Job) -> bool:
        """Checks whether an earlier run has loaded the job's model."""
        return job.model_key is not None and job.model_key in self._started_keys

    def clear(self) -> None:
        self.keys, self.set_key, self._started_keys = (), None, ()


def _with_first(key: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    return (key, *(other for other in keys if other != key))[:LOADED_MODELS_MAX]


ADOPT_ATTEMPTS_MAX = 4
ADOPT_PAUSE_SECONDS = 1.0
REST_REPORTS_MAX = 50


class LeasePhase(StrEnum):
    PREPARING = "preparing"  # The inputs are being downloaded and uploaded to the backend.
    QUEUED = "queued"  # The prompt waits in the backend's queue.
    RUNNING = "running"
    DELIVERING = "delivering"  # The outputs are being uploaded.


@dataclass(frozen=True, slots=True)
class LeaseDeps:
    """Dependencies shared by all leases of a worker."""

    backend: Backend
    assets: AssetProvider
    store: httpx.AsyncClient
    journal: Journal
    files: BackendFiles | None = None  # None for a cloud backend, which has no folders
    # None if the worker can't remove files from the backend's input folder.
    inputs: InputCache | None = None
    job_seconds: float | None = None  # limit for the whole job once the backend has its prompt
    upload_gate: UploadGate = field(default_factory=UploadGate)
    models: LoadedModels = field(default_factory=LoadedModels)
    turns: RecordTurns = field(default_factory=RecordTurns)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_journal_error: Callable[[OSError], None] = lambda error: None
    secrets: JobSecrets = field(default_factory=JobSecrets)


class ActiveLease:
    """A lease's current state. `on_phase` is called whenever the phase changes."""

    def __init__(self, entry: JournalEntry, on_phase: Callable[[], None] = lambda: None) -> None:
        self.entry = entry
        self.phase = LeasePhase.PREPARING
        self.resumes = False  # whether a killed worker left this lease behind
        self.model_change: ModelChange | None = None  # set when the run starts
        self.delivers_since = -math.inf  # monotonic time
        self.record = record_of(entry.job, self.folder)
        self.delivery: OutputDelivery | None = None  # set when the worker starts to follow the run
        self.keeping: asyncio.Task[None] | None = None  # the task that journals the run's start
        self.input_names: list[str] = []  # files of the input cache that the lease uses
        self._on_phase = on_phase

    @property
    def job(self) -> Job:
        return self.entry.job

    @property
    def prompt_id(self) -> str:
        return prompt_id_of(self.job.job_id, self.job.lease_number)

    @property
    def folder(self) -> str:
        """The folder of the job's files on the backend."""
        return job_folder(self.job.lease_token)

    @property
    def in_backend(self) -> bool:
        """Whether the backend may have the prompt. Also True for a lease left by a killed worker,
        until its run has been looked up.
        """
        left_over = self.resumes and self.phase is LeasePhase.PREPARING
        return left_over or self.phase in (LeasePhase.QUEUED, LeasePhase.RUNNING)

    def enter(self, phase: LeasePhase) -> None:
        if phase != self.phase:
            self.phase = phase
            if phase is LeasePhase.DELIVERING:
                self.delivers_since = time.monotonic()
            self._on_phase()


class KeysGone(Exception):
    """Raised if a restarted worker can't submit the prompt, because it doesn't have the caller's
    keys. They are never stored on disk."""


async def run_lease(
    lease: ActiveLease, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps, scratch: Path
) -> Complete:
    """Runs the job and returns the final report. Fetches the assets, uploads them, submits the
    prompt, follows the run, and uploads its outputs."""
    run_id = await adopt_run(lease, heartbeat_loop, deps) if lease.resumes else None
    if run_id is None:
        if lease.job.has_secrets and not lease.job.secrets:
            raise KeysGone
        with deps.upload_gate.preparing():
            run_id = await upload_and_submit(lease, heartbeat_loop, deps)
    record = lease.record
    lease.delivery = delivery = OutputDelivery(
        lease.job,
        deps.backend,
        OutputUploads(deps.store, heartbeat_loop, lease.job, deps.retry),
        deps.upload_gate,
        scratch,
        record=None if record is None else LiveOutputs(record, heartbeat_loop),
        resumes=lease.resumes,
    )
    seconds = await follow_run(lease, run_id, heartbeat_loop, deps)
    outputs = await deps.backend.outputs(run_id)
    delivered = await delivery.deliver_all(outputs)
    if record:
        record.release_results()
        await report_rest(record, heartbeat_loop)
    last = await last_report(lease, heartbeat_loop, deps)
    return Complete(
        dispatch_id=lease.job.dispatch_id,
        lease_token=lease.job.lease_token,
        provider_job_id=run_id,
        outputs=delivered,
        execution_seconds=seconds,
        model_change=lease.model_change,
        values=choose_values(outputs, lease.job.output_node_id),
        events=last.events,
        report=last.number,
        unheard=last.unheard,
        history=(record.history(outputs) or {}) if record else None,
        told_outputs=record is not None and (record.told_outputs or lease.resumes),
    )


async def report_rest(record: RunRecord, heartbeat_loop: HeartbeatLoop) -> None:
    """Sends messages before the final report, so that the rest fits into it. Makes a limited number
    of attempts."""
    if record.is_too_much:
        record.report_all()
    for _ in range(REST_REPORTS_MAX):
        if not record.is_too_much or not record.has_live:
            return
        with contextlib.suppress(Unavailable, Unauthenticated, Refused):
            await heartbeat_loop.send_now()


async def last_report(
    lease: ActiveLease, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps
) -> LastReport:
    """Returns the messages for the final report. Waits for the previous run's messages and for a
    heartbeat in progress."""
    if lease.record is None:
        return LastReport()
    await deps.turns.wait_for(lease.record)
    return await heartbeat_loop.take_last(lease.record)


async def adopt_run(
    lease: ActiveLease, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps
) -> str | None:
    """Returns the id of the run started by a killed worker, or None if it no longer exists on the
    backend."""
    with contextlib.suppress(Unavailable, Unauthenticated, Refused):
        await heartbeat_loop.send_now()
    run = await deps.backend.adopt(lease.entry.run_id or lease.prompt_id)
    if run is None and lease.entry.run_id not in (None, lease.prompt_id):
        run = await deps.backend.adopt(lease.prompt_id)
    if run is None:
        return None
    if deps.inputs is not None:
        lease.input_names += deps.inputs.hold(lease.job)
    lease.entry = replace(lease.entry, run_id=run.run_id)
    lease.enter(LeasePhase.QUEUED)
    return run.run_id


async def upload_and_submit(
    lease: ActiveLease, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps
) -> str:
    """Uploads the assets, submits the prompt and returns the run id."""
    job = lease.job
    async with AsyncExitStack() as held:
        paths = {
            asset.name: await held.enter_async_context(
                deps.assets.hold(asset, heartbeat_loop.renew)
            )
            for asset in job.assets
        }
        nested = deps.files is not None
        names = await upload_assets(paths, lease, deps, nested=nested)
        try:
            run_id = await submit_once(
                lease, await prepare_prompt(job, names, lease, deps), heartbeat_loop, deps
            )
        except PromptRefused as error:
            if not nested or not is_unlisted(error, names.values()):
                raise
            # A loader accepts only files in its list, which doesn't include subfolders, so the
            # files are uploaded outside the folder.
            names = await upload_assets(paths, lease, deps, nested=False)
            run_id = await submit_once(
                lease, await prepare_prompt(job, names, lease, deps), heartbeat_loop, deps
            )
    lease.entry = replace(lease.entry, run_id=run_id)
    if run_id != lease.prompt_id:
        # Only an id that the backend chose must be stored. The worker can derive its own prompt id
        # from the job.
        await keep_entry(lease, deps)
    return run_id


async def keep_entry(lease: ActiveLease, deps: LeaseDeps) -> None:
    """Writes the lease to the journal. A full disk pauses the worker but doesn't stop a run."""
    error = await asyncio.to_thread(deps.journal.keep, lease.entry)
    if error is not None:
        deps.on_journal_error(error)


async def upload_assets(
    paths: Mapping[str, Path], lease: ActiveLease, deps: LeaseDeps, *, nested: bool
) -> dict[str, str]:
    """Uploads the assets to the input cache, to the job's own folder or under an unguessable name.

    Returns the values for loaders, by asset.
    """
    names = {}
    for asset in lease.job.assets:
        path = paths[asset.name]
        name = input_name(asset.name, await asyncio.to_thread(_first_bytes, path))
        if nested and (cached := await keep_input(asset, path, PurePath(name).suffix, lease, deps)):
            names[asset.name] = cached
            continue
        upload_name = name if nested else flat_name(lease.folder, name)
        subfolder = lease.folder if nested else ""
        uploaded = await deps.backend.upload(path, name=upload_name, subfolder=subfolder)
        names[asset.name] = uploaded.value
    return names


async def keep_input(
    asset: Asset, path: Path, ending: str, lease: ActiveLease, deps: LeaseDeps
) -> str | None:
    """Uploads the asset to the input cache and returns its value for a loader. Returns None if the
    asset can't be cached."""
    if deps.inputs is None:
        return None

    async def upload(name: str, subfolder: str) -> Uploaded:
        return await deps.backend.upload(path, name=name, subfolder=subfolder)

    name = await deps.inputs.provide(lease.job, asset, path, ending, upload)
    if name is None:
        return None
    lease.input_names.append(name)
    return deps.inputs.value_of(name)


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(SNIFF_BYTES)


async def prepare_prompt(
    job: Job, names: Mapping[str, str], lease: ActiveLease, deps: LeaseDeps
) -> dict[str, Any]:
    """Returns the prompt with its inputs filled in. Raises InvalidInput if it names a file that
    doesn't belong to the job."""
    prompt: dict[str, Any] = fill_prompt(job.prompt, names, job.assets)
    if lease.record is not None:
        lease.record.show_as(client_names(job, names))
    if deps.files is None:
        return prompt
    is_strangers = job.records_run
    await deps.files.check(prompt, frozenset(names.values()), is_strangers=is_strangers)
    known = deps.files.known
    return with_output_folder(prompt, lease.folder, known, is_strangers=is_strangers)


def client_names(job: Job, names: Mapping[str, str]) -> dict[str, str]:
    """Returns a map from the names of files on the backend to their names in the client's
    prompt."""
    shown = {}
    for asset in job.assets:
        node_id, _, name = (asset.binding or "").partition(".")
        client_name = job.prompt.get(node_id, {}).get("inputs", {}).get(name)
        if isinstance(client_name, str) and asset.name in names:
            shown[names[asset.name]] = client_name
    return shown


async def submit_once(
    lease: ActiveLease, prompt: dict[str, Any], heartbeat_loop: HeartbeatLoop, deps: LeaseDeps
) -> str:
    """Submits the prompt and returns the run id. If the outcome is unknown, looks for the run but
    never submits the prompt again."""
    backend, prompt_id = deps.backend, lease.prompt_id
    heartbeat_loop.set_filled_in(changed_inputs(lease.job.prompt, prompt))
    lease.enter(LeasePhase.QUEUED)
    try:
        extra_data = {**lease.job.extra_data, **lease.job.secrets}
        sent = await backend.submit(prompt, prompt_id=prompt_id, extra_data=extra_data)
    except OutcomeUnknown:
        for attempt in range(ADOPT_ATTEMPTS_MAX):
            if run := await backend.adopt(prompt_id):
                return run.run_id
            await deps.retry.sleep(ADOPT_PAUSE_SECONDS * 2**attempt)
        raise
    return sent.run_id


async def follow_run(
    lease: ActiveLease, run_id: str, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps
) -> float | None:
    """Follows the run until it succeeds. Returns how many seconds it ran.

    Raises RunFailed, RunTimedOut and the exceptions of `follow`.
    """
    counts, end, began = begin_progress(lease.job.prompt), None, None
    try:
        async with asyncio.timeout(deps.job_seconds) as limit:
            tap = lease.record.take if lease.record else None
            async for event in deps.backend.follow(run_id, tap=tap):
                is_recorded = False
                if lease.record:
                    is_recorded = lease.record.note(event)
                    heartbeat_loop.show_record(lease.record)
                if isinstance(event, Started) and began is None:
                    began = note_start(lease, heartbeat_loop, deps)
                    limit.reschedule(_earlier(limit.when(), began, lease.job.run_limit_seconds))
                    lease.keeping = asyncio.create_task(keep_entry(lease, deps))
                if isinstance(event, NodeDone) and lease.delivery and deps.files is not None:
                    lease.delivery.begin(event)
                if isinstance(event, Preview) and not is_recorded:
                    heartbeat_loop.set_preview(event)
                counts = advance_progress(counts, event)
                if began is not None:
                    heartbeat_loop.set_progress(counts.report())
                end = event if isinstance(event, End) else end
    except TimeoutError:
        limits = filter(None, (lease.job.run_limit_seconds, deps.job_seconds))
        raise RunTimedOut(f"The run took longer than its limit of {min(limits):g} s.") from None
    lease.enter(LeasePhase.DELIVERING)
    require_success(end, run_id)
    return None if began is None else max(0.0, time.time() - began)


def note_start(lease: ActiveLease, heartbeat_loop: HeartbeatLoop, deps: LeaseDeps) -> float:
    """Records and reports the start of a run. Returns the start time.

    For an adopted run, this is the time that the previous worker recorded.
    """
    change = deps.models.began(lease.job)
    # For adopted runs and cloud backends, the models that were loaded at the start are unknown.
    is_known = not lease.resumes and deps.files is not None
    lease.model_change = change if is_known else None
    began = time.time() if lease.entry.started_at is None else lease.entry.started_at
    lease.entry = replace(lease.entry, started_at=began)
    lease.enter(LeasePhase.RUNNING)
    if lease.record is not None:
        lease.record.may_report = deps.turns.begin(lease.record)
    heartbeat_loop.start()
    return began


def _earlier(deadline: float | None, began: float, limit_seconds: float) -> float:
    """Returns the job's deadline or its run's deadline, whichever is earlier, by the loop's clock.
    `began` is when the run started, in wall-clock time."""
    of_run = asyncio.get_running_loop().time() + limit_seconds - (time.time() - began)
    return of_run if deadline is None else min(deadline, of_run)


def require_success(end: End | None, run_id: str) -> None:
    match end:
        case Failed(message=message):
            raise RunFailed(message, run_id=run_id, failed=end)
        case Cancelled():
            raise RunFailed("The run was interrupted on its server.", run_id=run_id)
        case None:
            raise UnexpectedAnswer(f"the messages of run {run_id} stopped before the run ended")


def _is_interruption(error: Exception) -> bool:
    return isinstance(error, RunFailed) and error.details.get("failed") is None


logger = logging.getLogger(__name__)

# A final report that the control plane hasn't accepted after this many seconds is written to the
# journal, so that the next worker can send it.
JOURNAL_AFTER_SECONDS = 0.5
# After these errors, the backend either doesn't have the prompt or doesn't respond, so the prompt
# isn't cancelled.
NOTHING_TO_CANCEL = (PromptRefused, RunLost, ServerUnavailable)


class StopReason(StrEnum):
    """The reasons to stop work on a lease early."""

    LOST = "lost"
    CANCELLED = "cancelled"
    RECALL = "recall"
    DRAIN = "drain"
    SPOT = "spot"
    REBALANCE = "rebalance"
    SHUTDOWN = "shutdown"
    BACKEND_DOWN = "backend_down"
    DISK_FULL = "disk_full"


REQUEUE_REASONS: Mapping[StopReason, RequeueReason] = {
    StopReason.RECALL: "recall",
    StopReason.DRAIN: "drain",
    StopReason.SPOT: "spot",
    StopReason.REBALANCE: "rebalance",
    StopReason.SHUTDOWN: "shutdown",
    StopReason.BACKEND_DOWN: "backend_down",
    StopReason.DISK_FULL: "disk_full",
}


class LeaseRunner:
    """Runs a lease. `on_fault` receives each backend fault, and `send_report` sends the final
    report."""

    def __init__(
        self,
        lease: ActiveLease,
        control: ControlClient,
        deps: LeaseDeps,
        make_heartbeat_loop: Callable[["LeaseRunner"], HeartbeatLoop],
        on_fault: Callable[[BackendFault, str], None],
        send_report: Callable[[FinalReport], Awaitable[object]] | None = None,
    ) -> None:
        self.lease = lease
        self.stop_reason: StopReason | None = None
        self._send_report = send_report or control.end
        self._deps = deps
        self._heartbeat_loop = make_heartbeat_loop(self)
        self._note_fault = on_fault
        self._work: asyncio.Task[Complete] | None = None
        self._interrupting: asyncio.Task[None] | None = None
        self._is_timed_out = False
        # This folder is created when the first file is written.
        self._scratch = deps.journal.scratch / f"{lease.job.dispatch_id}-{lease.job.lease_token}"

    def stop(self, why: StopReason) -> None:
        """Stops the work. The first reason is reported. LOST overrides other reasons, because a
        lost lease sends no report."""
        if self.stop_reason is None or why is StopReason.LOST:
            self.stop_reason = why
        if self._work is not None:
            self._work.cancel()

    def interrupt(self) -> None:
        """Interrupts the run on its backend once and keeps following it, because the backend
        reports how it ended."""
        if self.lease.phase is LeasePhase.PREPARING:
            self.stop(StopReason.CANCELLED)
        elif self._interrupting is None and self.lease.in_backend:
            self._interrupting = asyncio.create_task(self._interrupt_run())

    async def _interrupt_run(self) -> None:
        try:
            await self._deps.backend.cancel(self.lease.entry.run_id or self.lease.prompt_id)
        except FleetError as error:
            extra = {**self.ids, "reason": error.message}
            logger.warning("the prompt may not have been interrupted", extra=extra)

    async def run(self) -> None:
        """Runs until the control plane has accepted or refused the final report, or the lease is
        lost."""
        self._deps.secrets.add(self.lease.job)
        try:
            await self._run()
        finally:
            self._deps.secrets.remove(self.lease.job)
            if self.lease.record is not None:
                self._deps.turns.end(self.lease.record)

    async def _run(self) -> None:
        lease = self.lease
        report = lease.entry.report
        if report is None:
            report = await self._work_with_heartbeats()
        lease.enter(LeasePhase.DELIVERING)
        if lease.keeping is not None:
            # Otherwise, the entry could be written after its deletion below.
            await lease.keeping
        if report is not None:
            lease.entry = replace(lease.entry, report=report)
            await self._send_or_journal(report)
        await asyncio.to_thread(self._forget)
        if self._deps.inputs is not None:
            await self._deps.inputs.release(lease.input_names)

    async def _send_or_journal(self, report: FinalReport) -> None:
        """Sends the final report, and writes it to the journal only if that takes long.

        Most reports are accepted at once. If a crash loses one before then, the next worker creates
        it again, because its run is in the journal.
        """
        sending = asyncio.create_task(self._send_and_log(report))
        try:
            await asyncio.wait({sending}, timeout=JOURNAL_AFTER_SECONDS)
            if not sending.done():
                await keep_entry(self.lease, self._deps)
            await sending
        except asyncio.CancelledError:
            sending.cancel()
            self._deps.journal.keep(self.lease.entry)
            raise

    async def _with_prompt(self, report: FinalReport | None) -> FinalReport | None:
        """Adds unreported filled-in values and messages to the final report."""
        changes: dict[str, Any] = {}
        if isinstance(report, Complete | Fail) and self._heartbeat_loop.unreported is not None:
            changes["filled_in"] = self._heartbeat_loop.unreported
        if isinstance(report, Fail) and self.lease.entry.started_at is not None:
            changes["execution_seconds"] = max(0.0, time.time() - self.lease.entry.started_at)
        if isinstance(report, Fail) and self.lease.record is not None:
            self.lease.record.drop_results()
            if self.lease.delivery is not None:
                await self.lease.delivery.drain()
            last = await last_report(self.lease, self._heartbeat_loop, self._deps)
            events = last.all_events
            changes |= {"events": last.events, "report": last.number, "unheard": last.unheard}
            changes["outputs"] = self.lease.record.outputs_in(events)
            changes["told_outputs"] = self.lease.record.told_outputs or self.lease.resumes
            has_failed = any(kind == "execution_error" for kind, _ in events)
            is_stopped = self._is_cancelled or self._is_timed_out
            changes["interrupted"] = is_stopped and not has_failed
        return report.model_copy(update=changes) if report and changes else report

    @property
    def _is_cancelled(self) -> bool:
        return self.stop_reason is StopReason.CANCELLED or self._interrupting is not None

    def _forget(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._deps.files is not None:
            self._deps.files.remove(self.lease.folder)
        self._deps.journal.forget(self.lease.job)

    async def _work_with_heartbeats(self) -> FinalReport | None:
        heartbeats = [
            asyncio.create_task(self._heartbeat_loop.beat()),
            asyncio.create_task(self._heartbeat_loop.listen()),
            asyncio.create_task(self._report_in_turn()),
        ]
        try:
            return await self._with_prompt(await self._outcome(self._scratch))
        finally:
            for task in (*heartbeats, *([self._interrupting] if self._interrupting else ())):
                task.cancel()
            if self.lease.delivery is not None:
                await self.lease.delivery.close()

    async def _report_in_turn(self) -> None:
        """Allows this run's messages to be sent after the messages of earlier runs."""
        record = self.lease.record
        if record is None:
            return
        await self._heartbeat_loop.run_started.wait()
        await self._deps.turns.wait_for(record)
        record.may_report = True
        self._heartbeat_loop.show_record(record)

    async def _outcome(self, folder: Path) -> FinalReport | None:
        work = asyncio.create_task(run_lease(self.lease, self._heartbeat_loop, self._deps, folder))
        self._work = work
        if self.stop_reason is not None:
            work.cancel()
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if self.stop_reason is not None and (work.cancelled() or work.exception() is not None):
            return await self._report_stop(self.stop_reason)
        error = work.exception()
        if error is None:
            return work.result()
        if isinstance(error, LeaseLost):
            return await self._report_stop(StopReason.LOST)
        if isinstance(error, KeysGone):
            return await self._report_stop(StopReason.SHUTDOWN)
        if not isinstance(error, Exception):
            raise error
        return await self._report_failure(error)

    async def _report_stop(self, why: StopReason) -> FinalReport | None:
        job = self.lease.job
        logger.info("stopping work on a lease", extra={**self.ids, "reason": why.value})
        # A backend that is down can't cancel anything, and the request would take many seconds.
        if self.lease.in_backend and why is not StopReason.BACKEND_DOWN:
            await self._cancel_run()
        match why:
            case StopReason.LOST:
                return None
            case StopReason.CANCELLED:
                return failed_outcome(job, job_error("cancelled", "The job was cancelled."))
        return Requeue(
            dispatch_id=job.dispatch_id, lease_token=job.lease_token, reason=REQUEUE_REASONS[why]
        )

    async def _report_failure(self, error: Exception) -> FinalReport:
        if self._interrupting is not None and _is_interruption(error):
            return failed_outcome(self.lease.job, job_error("cancelled", "The job was cancelled."))
        outcome = outcome_of_error(error, self.lease.job)
        self._is_timed_out = isinstance(error, RunTimedOut)
        self._log(error, outcome)
        if self.lease.in_backend and not isinstance(error, NOTHING_TO_CANCEL):
            await self._cancel_run()
        if outcome.fault is not None:
            self._on_fault(outcome.fault, str(error))
        if isinstance(outcome.report, Fail) and self.lease.record is not None:
            self.lease.record.note_failure(error, time.time())
        return outcome.report

    async def _cancel_run(self) -> None:
        """Cancels the prompt, so that it doesn't waste time or run while another worker runs the
        same job."""
        lease, backend = self.lease, self._deps.backend
        try:
            run_id = lease.entry.run_id
            if run_id is None:
                run = await backend.adopt(lease.prompt_id)
                run_id = lease.prompt_id if run is None else run.run_id
            outcome = await backend.cancel(run_id)
        except CancelUnconfirmed as error:
            self._on_fault(BackendFault("backend_fault", BackendCondition.HUNG), error.message)
        except FleetError as error:
            extra = {**self.ids, "reason": error.message}
            logger.warning("the prompt may not have been cancelled", extra=extra)
        else:
            if outcome is Cancellation.CANCELLED:
                logger.info("the prompt was cancelled", extra=self.ids)

    async def _send_and_log(self, report: FinalReport) -> None:
        extra = {**self.ids, "report": REPORT_ENDPOINTS[type(report)]}
        try:
            await self._send_report(report)
        except LeaseLost:
            # A control plane may end a cancelled job without waiting for the worker's report.
            expected = self.stop_reason is StopReason.CANCELLED
            level = logging.INFO if expected else logging.WARNING
            logger.log(level, "the lease ended before its final report arrived", extra=extra)
        except Refused as error:
            logger.error("the final report was refused", extra={**extra, "reason": error.message})  # noqa: TRY400
            if isinstance(report, Complete):
                await self._send_and_log(
                    failed_outcome(self.lease.job, job_error(error.code, error.message))
                )
        else:
            logger.info("a lease has ended", extra=extra)

    def _log(self, error: Exception, outcome: LeaseOutcome) -> None:
        report = outcome.report
        reason = report.reason if isinstance(report, Requeue) else "fail"
        message = self._hide(str(error))[:2000]
        extra = {**self.ids, "outcome": reason, "error": message}
        is_shown = outcome.is_unexpected and not self.lease.job.secrets
        logger.warning(
            "a job failed or was requeued",
            extra=extra,
            exc_info=error if is_shown else None,
        )

    def _on_fault(self, fault: BackendFault, detail: str) -> None:
        self._note_fault(fault, self._hide(detail))

    def _hide(self, text: str) -> str:
        return hide(text, self.lease.job.secrets.values())

    @property
    def ids(self) -> dict[str, object]:
        job = self.lease.job
        return {
            "dispatch_id": job.dispatch_id,
            "job_id": str(job.job_id),
            "workflow": job.workflow_slug,
            "prompt_id": self.lease.prompt_id,
        }
