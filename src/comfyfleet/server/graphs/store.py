"""SQL for graphs, graph runs and triggers. The queries filter by tenant or by a trigger's id."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    Join,
    RowMapping,
    Select,
    Table,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    text,
    tuple_,
    update,
)

from comfyfleet.api.graphs import FiringCause, FiringStatus, RunErrorCode, TriggerKind
from comfyfleet.errors import LimitSpent
from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import (
    Moment,
    for_update,
    insert_if_new,
    is_one_of,
)
from comfyfleet.server.db.driver import PreparedStatement
from comfyfleet.server.db.tenant_tables import (
    graph_executions,
    graph_runs,
    graph_versions,
    graphs,
    pipeline_jobs,
    pipeline_runs,
    trigger_delivery_keys,
    trigger_firings,
    triggers,
)
from comfyfleet.server.graphs.run import (
    EXPIRED_REVISION,
    GraphListItem,
    GraphRunStatus,
    RunError,
    RunListItem,
    RunRow,
    StoredGraph,
)

OPEN_STATUSES = (GraphRunStatus.PENDING, GraphRunStatus.RUNNING, GraphRunStatus.WAITING_FOR_USER)


# Graphs


async def add_graph(tx: Tx, graph: StoredGraph) -> None:
    row = {name: getattr(graph, name) for name in ("id", "tenant_id", "user_id", "name", "version")}
    await tx.execute(insert(graphs).values({**row, "created_at": graph.created_at}))
    await add_version(tx, graph)


async def count_graphs(tx: Tx, tenant_id: UUID, user_id: UUID | None) -> int:
    """Counts a user's graphs. Deleted graphs don't count."""
    query = select(func.count()).where(
        graphs.c.tenant_id == tenant_id,
        graphs.c.user_id == user_id,
        graphs.c.deleted_at.is_(None),
    )
    return int(await tx.scalar(query) or 0)


async def add_version(tx: Tx, graph: StoredGraph) -> None:
    row = {
        "graph_id": graph.id,
        "version": graph.version,
        "tenant_id": graph.tenant_id,
        "document": dict(graph.document),
        "created_at": graph.created_at,
    }
    await tx.execute(insert(graph_versions).values(row))


async def next_version(tx: Tx, tenant_id: UUID, graph_id: UUID, name: str) -> int | None:
    """Increments the version under a row lock, so that concurrent requests get different numbers.
    Returns None if the graph doesn't exist."""
    changed = await tx.execute(
        update(graphs)
        .where(
            graphs.c.tenant_id == tenant_id, graphs.c.id == graph_id, graphs.c.deleted_at.is_(None)
        )
        .values(version=graphs.c.version + 1, name=name)
        .returning(graphs.c.version)
    )
    version: int | None = changed.scalar_one_or_none()
    return version


async def get_graph(
    tx: Tx, tenant_id: UUID, graph_id: UUID, version: int | None
) -> StoredGraph | None:
    query = _stored(tenant_id, version).where(graphs.c.id == graph_id)
    row = (await tx.execute(query)).mappings().one_or_none()
    return _graph(row) if row else None


async def graphs_named(
    tx: Tx, tenant_id: UUID, name: str, *, user_id: UUID | None = None, limit: int
) -> list[StoredGraph]:
    """Returns the tenant's graphs with this name, newest first. If `user_id` is set, returns only
    graphs of this user."""
    query = _stored(tenant_id, None).where(graphs.c.name == name)
    if user_id is not None:
        query = query.where(graphs.c.user_id == user_id)
    newest = (graphs.c.created_at.desc(), graphs.c.id.desc())
    rows = await tx.execute(query.order_by(*newest).limit(limit))
    return [_graph(row) for row in rows.mappings()]


async def delete_graph(tx: Tx, tenant_id: UUID, graph_id: UUID, *, now: datetime) -> None:
    """Marks a graph as deleted. Its runs remain, because each one has its own copy of the graph."""
    await tx.execute(
        update(graphs)
        .where(graphs.c.tenant_id == tenant_id, graphs.c.id == graph_id)
        .values(deleted_at=now)
    )


def _stored(tenant_id: UUID, version: int | None) -> Select[Any]:
    number = graphs.c.version if version is None else version
    joined = graphs.join(graph_versions, graph_versions.c.graph_id == graphs.c.id)
    return (
        select(graphs, graph_versions.c.document, graph_versions.c.version.label("found"))
        .select_from(joined)
        .where(graphs.c.tenant_id == tenant_id, graphs.c.deleted_at.is_(None))
        .where(graph_versions.c.version == number)
    )


