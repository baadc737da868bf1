"""Routes for the catalog of published effects, with their prices, examples and properties."""

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Path, Query, Request

from comfyfleet.api.jobs import EffectAnswer, PublicEffects, Takes
from comfyfleet.errors import NotFound, Unauthenticated
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import ResolvedEffect, json_schema_of
from comfyfleet.server.http.deps import NowDep, PlaneDep, is_catalogue_public, problems
from comfyfleet.server.http.examples import example_views
from comfyfleet.server.http.public.auth import (
    PAGE_USUAL,
    Limit,
    Reader,
    Text,
    admit_stranger,
    public_router,
)
from comfyfleet.server.tenants import wallet as ledger
from comfyfleet.server.tenants.model import Caller

router = public_router("effects")
# These routes need no key if the operator allows it.
CATALOGUE_PATH = "/api/catalogue"
catalogue_router = APIRouter(tags=["effects"], responses=problems(401, 404, 422, 429, 503))
TEXT_CHARACTERS_MAX = 100
Search = Annotated[
    Text | None,
    Query(max_length=TEXT_CHARACTERS_MAX, description="Only effects that contain this text."),
]
Tag = Annotated[
    str | None, Query(max_length=TEXT_CHARACTERS_MAX, description="Only effects with this tag.")
]
After = Annotated[Text | None, Query(max_length=100, description="Only effects after this slug.")]
EffectName = Annotated[Text, Path(max_length=100, description="The effect's id or slug.")]


@router.get("/effects")
async def list_effects(
    plane: PlaneDep,
    caller: Reader,
    q: Search = None,
    tag: Tag = None,
    after: After = None,
    limit: Limit = PAGE_USUAL,
) -> PublicEffects:
    """Lists published effects, optionally filtered by text or tag."""
    balance = await _balance(plane, caller)
    return await _list(plane, balance, q, tag, after, limit)


@catalogue_router.get(CATALOGUE_PATH, name="catalogue")
async def list_catalogue(
    plane: PlaneDep,
    request: Request,
    now: NowDep,
    q: Search = None,
    tag: Tag = None,
    after: After = None,
    limit: Limit = PAGE_USUAL,
) -> PublicEffects:
    """Lists published effects without a key, if COMFYFLEET_PUBLIC_CATALOGUE is set."""
    await _admit_visitor(request, now)
    return await _list(plane, 0, q, tag, after, limit)


@catalogue_router.get(CATALOGUE_PATH + "/{effect_id}", name="catalogue_entry")
async def show_catalogue_entry(
    effect_id: EffectName, plane: PlaneDep, request: Request, now: NowDep
) -> EffectAnswer:
    """Returns a published effect without a key, if COMFYFLEET_PUBLIC_CATALOGUE is set."""
    await _admit_visitor(request, now)
    return _effect_answer(plane, await _find(plane, effect_id), 0)


async def _admit_visitor(request: Request, now: datetime) -> None:
    if not await is_catalogue_public(request):
        raise Unauthenticated(
            "effects are visible to customers only",
            hint="Use /api/effects with a key, or ask the operator to set "
            "COMFYFLEET_PUBLIC_CATALOGUE.",
        )
    admit_stranger(request, now)


async def _list(
    plane: ControlPlane,
    balance: int,
    text: str | None,
    tag: str | None,
    after: str | None,
    limit: int,
) -> PublicEffects:
    async with plane.central.read() as tx:
        offers = await catalog.list_published(
            tx, after_slug=after, limit=limit + 1, text=text or None, tag=tag or None
        )
        tags = [] if after else await catalog.published_tags(tx)
    page = offers[:limit]
    return PublicEffects(
        effects=tuple(_effect_answer(plane, offer, balance) for offer in page),
        tags=tuple(tags),
        next=page[-1].effect.slug if len(offers) > limit else None,
    )


@router.get("/effects/{effect_id}", responses=problems(404), name="show")
async def show_effect(effect_id: EffectName, plane: PlaneDep, caller: Reader) -> EffectAnswer:
    """Returns an effect from the catalog."""
    offer = await _find(plane, effect_id)
    return _effect_answer(plane, offer, await _balance(plane, caller))


async def _find(plane: ControlPlane, id_or_slug: str) -> ResolvedEffect:
    async with plane.central.read() as tx:
        try:
            return await catalog.resolve(tx, UUID(id_or_slug))
        except ValueError:
            offer = await catalog.find_published(tx, id_or_slug)
    if offer is None:
        raise NotFound(f"effect {id_or_slug} was not found")
    return offer


async def _balance(plane: ControlPlane, caller: Caller) -> int:
    async with plane.pools[caller.tenant.pool].read() as tx:
        return await ledger.balance(tx, caller.tenant.id, caller.user_id)


def _effect_answer(plane: ControlPlane, offer: ResolvedEffect, balance: int) -> EffectAnswer:
    effect, settings = offer.effect, offer.effect.settings
    return EffectAnswer(
        id=effect.id,
        slug=effect.slug,
        title=settings.title or effect.slug,
        description=settings.description,
        preview_url=settings.preview_url,
        price_tokens=settings.price_tokens,
        typical_seconds=effect.typical_seconds,
        last_processing_time_seconds=effect.last_processing_time_seconds,
        takes=_takes(plane, offer),
        properties=json_schema_of(offer.version.properties, settings.overrides, settings.locked),
        tags=settings.tags,
        examples=tuple(example_views(plane, effect.examples)),
        can_pay=settings.price_tokens <= balance,
    )


def _takes(plane: ControlPlane, offer: ResolvedEffect) -> Takes | None:
    if offer.takes is None:
        return None
    most = plane.settings.max_upload_bytes
    return Takes(
        kind=offer.takes,
        media_types=tuple(offer.effect.settings.media_types),
        max_bytes=min(offer.effect.settings.max_upload_bytes or most, most),
    )
