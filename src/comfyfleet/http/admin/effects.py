"""Effects: what customers pick, made from registered workflows."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

from fastapi import Path, Query, status
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.effects import service as workflows
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.catalogue.model import Effect, Face
from comfyfleet.effects.model import Workflow
from comfyfleet.http.admin.routing import Answer, Body, Operator, admin_router
from comfyfleet.http.given import GivenNow, GivenPlane
from comfyfleet.http.values import Tokens
from comfyfleet.kernel.errors import InvalidInput, NotFound
from comfyfleet.plane import Plane

router = admin_router()
Slug = Annotated[str, Path(description="The effect's slug.")]
Change = Callable[[Tx, Effect], Awaitable[Effect]]


class FaceBody(Body):
    """What is left out stays as it is, or as it is usually."""

    title: str | None = Field(default=None, description="For people; else the slug.")
    description: str | None = None
    preview_url: str | None = Field(default=None, description="A picture or video of the result.")
    price_tokens: Tokens | None = Field(default=None, description="What a job costs; 0 at first.")
    overrides: dict[str, Any] | None = Field(
        default=None, description="Values of properties in place of the workflow's defaults."
    )
    locked: list[str] | None = Field(
        default=None, description="Properties that customers neither see nor set."
    )
    stage: str | None = Field(default=None, description="Of the fleets that run it; production.")
    provider: Literal["self_hosted", "cloud"] | None = None
    published: bool | None = Field(default=None, description="Whether customers see it.")
    max_upload_bytes: int | None = Field(default=None, description="Of the media sent to it.")
    media_types: list[str] | None = Field(
        default=None, description="Such as image/png; none named: all of the kind that it takes."
    )

    keep_metadata: bool | None = Field(
        default=None,
        description="Whether results carry the prompt and workflow that made them; false at first.",
    )

    def face(self, before: Face) -> Face:
        given = {name: getattr(self, name) for name in self.model_fields_set if name != "published"}
        # These can be taken back; for the others null says no more than leaving them out.
        kept = ("preview_url", "max_upload_bytes")
        said = {name: value for name, value in given.items() if value is not None or name in kept}
        known = {name: said[name] for name in said if name in Face.__slots__}
        for name in ("media_types", "locked"):
            if name in known:
                known[name] = tuple(known[name])
        published = before.is_published if self.published is None else self.published
        return replace(before, **known, is_published=published)


class NewEffect(FaceBody):
    slug: str = Field(
        description="Lower-case letters, digits, ., - and _; at most 100.", examples=["sepia"]
    )
    workflow_slug: str = Field(description="Of the registered workflow behind it.")


class MadeEffect(Answer):
    id: UUID
    slug: str


class AdminEffectAnswer(Answer):
    id: UUID
    slug: str
    workflow_slug: str
    title: str
    description: str
    preview_url: str | None
    price_tokens: int
    overrides: dict[str, Any]
    locked: list[str]
    stage: str
    provider: str
    published: bool
    max_upload_bytes: int | None
    media_types: list[str]
    keep_metadata: bool
    last_processing_time_seconds: float | None
    typical_seconds: float | None
    created_at: datetime


class AdminEffects(Answer):
    effects: list[AdminEffectAnswer]


@router.post("/effects", status_code=status.HTTP_201_CREATED)
async def create(
    body: NewEffect, plane: GivenPlane, now: GivenNow, operator: Operator
) -> MadeEffect:
    """Overrides are checked against the workflow's properties; customers see it once published."""
    face = body.face(Face())
    async with plane.central.begin() as tx:
        effect = await catalogue.create(
            tx,
            effect_id=uuid4(),
            slug=body.slug,
            workflow=await _workflow(tx, body.workflow_slug),
            face=face,
            now=now,
        )
        details = {"workflow": body.workflow_slug, **asdict(face)}
        await _record(tx, effect, "create_effect", operator, now, details)
    return MadeEffect(id=effect.id, slug=effect.slug)


@router.get("/effects")
async def list_effects(
    plane: GivenPlane,
    workflow: Annotated[str | None, Query(description="Only of this one.")] = None,
) -> AdminEffects:
    """By slug, also those that are not published."""
    async with plane.central.look() as tx:
        named = await workflows.by_slug(tx, workflow) if workflow else None
        found = await catalogue.all_of(tx, workflow=named)
        slugs = {each.id: each.slug for each in await workflows.all_of(tx)}
    return AdminEffects(effects=[_answer(each, slugs[each.workflow_id]) for each in found])


@router.get("/effects/{slug}")
async def show(slug: Slug, plane: GivenPlane) -> AdminEffectAnswer:
    async with plane.central.look() as tx:
        return await _answered(tx, await catalogue.by_slug(tx, slug))


@router.patch("/effects/{slug}")
async def change(
    slug: Slug, body: FaceBody, plane: GivenPlane, now: GivenNow, operator: Operator
) -> AdminEffectAnswer:
    """Jobs that were submitted keep their price and their prompt."""

    async def changed(tx: Tx, effect: Effect) -> Effect:
        return await catalogue.update(tx, effect, body.face(effect.face))

    details = body.model_dump(exclude_unset=True)
    return await _acted(plane, slug, "change_effect", changed, operator, now, details)


@router.post("/effects/{slug}/publish")
async def publish(
    slug: Slug, plane: GivenPlane, now: GivenNow, operator: Operator
) -> AdminEffectAnswer:
    """Checked again first: the workflow may have a new version since."""
    return await _acted(plane, slug, "publish", catalogue.publish, operator, now)


@router.post("/effects/{slug}/withdraw")
async def withdraw(
    slug: Slug, plane: GivenPlane, now: GivenNow, operator: Operator
) -> AdminEffectAnswer:
    """No new jobs; those that were submitted go on."""
    return await _acted(plane, slug, "withdraw", catalogue.withdraw, operator, now)


async def _acted(
    plane: Plane,
    slug: str,
    action: str,
    act: Change,
    operator: str,
    now: datetime,
    details: dict[str, Any] | None = None,
) -> AdminEffectAnswer:
    async with plane.central.begin() as tx:
        effect = await act(tx, await catalogue.by_slug(tx, slug))
        await _record(tx, effect, action, operator, now, details or {})
        return await _answered(tx, effect)


async def _workflow(tx: Tx, slug: str) -> Workflow:
    try:
        return await workflows.by_slug(tx, slug)
    except NotFound as error:
        raise InvalidInput(error.message, field="workflow_slug") from None


async def _record(
    tx: Tx, effect: Effect, action: str, operator: str, now: datetime, details: dict[str, Any]
) -> None:
    await audit.record(
        tx, actor=operator, action=action, subject=effect.subject, now=now, details=details
    )


async def _answered(tx: Tx, effect: Effect) -> AdminEffectAnswer:
    return _answer(effect, (await workflows.get(tx, effect.workflow_id)).slug)


def _answer(effect: Effect, workflow_slug: str) -> AdminEffectAnswer:
    face = asdict(effect.face)
    return AdminEffectAnswer(
        **{name: face[name] for name in face if name in AdminEffectAnswer.model_fields},
        id=effect.id,
        slug=effect.slug,
        workflow_slug=workflow_slug,
        published=effect.face.is_published,
        last_processing_time_seconds=effect.last_processing_time_seconds,
        typical_seconds=effect.typical_seconds,
        created_at=effect.created_at,
    )