def _graph(row: RowMapping) -> StoredGraph:
    return StoredGraph(
        row["id"],
        row["tenant_id"],
        row["user_id"],
        row["name"],
        row["found"],
        row["document"],
        row["created_at"],
    )


# Runs


def _head(row: RowMapping) -> RunRow:
    error = row["error"]
    values = {**row, "status": GraphRunStatus(row["status"]), "error": error and _error(error)}
    return RunRow(**values)


def _error(saved: Mapping[str, Any]) -> RunError:
    return RunError(
        saved["node"],
        tuple(saved["at"]),
        saved["backend"],
        saved["message"],
        tuple(saved["alternatives"]),
        RunErrorCode(saved["code"]) if saved.get("code") else None,
    )


async def add_run(tx: Tx, head: RunRow) -> bool:
    """Adds a run. Returns False if a run with this id already exists."""
    row = {
        "id": head.id,
        "tenant_id": head.tenant_id,
        "user_id": head.user_id,
        "graph_id": head.graph_id,
        "graph_version": head.graph_version,
        "snapshot": dict(head.snapshot),
        "inputs": dict(head.inputs),
        "max_tokens": head.max_tokens,
        "status": head.status,
        "revision": head.revision,
        "tokens": head.tokens,
        "created_at": head.created_at,
        "changed_at": head.created_at,
        "deadline_at": head.deadline_at,
        "rerun_of": head.rerun_of,
        "rerun": head.rerun,
    }
    added = await tx.execute(insert_if_new(tx, graph_runs, [row]).returning(graph_runs.c.id))
    return added.one_or_none() is not None


async def get_run(tx: Tx, tenant_id: UUID, run_id: UUID) -> RunRow | None:
    query = select(graph_runs).where(graph_runs.c.tenant_id == tenant_id, graph_runs.c.id == run_id)
    row = (await tx.execute(query)).mappings().one_or_none()
    return _head(row) if row else None


_LOCK_REVISION = PreparedStatement(
    lambda tx: for_update(
        tx,
        select(graph_runs.c.revision).where(
            graph_runs.c.tenant_id == bindparam("of_tenant"), graph_runs.c.id == bindparam("of_run")
        ),
    )
)


async def lock_revision(tx: Tx, tenant_id: UUID, run_id: UUID) -> int | None:
    """Locks the run and returns its revision. No other process can advance the run until the
    transaction ends."""
    row = await _LOCK_REVISION.first(tx, {"of_tenant": tenant_id, "of_run": run_id})
    return row["revision"] if row else None


async def revision_of(tx: Tx, tenant_id: UUID, run_id: UUID) -> int | None:
    query = select(graph_runs.c.revision).where(
        graph_runs.c.tenant_id == tenant_id, graph_runs.c.id == run_id
    )
    return (await tx.execute(query)).scalar_one_or_none()


class OpenRun(NamedTuple):
    tenant_id: UUID
    id: UUID
    is_cut: bool  # True if the last decision stopped early.
    changed_at: datetime


async def list_open_runs(tx: Tx, *, after: UUID | None, limit: int) -> list[OpenRun]:
    query = select(
        graph_runs.c.tenant_id,
        graph_runs.c.id,
        graph_runs.c.cut.is_not(None).label("is_cut"),
        graph_runs.c.changed_at,
    ).where(graph_runs.c.status.in_(OPEN_STATUSES))
    if after:
        query = query.where(graph_runs.c.id > after)
    rows = await tx.execute(query.order_by(graph_runs.c.id).limit(limit))
    return [OpenRun(*row) for row in rows]


# The functions below list graphs and runs without their documents, snapshots and records.


async def list_graphs(
    tx: Tx, tenant_id: UUID, *, before: GraphListItem | None, limit: int
) -> list[GraphListItem]:
    """Returns a page of graphs, newest first."""
    query = _entries(graphs, GraphListItem).where(
        graphs.c.tenant_id == tenant_id, graphs.c.deleted_at.is_(None)
    )
    rows = await tx.execute(_newest(graphs, query, before, limit))
    return [GraphListItem(**row) for row in rows.mappings()]


async def get_graph_item(tx: Tx, tenant_id: UUID, graph_id: UUID) -> GraphListItem | None:
    query = _entries(graphs, GraphListItem).where(
        graphs.c.tenant_id == tenant_id, graphs.c.id == graph_id
    )
    row = (await tx.execute(query)).mappings().one_or_none()
    return GraphListItem(**row) if row else None


