"""Advances graph runs: converts the states of their jobs into events, reads the outbox, and
regularly checks backends and timeouts."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from uuid import UUID

from comfyfleet.api.worker import Progress
from comfyfleet.errors import NotFound, QueueFull, Unavailable
from comfyfleet.server.db import Database, Tx
from comfyfleet.server.db.errors import log_level_of
from comfyfleet.server.db.outages import log_failure
from comfyfleet.server.graphs import store
from comfyfleet.server.graphs.apply import (
    GRAPH_RUN_KIND,
    GraphContext,
    LoadedRun,
    apply_decision,
    decide_slice,
    job_output,
)
from comfyfleet.server.graphs.catalogue import BackendState
from comfyfleet.server.graphs.decide import apply_event
from comfyfleet.server.graphs.draft import RunDecision, RunDraft
from comfyfleet.server.graphs.run import (
    Environment,
    Event,
    ExecutionKey,
    FailureCause,
    GraphRunState,
    JobCancelled,
    JobDone,
    JobFailed,
    JobProgressed,
    JobStarted,
    JobWaiting,
)
from comfyfleet.server.graphs.store import OpenRun
from comfyfleet.server.jobs import service as jobs
from comfyfleet.server.jobs.model import Failure, Job, JobStatus
from comfyfleet.server.jobs.outbox import flush
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File
from comfyfleet.server.media.service import FILES_AT_ONCE_MAX
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import Dispatch

TIMED_OUT = "node timeout"  # The raw error of a job that exceeded its node's timeout.


async def output_files(tx: Tx, tenant_id: UUID, jobs: Iterable[Job]) -> dict[UUID, File]:
    """Reads the output files of completed jobs, by id. Leaves out files that have expired."""
    file_ids = [
        output.file_id
        for job in jobs
        if job.status == JobStatus.COMPLETED
        for output in job.outputs
    ]
    files: dict[UUID, File] = {}
    for start in range(0, len(file_ids), FILES_AT_ONCE_MAX):
        files |= await media.find_existing(
            tx, tenant_id, file_ids[start : start + FILES_AT_ONCE_MAX]
        )
    return files


def events_from_job(
    key: ExecutionKey,
    attempt: int,
    job: Job,
    dispatch: Dispatch | None,
    files: Mapping[UUID, File],
    backends: Iterable[BackendState],
) -> Iterator[Event]:
    """Yields all events that correspond to the state of a job. Events that were already applied
    have no effect."""
    worker = dispatch.worker_id if dispatch else None
    if job.status == JobStatus.QUEUED:
        yield JobWaiting(key, attempt)
        return
    if worker and job.started_at:
        yield JobStarted(key, attempt, worker, job.started_at)
    if job.status == JobStatus.COMPLETED:
        yield JobDone(key, attempt, job_output(job, files), worker)
    elif job.status == JobStatus.CANCELLED:
        yield JobCancelled(key, attempt)
    elif job.status == JobStatus.FAILED:
        message = job.error_message or "Processing failed."
        cause = _cause(job, worker, backends)
        yield JobFailed(key, attempt, message, cause, worker, job.raw_error)


def _cause(job: Job, worker: str | None, backends: Iterable[BackendState]) -> FailureCause:
    if job.raw_error == TIMED_OUT:
        return FailureCause.TIMEOUT
    is_there = any(backend.is_online for backend in backends if backend.worker_id == worker)
    return FailureCause.ERROR if is_there or worker is None else FailureCause.BACKEND_LOST


def progress_event(key: ExecutionKey, attempt: int, progress: Progress) -> JobProgressed:
    step = f"{progress.step} of {progress.steps}" if progress.step and progress.steps else None
    words = [f"node {progress.node}" if progress.node else None, step]
    current = ", ".join(filter(None, words)) or None
    return JobProgressed(key, attempt, (progress.percent or 0.0) / 100, current)


log = logging.getLogger(__name__)
OUTBOX_PER_PAGE = 500
RETRY_DELAY = timedelta(seconds=30)
RUNS_PER_PAGE = 100
STEPS_AT_ONCE_MAX = 4  # Maximum number of slices per call. For more slices, tenants take turns.
# If a cut run has changed within this time, another process is continuing it.
CONTINUED_ELSEWHERE = timedelta(seconds=10)


async def advance(
    graphs: GraphContext, tenant_id: UUID, run_id: UUID, *, handled_outbox: tuple[int, ...] = ()
) -> LoadedRun:
    """Advances a run as far as is currently possible."""

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        events = await _read_events(graphs, loaded, environment)
        return await decide_slice(loaded, loaded.run, events, environment)

    loaded = await apply_decision(graphs, tenant_id, run_id, decide, handled_outbox=handled_outbox)
    for _ in range(STEPS_AT_ONCE_MAX):
        if not _has_more(graphs, loaded):
            return loaded
        revision = loaded.revision
        loaded = await _continue(graphs, tenant_id, run_id)
        if loaded.revision == revision:
            return loaded
    if _has_more(graphs, loaded):
        graphs.cut.add(tenant_id, run_id)
    return loaded


async def _continue(graphs: GraphContext, tenant_id: UUID, run_id: UUID) -> LoadedRun:
    """Computes the next slice of a cut decision, without reading the jobs again."""

    async def decide(loaded: LoadedRun, environment: Environment) -> RunDecision:
        return await decide_slice(loaded, loaded.run, (), environment)

    return await apply_decision(graphs, tenant_id, run_id, decide)


async def continue_cut_runs(graphs: GraphContext) -> bool:
    """Continues one cut run of each tenant. Returns whether any cut runs remain.

    This only covers runs that were cut in this process. After a restart, the sweep finds the
    others."""
    for tenant_id, run_id in graphs.cut.take_one_per_tenant():
        await _continue_safely(graphs, tenant_id, run_id)
    return bool(graphs.cut)


async def _continue_safely(graphs: GraphContext, tenant_id: UUID, run_id: UUID) -> None:
    """Continues a run and logs any error. The sweep retries failed runs."""
    before = graphs.runs.get_cached(tenant_id, run_id)
    try:
        loaded = await _continue(graphs, tenant_id, run_id)
    except (QueueFull, Unavailable, NotFound) as error:
        log.log(
            log_level_of(error),
            "graph run %s could not be continued and will be retried: %s",
            run_id,
            error.message,
        )
    except Exception:
        log.exception("graph run %s can't continue", run_id)
    else:
        # If another process has changed the run, that process continues it.
        is_ours = before is None or loaded.revision == before.revision + 1
        if is_ours and _has_more(graphs, loaded):
            graphs.cut.add(tenant_id, run_id)


def _has_more(graphs: GraphContext, loaded: LoadedRun) -> bool:
    """Checks whether the last decision stopped at its limit or the run can start more jobs. That is
    possible if some jobs were refused or reused existing results."""
    return loaded.run.is_cut or _has_room(graphs, loaded)


def _has_room(graphs: GraphContext, loaded: LoadedRun) -> bool:
    """Checks whether executions are held although the run could have more jobs in flight."""
    run, graph = loaded.run, loaded.plan.graph
    most = graphs.context.settings.max_queued_per_graph_run
    is_going = not run.status.is_over and run.paused_at is None and bool(run.held)
    return is_going and len(run.in_flight) < min(most, graph.at_once or most)


async def _dispatches(
    graphs: GraphContext, loaded: LoadedRun, run_jobs: Iterable[Job]
) -> dict[UUID, Dispatch]:
    """Reads the dispatches of all jobs that are no longer queued."""
    begun = [job.id for job in run_jobs if job.status != JobStatus.QUEUED]
    if not begun:
        return {}
    async with graphs.context.central.read() as tx:
        return await dispatch.of_jobs(tx, loaded.head.tenant_id, begun)


async def _read_events(
    graphs: GraphContext, loaded: LoadedRun, environment: Environment
) -> list[Event]:
    """Reads the events of all jobs that the run waits for. Events that were already applied have no
    effect."""
    waiting = loaded.jobs
    if not waiting:
        return []
    async with graphs.context.tenant(loaded.head.tenant_id) as tx:
        run_jobs = await jobs.get_many(tx, loaded.head.tenant_id, list(waiting))
        files = await output_files(tx, loaded.head.tenant_id, run_jobs.values())
    rows = await _dispatches(graphs, loaded, run_jobs.values())
    return [
        event
        for job_id, (key, attempt) in sorted(waiting.items(), key=lambda item: item[1])
        if job_id in run_jobs
        for event in events_from_job(
            key, attempt, run_jobs[job_id], rows.get(job_id), files, environment.backends
        )
    ]


async def with_live_progress(graphs: GraphContext, loaded: LoadedRun) -> GraphRunState:
    """Returns the run with the live progress of its jobs, which changes too often to be stored."""
    if loaded.run.status.is_over or not loaded.run.in_flight:
        return loaded.run
    async with graphs.context.tenant(loaded.head.tenant_id) as tx:
        run_jobs = await jobs.get_many(tx, loaded.head.tenant_id, list(loaded.jobs))
    rows = await _dispatches(graphs, loaded, run_jobs.values())
    environment = Environment(graphs.context.clock())
    draft = RunDraft(loaded.plan, loaded.run, environment)
    for job_id, (key, attempt) in loaded.jobs.items():
        job = run_jobs.get(job_id)
        if job is None:
            continue
        row = rows.get(job_id)
        if not job.status.is_active:
            # The job has ended, and the run will process this soon. Until then, the job is shown as
            # complete, so that the progress doesn't decrease.
            if job.status == JobStatus.COMPLETED:
                apply_event(
                    JobStarted(key, attempt, (row and row.worker_id) or "", job.started_at), draft
                )
                apply_event(JobProgressed(key, attempt, 1.0), draft)
            continue
        events: list[Event] = list(events_from_job(key, attempt, job, row, {}, ()))
        progress = graphs.context.caches.progress.of(job.lease_token)
        if progress and job.shown_status == JobStatus.PROCESSING:
            events.append(progress_event(key, attempt, progress))
        for event in events:
            apply_event(event, draft)
    return draft.finished().run


async def read_outbox(graphs: GraphContext, pool: Database) -> None:
    """Processes all outbox rows of a pool, page by page. A single page wouldn't be enough, because
    rows of blocked runs may remain for a long time and fill it."""
    after = 0
    while True:
        async with pool.read() as tx:
            rows = await jobs.outbox_of_runs(
                tx, GRAPH_RUN_KIND, now=graphs.context.clock(), limit=OUTBOX_PER_PAGE, after=after
            )
        by_run: dict[tuple[UUID, UUID], list[int]] = {}
        for outbox_id, tenant_id, run_id, _job in rows:
            by_run.setdefault((tenant_id, run_id), []).append(outbox_id)
        for (tenant_id, run_id), ids in by_run.items():
            await _advance_safely(graphs, pool, tenant_id, run_id, tuple(ids))
        if len(rows) < OUTBOX_PER_PAGE:
            return
        after = rows[-1][0]


async def _advance_safely(
    graphs: GraphContext,
    pool: Database,
    tenant_id: UUID,
    run_id: UUID,
    handled_outbox: tuple[int, ...] = (),
) -> None:
    """Advances a run and logs any error, so that a single run can't block the others. After an
    error, the run's outbox rows remain."""
    try:
        await advance(graphs, tenant_id, run_id, handled_outbox=handled_outbox)
    except (QueueFull, Unavailable) as error:
        log.log(
            log_level_of(error),
            "graph run %s could not be advanced and will be retried: %s",
            run_id,
            error.message,
        )
    except NotFound:
        # The run no longer exists, so its outbox rows are deleted.
        async with pool.transaction() as tx:
            await jobs.delete_outbox(tx, handled_outbox)
    except Exception as error:  # noqa: BLE001 — one run must not block the others
        log_failure(log, error, "graph run %s can't continue", run_id)
        await _reschedule(graphs, pool, handled_outbox)


