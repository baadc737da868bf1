"""The catalogue: what a customer can pick, and all that a form for it needs."""

from typing import Annotated, Any
from uuid import UUID

from fastapi import Query
from pydantic import Field

from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.effects.catalogue.model import Offer
from comfyfleet.effects.catalogue.schema import schema_of
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.problems import problems
from comfyfleet.http.public.auth import Reader
from comfyfleet.http.public.routing import PAGE_USUAL, Answer, Limit, Text, public_router
from comfyfleet.plane import Plane

router = public_router("effects")


class Takes(Answer):
    """The media that an effect is applied to."""

    kind: str = Field(description="image, video or audio", examples=["image"])
    media_types: list[str] = Field(
        description="None named: all of the kind.", examples=[["image/png", "image/jpeg"]]
    )
    max_bytes: int = Field(examples=[50_000_000])


class EffectAnswer(Answer):
    id: UUID = Field(description="What a job names as effect_id.")
    slug: str = Field(examples=["cartoon"])
    title: str = Field(examples=["Cartoon"])
    description: str
    preview_url: str | None
    price_tokens: int = Field(description="Reserved at submit, and due on success.", examples=[5])
    typical_seconds: float | None = Field(
        description="How long the latest ones took; null before the first.", examples=[12.5]
    )
    takes: Takes | None = Field(description="null: it needs no media, and so no video_id.")
    properties: dict[str, Any] = Field(
        description="JSON Schema (2020-12) of what a job may send as properties.",
        examples=[{"type": "object", "properties": {"prompt": {"type": "string"}}}],
    )


class PublicEffects(Answer):
    effects: list[EffectAnswer] = Field(description="By slug.")
    next: str | None = Field(description="Ask on with after=next; null: that was all.")


@router.get("/effects")
async def list_effects(
    plane: GivenPlane,
    _: Reader,
    after: Annotated[Text | None, Query(max_length=100, description="Only later slugs.")] = None,
    limit: Limit = PAGE_USUAL,
) -> PublicEffects:
    """All that is published."""
    async with plane.central.look() as tx:
        found = await catalogue.catalogue(tx, after_slug=after, limit=limit + 1)
    page = found[:limit]
    return PublicEffects(
        effects=[_answer(plane, each) for each in page],
        next=page[-1].effect.slug if len(found) > limit else None,
    )


@router.get("/effects/{effect_id}", responses=problems(404))
async def show(effect_id: UUID, plane: GivenPlane, _: Reader) -> EffectAnswer:
    """One of the catalogue."""
    async with plane.central.look() as tx:
        return _answer(plane, await catalogue.offer_of(tx, effect_id))


def _answer(plane: Plane, offer: Offer) -> EffectAnswer:
    effect, face = offer.effect, offer.effect.face
    return EffectAnswer(
        id=effect.id,
        slug=effect.slug,
        title=face.title or effect.slug,
        description=face.description,
        preview_url=face.preview_url,
        price_tokens=face.price_tokens,
        typical_seconds=effect.typical_seconds,
        takes=_takes(plane, offer),
        properties=schema_of(offer.version.properties, face.overrides, face.locked),
    )


def _takes(plane: Plane, offer: Offer) -> Takes | None:
    if offer.takes is None:
        return None
    most = plane.settings.max_upload_bytes
    return Takes(
        kind=offer.takes,
        media_types=list(offer.effect.face.media_types),
        max_bytes=min(offer.effect.face.max_upload_bytes or most, most),
    )
