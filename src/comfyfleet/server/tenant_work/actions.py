"""Lists, pauses and stops the work of a tenant or of one of its users, for operators.

All actions can be repeated. An item that is already stopped or paused isn't changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from comfyfleet.api.admin import WorkKind
from comfyfleet.errors import NotFound
from comfyfleet.server.db import Database
from comfyfleet.server.graphs import actions as graph_actions
from comfyfleet.server.graphs import pause_actions
from comfyfleet.server.graphs.actions import Owner
from comfyfleet.server.graphs.apply import GraphContext
from comfyfleet.server.jobs import submit
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.service import PendingAudit
from comfyfleet.server.pipelines import actions as pipelines
from comfyfleet.server.tenant_work import store
from comfyfleet.server.tenant_work.store import WorkItem
from comfyfleet.server.tenants import actions as tenant_actions
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import User

LISTED_MAX = 200  # maximum number of items of each kind
STOPPED_PER_CALL_MAX = 100
JOBS_PER_PAGE = 100
SYSTEM = "system"


@dataclass(frozen=True, slots=True)
class WorkOwner:
    """A tenant, or one of its users."""

    tenant_id: UUID
    user_id: UUID | None = None


class Stopped(NamedTuple):
    counts: Mapping[WorkKind, int]
    has_more: bool  # True means the call must be repeated


async def list_work(graphs: GraphContext, scope: WorkOwner) -> list[WorkItem]:
    """Returns open runs and all triggers, limited to the newest of each kind."""
    async with graphs.context.tenant(scope.tenant_id) as tx:
        return [
            item
            for kind in WorkKind
            for item in await store.open_work(
                tx, scope.tenant_id, scope.user_id, kind=kind, limit=LISTED_MAX
            )
        ]


async def stop_all(graphs: GraphContext, scope: WorkOwner, *, actor: str) -> Stopped:
    """Pauses all triggers first, so that nothing new starts, and then stops pipelines and runs."""
    await _require_known(graphs, scope)
    paused = await _pause_triggers(graphs, scope, actor=actor)
    items = await _open_runs(graphs, scope)
    counts = Counter({WorkKind.TRIGGER: paused})
    for item in items[:STOPPED_PER_CALL_MAX]:
        await _stop_run(graphs, scope.tenant_id, item, actor=actor)
        counts[item.kind] += 1
    return Stopped(counts, len(items) > STOPPED_PER_CALL_MAX)


async def pause_all(graphs: GraphContext, scope: WorkOwner, *, actor: str) -> Stopped:
    """Pauses triggers first, and then pipeline runs and graph runs. Submitted jobs continue."""
    await _require_known(graphs, scope)
    paused = await _pause_triggers(graphs, scope, actor=actor)
    items = await _open_runs(graphs, scope, is_running=True)
    counts = Counter({WorkKind.TRIGGER: paused})
    for item in items[:STOPPED_PER_CALL_MAX]:
        await _pause_run(graphs, scope.tenant_id, item, actor=actor)
        counts[item.kind] += 1
    return Stopped(counts, len(items) > STOPPED_PER_CALL_MAX)


async def _open_runs(
    graphs: GraphContext, scope: WorkOwner, *, is_running: bool = False
) -> list[WorkItem]:
    """Returns open pipeline runs and graph runs. If there are more than a single call can stop,
    returns at least one more than that limit, so that the caller notices."""
    async with graphs.context.tenant(scope.tenant_id) as tx:
        return [
            item
            for kind in (WorkKind.PIPELINE_RUN, WorkKind.GRAPH_RUN)
            for item in await store.open_work(
                tx,
                scope.tenant_id,
                scope.user_id,
                kind=kind,
                is_running=is_running,
                limit=STOPPED_PER_CALL_MAX + 1,
            )
        ]


async def stop_item(
    graphs: GraphContext, tenant_id: UUID, kind: WorkKind, item_id: UUID, *, actor: str
) -> WorkItem:
    """Stops a run, or pauses a trigger."""
    item = await _find(graphs, tenant_id, kind, item_id)
    if kind is WorkKind.TRIGGER:
        await _pause_triggers(graphs, WorkOwner(tenant_id), [item_id], actor=actor)
    else:
        await _stop_run(graphs, tenant_id, item, actor=actor)
    return await _find(graphs, tenant_id, kind, item_id)


async def pause_item(
    graphs: GraphContext, tenant_id: UUID, kind: WorkKind, item_id: UUID, *, actor: str
) -> WorkItem:
    item = await _find(graphs, tenant_id, kind, item_id)
    if kind is WorkKind.TRIGGER:
        await _pause_triggers(graphs, WorkOwner(tenant_id), [item_id], actor=actor)
    else:
        await _pause_run(graphs, tenant_id, item, actor=actor)
    return await _find(graphs, tenant_id, kind, item_id)


async def stop_deactivated(graphs: GraphContext, pool: Database) -> bool:
    """Stops the work of deactivated users, including those whose deactivation was interrupted.

    Returns whether there is more. A user who is active again is left alone.
    """
    async with pool.read() as tx:
        pending = await notifications.pending_stops(tx)
    has_more = False
    for stop in pending:
        async with pool.read() as tx:
            user = await tenants.get_user(tx, stop.tenant_id, stop.user_id)
        is_done = user.is_active
        if not is_done:
            scope = WorkOwner(stop.tenant_id, stop.user_id)
            is_done = not (await stop_all(graphs, scope, actor=SYSTEM)).has_more
            if is_done:
                await _cancel_single_jobs(graphs, stop.tenant_id, stop.user_id)
        has_more = has_more or not is_done
        if is_done:
            async with pool.transaction() as tx:
                await notifications.end_stop(tx, stop.id)
    return has_more


async def deactivate_user(graphs: GraphContext, scope: WorkOwner, *, actor: str) -> User:
    """Deactivates a user, revokes their keys, stops their work and cancels their single jobs.

    If this is interrupted, a sweep does the rest.
    """
    context, user_id = graphs.context, scope.user_id
    if user_id is None:
        raise NotFound("specify a user")
    pool = await context.pool_of(scope.tenant_id)
    user = await tenant_actions.deactivate_user(
        context.central, pool, scope.tenant_id, user_id, operator=actor, now=context.clock()
    )
    await stop_deactivated(graphs, pool)
    await notifications.flush_audits(context.central, pool)
    return user


async def _require_known(graphs: GraphContext, scope: WorkOwner) -> None:
    if scope.user_id is None:
        await graphs.context.pool_of(scope.tenant_id)
        return
    async with graphs.context.tenant(scope.tenant_id) as tx:
        await tenants.get_user(tx, scope.tenant_id, scope.user_id)


async def _find(graphs: GraphContext, tenant_id: UUID, kind: WorkKind, item_id: UUID) -> WorkItem:
    async with graphs.context.tenant(tenant_id) as tx:
        item = await store.find_work(tx, tenant_id, kind, item_id)
    if item is None:
        raise NotFound(
            f"{kind.replace('_', ' ')} {item_id} was not found",
            hint=f"List the tenant's work with: comfyfleet admin tenants work list {tenant_id}",
        )
    return item


async def _pause_triggers(
    graphs: GraphContext, scope: WorkOwner, ids: Sequence[UUID] | None = None, *, actor: str
) -> int:
    context, now = graphs.context, graphs.context.clock()
    pool = await context.pool_of(scope.tenant_id)
    async with pool.transaction() as tx:
        paused = await store.pause_triggers(tx, scope.tenant_id, scope.user_id, ids)
        for trigger_id in paused:
            entry = PendingAudit(
                actor, "pause_trigger", f"trigger:{trigger_id}", scope.tenant_id, now
            )
            await notifications.note_audit(tx, trigger_id, entry)
    await notifications.flush_audits(context.central, pool)
    return len(paused)


async def _pause_run(graphs: GraphContext, tenant_id: UUID, item: WorkItem, *, actor: str) -> None:
    if item.kind is WorkKind.PIPELINE_RUN:
        await pipelines.pause_run(graphs.context, tenant_id, item.user_id, item.id, actor=actor)
    else:
        await pause_actions.pause_graph_run(graphs, Owner(tenant_id, item.user_id), item.id)
    await _audit(graphs, tenant_id, item, f"pause_{item.kind}", actor)


async def _stop_run(graphs: GraphContext, tenant_id: UUID, item: WorkItem, *, actor: str) -> None:
    """Cancels the run first, so that it starts no more jobs, and then its running jobs."""
    context = graphs.context
    cancelled_before = await _count_cancelled(graphs, tenant_id, item)
    if item.kind is WorkKind.PIPELINE_RUN:
        await pipelines.cancel_run(context, tenant_id, item.user_id, item.id, actor=actor)
    else:
        await graph_actions.cancel_graph_run(graphs, Owner(tenant_id, item.user_id), item.id)
    await _cancel_jobs(graphs, tenant_id, run_id=item.id)
    jobs = await _count_cancelled(graphs, tenant_id, item) - cancelled_before
    if item.is_open or jobs:
        await _audit(graphs, tenant_id, item, f"stop_{item.kind}", actor, jobs_cancelled=jobs)


async def _cancel_single_jobs(graphs: GraphContext, tenant_id: UUID, user_id: UUID) -> None:
    cancelled = await _cancel_jobs(graphs, tenant_id, user_id=user_id)
    if cancelled:
        await graphs.context.audit(
            SYSTEM, "cancel_jobs", f"user:{user_id}", tenant_id, jobs_cancelled=cancelled
        )


async def _count_cancelled(graphs: GraphContext, tenant_id: UUID, item: WorkItem) -> int:
    async with graphs.context.tenant(tenant_id) as tx:
        return await store.count_cancelled_jobs(tx, tenant_id, item.id)


async def _cancel_jobs(
    graphs: GraphContext,
    tenant_id: UUID,
    *,
    user_id: UUID | None = None,
    run_id: UUID | None = None,
) -> int:
    """Cancels and refunds the queued and running jobs of a user or a run. Returns their number."""
    cancelled = 0
    while True:
        async with graphs.context.tenant(tenant_id) as tx:
            job_ids = await store.active_jobs(
                tx, tenant_id, user_id=user_id, run_id=run_id, limit=JOBS_PER_PAGE
            )
        if not job_ids:
            return cancelled
        for job_id in job_ids:
            await submit.cancel_job(graphs.context, tenant_id, job_id)
        cancelled += len(job_ids)


async def _audit(
    graphs: GraphContext,
    tenant_id: UUID,
    item: WorkItem,
    action: str,
    actor: str,
    **details: object,
) -> None:
    await graphs.context.audit(
        actor, action, f"{item.kind}:{item.id}", tenant_id, user_id=item.user_id, **details
    )
