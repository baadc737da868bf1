"""A run goes on: when jobs of it have ended, when backends come and go, when time is up."""

import logging
from collections.abc import Iterable, Mapping
from datetime import timedelta
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.db.outages import level_of
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Dispatch
from comfyfleet.graphs import store
from comfyfleet.graphs.advancing import KIND, STEPS_MAX, Graphs, change
from comfyfleet.graphs.decide import next_actions
from comfyfleet.graphs.draft import Advance, Draft
from comfyfleet.graphs.events import Event, JobProgressed, JobStarted, Surroundings
from comfyfleet.graphs.hearing import TIMED_OUT, files_of, progressed, told
from comfyfleet.graphs.keeping import Kept
from comfyfleet.graphs.news import take
from comfyfleet.graphs.runs import Run, RunStatus
from comfyfleet.jobs import service as jobs
from comfyfleet.jobs.model import Failure, Job, JobStatus
from comfyfleet.jobs.settling import deliver
from comfyfleet.kernel.errors import NotFound, QueueFull, Unavailable

log = logging.getLogger(__name__)
WORDS_PER_PAGE = 500
PUT_OFF = timedelta(seconds=30)
RUNS_PER_PAGE = 100


async def advance(
    graphs: Graphs, tenant_id: UUID, run_id: UUID, *, heard: tuple[int, ...] = ()
) -> Kept:
    """As far as it can go at present."""

    async def decide(kept: Kept, world: Surroundings) -> Advance:
        return next_actions(kept.plan, kept.run, await _news(graphs, kept, world), world)

    kept = await change(graphs, tenant_id, run_id, decide, heard=heard)
    for _ in range(STEPS_MAX):
        # A step in which jobs were refused has started nothing in their place.
        if kept.run.status != RunStatus.RUNNING or kept.run.in_flight or not kept.run.held:
            break
        kept = await change(graphs, tenant_id, run_id, decide)
    return kept


async def _dispatches(graphs: Graphs, kept: Kept, found: Iterable[Job]) -> dict[UUID, Dispatch]:
    """Of those that some worker has or had."""
    begun = [job.id for job in found if job.status != JobStatus.QUEUED]
    if not begun:
        return {}
    async with graphs.sides.central.look() as tx:
        return await dispatch.of_jobs(tx, kept.head.tenant_id, begun)


async def _news(graphs: Graphs, kept: Kept, world: Surroundings) -> list[Event]:
    """Of all jobs that the run waits for: what it knows already changes nothing."""
    waiting = kept.jobs
    if not waiting:
        return []
    pool = await graphs.sides.pool_of(kept.head.tenant_id)
    async with pool.look() as tx:
        found = await jobs.some(tx, kept.head.tenant_id, list(waiting))
        made = await files_of(tx, kept.head.tenant_id, found.values())
    rows = await _dispatches(graphs, kept, found.values())
    return [
        event
        for job_id, (key, attempt) in sorted(waiting.items(), key=lambda each: each[1])
        if job_id in found
        for event in told(key, attempt, found[job_id], rows.get(job_id), made, world.backends)
    ]


async def as_of_now(graphs: Graphs, kept: Kept) -> Run:
    """With what running jobs have said since: told often, so never written down."""
    if kept.run.status.is_over or not kept.run.in_flight:
        return kept.run
    pool = await graphs.sides.pool_of(kept.head.tenant_id)
    async with pool.look() as tx:
        found = await jobs.some(tx, kept.head.tenant_id, list(kept.jobs))
    rows = await _dispatches(graphs, kept, found.values())
    world = Surroundings(graphs.sides.clock())
    draft = Draft(kept.plan, kept.run, world)
    for job_id, (key, attempt) in kept.jobs.items():
        job = found.get(job_id)
        if job is None:
            continue
        row = rows.get(job_id)
        if not job.status.is_active:
            # It has ended, and the run will hear of that in a moment: it doesn't fall back till then.
            if job.status == JobStatus.COMPLETED:
                take(JobStarted(key, attempt, (row and row.worker_id) or "", job.started_at), draft)
                take(JobProgressed(key, attempt, 1.0), draft)
            continue
        events: list[Event] = list(told(key, attempt, job, row, {}, ()))
        progress = graphs.sides.progresses.of(job.lease_token)
        if progress and job.shown_status == JobStatus.PROCESSING:
            events.append(progressed(key, attempt, progress))
        for event in events:
            take(event, draft)
    return draft.finished().run


