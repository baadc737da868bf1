"""The worker, which leases as many jobs as its backend can run and shuts down in an orderly way."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from comfyfleet.api.values import OutputSlot
from comfyfleet.api.worker import (
    BackendFacts,
    BackendProblem,
    Complete,
    FactsReport,
    FactsWanted,
    HeartbeatAnswer,
    HeldLease,
    Poll,
    Polled,
    Reading,
)
from comfyfleet.comfy import Backend, ComfyServer, Description
from comfyfleet.errors import (
    FleetError,
    NotOffered,
    Unauthenticated,
    Unavailable,
    WorkerRevoked,
    is_full_disk,
)
from comfyfleet.worker.backend_facts import backend_facts
from comfyfleet.worker.control_client import ControlClient, FinalReport
from comfyfleet.worker.failures import (
    DISK_FULL,
    OUT_OF_MEMORY,
    BackendCondition,
    BackendFault,
)
from comfyfleet.worker.health import BackendHealth
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.journal import JournalEntry
from comfyfleet.worker.lease_runner import (
    ActiveLease,
    LeaseDeps,
    LeasePhase,
    LeaseRunner,
    StopReason,
)
from comfyfleet.worker.managed_process import ManagedProcess
from comfyfleet.worker.memory_keeper import MemoryKeeper, MemoryState, read_memory
from comfyfleet.worker.platform import Platform
from comfyfleet.worker.registration import RegistrationClient, upload_object_info
from comfyfleet.worker.requested_facts import RequestedFacts
from comfyfleet.worker.routes import RoutePasser
from comfyfleet.worker.settings import WorkerSettings
from comfyfleet.worker.shutdown import StopRequest, stop_on_notices

logger = logging.getLogger(__name__)

# Seconds between checks for free space while the disk is full.
DISK_SECONDS = 5.0
# Maximum seconds between two checks of the deadline during a shutdown.
LOOK_SECONDS = 50.0
EMPTY_PAUSE_SECONDS = 1.0
# Seconds that a prefetch waits for the final report of a lease whose outputs are being uploaded.
PREFETCH_DELAY_SECONDS = 1.0
# Seconds that a prefetch waits while jobs arrive one by one. In this case, a prefetch is rarely
# needed and would compete with the delivery of results.
ALONE_SECONDS = 0.25
# A poll that returns a job within this many seconds shows that jobs were queued.
BACKLOG_SECONDS = 0.1
# Seconds that a pending prefetch poll continues after the backend becomes idle. A final report in
# this time turns it into the poll of an idle worker. Otherwise, a new poll replaces it.
IDLE_POLL_DELAY_SECONDS = 0.25
# Seconds between two fetches of the backend's node types. Slow fetches are less frequent.
FACTS_SECONDS = 60.0
FACTS_ATTEMPTS_MAX, UPLOAD_PAUSE_SECONDS = 5, 0.3
CLOUD_FACTS_SECONDS = 900.0
FACTS_SHARE = 1 / 100
# Maximum seconds for handing back unfinished jobs, even if the machine stops before then.
HAND_BACK_SECONDS_MAX = 10.0
DEREGISTER_SECONDS_MAX = 15.0


# Conditions that are reported as problems. GROWN isn't one, because its restart is planned.
_PROBLEMS: Mapping[BackendCondition, BackendProblem] = {
    BackendCondition.DOWN: "down",
    BackendCondition.HUNG: "hung",
    BackendCondition.POISONED: "poisoned",
    BackendCondition.CLOSED: "closed",
    BackendCondition.DISK_FULL: "disk_full",
}
# Under these conditions, leases that haven't started are handed back, because they can't start.
_STOP_BY_CONDITION = {
    BackendCondition.DOWN: StopReason.BACKEND_DOWN,
    BackendCondition.DISK_FULL: StopReason.DISK_FULL,
}


@dataclass(slots=True)
class JobCounts:
    """Counts of job outcomes. Workers can share one object."""

    finished: int = 0
    out_of_memory: int = 0


class Worker:
    """Leases and runs jobs. One prompt runs, one waits, and earlier outputs are uploaded."""

    def __init__(
        self,
        settings: WorkerSettings,
        control: ControlClient,
        deps: LeaseDeps,
        platform: Platform,
        *,
        probe: Backend,
        owned: ManagedProcess | None = None,
        counts: JobCounts | None = None,
    ) -> None:
        self.stop = StopRequest(self._wake)
        self.models = deps.models
        self._counts = counts or JobCounts()
        self._has_begun = False
        self._settings = settings
        self._control = control
        self._deps = replace(deps, on_journal_error=self._on_journal_error, secrets=control.secrets)
        self._platform = platform
        self._owned = owned
        self._registration = RegistrationClient(settings, control, deps.journal)
        self._health = BackendHealth(
            probe,
            place=settings.place,
            folder=settings.state,
            owned=owned,
            on_change=self._on_condition,
            on_recovery=self._recover,
            address=settings.backend_address,
        )
        self._keeper = self._memory_keeper(owned)
        self._has_backlog = True  # whether jobs were queued at the last poll
        self._taken_at = float("-inf")  # monotonic time of the newest job's arrival
        self._is_recycling = False  # whether ComfyUI will be restarted after its current jobs
        self._lease_runners: dict[LeaseRunner, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._facts: BackendFacts | None = None
        self._reported_facts: BackendFacts | None = None
        # The facts, load and condition at the start of the current poll.
        self._polled_facts: BackendFacts | None = None
        self._polled_load = 0
        self._polled_condition: BackendCondition | None = None
        self._is_polling = False
        self._is_requesting = False  # whether a poll or final report requests a job now
        self._logged_reason: str | None = None  # the last logged reason why there was no job
        self._description: Description | None = None  # None once it has been uploaded
        self._requested_facts = RequestedFacts(self._answer_facts_requests, self._run_in_background)
        self._background: set[asyncio.Task[None]] = set()
        self._revoked: WorkerRevoked | None = None

    async def work(self) -> None:
        """Runs until stopped. Raises WorkerRevoked if the worker was revoked, and Unauthenticated
        or InvalidInput if it can't register."""
        side = [asyncio.create_task(stop_on_notices(self._platform.notices, self.stop))]
        if self._owned is not None:
            side.append(asyncio.create_task(self._owned.keep_log_small()))
        try:
            if await self._unless_stopped(self._begin()):
                side.append(asyncio.create_task(self._health.watch(self._is_idle)))
                side.append(asyncio.create_task(self._refresh_facts()))
                if self._settings.passthrough:
                    side.append(asyncio.create_task(self._route_passer().run()))
                await self._lease_jobs()
            await self._shut_down()
        except FleetError:
            # The control plane no longer accepts results, so all work is stopped.
            self.stop.ask("shutdown", 0)
            await self._shut_down()
            raise
        else:
            if self._revoked is not None:
                raise self._revoked
        finally:
            for task in [*side, *self._background, *self._lease_runners.values()]:
                task.cancel()
            # Wait for these tasks first, because they may be starting the process to stop.
            await asyncio.gather(*side, return_exceptions=True)
            if self._owned is not None:
                await self._stop_process(self._owned)

    def _memory_keeper(self, owned: ManagedProcess | None) -> MemoryKeeper | None:
        """Creates the memory keeper. Returns None if the worker can't restart its backend."""
        backend = self._deps.backend
        if owned is None or not isinstance(backend, ComfyServer):
            return None

        async def read() -> MemoryState:
            return await asyncio.to_thread(lambda: read_memory(owned.memory_bytes))

        return MemoryKeeper(
            share=self._settings.free_memory_min,
            read=read,
            devices=backend.devices,
            free=self._free,
            is_needed=self._needs_loaded_model,
            restart=self._recycle,
        )

    def _needs_loaded_model(self) -> bool:
        """Checks whether an unfinished leased job uses a loaded model."""
        jobs = [
            runner.lease.job
            for runner in self._lease_runners
            if runner.lease.phase is not LeasePhase.DELIVERING
        ]
        return any(self.models.is_loaded(job) for job in jobs)

    def _recycle(self, reason: str) -> None:
        self._is_recycling = True
        self._restart_if_idle()

    def _restart_if_idle(self) -> None:
        """Restarts a ComfyUI that uses too much memory as soon as it has no jobs. Until then, the
        worker takes no new ones."""
        if self._is_recycling and self.is_idle:
            self._is_recycling = False
            fault = BackendFault("backend_fault", BackendCondition.GROWN)
            self._health.note(fault, "ComfyUI didn't free its memory on request")

    def _route_passer(self) -> RoutePasser:
        return RoutePasser(
            self._settings,
            self._control,
            worker_id=lambda: self._registration.worker_id,
            is_ready=lambda: self.is_ready,
            on_change=lambda: self._requested_facts.add(FactsWanted(tokens=())),
            retry=self._deps.retry,
        )

    async def _begin(self) -> bool:
        journal = self._deps.journal
        await self._open_journal()
        self._registration.check_secret()
        await self._health.wait_until_ready()
        await self._describe()
        if not self._registration.take_up():
            await self._register()
        entries = await asyncio.to_thread(journal.entries)
        if (inputs := self._deps.inputs) is not None:
            await asyncio.to_thread(inputs.open, [entry.job for entry in entries])
        for entry in entries:
            self._take(entry, resumes=True)
        self._has_begun = True
        return True

    async def _open_journal(self) -> None:
        """Opens the journal. Waits for disk space, because the disk may have filled up while the
        worker was off."""
        is_logged = False
        while True:
            try:
                await asyncio.to_thread(self._deps.journal.open)
            except OSError as error:
                if not is_full_disk(error):
                    raise
                if not is_logged:
                    logger.warning(
                        "the disk is full; waiting until there is space",
                        extra={"detail": str(error)},
                    )
                is_logged = True
                await asyncio.sleep(DISK_SECONDS)
            else:
                return

    async def _register(self) -> None:
        facts = self._facts
        registered = await self._registration.register(facts)
        self._reported_facts = facts
        await self._upload(registered.object_info_upload)

    async def _upload(self, slot: OutputSlot | None) -> None:
        """Uploads the node types once after each change of the backend."""
        description, self._description = self._description, None
        if slot is not None and description is not None:
            await upload_object_info(self._deps.store, slot, description)

    # Leasing

    async def _lease_jobs(self) -> None:
        failures = 0
        while not self.stop.asked:
            await self._until(lambda: self.stop.asked or self._may_poll())
            if self.stop.asked:
                return
            with self._requesting_job():
                polled = await self._unless_stopped(self._poll(failures), self._is_poll_outdated)
                # Take the job now, because the next request must already report it as held.
                await self._take_job(polled)
            is_cut = polled is None and self._polled_condition is not self._health.condition
            failures = 0 if polled is not None or is_cut else failures + 1

    async def _take_job(self, polled: Polled | None) -> None:
        if polled is None or polled.job is None:
            return
        entry = JournalEntry(polled.job)
        error = await asyncio.to_thread(self._deps.journal.keep, entry)
        if error is not None:
            self._on_journal_error(error)
        self._take(entry)
        if self._health.condition is not None:
            self._hand_back_for(self._health.condition)

    @contextlib.contextmanager
    def _requesting_job(self) -> Iterator[None]:
        """Marks that a job is being requested, by a poll or with a final report. Only one request
        is made at a time."""
        self._is_requesting = True
        self._polled_facts, self._polled_load = self._facts, self._load()
        self._polled_condition = self._health.condition
        try:
            yield
        finally:
            self._is_requesting = False
            self._wake()

    async def _end(self, report: FinalReport) -> None:
        """Retries the final report until the control plane responds.

        A result also requests the next job if the worker has room for it.
        """
        may_ask = self._has_room() and not self._is_requesting and not self.stop.asked
        may_ask = may_ask and not self._is_alone()
        if may_ask and isinstance(report, Complete):
            with contextlib.suppress(Unavailable, Unauthenticated):
                await self._end_and_poll(report)
                return
        answer = await self._control.end(report)
        if answer.polls_on and self._is_polling:
            # The lease of this report is still counted, so subtract one.
            self._polled_load = min(self._polled_load, len(self._lease_runners) - 1)

    async def _end_and_poll(self, report: Complete) -> None:
        with self._requesting_job():
            message = await self._poll_message(wait_seconds=0, ended=report.lease_token)
            answer = await self._control.send_report(report.model_copy(update={"poll": message}))
            if answer.next is not None:
                self._apply_answer(answer.next)
                self._has_backlog = answer.next.job is not None
                await self._take_job(answer.next)

    def _may_poll(self) -> bool:
        """Checks whether to poll now. A prefetch waits briefly for a result that is about to be
        sent, because its report can also request a job. While jobs arrive one by one, all polls
        wait like this."""
        if self._health.condition is BackendCondition.GROWN:
            return False  # A planned restart isn't reported.
        if self._health.condition is not None:
            # This poll only reports the problem. The control plane returns no job.
            return not self._is_requesting
        is_prefetch = self._load() >= self._settings.max_concurrency
        waits = is_prefetch and (
            self._is_ending(PREFETCH_DELAY_SECONDS) or self._is_alone() or self._is_submitting()
        )
        waits = waits or (self._is_alone() and self._is_ending(IDLE_POLL_DELAY_SECONDS))
        return self._has_room() and not self._is_requesting and not waits

    def _is_alone(self) -> bool:
        """Checks whether the newest job has just arrived and no other jobs were queued."""
        return not self._has_backlog and time.monotonic() < self._taken_at + ALONE_SECONDS

    def _is_submitting(self) -> bool:
        """Checks whether a job that has just arrived hasn't been submitted to the backend yet."""
        is_new = time.monotonic() < self._taken_at + ALONE_SECONDS
        return is_new and self._count(LeasePhase.PREPARING) > 0

    def _is_ending(self, seconds: float) -> bool:
        """Checks whether the delivery of a result started less than this many seconds ago."""
        since = time.monotonic() - seconds
        return any(runner.lease.delivers_since > since for runner in self._lease_runners)

    def _is_poll_outdated(self) -> bool:
        """Checks whether the pending poll is outdated, because the backend has changed or become
        idle, and a new poll may return a different job."""
        if self._health.condition is not self._polled_condition:
            return True
        most = self._settings.max_concurrency
        is_idle_now = self._load() < most <= self._polled_load
        is_other = self._facts is not self._polled_facts
        return self._is_polling and (
            is_other or (is_idle_now and not self._is_ending(IDLE_POLL_DELAY_SECONDS))
        )

    def _has_room(self) -> bool:
        """Checks whether the worker can take another lease. It takes one more than it can run.
        Deliveries are limited, so that results don't pile up on a slow network."""
        delivering = self._count(LeasePhase.DELIVERING)
        return (
            self._health.condition is None
            and not self._is_recycling
            and self._load() <= self._settings.max_concurrency
            and delivering <= self._settings.max_concurrency + 1
        )

    @property
    def is_ready(self) -> bool:
        """Whether the worker currently accepts jobs."""
        return self._has_begun and self._health.condition is None and not self.stop.asked

    @property
    def waiting(self) -> int:
        """The number of leases that wait for a slot. Negative if slots are free."""
        return self._load() - self._settings.max_concurrency

    @property
    def is_idle(self) -> bool:
        return self._load() == 0

    def _load(self) -> int:
        """Returns the number of leases whose prompts have not finished."""
        return len(self._lease_runners) - self._count(LeasePhase.DELIVERING)

    def _count(self, phase: LeasePhase) -> int:
        return sum(runner.lease.phase is phase for runner in self._lease_runners)

    async def _poll(self, failures: int) -> Polled | None:
        sent_at, key = time.monotonic(), self._control.key
        try:
            message = await self._poll_message()
            self._is_polling = True
            polled = await self._control.poll(message)
        except WorkerRevoked as error:
            self._stop_revoked(error)
            return None
        except Unauthenticated as error:
            self._is_polling = False
            if key != self._control.key:
                return None  # Another response has already delivered a new key.
            logger.warning("the key is no longer valid", extra={"reason": error.message})
            await self._describe()
            await self._register()
            return None
        except FleetError as error:
            level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
            logger.log(level, "a poll failed", extra={"reason": error.message})
            await self._deps.retry.back_off(min(failures + 1, 6))
            return None
        finally:
            self._is_polling = False
        self._apply_answer(polled)
        if polled.job is not None:
            self._has_backlog = time.monotonic() - sent_at < BACKLOG_SECONDS
        if polled.job is None and polled.reason != self._logged_reason:
            self._logged_reason = polled.reason
            logger.info("no jobs: %s", polled.reason)
        is_early = time.monotonic() - sent_at < self._control.wait_seconds / 2
        if polled.job is None and polled.facts_wanted is None and is_early:
            # The response came early because the worker is draining or paused, or has no workflow.
            await asyncio.sleep(EMPTY_PAUSE_SECONDS)
        return polled

    def _apply_answer(self, polled: Polled) -> None:
        self._reported_facts = self._polled_facts
        if polled.object_info_upload is not None:
            self._run_in_background(self._upload(polled.object_info_upload))
        self._apply_new_key(polled.new_token)
        if polled.facts_wanted is not None:
            self._requested_facts.add(polled.facts_wanted)
        if polled.drain:
            self._hand_back_unstarted(StopReason.DRAIN)

    async def _poll_message(
        self, wait_seconds: float | None = None, ended: UUID | None = None
    ) -> Poll:
        reading = await self._read()
        jobs = [runner.lease.job for runner in self._lease_runners]
        held = [job for job in jobs if job.lease_token != ended]
        facts, self._polled_load = self._polled_facts, self._load()
        problem = self._polled_condition
        return Poll(
            worker_id=self._registration.worker_id,
            is_brief=True,
            capabilities=self._settings.capabilities,
            current_load=self._polled_load,
            max_concurrency=self._settings.max_concurrency,
            providers=(self._registration.provider,),
            wait_seconds=self._control.wait_seconds if wait_seconds is None else wait_seconds,
            held=tuple(
                HeldLease(dispatch_id=job.dispatch_id, lease_token=job.lease_token) for job in held
            ),
            models_loaded=self.models.keys,
            model_set=self.models.set_key,
            backend_problem=None if problem is None else _PROBLEMS.get(problem),
            reading=reading,
            backend=None if facts is self._reported_facts else facts,
        )

    def _take(self, entry: JournalEntry, *, resumes: bool = False) -> None:
        job = entry.job
        if any(runner.lease.job.lease_token == job.lease_token for runner in self._lease_runners):
            return
        lease = ActiveLease(entry, self._on_phase)
        lease.resumes = resumes
        lease_runner = LeaseRunner(
            lease, self._control, self._deps, self._heartbeat_loop_of, self._on_fault, self._end
        )
        logger.info("a lease was taken", extra={**lease_runner.ids, "attempt": job.attempt})
        self._platform.protection.busy()
        self._taken_at = time.monotonic()
        asyncio.get_running_loop().call_later(ALONE_SECONDS, self._wake)
        # The model is noted now, because the next job is requested before this run starts.
        self.models.used(job)
        held = asyncio.create_task(lease_runner.run())
        self._lease_runners[lease_runner] = held
        held.add_done_callback(lambda held: self._forget_runner(lease_runner, held))

    def _forget_runner(self, lease_runner: LeaseRunner, held: "asyncio.Task[None]") -> None:
        del self._lease_runners[lease_runner]
        self._counts.finished += isinstance(lease_runner.lease.entry.report, Complete)
        if not held.cancelled() and (error := held.exception()) is not None:
            logger.error(
                "a lease ended with an unexpected error", extra=lease_runner.ids, exc_info=error
            )
        if not self._lease_runners:
            self._platform.protection.idle()
        self._wake()
        self._restart_if_idle()
        if self._keeper is not None and not self.stop.asked:
            self._run_in_background(self._keeper.look())

    # Lease events

    def _heartbeat_loop_of(self, lease_runner: LeaseRunner) -> HeartbeatLoop:
        return HeartbeatLoop(
            self._control,
            lease_runner.lease.job,
            seconds=self._registration.heartbeat_seconds,
            reading=self._read,
            on_answer=lambda answer: self._on_answer(lease_runner, answer),
            on_lost=lambda error: self._on_lost(lease_runner, error),
        )

    def _on_lost(self, lease_runner: LeaseRunner, error: FleetError) -> None:
        lease_runner.stop(StopReason.LOST)
        if isinstance(error, WorkerRevoked):
            self._stop_revoked(error)

    def _stop_revoked(self, error: WorkerRevoked) -> None:
        """Stops all leases and the worker, because the control plane no longer accepts results."""
        if self._revoked is None:
            logger.warning("stopping; this worker was revoked", extra={"reason": error.message})
            self._revoked = error
            for lease_runner in self._lease_runners:
                lease_runner.stop(StopReason.LOST)
            self.stop.ask("shutdown", 0)

    def _apply_new_key(self, key: str | None) -> None:
        if key is not None and key != self._control.key:
            self._registration.take_new_key(key)

    async def _read(self) -> Reading | None:
        reading = await self._platform.machine.read()
        if self._keeper is None:
            return reading
        return reading.model_copy(update={"comfyui_restarts": self._keeper.restarts})

    def _on_answer(self, lease_runner: LeaseRunner, answer: HeartbeatAnswer) -> None:
        self._apply_new_key(answer.new_token)
        if answer.facts_wanted is not None:
            self._requested_facts.add(answer.facts_wanted)
        if answer.cancelled:
            lease_runner.stop(StopReason.CANCELLED)
        elif answer.interrupt:
            lease_runner.interrupt()
        elif answer.recall and self._is_unstarted(lease_runner):
            lease_runner.stop(StopReason.RECALL)
        if answer.drain:
            self._hand_back_unstarted(StopReason.DRAIN)

    def _hand_back_unstarted(self, why: StopReason) -> None:
        for lease_runner in [*filter(self._is_unstarted, self._lease_runners)]:
            lease_runner.stop(why)

    def _is_unstarted(self, lease_runner: LeaseRunner) -> bool:
        """Checks whether a lease can't have started. A queued prompt may start at any moment unless
        others occupy all slots."""
        phase = lease_runner.lease.phase
        others_run = self._count(LeasePhase.RUNNING)
        return phase is LeasePhase.PREPARING or (
            phase is LeasePhase.QUEUED and others_run >= self._settings.max_concurrency
        )

    # The backend

    def _on_fault(self, fault: BackendFault, detail: str) -> None:
        self._counts.out_of_memory += fault.reason == OUT_OF_MEMORY.reason
        if fault.changes_lists:
            self._run_in_background(self._describe())
        if fault.frees:
            self._run_in_background(self._free())
        self._health.note(fault, detail)

    def _on_journal_error(self, error: OSError) -> None:
        """Pauses new leases, because a worker that can't write its journal would lose them if it
        were killed."""
        self._on_fault(DISK_FULL, str(error))

    def _on_condition(self) -> None:
        """Hands back the leases that the backend can't start, and wakes the poll loop."""
        if self._health.condition is not None:
            self._hand_back_for(self._health.condition)
        self._wake()

    def _hand_back_for(self, condition: BackendCondition) -> None:
        """Hands back the leases that can't start under this condition."""
        why = _STOP_BY_CONDITION.get(condition)
        if why is not None:
            self._hand_back_unstarted(why)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        background = asyncio.create_task(work)
        self._background.add(background)
        background.add_done_callback(self._background.discard)

    async def _free(self) -> None:
        self.models.clear()
        if self._keeper is not None:
            self._keeper.note_freed()
        try:
            await self._deps.backend.free()
        except FleetError as error:
            logger.warning("memory was not freed", extra={"reason": error.message})

    async def _recover(self) -> None:
        self.models.clear()
        await self._describe()

    async def _describe(self) -> None:
        """Reads the backend's description. A change wakes the poll loop and is reported."""
        self._requested_facts.note_reading()
        description: Description | None = None
        try:
            description = await self._deps.backend.describe()
            facts = await asyncio.to_thread(
                backend_facts, description, is_cloud=self._settings.is_cloud
            )
            if self._deps.files is not None:
                await asyncio.to_thread(self._deps.files.learn, description.object_info)
        except NotOffered:
            facts = BackendFacts(kind="Comfy Cloud")
        except FleetError as error:
            logger.warning("reading the backend's facts failed", extra={"reason": error.message})
            return
        if facts != self._facts:
            self._facts, self._description = facts, description
            self._wake()

    async def _answer_facts_requests(self, tokens: tuple[str, ...]) -> None:
        await self._describe()
        await self._report_facts(tokens)

    async def _report_facts(self, tokens: tuple[str, ...]) -> None:
        """Reports the backend's facts, and uploads object_info and reports again if necessary.
        After an error, the next poll reports the facts."""
        facts = self._facts
        for _ in range(FACTS_ATTEMPTS_MAX):
            report = FactsReport(
                worker_id=self._registration.worker_id,
                tokens=tokens,
                backend=None if facts is self._reported_facts else facts,
            )
            try:
                answer = await self._control.report_facts(report)
            except FleetError as error:
                logger.debug("the backend's facts were not reported: %s", error.message)
                return
            self._reported_facts = facts
            if answer.object_info_upload is None:
                return
            if self._description is None:
                # A poll has already started this upload.
                await asyncio.sleep(UPLOAD_PAUSE_SECONDS)
            await self._upload(answer.object_info_upload)

    async def _refresh_facts(self) -> None:
        """Calls `_describe` regularly, because node packs and models change while ComfyUI runs."""
        usual = CLOUD_FACTS_SECONDS if self._settings.is_cloud else FACTS_SECONDS
        took = 0.0
        while True:
            await asyncio.sleep(max(usual, took / FACTS_SHARE))
            began = time.monotonic()
            await self._describe()
            took = time.monotonic() - began
            if self._deps.inputs is not None:
                await self._deps.inputs.shrink()

    def _is_idle(self) -> bool:
        """Checks whether the backend has no prompt, so that it may be probed every few seconds.
        Always returns False for cloud services."""
        in_backend = any(runner.lease.in_backend for runner in self._lease_runners)
        return not in_backend and not self._settings.is_cloud

    # Shutdown

    async def _shut_down(self) -> None:
        why = StopReason(self.stop.reason or "shutdown")
        self._hand_back_unstarted(why)
        self._log_waiting()
        await self._wait_for_leases(lambda: self.stop.seconds_left - self.stop.reserve_seconds)
        why = StopReason(self.stop.reason or "shutdown")
        for lease_runner in [*self._lease_runners]:
            lease_runner.stop(why)
        deadline = time.monotonic() + HAND_BACK_SECONDS_MAX
        await self._wait_for_leases(lambda: self.stop.seconds_to(deadline))
        deregistered = await self._deregister(time.monotonic() + DEREGISTER_SECONDS_MAX)
        if deregistered:
            await asyncio.to_thread(self._deps.journal.forget_identity)
        logger.info(
            "stopped", extra={"deregistered": deregistered, "leases_left": len(self._lease_runners)}
        )

    def _log_waiting(self) -> None:
        count = sum(runner.stop_reason is None for runner in self._lease_runners)
        if count and self.stop.seconds_left > 0:
            logger.warning(
                "waiting up to %.0f s for running jobs (jobs: %d); a second Ctrl-C stops them now",
                self.stop.seconds_left,
                count,
            )

    async def _deregister(self, deadline: float) -> bool:
        """Deregisters the worker and returns whether that succeeded. A second stop signal cuts this
        short."""
        if self._control.key is None or self._revoked is not None:
            return False
        deregistering = asyncio.create_task(self._control.deregister(self._registration.worker_id))
        deregistering.add_done_callback(lambda _: self._wake())
        await self._wait_for(deregistering.done, lambda: self.stop.seconds_to(deadline))
        if not deregistering.done():
            deregistering.cancel()
            return False
        return deregistering.result()

    async def _stop_process(self, owned: ManagedProcess) -> None:
        """Stops the process gracefully. After a second stop signal, kills it."""
        stopping = asyncio.create_task(owned.stop())
        stopping.add_done_callback(lambda _: self._wake())
        await self._wait_for(stopping.done, lambda: self.stop.seconds_to(float("inf")))
        if not stopping.done():
            owned.kill()
        await stopping

    async def _wait_for_leases(self, seconds_left: Callable[[], float]) -> None:
        """Waits until all leases have ended or the deadline, which may move closer, has passed."""
        await self._wait_for(lambda: not self._lease_runners, seconds_left)

    async def _wait_for(
        self, is_done: Callable[[], bool], seconds_left: Callable[[], float]
    ) -> None:
        while not is_done() and (seconds := seconds_left()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(min(seconds, LOOK_SECONDS)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    # Waiting

    def _wake(self) -> None:
        self._changed.set()

    def _on_phase(self) -> None:
        self._wake()
        for seconds in (IDLE_POLL_DELAY_SECONDS, PREFETCH_DELAY_SECONDS):
            asyncio.get_running_loop().call_later(seconds, self._wake)

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._changed.clear()
            await self._changed.wait()

    async def _unless_stopped(
        self, coroutine: Coroutine[Any, Any, Any], until: Callable[[], bool] = lambda: False
    ) -> Any:
        """Runs `coroutine`. Returns None if a stop is requested or `until` becomes true first."""
        work = asyncio.create_task(coroutine)
        try:
            while not (work.done() or self.stop.asked or until()):
                self._changed.clear()
                waker = asyncio.create_task(self._changed.wait())
                await asyncio.wait({work, waker}, return_when=asyncio.FIRST_COMPLETED)
                waker.cancel()
        finally:
            if not work.done():
                work.cancel()
        return await work if work.done() else None
