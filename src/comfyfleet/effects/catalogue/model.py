"""An effect: a workflow with a price, values of its own, and limits on what is sent to it. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.effects.model import (
    PRICE_TOKENS_MAX,
    PRIMARY_INPUT,
    Property,
    PropertyType,
    Version,
    Workflow,
    check_slug,
)
from comfyfleet.effects.values import checked, shown
from comfyfleet.kernel.errors import InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.kernel.texts import is_storable

TITLE_CHARACTERS_MAX = 200
DESCRIPTION_CHARACTERS_MAX = 10_000
PREVIEW_URL_CHARACTERS_MAX = 2000
UPLOAD_BYTES_MAX = 16 * 1024**3
MEDIA_TYPES_MAX = 50
STAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,49}")
MEDIA_TYPE = re.compile(r"(image|video|audio)/[a-z0-9][a-z0-9.+-]{0,99}")
PROVIDERS = ("self_hosted", "cloud")


@dataclass(frozen=True, slots=True)
class Face:
    """All of an effect that an operator sets."""

    title: str = ""  # empty: the slug
    description: str = ""
    preview_url: str | None = None
    price_tokens: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    stage: str = "production"
    provider: str = "self_hosted"
    is_published: bool = False
    max_upload_bytes: int | None = None  # None: as much as the settings allow
    media_types: tuple[str, ...] = ()  # none named: all of the kind that it takes
    locked: tuple[str, ...] = ()  # properties that customers neither see nor set
    keep_metadata: bool = False  # whether results carry the prompt and workflow that made them


@dataclass(frozen=True, slots=True)
class Effect:
    id: UUID
    slug: str
    workflow_id: int
    face: Face
    last_processing_time_seconds: float | None
    typical_seconds: float | None
    created_at: datetime

    @property
    def subject(self) -> str:
        return f"effect:{self.slug}"


@dataclass(frozen=True, slots=True)
class Offer:
    """An effect with what stands behind it at this moment."""

    effect: Effect
    workflow: Workflow
    version: Version

    @property
    def is_open(self) -> bool:
        """Whether a customer may pick it."""
        return self.effect.face.is_published and self.workflow.is_active

    @property
    def properties(self) -> tuple[Property, ...]:
        """As customers may set them: without those that are locked, and with the effect's defaults."""
        face = self.effect.face
        return tuple(
            replace(each, default=face.overrides[each.name])
            if face.overrides.get(each.name) is not None
            else each
            for each in self.version.properties
            if each.name not in face.locked
        )

    @property
    def takes(self) -> PropertyType | None:
        """The kind of media that it is applied to, if to any."""
        return primary_kind(self.version.properties)

    def check_upload(self, media_type: str, size_bytes: int, *, at_most_bytes: int) -> None:
        """Before the first byte is sent: is it something that this effect would take?"""
        wanted = self.takes
        if wanted is None:
            raise InvalidInput("this effect takes no media", field="content_type")
        allowed = self.effect.face.media_types
        fits = media_type in allowed if allowed else media_type.startswith(f"{wanted}/")
        if not fits:
            names = ", ".join(allowed) or f"{wanted}/*"
            raise InvalidInput(
                f"this effect takes {names}, not {shown(media_type)}", field="content_type"
            )
        limit = min(self.effect.face.max_upload_bytes or at_most_bytes, at_most_bytes)
        if size_bytes > limit:
            raise LimitExceeded(
                f"this effect takes at most {limit:,} bytes, not {size_bytes:,}",
                field="size",
                max_bytes=limit,
            )


def primary_kind(properties: Sequence[Property]) -> PropertyType | None:
    found = (each.type for each in properties if each.name == PRIMARY_INPUT and each.is_media)
    return next(found, None)


def check_new(slug: str, face: Face, properties: Sequence[Property]) -> None:
    check_slug(slug, "an effect")
    check_face(face, properties)


