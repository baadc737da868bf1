"""SQL for fleets, workers, readings, and the workflows that are assigned to fleets."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Row,
    Select,
    String,
    bindparam,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
    text,
    tuple_,
    update,
)

from comfyfleet.api.worker import BackendFacts, Reading
from comfyfleet.server.db import Tx
from comfyfleet.server.db.central_tables import (
    control_state,
    dispatches,
    fleets,
    worker_readings,
    worker_workflows,
    workers,
    workflow_fleets,
    workflow_versions,
    workflows,
)
from comfyfleet.server.db.coordination import MAINTENANCE
from comfyfleet.server.db.dialect import (
    Json,
    Moment,
    for_update,
    insert_if_new,
    is_one_of,
    is_sqlite,
)
from comfyfleet.server.db.driver import PreparedStatement, StatementCall, execute_together
from comfyfleet.server.fleets.model import (
    AssignedWorkflow,
    BackendKind,
    BackendSummary,
    Fleet,
    FleetWorker,
    StoredReading,
    WorkerStanding,
)


async def add_fleet(tx: Tx, row: Mapping[str, Any]) -> Fleet | None:
    """Adds a fleet. Returns None if a fleet with the same name exists."""
    added = (await tx.execute(insert_if_new(tx, fleets, [row]).returning(fleets))).first()
    return _fleet(added) if added else None


async def get_fleet(tx: Tx, slug: str, stage: str) -> Fleet | None:
    query = select(fleets).where(fleets.c.slug == slug, fleets.c.stage == stage)
    row = (await tx.execute(query)).first()
    return _fleet(row) if row else None


async def fleet_by_id(tx: Tx, fleet_id: int) -> Fleet | None:
    row = (await tx.execute(select(fleets).where(fleets.c.id == fleet_id))).first()
    return _fleet(row) if row else None


async def fleet_by_secret(tx: Tx, secret_hash: str) -> Fleet | None:
    query = select(fleets).where(fleets.c.secret_hash == secret_hash).limit(1)
    row = (await tx.execute(query)).first()
    return _fleet(row) if row else None


async def has_fleet_secret(tx: Tx, secret_hash: str) -> bool:
    query = select(fleets.c.id).where(fleets.c.secret_hash == secret_hash).limit(1)
    return (await tx.execute(query)).first() is not None


async def lock_fleet(tx: Tx, fleet_id: int) -> None:
    """Locks the fleet's row until the transaction ends."""
    await tx.execute(for_update(tx, select(fleets.c.id).where(fleets.c.id == fleet_id)))


async def all_fleets(tx: Tx) -> list[Fleet]:
    query = select(fleets).order_by(fleets.c.slug, fleets.c.stage)
    return [_fleet(row) for row in await tx.execute(query)]


async def update_fleet(tx: Tx, fleet_id: int, values: Mapping[str, Any]) -> Fleet | None:
    statement = update(fleets).where(fleets.c.id == fleet_id).values(dict(values))
    row = (await tx.execute(statement.returning(fleets))).first()
    return _fleet(row) if row else None


# This query is built only once, because building it takes longer than its execution on SQLite.
_ASSIGNED: Select[Any] = (
    select(
        workflow_fleets.c.fleet_id,
        workflows.c.id.label("workflow_id"),
        workflows.c.slug,
        workflows.c.version,
        workflows.c.required_capabilities,
        workflows.c.is_active,
        workflows.c.is_paused,
        workflows.c.is_open,
    )
    .join(workflows, workflows.c.id == workflow_fleets.c.workflow_id)
    .order_by(workflows.c.slug)
)


async def assigned(
    tx: Tx, fleet_ids: Collection[int] | None = None
) -> dict[int, list[AssignedWorkflow]]:
    """Returns the workflows of these fleets, or of all fleets, by fleet id."""
    query = _ASSIGNED
    if fleet_ids is not None:
        query = query.where(is_one_of(tx, workflow_fleets.c.fleet_id, fleet_ids))
    workflows_by_fleet: dict[int, list[AssignedWorkflow]] = {}
    for row in (await tx.execute(query)).mappings():
        workflows_by_fleet.setdefault(row["fleet_id"], []).append(_assigned(row))
    return workflows_by_fleet


async def fleets_with(tx: Tx, workflow_id: int, stage: str | None) -> list[Fleet]:
    """Returns the fleets that a workflow is assigned to, in one stage or in all stages."""
    if stage is None:
        return [Fleet(**row) for row in await _FLEETS_WITH.rows(tx, {"of_workflow": workflow_id})]
    values = {"of_workflow": workflow_id, "of_stage": stage}
    return [Fleet(**row) for row in await _FLEETS_WITH_OF_STAGE.rows(tx, values)]