async def hear(graphs: Graphs, pool: Database) -> None:
    """Reads the words of one pool's outbox, all of them: some may be there for long."""
    after = 0
    while True:
        async with pool.look() as tx:
            words = await jobs.words_for_runs(
                tx, KIND, now=graphs.sides.clock(), limit=WORDS_PER_PAGE, after=after
            )
        by_run: dict[tuple[UUID, UUID], list[int]] = {}
        for word, tenant_id, run_id, _job in words:
            by_run.setdefault((tenant_id, run_id), []).append(word)
        for (tenant_id, run_id), ids in by_run.items():
            await _goes_on(graphs, pool, tenant_id, run_id, tuple(ids))
        if len(words) < WORDS_PER_PAGE:
            return
        after = words[-1][0]


async def _goes_on(
    graphs: Graphs, pool: Database, tenant_id: UUID, run_id: UUID, heard: tuple[int, ...] = ()
) -> None:
    """One that can't go on now holds up no other, whatever ails it; its words stay where they are."""
    try:
        await advance(graphs, tenant_id, run_id, heard=heard)
    except (QueueFull, Unavailable) as error:
        log.log(level_of(error), "graph run %s waits: %s", run_id, error.message)
    except NotFound:
        # It was removed; nobody is left to hear this.
        async with pool.begin() as tx:
            await jobs.forget_words(tx, heard)
    except Exception:
        log.exception("graph run %s can't go on", run_id)
        await _put_off(graphs, pool, heard)


async def _put_off(graphs: Graphs, pool: Database, heard: tuple[int, ...]) -> None:
    """To be told of the same mistake every second helps nobody."""
    if heard:
        async with pool.begin() as tx:
            until = graphs.sides.clock() + PUT_OFF
            await jobs.postpone_words(tx, heard, until=until)


async def judge_all(graphs: Graphs, pool: Database) -> None:
    """Every run that goes on, against the backends as they are, and the time."""
    after: UUID | None = None
    while True:
        async with pool.look() as tx:
            page = await store.runs_going_on(tx, after=after, limit=RUNS_PER_PAGE)
        for tenant_id, run_id in page:
            await _judge(graphs, pool, tenant_id, run_id)
        if len(page) < RUNS_PER_PAGE:
            return
        after = page[-1][1]


async def _judge(graphs: Graphs, pool: Database, tenant_id: UUID, run_id: UUID) -> None:
    try:
        await _end_overdue(graphs, pool, tenant_id, run_id)
    except Exception:
        log.exception("graph run %s can't be judged", run_id)
    else:
        await _goes_on(graphs, pool, tenant_id, run_id)


async def _end_overdue(graphs: Graphs, pool: Database, tenant_id: UUID, run_id: UUID) -> None:
    async with pool.look() as tx:
        kept = await graphs.runs.get(tx, tenant_id, run_id)
    limits = {
        job_id: seconds
        for job_id, (key, _) in kept.jobs.items()
        if (seconds := kept.plan.workflow_node(key.node).timeout_seconds)
    }
    if not limits:
        return
    async with pool.look() as tx:
        found = await jobs.some(tx, tenant_id, list(limits))
    for job in overdue(graphs, found, limits):
        await _give_up(graphs, pool, job, limits[job.id])


def overdue(graphs: Graphs, found: Mapping[UUID, Job], limits: Mapping[UUID, int]) -> list[Job]:
    """Counted from the start on a worker: waiting in the queue is nobody's fault."""
    now = graphs.sides.clock()
    return [
        job
        for job in found.values()
        if job.status == JobStatus.PROCESSING
        and job.started_at
        and now - job.started_at > timedelta(seconds=limits[job.id])
    ]


async def _give_up(graphs: Graphs, pool: Database, job: Job, seconds: int) -> None:
    sides = graphs.sides
    why = Failure(f"it took longer than {seconds} s", TIMED_OUT)
    async with pool.begin() as tx:
        ended, words = await jobs.give_up(
            tx, job.tenant_id, job.id, why, new_id=sides.new_id, now=sides.clock()
        )
    if ended:
        await deliver(sides, pool, [ended], words)