async def list_runs(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    graph_id: UUID | None,
    status: GraphRunStatus | None,
    rerun_of: UUID | None,
    before: RunListItem | None,
    limit: int,
) -> list[RunListItem]:
    """Returns a page of runs, newest first."""
    query = _run_entries().where(
        graph_runs.c.tenant_id == tenant_id, graph_runs.c.user_id == user_id
    )
    if graph_id:
        query = query.where(graph_runs.c.graph_id == graph_id)
    if status:
        query = query.where(graph_runs.c.status == status)
    if rerun_of:
        query = query.where(graph_runs.c.rerun_of == rerun_of)
    rows = await tx.execute(_newest(graph_runs, query, before, limit))
    return [_run_entry(row) for row in rows.mappings()]


async def get_run_item(tx: Tx, tenant_id: UUID, user_id: UUID, run_id: UUID) -> RunListItem | None:
    query = _run_entries().where(
        graph_runs.c.tenant_id == tenant_id,
        graph_runs.c.user_id == user_id,
        graph_runs.c.id == run_id,
    )
    row = (await tx.execute(query)).mappings().one_or_none()
    return _run_entry(row) if row else None


def _entries(table: Table, entry: type[GraphListItem]) -> Select[Any]:
    return select(*(table.c[field.name] for field in fields(entry)))


def _run_entries() -> Select[Any]:
    """Selects runs with the names of their graphs, even if a graph was deleted."""
    own = (graph_runs.c[field.name] for field in fields(RunListItem) if field.name != "name")
    joined = graph_runs.join(graphs, graphs.c.id == graph_runs.c.graph_id)
    return select(*own, graphs.c.name).select_from(joined)


def _newest(
    table: Table,
    query: Select[Any],
    before: "GraphListItem | RunListItem | StoredTrigger | TriggerFiring | None",
    limit: int,
) -> Select[Any]:
    place = (table.c.created_at, table.c.id)
    if before:
        last = tuple_(literal(before.created_at, Moment()), before.id)
        query = query.where(tuple_(*place) < last)
    return query.order_by(*(column.desc() for column in place)).limit(limit)


def _run_entry(row: RowMapping) -> RunListItem:
    error = row["error"]
    values = {**row, "status": GraphRunStatus(row["status"]), "error": error and _error(error)}
    return RunListItem(**values)


# Retention


async def expire_runs(tx: Tx, tenant_id: UUID, *, ended_before: datetime, limit: int) -> list[UUID]:
    """Deletes the inputs, outputs and records of runs that have ended, oldest first. Returns the
    ids of these runs."""
    old = (
        select(graph_runs.c.id)
        .where(
            graph_runs.c.tenant_id == tenant_id,
            graph_runs.c.ended_at < ended_before,
            graph_runs.c.revision != EXPIRED_REVISION,
        )
        .order_by(graph_runs.c.ended_at)
        .limit(limit)
    )
    ids = list((await tx.execute(for_update(tx, old, skip_locked=True))).scalars())
    if not ids:
        return []
    lost = {
        "snapshot": {},
        "inputs": {},
        "outputs": null(),
        "error": null(),
        "rerun": null(),
        "cut": null(),
    }
    # Checks ended_at again, because a retry in the meantime would have cleared it.
    over = (is_one_of(tx, graph_runs.c.id, ids), graph_runs.c.ended_at < ended_before)
    changed = update(graph_runs).where(*over).values({**lost, "revision": EXPIRED_REVISION})
    expired = list((await tx.execute(changed.returning(graph_runs.c.id))).scalars())
    await tx.execute(
        delete(graph_executions).where(is_one_of(tx, graph_executions.c.run_id, expired))
    )
    return expired


async def jobs_reused_by_open_runs(tx: Tx, tenant_id: UUID) -> set[UUID]:
    """Returns the ids of the jobs whose results active runs have reused."""
    job_id = graph_executions.c.record["reused_from"]["job_id"].as_string()
    query = (
        select(job_id)
        .select_from(
            graph_executions.join(graph_runs, graph_runs.c.id == graph_executions.c.run_id)
        )
        .where(
            graph_runs.c.tenant_id == tenant_id,
            graph_runs.c.status.in_(OPEN_STATUSES),
            job_id.is_not(None),
        )
        .distinct()
    )
    return {UUID(reused_id) for reused_id in (await tx.execute(query)).scalars()}


