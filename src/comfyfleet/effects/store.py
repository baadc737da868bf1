"""The only SQL of registered workflows and their versions."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, and_, insert, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import workflow_versions, workflows
from comfyfleet.db.dialect import insert_if_new, is_one_of
from comfyfleet.effects.model import Property, Version, Workflow
from comfyfleet.fleets.offers import ModelUse


async def add(tx: Tx, row: Mapping[str, Any]) -> Workflow | None:
    """None: there is one of that slug."""
    found = (await tx.execute(insert_if_new(tx, workflows, [row]).returning(workflows))).first()
    return _workflow(found) if found else None


async def raise_version(tx: Tx, slug: str, values: Mapping[str, Any]) -> Workflow | None:
    """Past the highest that there is; also locks the row, so that two get two numbers."""
    locked = update(workflows).where(workflows.c.slug == slug).values(slug=slug)
    workflow_id = await tx.scalar(locked.returning(workflows.c.id))
    if workflow_id is None:
        return None
    highest = await tx.scalar(
        select(workflow_versions.c.version)
        .where(workflow_versions.c.workflow_id == workflow_id)
        .order_by(workflow_versions.c.version.desc())
        .limit(1)
    )
    return await change(tx, workflow_id, {**values, "version": (highest or 0) + 1})


async def change(tx: Tx, workflow_id: int, values: Mapping[str, Any]) -> Workflow | None:
    statement = update(workflows).where(workflows.c.id == workflow_id).values(dict(values))
    found = (await tx.execute(statement.returning(workflows))).first()
    return _workflow(found) if found else None


async def get(tx: Tx, workflow_id: int) -> Workflow | None:
    found = (await tx.execute(select(workflows).where(workflows.c.id == workflow_id))).first()
    return _workflow(found) if found else None


async def by_slug(tx: Tx, slug: str) -> Workflow | None:
    found = (await tx.execute(select(workflows).where(workflows.c.slug == slug))).first()
    return _workflow(found) if found else None


async def all_of(tx: Tx, *, with_open: bool) -> list[Workflow]:
    query = select(workflows).order_by(workflows.c.slug)
    if not with_open:
        query = query.where(workflows.c.is_open.is_(False))
    return [_workflow(row) for row in await tx.execute(query)]


async def add_version(tx: Tx, version: Version) -> None:
    row = {**asdict(version), "models": [[each.input, each.file] for each in version.models]}
    row["properties"] = [property_row(each) for each in version.properties]
    row["node_types"] = list(version.node_types)
    await tx.execute(insert(workflow_versions).values(row))


async def get_version(tx: Tx, workflow_id: int, version: int) -> Version | None:
    query = select(workflow_versions).where(
        workflow_versions.c.workflow_id == workflow_id, workflow_versions.c.version == version
    )
    found = (await tx.execute(query)).first()
    return _version(found) if found else None


async def versions_of(tx: Tx, workflow_id: int) -> list[Version]:
    query = (
        select(workflow_versions)
        .where(workflow_versions.c.workflow_id == workflow_id)
        .order_by(workflow_versions.c.version.desc())
    )
    return [_version(row) for row in await tx.execute(query)]


async def in_use(tx: Tx, workflow_ids: Collection[int]) -> dict[int, tuple[Workflow, Version]]:
    """Each with the version that new jobs get."""
    query = select(workflows).where(is_one_of(tx, workflows.c.id, workflow_ids))
    found = {row.id: _workflow(row) for row in await tx.execute(query)}
    is_current = and_(
        workflow_versions.c.workflow_id == workflows.c.id,
        workflow_versions.c.version == workflows.c.version,
    )
    current = select(workflow_versions).join(workflows, is_current)
    rows = await tx.execute(current.where(is_one_of(tx, workflows.c.id, workflow_ids)))
    return {row.workflow_id: (found[row.workflow_id], _version(row)) for row in rows}


def property_row(each: Property) -> dict[str, Any]:
    """Only what is said: a field that comes later is then absent in older rows."""
    return {name: value for name, value in asdict(each).items() if value is not None}


def _workflow(row: Row[Any]) -> Workflow:
    return workflow_of(row._mapping)


def workflow_of(values: Mapping[Any, Any]) -> Workflow:
    row = dict(values)
    if not row.pop("is_offered"):
        row["price_tokens"] = None
    return Workflow(**{**row, "required_capabilities": frozenset(row["required_capabilities"])})


def _version(row: Row[Any]) -> Version:
    return version_of(row._mapping)


def version_of(row: Mapping[Any, Any]) -> Version:
    values = dict(row)
    values["properties"] = tuple(_property(each) for each in values["properties"])
    values["models"] = tuple(ModelUse(*each) for each in values["models"])
    values["node_types"] = tuple(values["node_types"])
    return Version(**values)


def _property(row: Mapping[str, Any]) -> Property:
    choices = row.get("choices")
    return Property(**{**row, "choices": None if choices is None else tuple(choices)})