async def _reschedule(
    graphs: GraphContext, pool: Database, handled_outbox: tuple[int, ...]
) -> None:
    """Delays the outbox rows, so that the same error isn't logged every second."""
    if handled_outbox:
        async with pool.transaction() as tx:
            until = graphs.context.clock() + RETRY_DELAY
            await jobs.reschedule_outbox(tx, handled_outbox, until=until)


async def sweep_runs(graphs: GraphContext, pool: Database) -> None:
    """Advances all active runs, because backends or the time may have changed."""
    after: UUID | None = None
    while True:
        async with pool.read() as tx:
            page = await store.list_open_runs(tx, after=after, limit=RUNS_PER_PAGE)
        for run in page:
            if not _is_being_continued(graphs, run):
                await _sweep_run(graphs, pool, run.tenant_id, run.id)
        if len(page) < RUNS_PER_PAGE:
            return
        after = page[-1].id


def _is_being_continued(graphs: GraphContext, run: OpenRun) -> bool:
    if not run.is_cut:
        return False
    is_known = graphs.runs.get_cached(run.tenant_id, run.id) is not None
    if is_known and run.id not in graphs.cut:
        return False  # This process has cut the run and failed to continue it.
    return run.id in graphs.cut or graphs.context.clock() - run.changed_at < CONTINUED_ELSEWHERE


