"""The effects' only SQL."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any
from uuid import UUID

from sqlalchemy import Row, case, select, update

from comfyfleet.db import Tx
from comfyfleet.db.central import effects, workflows
from comfyfleet.db.dialect import insert_if_new
from comfyfleet.effects.catalogue.model import Effect, Face


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
    }


def _effect(row: Row[Any]) -> Effect:
    values = row._mapping
    face = {each.name: values[each.name] for each in fields(Face)}
    rest = {each.name: values[each.name] for each in fields(Effect) if each.name != "face"}
    return Effect(face=Face(**{**face, "media_types": tuple(face["media_types"])}), **rest)