def _fleets_with_query(*conditions: ColumnElement[bool]) -> Any:
    return (
        select(fleets)
        .join(workflow_fleets, workflow_fleets.c.fleet_id == fleets.c.id)
        .where(workflow_fleets.c.workflow_id == bindparam("of_workflow"), *conditions)
        .order_by(fleets.c.slug, fleets.c.stage)
    )


_FLEETS_WITH = PreparedStatement(lambda tx: _fleets_with_query())
_FLEETS_WITH_OF_STAGE = PreparedStatement(
    lambda tx: _fleets_with_query(fleets.c.stage == bindparam("of_stage"))
)


async def fleet_ids_with_any(tx: Tx, workflow_ids: Collection[int], stage: str) -> list[int]:
    query = (
        select(fleets.c.id)
        .join(workflow_fleets, workflow_fleets.c.fleet_id == fleets.c.id)
        .where(is_one_of(tx, workflow_fleets.c.workflow_id, workflow_ids), fleets.c.stage == stage)
        .distinct()
    )
    return list(await tx.scalars(query))


async def assign(tx: Tx, fleet_id: int, workflow_ids: Collection[int], now: datetime) -> None:
    if not workflow_ids:
        return
    rows = [{"workflow_id": id_, "fleet_id": fleet_id, "created_at": now} for id_ in workflow_ids]
    await tx.execute(insert(workflow_fleets), rows)


async def unassign(tx: Tx, fleet_id: int, workflow_ids: Collection[int]) -> None:
    await tx.execute(
        delete(workflow_fleets).where(
            workflow_fleets.c.fleet_id == fleet_id,
            is_one_of(tx, workflow_fleets.c.workflow_id, workflow_ids),
        )
    )


async def workflow_ids(tx: Tx, slugs: Collection[str]) -> dict[str, int]:
    query = select(workflows.c.slug, workflows.c.id).where(is_one_of(tx, workflows.c.slug, slugs))
    return {row.slug: row.id for row in await tx.execute(query)}


async def workflow_slugs(tx: Tx) -> list[str]:
    """Returns the slugs of all registered workflows. Open workflows are left out."""
    query = select(workflows.c.slug).where(workflows.c.is_open.is_(False))
    return list(await tx.scalars(query.order_by(workflows.c.slug)))


async def known_workflow_ids(tx: Tx, ids: Collection[int]) -> set[int]:
    return set(await tx.scalars(select(workflows.c.id).where(is_one_of(tx, workflows.c.id, ids))))


def _fleet(row: Row[Any]) -> Fleet:
    return Fleet(**row._mapping)


def _assigned(row: Mapping[Any, Any]) -> AssignedWorkflow:
    return AssignedWorkflow(
        workflow_id=row["workflow_id"],
        slug=row["slug"],
        required_capabilities=frozenset(row["required_capabilities"]),
        is_active=row["is_active"],
        is_paused=row["is_paused"],
        version=row["version"],
        is_open=row["is_open"],
    )


WORKERS_PER_PAGE = 200  # reading this many takes a few milliseconds
# A worker's columns without its backend's facts, which are large and rarely needed.
COLUMNS = (
    *(column for column in workers.c if column.name not in ("facts", "object_info_hash")),
    fleets.c.slug.label("fleet_slug"),
    fleets.c.stage,
)


# This query is built only once, because building it takes longer than its execution on SQLite.
_WORKERS: Select[Any] = (
    select(
        *COLUMNS,
        worker_workflows.c.workflow_id,
    )
    .join(fleets, fleets.c.id == workers.c.fleet_id)
    .outerjoin(worker_workflows, worker_workflows.c.worker_row_id == workers.c.id)
    .order_by(workers.c.worker_id)
)


async def add_worker(tx: Tx, row: Mapping[str, Any], workflow_ids: Collection[int]) -> int | None:
    """Adds a worker. Returns its row id, or None if a worker with the same id exists."""
    statement = insert_if_new(tx, workers, [row]).returning(workers.c.id)
    row_id: int | None = await tx.scalar(statement)
    if row_id is not None and workflow_ids:
        links = [
            {"worker_row_id": row_id, "workflow_id": workflow_id} for workflow_id in workflow_ids
        ]
        await tx.execute(insert(worker_workflows), links)
    return row_id


