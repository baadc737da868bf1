"""Workers: their rows, and which workflows they restrict themselves to."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    String,
    bindparam,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.central import fleets, worker_workflows, workers
from comfyfleet.db.dialect import insert_if_new, is_one_of, locked
from comfyfleet.db.statement import Call, Statement, send_together
from comfyfleet.fleets.model import Worker
from comfyfleet.wire.messages import BackendFacts

# Of a worker: all but the facts of its backend, which are large and seldom asked for.
COLUMNS = (
    *(each for each in workers.c if each.name != "facts"),
    fleets.c.slug.label("fleet_slug"),
    fleets.c.stage,
)


# Built once: that takes longer than SQLite takes to answer.
_ALL: Select[Any] = (
    select(
        *COLUMNS,
        worker_workflows.c.workflow_id,
    )
    .join(fleets, fleets.c.id == workers.c.fleet_id)
    .outerjoin(worker_workflows, worker_workflows.c.worker_row_id == workers.c.id)
    .order_by(workers.c.worker_id)
)


async def add(tx: Tx, row: Mapping[str, Any], workflow_ids: Collection[int]) -> int | None:
    """The row's id; None: the worker's id is taken."""
    statement = insert_if_new(tx, workers, [row]).returning(workers.c.id)
    row_id: int | None = await tx.scalar(statement)
    if row_id is not None and workflow_ids:
        links = [{"worker_row_id": row_id, "workflow_id": each} for each in workflow_ids]
        await tx.execute(insert(worker_workflows), links)
    return row_id


async def count(tx: Tx, fleet_id: int) -> int:
    """Without those that were revoked: their rows are kept, their places are free."""
    query = select(func.count()).where(
        workers.c.fleet_id == fleet_id, workers.c.revoked_at.is_(None)
    )
    return await tx.scalar(query) or 0


def has_key() -> ColumnElement[bool]:
    """Its own, or the one that it was told to use."""
    key: ColumnElement[str] = bindparam("of_key", type_=workers.c.key_hash.type)
    return or_(workers.c.key_hash == key, workers.c.next_key_hash == key)


_BY_KEY_HASH = Statement(lambda tx: _ALL.where(has_key()))
_BY_WORKER_ID = Statement(lambda tx: _ALL.where(workers.c.worker_id == bindparam("of_worker")))


async def by_key_hash(tx: Tx, key_hash: str) -> Worker | None:
    """Of its key, or of the one that it was told to use."""
    return next(iter(_workers(await _BY_KEY_HASH.rows(tx, {"of_key": key_hash}))), None)


async def by_worker_id(tx: Tx, worker_id: str) -> Worker | None:
    return next(iter(_workers(await _BY_WORKER_ID.rows(tx, {"of_worker": worker_id}))), None)


async def with_keys(tx: Tx, key_hashes: Collection[str]) -> list[Worker]:
    """Without those that were revoked."""
    query = _ALL.where(
        is_one_of(tx, workers.c.key_hash, key_hashes), workers.c.revoked_at.is_(None)
    )
    return _workers((await tx.execute(query)).mappings())


async def note_seen(tx: Tx, row_ids: Collection[int], now: datetime) -> None:
    """One that somebody else writes just now is seen by that; to wait for it could be a deadlock."""
    earlier = select(workers.c.id).where(
        is_one_of(tx, workers.c.id, row_ids), workers.c.last_seen_at < now
    )
    free = locked(tx, earlier, skip_locked=True).scalar_subquery()
    await tx.execute(update(workers).where(workers.c.id.in_(free)).values(last_seen_at=now))


async def all_of(
    tx: Tx,
    *,
    fleet_ids: Collection[int] | None = None,
    seen_since: datetime | None = None,
    unseen_since: datetime | None = None,
    only_taking_jobs: bool = False,
    after_worker_id: str | None = None,
    limit: int | None = None,
) -> list[Worker]:
    wanted: list[ColumnElement[bool]] = []
    if only_taking_jobs:
        wanted += [workers.c.is_approved.is_(True), workers.c.is_draining.is_(False)]
    if fleet_ids is not None:
        wanted.append(is_one_of(tx, workers.c.fleet_id, fleet_ids))
    if seen_since is not None:
        wanted.append(workers.c.last_seen_at >= seen_since)
    if unseen_since is not None:
        wanted += [workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_(None)]
    if after_worker_id is not None:
        wanted.append(workers.c.worker_id > after_worker_id)
    # Limited inside: outside a worker has as many rows as workflows.
    page = select(workers.c.id).where(*wanted).order_by(workers.c.worker_id).limit(limit)
    found = await tx.execute(_ALL.where(workers.c.id.in_(page.scalar_subquery())))
    return _workers(found.mappings())


async def one_of_each_kind(tx: Tx, fleet_id: int, *, seen_since: datetime) -> list[Worker]:
    """Of those whose backends have the same, and that have the same capabilities, the first."""
    firsts = (
        select(func.min(workers.c.id))
        .where(workers.c.fleet_id == fleet_id, workers.c.last_seen_at >= seen_since)
        .group_by(workers.c.facts_hash, cast(workers.c.capabilities, String))
    )
    found = await tx.execute(_ALL.where(workers.c.id.in_(firsts.scalar_subquery())))
    return _workers(found.mappings())


async def change(tx: Tx, row_id: int, values: Mapping[str, Any]) -> bool:
    statement = update(workers).where(workers.c.id == row_id).values(dict(values))
    return (await tx.execute(statement)).rowcount == 1


_SIGHTED = (
    "last_seen_at",
    "current_load",
    "models_loaded",
    "capabilities",
    "providers",
    "max_concurrency",
)
_NOTE_SIGHTING = Statement(
    lambda tx: (
        update(workers)
        .where(workers.c.id == bindparam("of_id"))
        .values({each: bindparam(f"to_{each}") for each in _SIGHTED})
        .returning(workers.c.id)
    )
)


async def note_sighting(
    tx: Tx, row_id: int, values: Mapping[str, Any], reading: Call | None
) -> bool:
    """With a reading of its machine, in one statement on PostgreSQL; false: there is no such worker."""
    bound = {"of_id": row_id} | {f"to_{name}": value for name, value in values.items()}
    calls = [] if reading is None else [reading]
    return bool(await send_together(tx, *calls, (_NOTE_SIGHTING, bound)))


async def take_next_key(tx: Tx, row_id: int, key_hash: str) -> bool:
    statement = update(workers).where(workers.c.id == row_id, workers.c.next_key_hash == key_hash)
    taken = statement.values(key_hash=key_hash, next_key=None, next_key_hash=None)
    return (await tx.execute(taken)).rowcount == 1


async def remove(tx: Tx, row_id: int, *, unseen_since: datetime | None = None) -> bool:
    statement = delete(workers).where(workers.c.id == row_id)
    if unseen_since is not None:
        statement = statement.where(
            workers.c.last_seen_at < unseen_since, workers.c.revoked_at.is_(None)
        )
    return (await tx.execute(statement)).rowcount == 1


async def object_info_hashes(tx: Tx) -> dict[int, str]:
    """By fleet, as its worker that was seen last reports it."""
    reported = workers.c.facts["object_info_hash"].as_string()
    query = (
        select(workers.c.fleet_id, reported)
        .where(workers.c.facts.is_not(None), reported.is_not(None), workers.c.is_approved)
        .order_by(workers.c.last_seen_at, workers.c.id)
    )
    return {row[0]: row[1] for row in await tx.execute(query)}


async def facts_of(tx: Tx, row_ids: Collection[int]) -> dict[str, BackendFacts]:
    """Of those that have told them."""
    query = select(workers.c.worker_id, workers.c.facts).where(
        is_one_of(tx, workers.c.id, row_ids), workers.c.facts.is_not(None)
    )
    return {
        row.worker_id: BackendFacts.model_validate(row.facts) for row in await tx.execute(query)
    }


def _workers(rows: Iterable[Mapping[Any, Any]]) -> list[Worker]:
    """One row for each workflow that a worker restricts itself to, or one without any."""
    found: dict[int, Worker] = {}
    for row in rows:
        worker = found.get(row["id"])
        values = {name: value for name, value in row.items() if name != "workflow_id"}
        worker = worker or worker_of(values)
        if row["workflow_id"] is not None:
            ids = (worker.workflow_ids or frozenset()) | {row["workflow_id"]}
            worker = replace(worker, workflow_ids=ids)
        found[row["id"]] = worker
    return list(found.values())


def worker_of(values: dict[str, Any], workflow_ids: Collection[int] = ()) -> Worker:
    """By its columns. Without workflows that it restricts itself to, it takes all of its fleet."""
    values["capabilities"] = frozenset(values["capabilities"])
    values["providers"] = tuple(values["providers"])
    values["models_loaded"] = tuple(values["models_loaded"])
    return Worker(**values, workflow_ids=frozenset(workflow_ids) or None)
