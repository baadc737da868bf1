"""The effects' only SQL."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any
from uuid import UUID

from sqlalchemy import Row, ScalarSelect, Select, Table, and_, bindparam, case, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import effects, fleets, workflow_fleets, workflows
from comfyfleet.db.central import workflow_versions as versions
from comfyfleet.db.dialect import insert_if_new
from comfyfleet.db.statement import Statement, in_parts
from comfyfleet.effects.catalogue.model import Effect, Face, Offer, RunTerms
from comfyfleet.effects.store import version_of, workflow_of
from comfyfleet.fleets.model import Fleet

_FACE = tuple(each.name for each in fields(Face))
_REST = tuple(each.name for each in fields(Effect) if each.name != "face")
# Columns of several tables in one row, told apart by the names that they get.
_BEHIND = ((effects, "effect_"), (workflows, "workflow_"), (versions, "version_"))
_WITH_FLEET = (*_BEHIND, (fleets, "fleet_"))
_COLUMNS = [[each.name for each in table.c] for table, _ in _WITH_FLEET]


def _offer_of(*tables: tuple[Table, str]) -> Select[Any]:
    return (
        select(*(each.label(prefix + each.name) for table, prefix in tables for each in table.c))
        .select_from(effects)
        .join(workflows, workflows.c.id == effects.c.workflow_id)
        .join(
            versions,
            and_(
                versions.c.workflow_id == workflows.c.id, versions.c.version == workflows.c.version
            ),
        )
        .where(effects.c.id == bindparam("of_id"))
    )


def _fleet_for() -> ScalarSelect[int]:
    """Of those that have the workflow, the first whose node types are known; else the first."""
    assigned = fleets.alias("assigned")
    return (
        select(assigned.c.id)
        .join(workflow_fleets, workflow_fleets.c.fleet_id == assigned.c.id)
        .where(workflow_fleets.c.workflow_id == workflows.c.id, assigned.c.stage == effects.c.stage)
        .order_by(assigned.c.object_info_hash.is_(None), assigned.c.slug)
        .limit(1)
        .correlate(effects, workflows)
        .scalar_subquery()
    )


_OFFER = Statement(lambda tx: _offer_of(*_BEHIND))
_OFFER_WITH_FLEET = Statement(
    lambda tx: _offer_of(*_WITH_FLEET).outerjoin(fleets, fleets.c.id == _fleet_for())
)


async def offer(tx: Tx, effect_id: UUID) -> Offer | None:
    """An effect with its workflow, and the version that new jobs get."""
    found = await _OFFER.tuples(tx, {"of_id": effect_id})
    return _offer(*in_parts(found[0], *_COLUMNS[:-1])) if found else None


async def offer_with_fleet(tx: Tx, effect_id: UUID) -> tuple[Offer, Fleet | None] | None:
    """The same, and the fleet whose node types decide how it becomes a prompt."""
    found = await _OFFER_WITH_FLEET.tuples(tx, {"of_id": effect_id})
    if not found:
        return None
    *behind, fleet = in_parts(found[0], *_COLUMNS)
    return _offer(*behind), None if fleet["id"] is None else Fleet(**fleet)


def _offer(
    effect: Mapping[str, Any], workflow: Mapping[str, Any], version: Mapping[str, Any]
) -> Offer:
    return Offer(_effect_of(effect), workflow_of(workflow), version_of(version))


_TYPICAL = Statement(
    lambda tx: select(effects.c.typical_seconds).where(effects.c.id == bindparam("of_id"))
)


async def typical_seconds(tx: Tx, effect_id: UUID) -> float | None:
    """None also if there is no such effect."""
    found = await _TYPICAL.first(tx, {"of_id": effect_id})
    return found["typical_seconds"] if found else None


_RUN_TERMS = Statement(
    lambda tx: (
        select(workflows.c.run_limit_seconds, effects.c.keep_metadata)
        .select_from(workflows.outerjoin(effects, effects.c.id == bindparam("of_effect")))
        .where(workflows.c.id == bindparam("of_workflow"))
    )
)


async def run_terms(tx: Tx, workflow_id: int, effect_id: UUID | None) -> RunTerms | None:
    """None: there is no such workflow."""
    found = await _RUN_TERMS.tuples(tx, {"of_workflow": workflow_id, "of_effect": effect_id})
    return RunTerms(found[0][0], bool(found[0][1])) if found else None


async def add(tx: Tx, effect: Effect) -> Effect | None:
    """None: there is one of that slug."""
    row = {
        "id": effect.id,
        "slug": effect.slug,
        "workflow_id": effect.workflow_id,
        "created_at": effect.created_at,
        **face_row(effect.face),
    }
    found = (await tx.execute(insert_if_new(tx, effects, [row]).returning(effects))).first()
    return _effect(found) if found else None


async def get(tx: Tx, effect_id: UUID) -> Effect | None:
    found = (await tx.execute(select(effects).where(effects.c.id == effect_id))).first()
    return _effect(found) if found else None


async def by_slug(tx: Tx, slug: str) -> Effect | None:
    found = (await tx.execute(select(effects).where(effects.c.slug == slug))).first()
    return _effect(found) if found else None


async def published_slugs(tx: Tx) -> list[str]:
    query = (
        select(effects.c.slug)
        .join(workflows, effects.c.workflow_id == workflows.c.id)
        .where(effects.c.is_published.is_(True), workflows.c.is_active.is_(True))
        .order_by(effects.c.slug)
    )
    return list(await tx.scalars(query))


async def all_of(tx: Tx, *, workflow_id: int | None, limit: int) -> list[Effect]:
    query = select(effects).order_by(effects.c.slug).limit(limit)
    if workflow_id is not None:
        query = query.where(effects.c.workflow_id == workflow_id)
    return [_effect(row) for row in await tx.execute(query)]


async def published(tx: Tx, *, after_slug: str | None, limit: int) -> list[Effect]:
    """Those that are for sale: of workflows that are active."""
    query = (
        select(effects)
        .join(workflows, effects.c.workflow_id == workflows.c.id)
        .where(effects.c.is_published.is_(True), workflows.c.is_active.is_(True))
        .order_by(effects.c.slug)
        .limit(limit)
    )
    if after_slug is not None:
        query = query.where(effects.c.slug > after_slug)
    return [_effect(row) for row in await tx.execute(query)]


async def change(tx: Tx, effect_id: UUID, values: Mapping[str, Any]) -> Effect | None:
    statement = update(effects).where(effects.c.id == effect_id).values(dict(values))
    found = (await tx.execute(statement.returning(effects))).first()
    return _effect(found) if found else None


async def note_duration(tx: Tx, effect_id: UUID, seconds: float, *, weight: float) -> None:
    typical = effects.c.typical_seconds
    smoothed = typical + (seconds - typical) * weight
    await tx.execute(
        update(effects)
        .where(effects.c.id == effect_id)
        .values(
            last_processing_time_seconds=seconds,
            typical_seconds=case((typical.is_(None), seconds), else_=smoothed),
        )
    )


def face_row(face: Face) -> dict[str, Any]:
    return {
        **asdict(face),
        "overrides": dict(face.overrides),
        "media_types": list(face.media_types),
        "locked": list(face.locked),
    }


def _effect(row: Row[Any]) -> Effect:
    return _effect_of(row._mapping)


def _effect_of(values: Mapping[Any, Any]) -> Effect:
    face = {name: values[name] for name in _FACE}
    rest = {name: values[name] for name in _REST}
    tuples = {name: tuple(face[name]) for name in ("media_types", "locked")}
    return Effect(face=Face(**{**face, **tuples}), **rest)