async def count_workers(tx: Tx, fleet_id: int) -> int:
    """Counts the workers of a fleet. Revoked workers don't count toward the fleet's limit, although
    their rows are kept.
    """
    query = select(func.count()).where(
        workers.c.fleet_id == fleet_id, workers.c.revoked_at.is_(None)
    )
    return await tx.scalar(query) or 0


def has_key() -> ColumnElement[bool]:
    """Returns the condition that a worker has a key as its key or next key."""
    key: ColumnElement[str] = bindparam("of_key", type_=workers.c.key_hash.type)
    return or_(workers.c.key_hash == key, workers.c.next_key_hash == key)


_BY_KEY_HASH = PreparedStatement(lambda tx: _WORKERS.where(has_key()))
_BY_WORKER_ID = PreparedStatement(
    lambda tx: _WORKERS.where(workers.c.worker_id == bindparam("of_worker"))
)


async def worker_by_key_hash(tx: Tx, key_hash: str) -> FleetWorker | None:
    """Finds a worker by its key or its next key."""
    return next(iter(_workers(await _BY_KEY_HASH.rows(tx, {"of_key": key_hash}))), None)


async def worker_by_id(tx: Tx, worker_id: str) -> FleetWorker | None:
    return next(iter(_workers(await _BY_WORKER_ID.rows(tx, {"of_worker": worker_id}))), None)


async def workers_with_keys(tx: Tx, key_hashes: Collection[str]) -> list[FleetWorker]:
    """Returns the workers with these keys. Revoked workers are left out."""
    query = _WORKERS.where(
        is_one_of(tx, workers.c.key_hash, key_hashes), workers.c.revoked_at.is_(None)
    )
    return _workers((await tx.execute(query)).mappings())


async def update_seen(tx: Tx, row_ids: Collection[int], now: datetime) -> None:
    """Updates the time at which workers were last seen. Skips locked rows, because another
    transaction is updating them and waiting for it could cause a deadlock.
    """
    earlier = select(workers.c.id).where(
        is_one_of(tx, workers.c.id, row_ids), workers.c.last_seen_at < now
    )
    free = for_update(tx, earlier, skip_locked=True).scalar_subquery()
    await tx.execute(update(workers).where(workers.c.id.in_(free)).values(last_seen_at=now))


async def all_workers(
    tx: Tx,
    *,
    fleet_ids: Collection[int] | None = None,
    seen_since: datetime | None = None,
    unseen_since: datetime | None = None,
    only_taking_jobs: bool = False,
    after_worker_id: str | None = None,
    limit: int | None = None,
) -> list[FleetWorker]:
    conditions: list[ColumnElement[bool]] = []
    if only_taking_jobs:
        conditions += [
            workers.c.is_approved.is_(True),
            workers.c.is_draining.is_(False),
            workers.c.backend_problem.is_(None),
        ]
    if fleet_ids is not None:
        conditions.append(is_one_of(tx, workers.c.fleet_id, fleet_ids))
    if seen_since is not None:
        conditions.append(workers.c.last_seen_at >= seen_since)
    if unseen_since is not None:
        conditions += [workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_(None)]
    if after_worker_id is not None:
        conditions.append(workers.c.worker_id > after_worker_id)
    # The limit is in the subquery, because the join may have several rows per worker.
    page = select(workers.c.id).where(*conditions).order_by(workers.c.worker_id).limit(limit)
    rows = await tx.execute(_WORKERS.where(workers.c.id.in_(page.scalar_subquery())))
    return _workers(rows.mappings())


async def workers_in_pages(tx: Tx, fleet_ids: Collection[int]) -> list[FleetWorker]:
    """Returns all workers of some fleets. Other tasks run between the pages."""
    workers: list[FleetWorker] = []
    after_id: str | None = None
    while True:
        page = await all_workers(
            tx, fleet_ids=fleet_ids, after_worker_id=after_id, limit=WORKERS_PER_PAGE
        )
        workers += page
        if len(page) < WORKERS_PER_PAGE:
            return workers
        after_id = page[-1].worker_id


async def one_of_each_kind(tx: Tx, fleet_id: int, *, seen_since: datetime) -> list[FleetWorker]:
    """Returns the first worker for each combination of backend facts and capabilities."""
    firsts = (
        select(func.min(workers.c.id))
        .where(workers.c.fleet_id == fleet_id, workers.c.last_seen_at >= seen_since)
        .group_by(workers.c.facts_hash, cast(workers.c.capabilities, String))
    )
    rows = await tx.execute(_WORKERS.where(workers.c.id.in_(firsts.scalar_subquery())))
    return _workers(rows.mappings())