async def _sweep_run(graphs: GraphContext, pool: Database, tenant_id: UUID, run_id: UUID) -> None:
    try:
        await _end_overdue(graphs, pool, tenant_id, run_id)
    except Exception as error:  # noqa: BLE001 — one run must not block the others
        log_failure(
            log, error, "timeouts of graph run %s could not be checked; retrying later", run_id
        )
    else:
        await _advance_safely(graphs, pool, tenant_id, run_id)


async def _end_overdue(graphs: GraphContext, pool: Database, tenant_id: UUID, run_id: UUID) -> None:
    async with pool.read() as tx:
        loaded = await graphs.runs.get(tx, tenant_id, run_id)
    limits = {
        job_id: seconds
        for job_id, (key, _) in loaded.jobs.items()
        if (seconds := loaded.plan.workflow_node(key.node).timeout_seconds)
    }
    if not limits:
        return
    async with pool.read() as tx:
        run_jobs = await jobs.get_many(tx, tenant_id, list(limits))
    for job in overdue_jobs(graphs, run_jobs, limits):
        await _fail_overdue(graphs, pool, job, limits[job.id])


def overdue_jobs(
    graphs: GraphContext, candidates: Mapping[UUID, Job], limits: Mapping[UUID, int]
) -> list[Job]:
    """Returns the jobs that have exceeded their time limit. The limit applies from the start on a
    worker, so the time in the queue doesn't count."""
    now = graphs.context.clock()
    return [
        job
        for job in candidates.values()
        if job.status == JobStatus.PROCESSING
        and job.started_at
        and now - job.started_at > timedelta(seconds=limits[job.id])
    ]


async def _fail_overdue(graphs: GraphContext, pool: Database, job: Job, seconds: int) -> None:
    context = graphs.context
    why = Failure(f"it took longer than {seconds} s", TIMED_OUT)
    async with pool.transaction() as tx:
        ended, outbox_ids = await jobs.force_fail(
            tx, job.tenant_id, job.id, why, new_id=context.new_id, now=context.clock()
        )
    if ended:
        await flush(context, pool, [ended], outbox_ids)
