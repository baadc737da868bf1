"""Effects: made from a registered workflow, changed, published, offered, timed."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.effects import service as workflows
from comfyfleet.effects import store as workflow_store
from comfyfleet.effects.catalogue import store
from comfyfleet.effects.catalogue.model import (
    Effect,
    Face,
    Offer,
    RunTerms,
    check_face,
    check_new,
    problems_of,
)
from comfyfleet.effects.model import Property, Workflow
from comfyfleet.fleets.model import Fleet
from comfyfleet.kernel.errors import Conflict, InvalidInput, NotFound
from comfyfleet.kernel.texts import is_storable

PAGE_MAX = 500
# Of each new duration in the typical one: the last ten or so count.
NEW_DURATION_WEIGHT = 0.2


async def create(
    tx: Tx, *, effect_id: UUID, slug: str, workflow: Workflow, face: Face, now: datetime
) -> Effect:
    if workflow.is_open:
        raise InvalidInput(
            "an open workflow has no properties and can't be an effect", field="workflow_slug"
        )
    version = await workflows.get_version(tx, workflow)
    check_new(slug, face, version.properties)
    titled = replace(face, title=face.title.strip() or slug)
    effect = Effect(effect_id, slug, workflow.id, titled, None, None, now)
    made = await store.add(tx, effect)
    if made is None:
        raise Conflict(f"there is an effect {slug} already", field="slug")
    return made


async def update(tx: Tx, effect: Effect, face: Face) -> Effect:
    """Jobs keep what they were submitted with: their price, their prompt."""
    workflow = await workflows.get(tx, effect.workflow_id)
    version = await workflows.get_version(tx, workflow)
    check_face(face, version.properties)
    titled = replace(face, title=face.title.strip() or effect.slug)
    return _found(await store.change(tx, effect.id, store.face_row(titled)), effect.slug)


async def publish(tx: Tx, effect: Effect) -> Effect:
    """Checked again: the workflow may have a new version since."""
    return await update(tx, effect, replace(effect.face, is_published=True))


async def withdraw(tx: Tx, effect: Effect) -> Effect:
    """No new jobs; those that were submitted go on."""
    return _found(await store.change(tx, effect.id, {"is_published": False}), effect.slug)


async def get(tx: Tx, effect_id: UUID) -> Effect:
    return _found(await store.get(tx, effect_id), str(effect_id))


async def by_slug(tx: Tx, slug: str) -> Effect:
    return _found(await store.by_slug(tx, slug) if is_storable(slug) else None, repr(slug))


async def all_of(tx: Tx, *, workflow: Workflow | None = None) -> list[Effect]:
    return await store.all_of(tx, workflow_id=workflow.id if workflow else None, limit=PAGE_MAX)


async def catalogue(tx: Tx, *, after_slug: str | None = None, limit: int) -> list[Offer]:
    """What customers can pick, by slug; go on with `after_slug` = the last one's."""
    found = await store.published(tx, after_slug=after_slug, limit=min(limit, PAGE_MAX))
    behind = await workflow_store.in_use(tx, {each.workflow_id for each in found})
    return [Offer(each, *behind[each.workflow_id]) for each in found]


async def offer_of(tx: Tx, effect_id: UUID) -> Offer:
    """What a customer picked; NotFound unless it is published and its workflow active."""
    offer = await store.offer(tx, effect_id)
    if offer is None or not offer.is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return offer


async def offer_with_fleet(tx: Tx, effect_id: UUID) -> tuple[Offer, Fleet | None]:
    """The same, and the fleet whose node types decide how it becomes a prompt."""
    found = await store.offer_with_fleet(tx, effect_id)
    if found is None or not found[0].is_open:
        raise NotFound(f"there is no effect {effect_id}")
    return found


async def typical_seconds(tx: Tx, effect_id: UUID) -> float | None:
    """How long it takes, from its history; None also if there is no such effect."""
    return await store.typical_seconds(tx, effect_id)


async def open_slugs(tx: Tx) -> list[str]:
    """Of the effects that a customer may pick."""
    return await store.published_slugs(tx)


async def open_offer(tx: Tx, slug: str) -> Offer | None:
    """None unless it is published and its workflow active: a customer can't tell those apart."""
    effect = await store.by_slug(tx, slug) if is_storable(slug) else None
    offer = await store.offer(tx, effect.id) if effect else None
    return offer if offer and offer.is_open else None


async def broken_by(
    tx: Tx,
    workflow: Workflow,
    properties: Sequence[Property],
    before: Sequence[Property] = (),
) -> list[tuple[Effect, str]]:
    """Published effects that a version with these properties would not fit, and why.

    `before` are those of the version that customers are offered now: what they may set stays.
    """
    found = await all_of(tx, workflow=workflow)
    return [
        (each, problem)
        for each in found
        if each.face.is_published
        for problem in problems_of(each.face, properties, before)
    ]


async def require_unbroken(
    tx: Tx, workflow: Workflow, properties: Sequence[Property], before: Sequence[Property]
) -> None:
    """A version is what new jobs get at once: it must not close what customers are offered."""
    broken = await broken_by(tx, workflow, properties, before)
    if broken:
        says = "; ".join(f"{effect.slug}: {problem}" for effect, problem in broken)
        raise Conflict(
            f"published effects of {workflow.slug} would break: {says}",
            effects=sorted({effect.slug for effect, _ in broken}),
            hint="Withdraw or change them first, or say `break_effects` (--break-effects).",
        )


async def run_terms(tx: Tx, workflow_id: int, effect_id: UUID | None) -> RunTerms:
    """An effect that is gone, or none, keeps no metadata."""
    found = await store.run_terms(tx, workflow_id, effect_id)
    if found is None:
        raise NotFound(f"there is no workflow {workflow_id}")
    return found


async def note_duration(tx: Tx, effect_id: UUID, seconds: float) -> None:
    """After each success; nothing happens to an effect that is gone."""
    await store.note_duration(tx, effect_id, max(seconds, 0.0), weight=NEW_DURATION_WEIGHT)


def _found(effect: Effect | None, name: str) -> Effect:
    if effect is None:
        raise NotFound(f"there is no effect {name}")
    return effect