async def update_worker(tx: Tx, row_id: int, values: Mapping[str, Any]) -> bool:
    statement = update(workers).where(workers.c.id == row_id).values(dict(values))
    return (await tx.execute(statement)).rowcount == 1


_SIGHTED = (
    "last_seen_at",
    "current_load",
    "models_loaded",
    "capabilities",
    "providers",
    "max_concurrency",
    "backend_problem",
)
_NOTE_SIGHTING = PreparedStatement(
    lambda tx: (
        update(workers)
        .where(workers.c.id == bindparam("of_id"))
        .values({name: bindparam(f"to_{name}") for name in _SIGHTED})
        .returning(workers.c.id)
    )
)


async def note_sighting(
    tx: Tx, row_id: int, values: Mapping[str, Any], reading: StatementCall | None
) -> bool:
    """Writes a worker's report and reading. On PostgreSQL, this is a single statement. Returns
    False if the worker was removed.
    """
    bound = {"of_id": row_id} | {f"to_{name}": value for name, value in values.items()}
    calls = [] if reading is None else [reading]
    return bool(await execute_together(tx, *calls, (_NOTE_SIGHTING, bound)))


async def take_next_key(tx: Tx, row_id: int, key_hash: str) -> bool:
    statement = update(workers).where(workers.c.id == row_id, workers.c.next_key_hash == key_hash)
    update_key = statement.values(key_hash=key_hash, next_key=None, next_key_hash=None)
    return (await tx.execute(update_key)).rowcount == 1


async def delete_worker(tx: Tx, row_id: int, *, unseen_since: datetime | None = None) -> bool:
    statement = delete(workers).where(workers.c.id == row_id)
    if unseen_since is not None:
        statement = statement.where(
            workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_(None)
        )
    return (await tx.execute(statement)).rowcount == 1


async def object_info_hashes(tx: Tx) -> dict[int, str]:
    """Returns each fleet's object_info hash, as reported by the approved worker that was seen
    last.
    """
    reported = workers.c.object_info_hash
    query = (
        select(workers.c.fleet_id, reported)
        .where(reported.is_not(None), workers.c.is_approved)
        .order_by(workers.c.last_seen_at, workers.c.id)
    )
    return {row[0]: row[1] for row in await tx.execute(query)}


async def backend_kinds(tx: Tx) -> list[BackendKind]:
    """Returns the kinds of backends of all workers that may run prompts of their fleet's open
    workflow.
    """
    own = worker_workflows.alias("own")
    serves_only = select(own.c.workflow_id).where(own.c.worker_row_id == workers.c.id)
    serves_open = serves_only.where(own.c.workflow_id == fleets.c.open_workflow_id)
    query = (
        select(
            workers.c.fleet_id,
            workers.c.object_info_hash,
            func.min(workers.c.id),
            func.count(),
            func.max(workers.c.last_seen_at),
        )
        .join(fleets, fleets.c.id == workers.c.fleet_id)
        .where(
            workers.c.is_approved,
            workers.c.is_draining.is_(False),
            workers.c.object_info_hash.is_not(None),
            or_(~serves_only.exists(), serves_open.exists()),
        )
        .group_by(workers.c.fleet_id, workers.c.object_info_hash)
        .order_by(workers.c.fleet_id, workers.c.object_info_hash)
    )
    return [BackendKind(*row) for row in await tx.execute(query)]


async def backend_facts_of(tx: Tx, row_ids: Collection[int]) -> dict[str, BackendFacts]:
    """Returns backend facts by worker id. Workers without facts are left out."""
    query = select(workers.c.worker_id, workers.c.facts).where(
        is_one_of(tx, workers.c.id, row_ids), workers.c.facts.is_not(None)
    )
    return {
        row.worker_id: BackendFacts.model_validate(row.facts) for row in await tx.execute(query)
    }


def _workers(rows: Iterable[Mapping[Any, Any]]) -> list[FleetWorker]:
    """Builds workers from joined rows. A worker has one row for each workflow that it is restricted
    to, or a single row without a workflow.
    """
    workers_by_id: dict[int, FleetWorker] = {}
    for row in rows:
        worker = workers_by_id.get(row["id"])
        values = {name: value for name, value in row.items() if name != "workflow_id"}
        worker = worker or worker_of(values)
        if row["workflow_id"] is not None:
            ids = (worker.workflow_ids or frozenset()) | {row["workflow_id"]}
            worker = replace(worker, workflow_ids=ids)
        workers_by_id[row["id"]] = worker
    return list(workers_by_id.values())