async def inputs_of_open_runs(tx: Tx, tenant_id: UUID) -> list[Mapping[str, Any]]:
    """Returns the inputs of active runs."""
    query = select(graph_runs.c.inputs).where(
        graph_runs.c.tenant_id == tenant_id, graph_runs.c.status.in_(OPEN_STATUSES)
    )
    return list((await tx.execute(query)).scalars())


# Triggers


@dataclass(frozen=True, slots=True)
class StoredTrigger:
    """A trigger that starts runs of a graph or pipeline for a user, on a schedule or when a webhook
    is called."""

    id: UUID
    tenant_id: UUID
    user_id: UUID
    name: str
    kind: TriggerKind
    inputs: Mapping[str, Any]
    timezone: str
    tokens_per_day: int
    created_at: datetime
    graph_id: UUID | None = None
    graph_version: int | None = None
    pipeline_id: UUID | None = None
    base_candidates: int | None = None
    cron: str | None = None
    catch_up: bool = False
    max_tokens: int | None = None
    is_paused: bool = False
    next_at: datetime | None = None
    missed: int = 0
    missed_at: datetime | None = None
    secret_number: int = 1


@dataclass(frozen=True, slots=True)
class TriggerFiring:
    id: UUID
    tenant_id: UUID
    trigger_id: UUID
    cause: FiringCause
    day: str  # The date in the trigger's time zone, such as 2026-11-16.
    status: FiringStatus
    created_at: datetime
    not_before: datetime
    planned_at: datetime | None = None
    granted_tokens: int = 0
    inputs: Mapping[str, Any] | None = None
    run_id: UUID | None = None
    error_code: str | None = None
    error: str | None = None
    missed: int = 0
    tries: int = 0
    ended_at: datetime | None = None
    run_status: str | None = None  # The current status of the run.


async def add_trigger(tx: Tx, trigger: StoredTrigger) -> None:
    await tx.execute(insert(triggers).values(asdict(trigger)))


