"""Fleets and the workflows assigned to them."""

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    bindparam,
    delete,
    insert,
    select,
    update,
)

from comfyfleet.db import Tx
from comfyfleet.db.central import fleets, workflow_fleets, workflows
from comfyfleet.db.dialect import insert_if_new, is_one_of, locked
from comfyfleet.db.statement import Statement
from comfyfleet.fleets.model import Assigned, Fleet


async def add(tx: Tx, row: Mapping[str, Any]) -> Fleet | None:
    """None: there is one of that name."""
    found = (await tx.execute(insert_if_new(tx, fleets, [row]).returning(fleets))).first()
    return _fleet(found) if found else None


async def get(tx: Tx, slug: str, stage: str) -> Fleet | None:
    query = select(fleets).where(fleets.c.slug == slug, fleets.c.stage == stage)
    found = (await tx.execute(query)).first()
    return _fleet(found) if found else None


async def by_id(tx: Tx, fleet_id: int) -> Fleet | None:
    found = (await tx.execute(select(fleets).where(fleets.c.id == fleet_id))).first()
    return _fleet(found) if found else None


async def by_secret(tx: Tx, secret_hash: str) -> Fleet | None:
    query = select(fleets).where(fleets.c.secret_hash == secret_hash).limit(1)
    found = (await tx.execute(query)).first()
    return _fleet(found) if found else None


async def has_secret(tx: Tx, secret_hash: str) -> bool:
    query = select(fleets.c.id).where(fleets.c.secret_hash == secret_hash).limit(1)
    return (await tx.execute(query)).first() is not None


async def lock(tx: Tx, fleet_id: int) -> None:
    """Until the transaction ends nobody else changes what depends on this fleet."""
    await tx.execute(locked(tx, select(fleets.c.id).where(fleets.c.id == fleet_id)))


async def all_of(tx: Tx) -> list[Fleet]:
    query = select(fleets).order_by(fleets.c.slug, fleets.c.stage)
    return [_fleet(row) for row in await tx.execute(query)]


async def change(tx: Tx, fleet_id: int, values: Mapping[str, Any]) -> Fleet | None:
    statement = update(fleets).where(fleets.c.id == fleet_id).values(dict(values))
    found = (await tx.execute(statement.returning(fleets))).first()
    return _fleet(found) if found else None


# Built once: that takes longer than SQLite takes to answer.
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


async def assigned(tx: Tx, fleet_ids: Collection[int] | None = None) -> dict[int, list[Assigned]]:
    """The workflows of each fleet, of all fleets if none is named."""
    query = _ASSIGNED
    if fleet_ids is not None:
        query = query.where(is_one_of(tx, workflow_fleets.c.fleet_id, fleet_ids))
    found: dict[int, list[Assigned]] = {}
    for row in (await tx.execute(query)).mappings():
        found.setdefault(row["fleet_id"], []).append(_assigned(row))
    return found


async def fleets_with(tx: Tx, workflow_id: int, stage: str | None) -> list[Fleet]:
    """Of one stage, or of all."""
    if stage is None:
        return [Fleet(**row) for row in await _WITH.rows(tx, {"of_workflow": workflow_id})]
    values = {"of_workflow": workflow_id, "of_stage": stage}
    return [Fleet(**row) for row in await _WITH_OF_STAGE.rows(tx, values)]


def _with(*conditions: ColumnElement[bool]) -> Any:
    return (
        select(fleets)
        .join(workflow_fleets, workflow_fleets.c.fleet_id == fleets.c.id)
        .where(workflow_fleets.c.workflow_id == bindparam("of_workflow"), *conditions)
        .order_by(fleets.c.slug, fleets.c.stage)
    )


_WITH = Statement(lambda tx: _with())
_WITH_OF_STAGE = Statement(lambda tx: _with(fleets.c.stage == bindparam("of_stage")))


async def ids_with_any(tx: Tx, workflow_ids: Collection[int], stage: str) -> list[int]:
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


async def slugs(tx: Tx) -> list[str]:
    """Of the workflows that operators have registered."""
    query = select(workflows.c.slug).where(workflows.c.is_open.is_(False))
    return list(await tx.scalars(query.order_by(workflows.c.slug)))


async def known_workflow_ids(tx: Tx, ids: Collection[int]) -> set[int]:
    return set(await tx.scalars(select(workflows.c.id).where(is_one_of(tx, workflows.c.id, ids))))


def _fleet(row: Row[Any]) -> Fleet:
    return Fleet(**row._mapping)


def _assigned(row: Mapping[Any, Any]) -> Assigned:
    return Assigned(
        workflow_id=row["workflow_id"],
        slug=row["slug"],
        required_capabilities=frozenset(row["required_capabilities"]),
        is_active=row["is_active"],
        is_paused=row["is_paused"],
        version=row["version"],
        is_open=row["is_open"],
    )