def worker_of(values: dict[str, Any], workflow_ids: Collection[int] = ()) -> FleetWorker:
    """Builds a worker from its columns. Without `workflow_ids`, the worker serves all workflows of
    its fleet.
    """
    values["capabilities"] = frozenset(values["capabilities"])
    values["providers"] = tuple(values["providers"])
    values["models_loaded"] = tuple(values["models_loaded"])
    return FleetWorker(**values, workflow_ids=frozenset(workflow_ids) or None)


def _add_reading_query() -> Any:
    worker_id = bindparam("of_worker", type_=worker_readings.c.worker_id.type)
    newer = select(worker_readings.c.id).where(
        worker_readings.c.worker_id == worker_id,
        worker_readings.c.at > bindparam("none_since", type_=Moment()),
    )
    row = select(
        worker_id, bindparam("at_now", type_=Moment()), bindparam("with_reading", type_=Json)
    ).where(~newer.exists())
    columns = ["worker_id", "at", "reading"]
    return insert(worker_readings).from_select(columns, row).returning(worker_readings.c.id)


_ADD_READING = PreparedStatement(lambda tx: _add_reading_query())


def add_reading_call(
    worker_id: str, reading: Mapping[str, Any], *, now: datetime, none_since: datetime
) -> StatementCall:
    """Returns a statement call that adds a reading, unless the worker has one since
    `none_since`.
    """
    values = {"of_worker": worker_id, "with_reading": dict(reading)}
    return _ADD_READING, {**values, "at_now": now, "none_since": none_since}


async def newest_readings(
    tx: Tx, worker_id: str, *, since: datetime, limit: int
) -> list[StoredReading]:
    query = (
        select(worker_readings.c.at, worker_readings.c.reading)
        .where(worker_readings.c.worker_id == worker_id, worker_readings.c.at >= since)
        .order_by(worker_readings.c.at.desc())
        .limit(limit)
    )
    rows = await tx.execute(query)
    return [StoredReading(row.at, Reading.model_validate(row.reading)) for row in rows]


async def backends_of(tx: Tx, worker_ids: Collection[str]) -> dict[str, BackendSummary]:
    """Returns the backends of these workers. Only reads a few fields of the facts, which may be
    large.
    """
    facts = workers.c.facts
    fields = [facts[name].as_string() for name in ("kind", "version", "gpu", "gpu_memory_bytes")]
    query = select(workers.c.worker_id, *fields).where(
        is_one_of(tx, workers.c.worker_id, worker_ids), facts.is_not(None)
    )
    return {
        worker_id: BackendSummary(kind, version, gpu, int(memory) if memory else None)
        for worker_id, kind, version, gpu, memory in await tx.execute(query)
    }


async def latest_readings(tx: Tx, worker_ids: Collection[str]) -> dict[str, StoredReading]:
    """Returns the latest reading of each worker. Uses one index lookup per worker, regardless of
    its number of readings.
    """
    newest = (
        select(worker_readings.c.id)
        .where(worker_readings.c.worker_id == workers.c.worker_id)
        .order_by(worker_readings.c.at.desc())
        .limit(1)
        .correlate(workers)
        .scalar_subquery()
    )
    ids = select(newest).where(is_one_of(tx, workers.c.worker_id, worker_ids))
    rows = await tx.execute(select(worker_readings).where(worker_readings.c.id.in_(ids)))
    return {
        row.worker_id: StoredReading(row.at, Reading.model_validate(row.reading)) for row in rows
    }


async def delete_readings_before(tx: Tx, before: datetime, *, limit: int) -> int:
    old = (
        select(worker_readings.c.id)
        .where(worker_readings.c.at < before)
        .order_by(worker_readings.c.at)
        .limit(limit)
    )
    statement = delete(worker_readings).where(worker_readings.c.id.in_(old.scalar_subquery()))
    return (await tx.execute(statement)).rowcount


# The node types, models and properties of a workflow version, as they are stored.
NeedsRow = tuple[list[str], list[list[str]], list[dict[str, Any]]]


async def needs_of_versions(
    tx: Tx, keys: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], NeedsRow]:
    """Returns stored requirements by workflow and version. Open workflows have none."""
    versions = workflow_versions.c
    query = select(
        versions.workflow_id,
        versions.version,
        versions.node_types,
        versions.models,
        versions.properties,
    ).where(tuple_(versions.workflow_id, versions.version).in_(keys))
    return {(row[0], row[1]): (row[2], row[3], row[4]) for row in await tx.execute(query)}