def check_face(face: Face, properties: Sequence[Property]) -> None:
    _check_texts(face)
    for name, value, most in (
        ("price_tokens", face.price_tokens, PRICE_TOKENS_MAX),
        ("max_upload_bytes", face.max_upload_bytes or 0, UPLOAD_BYTES_MAX),
    ):
        if not 0 <= value <= most:
            raise InvalidInput(f"{name} must be 0 to {most:,}, not {value}", field=name)
    if not STAGE.fullmatch(face.stage):
        raise InvalidInput(
            f"a stage is lower-case letters, digits, - and _, not {face.stage!r}", field="stage"
        )
    if face.provider not in PROVIDERS:
        raise InvalidInput(
            f"a provider is {' or '.join(PROVIDERS)}, not {face.provider!r}", field="provider"
        )
    _check_media_types(face, properties)
    _check_locked(face, properties)
    for name in face.overrides:
        problem = problem_with(name, face.overrides[name], properties)
        if problem:
            raise InvalidValue(problem, field="overrides", property=name)


def problems_of(
    face: Face, properties: Sequence[Property], before: Sequence[Property]
) -> Iterator[str]:
    """Why a version with these properties doesn't fit an effect that customers use."""
    for name, value in face.overrides.items():
        if problem := problem_with(name, value, properties):
            yield problem
    known = {each.name for each in properties} | {*face.overrides}
    for name in face.locked:
        if name not in known:
            yield f"the workflow has no property {shown(name)}, which it locks"
    for each in before:
        if each.name not in known and each.name not in face.locked:
            yield f"the workflow has no property {shown(each.name)}, which customers may set"


def problem_with(name: str, override: Any, properties: Sequence[Property]) -> str | None:
    """Why a property can't have this value of the effect's, if it can't."""
    found = next((each for each in properties if each.name == name), None)
    if found is None:
        return f"the workflow has no property {shown(name)}"
    try:
        if override is not None:
            checked(found, override, is_ours=True)
    except InvalidValue as error:
        return error.message
    return None


def _check_texts(face: Face) -> None:
    for name, text, most in (
        ("title", face.title, TITLE_CHARACTERS_MAX),
        ("description", face.description, DESCRIPTION_CHARACTERS_MAX),
        ("preview_url", face.preview_url or "", PREVIEW_URL_CHARACTERS_MAX),
    ):
        if len(text) > most or not is_storable(text):
            raise InvalidInput(f"{name} must have at most {most:,} characters", field=name)
    if face.preview_url and not face.preview_url.startswith(("https://", "http://")):
        raise InvalidInput("preview_url must be an http or https URL", field="preview_url")


def _check_locked(face: Face, properties: Sequence[Property]) -> None:
    known = {each.name: each for each in properties}
    for name in face.locked:
        found = known.get(name)
        if found is None:
            raise InvalidInput(f"the workflow has no property {shown(name)}", field="locked")
        if found.is_primary_input:
            raise InvalidInput("what the effect is applied to can't be locked", field="locked")
        has_value = face.overrides.get(name) is not None or found.default is not None
        if found.required and not has_value and found.type != "seed":
            raise InvalidInput(
                f"{shown(name)} is locked, and has no value: set it in overrides", field="locked"
            )


def _check_media_types(face: Face, properties: Sequence[Property]) -> None:
    kind = primary_kind(properties)
    if face.media_types and kind is None:
        raise InvalidInput(
            "media_types are named, and the workflow has no media property named input",
            field="media_types",
        )
    if len(face.media_types) > MEDIA_TYPES_MAX:
        raise InvalidInput(f"at most {MEDIA_TYPES_MAX} media types", field="media_types")
    for each in face.media_types:
        if not MEDIA_TYPE.fullmatch(each) or not each.startswith(f"{kind}/"):
            raise InvalidInput(f"{shown(each)} is no type of {kind}", field="media_types")


class RunTerms(NamedTuple):
    """What a worker is told of a run, by the job's workflow and effect."""

    run_limit_seconds: int
    keeps_metadata: bool  # false: its outputs lose their prompt and workflow