async def count_triggers(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    query = select(func.count()).where(
        triggers.c.tenant_id == tenant_id, triggers.c.user_id == user_id
    )
    return await tx.scalar(query) or 0


async def get_trigger(
    tx: Tx, trigger_id: UUID, *, owner: tuple[UUID, UUID] | None = None
) -> StoredTrigger | None:
    """Returns a trigger or None. If `owner` is set, the trigger must belong to this tenant and
    user. Otherwise, the caller must check the trigger's secret."""
    query = select(triggers).where(triggers.c.id == trigger_id)
    if owner:
        query = query.where(triggers.c.tenant_id == owner[0], triggers.c.user_id == owner[1])
    row = (await tx.execute(query)).mappings().one_or_none()
    return _trigger(row) if row else None


async def lock_trigger(tx: Tx, trigger_id: UUID) -> StoredTrigger | None:
    """Locks a trigger, so that concurrent firings can't exceed its limit."""
    query = for_update(tx, select(triggers).where(triggers.c.id == trigger_id))
    row = (await tx.execute(query)).mappings().one_or_none()
    return _trigger(row) if row else None


async def list_triggers(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before: StoredTrigger | None, limit: int
) -> list[StoredTrigger]:
    """Returns a page of triggers, newest first."""
    query = select(triggers).where(triggers.c.tenant_id == tenant_id, triggers.c.user_id == user_id)
    rows = await tx.execute(_newest(triggers, query, before, limit))
    return [_trigger(row) for row in rows.mappings()]


async def update_trigger(
    tx: Tx, owner: tuple[UUID, UUID], trigger_id: UUID, values: Mapping[str, Any]
) -> StoredTrigger | None:
    changed = await tx.execute(
        update(triggers)
        .where(
            triggers.c.tenant_id == owner[0],
            triggers.c.user_id == owner[1],
            triggers.c.id == trigger_id,
        )
        .values(values)
        .returning(triggers)
    )
    row = changed.mappings().one_or_none()
    return _trigger(row) if row else None


async def delete_trigger(tx: Tx, owner: tuple[UUID, UUID], trigger_id: UUID) -> bool:
    """Deletes a trigger and its firings. Their runs remain."""
    deleted = await tx.execute(
        delete(triggers)
        .where(
            triggers.c.tenant_id == owner[0],
            triggers.c.user_id == owner[1],
            triggers.c.id == trigger_id,
        )
        .returning(triggers.c.id)
    )
    return deleted.first() is not None


# Literal SQL that matches the conditions of the partial indexes. The planner wouldn't use these
# indexes for conditions with bound parameters.
_IS_SCHEDULED = text("next_at IS NOT NULL AND NOT is_paused")
_IS_STARTING = text("trigger_firings.status = 'starting'")


async def due_triggers(tx: Tx, now: datetime, *, limit: int) -> list[StoredTrigger]:
    query = select(triggers).where(_IS_SCHEDULED, triggers.c.next_at <= now)
    rows = await tx.execute(query.order_by(triggers.c.next_at).limit(limit))
    return [_trigger(row) for row in rows.mappings()]


async def claim_moment(tx: Tx, trigger: StoredTrigger, values: Mapping[str, Any]) -> bool:
    """Claims the due time of a schedule and sets the next one. Returns False if another process was
    faster, or if the trigger was paused or deleted."""
    changed = await tx.execute(
        update(triggers)
        .where(triggers.c.id == trigger.id, triggers.c.next_at == trigger.next_at, _IS_SCHEDULED)
        .values(values)
        .returning(triggers.c.id)
    )
    return changed.first() is not None


async def add_firing(tx: Tx, firing: TriggerFiring) -> bool:
    """Adds a firing. Returns False if the firing already exists."""
    row = {name: value for name, value in asdict(firing).items() if name != "run_status"}
    added = await tx.execute(
        insert_if_new(tx, trigger_firings, [row]).returning(trigger_firings.c.id)
    )
    return added.one_or_none() is not None


async def firing_of_keys(
    tx: Tx, trigger_id: UUID, key_hashes: Sequence[str]
) -> tuple[TriggerFiring | None, frozenset[str]]:
    """Returns the oldest firing that has one of these delivery keys, and which of the keys are
    already stored."""
    keys = trigger_delivery_keys
    stored = await tx.execute(
        select(keys.c.key_hash, keys.c.firing_id)
        .where(keys.c.trigger_id == trigger_id, keys.c.key_hash.in_(key_hashes))
        .order_by(keys.c.created_at, keys.c.key_hash)
    )
    rows = stored.all()
    firing = await get_firing(tx, trigger_id, rows[0].firing_id) if rows else None
    return firing, frozenset(row.key_hash for row in rows)


async def add_delivery_keys(
    tx: Tx, firing: TriggerFiring, key_hashes: Collection[str], *, now: datetime
) -> None:
    """Stores the keys of a delivery. Keys that are already stored aren't changed."""
    rows = [
        {
            "trigger_id": firing.trigger_id,
            "key_hash": key_hash,
            "firing_id": firing.id,
            "created_at": now,
        }
        for key_hash in key_hashes
    ]
    if rows:
        await tx.execute(insert_if_new(tx, trigger_delivery_keys, rows))


async def end_firing(tx: Tx, firing_id: UUID, values: Mapping[str, Any]) -> bool:
    """Writes the result of a firing. Returns False if the firing already has a result."""
    changed = await tx.execute(
        update(trigger_firings)
        .where(trigger_firings.c.id == firing_id, trigger_firings.c.status == FiringStatus.STARTING)
        .values({**values, "inputs": null()})
        .returning(trigger_firings.c.id)
    )
    return changed.first() is not None


async def stuck_firings(tx: Tx, now: datetime, *, limit: int) -> list[TriggerFiring]:
    """Returns firings that didn't start a run, because the process that handled them died or
    failed."""
    query = select(trigger_firings).where(_IS_STARTING, trigger_firings.c.not_before <= now)
    rows = await tx.execute(query.order_by(trigger_firings.c.not_before).limit(limit))
    return [_firing(row) for row in rows.mappings()]


async def take_firing(tx: Tx, firing: TriggerFiring, *, until: datetime) -> bool:
    """Claims a firing and counts the attempt. Returns False if another process was faster."""
    changed = await tx.execute(
        update(trigger_firings)
        .where(
            trigger_firings.c.id == firing.id,
            trigger_firings.c.status == FiringStatus.STARTING,
            trigger_firings.c.tries == firing.tries,
        )
        .values(tries=firing.tries + 1, not_before=until)
        .returning(trigger_firings.c.id)
    )
    return changed.first() is not None


async def is_any_trigger_due(tx: Tx, now: datetime) -> bool:
    """Checks whether any trigger is due or any firing is stuck. The query must be cheap, because
    it runs every second."""
    due = select(triggers.c.id).where(_IS_SCHEDULED, triggers.c.next_at <= now).limit(1)
    stuck = select(trigger_firings.c.id).where(_IS_STARTING, trigger_firings.c.not_before <= now)
    return bool(await tx.scalar(select(or_(due.exists(), stuck.limit(1).exists()))))


def _firing_rows() -> Select[Any]:
    """Selects firings with the status of their runs."""
    state = func.coalesce(graph_runs.c.status, pipeline_runs.c.status).label("run_status")
    return select(trigger_firings, state).select_from(_with_runs())


def _with_runs() -> Join:
    return trigger_firings.outerjoin(
        graph_runs, graph_runs.c.id == trigger_firings.c.run_id
    ).outerjoin(pipeline_runs, pipeline_runs.c.id == trigger_firings.c.run_id)


async def get_firing(tx: Tx, trigger_id: UUID, firing_id: UUID) -> TriggerFiring | None:
    query = _firing_rows().where(
        trigger_firings.c.trigger_id == trigger_id, trigger_firings.c.id == firing_id
    )
    row = (await tx.execute(query)).mappings().one_or_none()
    return _firing(row) if row else None


async def list_firings(
    tx: Tx, trigger_id: UUID, *, before: TriggerFiring | None, limit: int
) -> list[TriggerFiring]:
    """Returns a page of firings, newest first."""
    query = _firing_rows().where(trigger_firings.c.trigger_id == trigger_id)
    rows = await tx.execute(_newest(trigger_firings, query, before, limit))
    return [_firing(row) for row in rows.mappings()]


class DayUse(NamedTuple):
    """A trigger's usage on one day."""

    tokens: int = 0
    started: int = 0
    refused: int = 0
    is_spent: bool = False  # True if a run was refused because of the limit.


async def day_uses(tx: Tx, days: Mapping[UUID, str]) -> dict[UUID, DayUse]:
    """Sums up the cost of the runs that each trigger started on the given day. An active run counts
    with the full amount that it may spend."""
    of_pipeline = (
        select(func.coalesce(func.sum(pipeline_jobs.c.tokens), 0))
        .where(pipeline_jobs.c.run_id == pipeline_runs.c.id)
        .scalar_subquery()
    )
    granted = trigger_firings.c.granted_tokens
    counted = case(
        (trigger_firings.c.status.in_((FiringStatus.REFUSED, FiringStatus.MISSED)), 0),
        (graph_runs.c.status.not_in(OPEN_STATUSES), graph_runs.c.tokens),
        (graph_runs.c.tokens > granted, graph_runs.c.tokens),
        (pipeline_runs.c.status == "cancelled", of_pipeline),
        else_=granted,
    )
    state, code = trigger_firings.c.status, trigger_firings.c.error_code
    is_open = state.in_((FiringStatus.STARTING, FiringStatus.STARTED))
    query = (
        select(
            trigger_firings.c.trigger_id,
            func.sum(counted),
            func.sum(case((is_open, 1), else_=0)),
            func.sum(case((state == FiringStatus.REFUSED, 1), else_=0)),
            func.max(case((code == LimitSpent.code, 1), else_=0)),
        )
        .select_from(_with_runs())
        .where(tuple_(trigger_firings.c.trigger_id, trigger_firings.c.day).in_(days.items()))
        .group_by(trigger_firings.c.trigger_id)
    )
    return {
        row[0]: DayUse(int(row[1]), int(row[2]), int(row[3]), bool(row[4]))
        for row in await tx.execute(query)
    }


async def prune_firings(tx: Tx, *, before: datetime, limit: int) -> int:
    """Deletes old firings that have ended, and returns their number."""
    old = (
        select(trigger_firings.c.id)
        .where(
            trigger_firings.c.created_at < before,
            trigger_firings.c.status != FiringStatus.STARTING,
        )
        .limit(limit)
    )
    deleted = await tx.execute(delete(trigger_firings).where(trigger_firings.c.id.in_(old)))
    return int(deleted.rowcount)


def _trigger(row: RowMapping) -> StoredTrigger:
    return StoredTrigger(**{**row, "kind": TriggerKind(row["kind"])})


def _firing(row: RowMapping) -> TriggerFiring:
    kinds = {"cause": FiringCause(row["cause"]), "status": FiringStatus(row["status"])}
    return TriggerFiring(**{**row, **kinds})