_ASSIGNED_COLUMNS = (
    workflows.c.id,
    workflows.c.slug,
    workflows.c.required_capabilities,
    workflows.c.is_active,
    workflows.c.is_paused,
    workflows.c.version,
    workflows.c.is_open,
)


async def standing_of_worker(tx: Tx, fleet_id: int, worker_id: str) -> WorkerStanding:
    rows = await _OF_WORKER.tuples(tx, {"of_fleet": fleet_id, "of_worker": worker_id})
    return _standing(*rows[0])


async def worker_and_standing_by_key_hash(
    tx: Tx, key_hash: str
) -> tuple[FleetWorker | None, WorkerStanding]:
    """Finds a worker by its key or its next key, and returns it with its standing."""
    rows = await _STANDING_BY_KEY_HASH.tuples(tx, {"of_key": key_hash})
    if not rows:
        return None, _standing([], False, None)
    *cells, workflow_ids, held, maintenance, assigned = rows[0]
    names = _STANDING_BY_KEY_HASH.compiled(tx).columns
    worker = worker_of(dict(zip(names, cells, strict=False)), workflow_ids)
    return worker, _standing(held, maintenance, assigned)


def _standing_columns(tx: Tx, fleet_id: Any, worker_id: Any) -> tuple[Any, ...]:
    """Returns the columns in the order of `_standing`'s parameters."""
    held = _id_list(
        tx,
        dispatches.c.id,
        dispatches.c.worker_id == worker_id,
        text("status = 'leased'"),  # must match the index's condition
    )
    state = select(control_state.c.value).where(control_state.c.name == MAINTENANCE)
    maintenance = state.scalar_subquery().label("maintenance")
    return held.label("held"), maintenance, _assigned_list(tx, fleet_id).label("assigned")


def _id_list(tx: Tx, column: Any, *conditions: Any) -> Any:
    """Returns a scalar subquery that selects all values of a column as a list."""
    if is_sqlite(tx):
        all_of = select(func.json_group_array(column, type_=Json)).where(*conditions)
        return all_of.scalar_subquery()
    return func.array(select(column).where(*conditions).scalar_subquery(), type_=ARRAY(BigInteger))


def _assigned_list(tx: Tx, fleet_id: Any) -> Any:
    """Returns a scalar subquery that selects the fleet's workflows as a JSON list. A join would
    repeat the worker's columns for each workflow.
    """
    if is_sqlite(tx):
        cells = [
            func.json(column) if column.type is Json else column for column in _ASSIGNED_COLUMNS
        ]
        lists = func.json_group_array(func.json_array(*cells), type_=Json)
    else:
        lists = func.json_agg(func.json_build_array(*_ASSIGNED_COLUMNS), type_=Json)
    return (
        select(lists)
        .select_from(workflows)
        .join(workflow_fleets, workflow_fleets.c.workflow_id == workflows.c.id)
        .where(workflow_fleets.c.fleet_id == fleet_id)
        .scalar_subquery()
    )


def _standing(
    held: list[int], maintenance: Any, assigned: list[list[Any]] | None
) -> WorkerStanding:
    return WorkerStanding(
        assigned=sorted(
            (
                AssignedWorkflow(
                    workflow_id,
                    slug,
                    frozenset(needed),
                    bool(active),
                    bool(paused),
                    version,
                    bool(own),
                )
                for workflow_id, slug, needed, active, paused, version, own in assigned or ()
            ),
            key=lambda workflow: workflow.slug,
        ),
        held=tuple(sorted(held)),
        in_maintenance=bool(maintenance),
    )


_OF_WORKER = PreparedStatement(
    lambda tx: select(*_standing_columns(tx, bindparam("of_fleet"), bindparam("of_worker")))
)


def _worker_and_standing_query(tx: Tx) -> Any:
    only = _id_list(
        tx, worker_workflows.c.workflow_id, worker_workflows.c.worker_row_id == workers.c.id
    )
    return (
        select(
            *COLUMNS,
            only.label("workflow_ids"),
            *_standing_columns(tx, workers.c.fleet_id, workers.c.worker_id),
        )
        .select_from(workers)
        .join(fleets, fleets.c.id == workers.c.fleet_id)
        .where(has_key())
    )


_STANDING_BY_KEY_HASH = PreparedStatement(_worker_and_standing_query)
