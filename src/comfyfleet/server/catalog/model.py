"""Registered workflows, their properties with checked values, and effects based on them. Pure."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.api.admin import AiMark, FleetPrompts, OutputRule, PropertyFormat, PropertyType
from comfyfleet.api.values import is_storable, problem_with_text
from comfyfleet.api.worker import BackendFacts
from comfyfleet.errors import InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.server.fleets.model import (
    MissingRequirements,
    ModelUse,
    WorkflowRequirements,
    backend_offer,
)
from comfyfleet.workflow.inspect.inputs_outputs import is_model_file

MEDIA_TYPES = frozenset({"image", "video", "audio"})
PRIMARY_INPUT = "input"
SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
OPEN_PREFIX = "open-"
SEED_MAX = 2**64 - 1
RUN_LIMIT_SECONDS_MAX = 7 * 24 * 3600
PRICE_TOKENS_MAX = 2**31 - 1
COLOUR = re.compile("^#[0-9a-fA-F]{6}$")
COLOUR_MAX = 0xFFFFFF

Kind: TypeAlias = Literal["workflow", "prompt"]


@dataclass(frozen=True, slots=True)
class Property:
    """A named, typed input of a workflow, bound to `node.input` or to a placeholder in its text."""

    name: str
    type: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    # None means that files, and placeholders without a default, are required.
    required: bool | None = None
    description: str = ""
    label: str | None = None  # None means that the label is derived from the name
    format: PropertyFormat | None = None  # the kind of form field, for types that allow several

    @property
    def is_media(self) -> bool:
        return self.type in MEDIA_TYPES

    @property
    def is_primary_input(self) -> bool:
        return self.is_media and self.name == PRIMARY_INPUT

    @property
    def kind(self) -> str:
        """The kind of form field: the format or, without one, the type."""
        return self.format or self.type

    @property
    def place(self) -> str:
        """The binding or placeholder that receives the value, for messages."""
        return f"binding {self.binding}" if self.binding else f"placeholder {self.placeholder!r}"


@dataclass(frozen=True, slots=True)
class RegisteredWorkflow:
    id: int
    slug: str
    version: int  # the version that new jobs get; 0 for an open workflow, which has no versions
    required_capabilities: frozenset[str]
    price_tokens: int | None  # price in graphs and pipelines; None means it isn't offered there
    run_limit_seconds: int
    is_active: bool
    is_paused: bool
    is_open: bool
    created_at: datetime
    output: OutputRule = "required"
    ai_mark: AiMark = "auto"

    @property
    def subject(self) -> str:
        return f"workflow:{self.slug}"

    @property
    def is_offered(self) -> bool:
        """Checks whether customers may use the workflow in graphs and pipelines."""
        return self.is_active and not self.is_open and self.price_tokens is not None


@dataclass(frozen=True, slots=True)
class WorkflowVersion:
    """A version of a workflow. It never changes, because jobs refer to it."""

    workflow_id: int
    version: int
    kind: Kind
    document_key: str
    document_hash: str
    properties: tuple[Property, ...]
    output_node_id: str | None
    node_types: tuple[str, ...]
    models: tuple[ModelUse, ...]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class WorkflowTerms:
    """Settings for all versions of a workflow. None keeps the current value or the default."""

    required_capabilities: frozenset[str] | None = None
    run_limit_seconds: int | None = None
    price_tokens: int | None = None  # the price for customers; 0 means free
    is_withdrawn: bool | None = None  # True means the workflow is no longer offered
    output: OutputRule | None = None
    ai_mark: AiMark | None = None


@dataclass(frozen=True, slots=True)
class WorkflowDraft:
    """A version that has been checked and is not registered yet."""

    slug: str
    kind: Kind
    document: bytes
    document_hash: str
    properties: tuple[Property, ...]
    output_node_id: str | None
    node_types: tuple[str, ...]
    models: tuple[ModelUse, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # checks that could not be done yet
    shows_text_only: bool = False  # its output nodes accept no media and save no files

    @property
    def document_key(self) -> str:
        """The object key. It is derived from the content, so the document can be stored before its
        row exists."""
        return f"central/workflows/{self.slug}/{self.document_hash}.json"


@dataclass(frozen=True, slots=True)
class AssetRef:
    """A file that the worker uploads to its backend, and the input that receives its name."""

    name: str
    file_id: UUID
    kind: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    is_primary_input: bool = False


@dataclass(frozen=True, slots=True)
class JobPayload:
    """A job's copy of its workflow version, so that later versions don't change the job."""

    prompt: dict[str, Any]
    assets: tuple[AssetRef, ...]
    properties: dict[str, Any]  # resolved values, with files as ids
    model_key: str | None
    model_set: str | None


def check_slug(slug: str, of: str = "a workflow") -> None:
    if not SLUG.fullmatch(slug):
        raise InvalidInput(
            f"the slug of {of} must consist of lower-case letters, digits, ., - and _, not {slug!r}",
            field="slug",
        )


def check_terms(terms: WorkflowTerms) -> None:
    if not all(
        capability and is_storable(capability) for capability in terms.required_capabilities or ()
    ):
        raise InvalidInput("a capability must be a non-empty string", field="required_capabilities")
    if terms.is_withdrawn and terms.price_tokens is not None:
        raise InvalidInput("a withdrawn workflow can't have a price", field="price_tokens")
    limits = (
        ("run_limit_seconds", terms.run_limit_seconds, 1, RUN_LIMIT_SECONDS_MAX),
        ("price_tokens", terms.price_tokens, 0, PRICE_TOKENS_MAX),
    )
    for name, value, least, most in limits:
        if value is not None and not least <= value <= most:
            raise InvalidInput(
                f"{name} must be between {least} and {most:,}, not {value}", field=name
            )


# Input names of nodes that load large models, most certain first.
HEAVY_INPUTS = (
    ("ckpt_name", "unet_name"),
    ("checkpoint", "checkpoint_name", "diffusion_model", "diffusion_model_name", "gguf_name"),
    ("model_name", "model", "model_path"),
)
# Parts of the class names of loaders that use `model_name` for small models.
LIGHT_CLASSES = ("upscale", "lora", "vae", "clip", "controlnet", "style", "gligen", "photomaker")
KEY_CHARACTERS_MAX = 300
VALUE_DEPTH_MAX = 4


def models_of(prompt: Mapping[str, Any]) -> tuple[ModelUse, ...]:
    """Returns the model files that are named in a prompt, in order and without duplicates."""
    uses = (
        ModelUse(f"{node.get('class_type', '')}.{name}", file)
        for node in prompt.values()
        for name, value in node.get("inputs", {}).items()
        for file in _files_in(value, VALUE_DEPTH_MAX)
    )
    return tuple(dict.fromkeys(uses))


def models_chosen(
    properties: Iterable[Property], values: Mapping[str, Any]
) -> tuple[ModelUse, ...]:
    """Returns the model files named in property values or defaults, without node classes."""
    choices = (
        (prop.binding.rpartition(".")[2], _first_text(values.get(prop.name), prop.default))
        for prop in properties
        if prop.binding and not prop.is_media
    )
    return tuple(ModelUse(name, value) for name, value in choices if is_model_file(value))


def model_key(models: Iterable[ModelUse]) -> str | None:
    """Returns a job's largest model, judging by the input names. Workers avoid reloading it."""
    uses = list(models)
    heavy = next((use for tier in HEAVY_INPUTS for use in uses if is_heavy(use, tier)), None)
    chosen = heavy or next(iter(uses), None)
    if chosen is None:
        return None
    is_short = len(chosen.file) <= KEY_CHARACTERS_MAX
    return chosen.file if is_short else hashlib.sha256(chosen.file.encode()).hexdigest()


def model_set(models: Iterable[ModelUse]) -> str | None:
    """Returns a hash of the model files and their inputs. The order of `models` doesn't matter."""
    uses = sorted(set(models))
    return hashlib.sha256(json.dumps(uses).encode()).hexdigest() if uses else None


def prompt_needs(prompt: Mapping[str, Any]) -> WorkflowRequirements:
    """Returns the node types and model files that a prompt requires."""
    types = {str(node.get("class_type", "")) for node in prompt.values()}
    return WorkflowRequirements(tuple(sorted(types)), models_of(prompt))


def needs_hash(needs: WorkflowRequirements) -> str:
    """Returns a hash of an open prompt's node types and models. It never equals a `model_set`."""
    data = json.dumps([needs.node_types, sorted(set(needs.models))])
    return hashlib.sha256(data.encode()).hexdigest()


def missing_on_backend(version: WorkflowVersion, facts: BackendFacts) -> MissingRequirements:
    """Returns the missing requirements. Models of inputs without a reported list count as
    present."""
    return backend_offer(facts).lacks(version.node_types, version.models)


def _first_text(value: Any, default: Any) -> Any:
    return default if value is None else value


def is_heavy(use: ModelUse, tier: tuple[str, ...]) -> bool:
    class_name, _, name = use.input.partition(".")
    lowered = class_name.lower()
    is_light = any(word in lowered for word in LIGHT_CLASSES) and "checkpoint" not in lowered
    return name in tier and (not is_light or "ckpt_name" in tier)


def _files_in(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if is_model_file(value):
            yield value
    elif depth and isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _files_in(inner, depth - 1)


TEXT_CHARACTERS_MAX = 1_000_000
SHOWN_CHARACTERS_MAX = 60
SHOWN_CHOICES_MAX = 20


def resolve_values(
    properties: Iterable[Property],
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any]:
    """Returns the checked values by property name, without properties whose value is None. Files
    are returned as UUIDs."""
    named = {prop.name: prop for prop in properties}
    for given_values in (values, overrides):
        refuse_unknown(given_values, named, named)
    resolved: dict[str, Any] = {}
    for name, prop in named.items():
        value = _first_given(values.get(name), overrides.get(name), prop.default)
        if value is None and prop.type == "seed":
            value = seed_within(prop, seed)
        if value is not None:
            is_operator_value = values.get(name) is None
            resolved[name] = check_value(prop, value, is_operator_value=is_operator_value)
        elif prop.required:
            raise InvalidValue(f"the property {name} needs a value", property=name)
    return resolved


def check_value(prop: Property, value: Any, *, is_operator_value: bool = False) -> Any:
    """Returns the value in the form used in the prompt. With `is_operator_value`, the value may
    name a file on the backend. A customer's value must be an upload."""
    checked = _CHECKS[prop.type](prop, value, is_operator_value)
    _check_range(prop, checked)
    return checked


def seed_within(prop: Property, seed: int) -> int:
    least, most = int(prop.minimum or 0), int(SEED_MAX if prop.maximum is None else prop.maximum)
    return least + seed % (most - least + 1)


def value_error(prop: Property, problem: str) -> InvalidValue:
    return InvalidValue(f"the property {prop.name}: {problem}", property=prop.name)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}…"


def _first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def refuse_unknown(given: Iterable[str], names: Container[str], settable: Iterable[str]) -> None:
    """Raises InvalidValue for a name that isn't a property. The error lists the settable ones."""
    for name in given:
        if name not in names:
            known = ", ".join(settable) or "none"
            raise InvalidValue(
                f"unknown property {shown(name)}; available properties: {known}", property=name
            )


def _text(prop: Property, value: Any, _is_operator_value: bool) -> str:
    if not isinstance(value, str):
        raise value_error(prop, f"{shown(value)} is not a string")
    if len(value) > TEXT_CHARACTERS_MAX:
        raise value_error(prop, f"the text has more than {TEXT_CHARACTERS_MAX:,} characters")
    problem = problem_with_text(value)
    if problem:
        raise value_error(prop, problem)
    if prop.format == "colour" and not COLOUR.fullmatch(value):
        raise value_error(prop, f"{shown(value)} is not a color such as #ffcc00")
    return value


def _number(prop: Property, value: Any, _is_operator_value: bool) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_finite(value):
        raise value_error(prop, f"{shown(value)} is not a number")
    number: int | float = value
    return number


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is too large for a float
        return False


def _integer(prop: Property, value: Any, is_operator_value: bool) -> int:
    number = _number(prop, value, is_operator_value)
    if number != int(number):
        raise value_error(prop, f"{shown(value)} is not a whole number")
    if prop.format == "colour" and not 0 <= number <= COLOUR_MAX:
        raise value_error(prop, f"a color must be between 0 and {COLOUR_MAX}, not {shown(value)}")
    return int(number)


def _boolean(prop: Property, value: Any, _is_operator_value: bool) -> bool:
    if not isinstance(value, bool):
        raise value_error(prop, f"{shown(value)} is neither true nor false")
    return value


def _choice(prop: Property, value: Any, _is_operator_value: bool) -> Any:
    """Returns the choice with the same value and type, because True equals 1 in Python."""
    choices = prop.choices or ()
    for choice in choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    more = ", …" if len(choices) > SHOWN_CHOICES_MAX else ""
    listed = ", ".join(shown(choice) for choice in choices[:SHOWN_CHOICES_MAX]) + more
    raise value_error(prop, f"{shown(value)} is not among the choices: {listed}")


def _seed(prop: Property, value: Any, is_operator_value: bool) -> int:
    seed = _integer(prop, value, is_operator_value)
    if not 0 <= seed <= SEED_MAX:
        raise value_error(prop, f"a seed must be between 0 and {SEED_MAX}, not {shown(value)}")
    return seed


def _file(prop: Property, value: Any, is_operator_value: bool) -> UUID | str:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, TypeError, AttributeError):
        if (
            is_operator_value
            and isinstance(value, str)
            and value
            and problem_with_text(value) is None
        ):
            return value
        raise value_error(prop, f"{shown(value)} is not a file id") from None


def _check_range(prop: Property, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or prop.choices is not None:
        return
    if prop.minimum is not None and value < prop.minimum:
        raise value_error(prop, f"{shown(value)} is below the minimum of {shown(prop.minimum)}")
    if prop.maximum is not None and value > prop.maximum:
        raise value_error(prop, f"{shown(value)} is above the maximum of {shown(prop.maximum)}")


_CHECKS: Mapping[str, Callable[[Property, Any, bool], Any]] = {
    "text": _text,
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "choice": _choice,
    "seed": _seed,
    "image": _file,
    "video": _file,
    "audio": _file,
}


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema_of(
    properties: Iterable[Property],
    overrides: Mapping[str, Any],
    locked: Collection[str] = (),
) -> dict[str, Any]:
    """Returns a JSON Schema of the `properties` that customers may send, without locked properties.
    Overrides become the defaults."""
    shown = [prop for prop in properties if not prop.is_primary_input and prop.name not in locked]
    return {
        "$schema": DIALECT,
        "type": "object",
        "properties": {prop.name: _property_schema(prop, overrides) for prop in shown},
        "required": [prop.name for prop in shown if _is_required(prop, overrides)],
        "additionalProperties": False,
    }


def _property_schema(prop: Property, overrides: Mapping[str, Any]) -> dict[str, Any]:
    title = prop.label or prop.name.replace("_", " ").strip().capitalize()
    schema = {"title": title, "x-kind": prop.kind, **_type_schema(prop)}
    if prop.description:
        schema["description"] = prop.description
    default = overrides.get(prop.name)
    if default is None:
        default = prop.default
    # The default of a media property names a file on the backend, which customers can't use.
    if default is not None and not prop.is_media:
        schema["default"] = default
    return schema


def _type_schema(prop: Property) -> dict[str, Any]:
    if prop.type == "choice":
        return {"enum": list(prop.choices or ())}
    if prop.is_media:
        return {"type": "string", "format": "uuid", "x-media": prop.type}
    if prop.type == "text":
        colour = {"pattern": COLOUR.pattern} if prop.format == "colour" else {}
        return {"type": "string", "maxLength": TEXT_CHARACTERS_MAX, **colour}
    if prop.type == "boolean":
        return {"type": "boolean"}
    return _number_schema(prop)


def _number_schema(prop: Property) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number" if prop.type == "number" else "integer"}
    least, most = prop.minimum, prop.maximum
    if prop.format == "colour":
        least, most = max(least or 0, 0), COLOUR_MAX if most is None else min(most, COLOUR_MAX)
    if prop.type == "seed":
        schema["x-seed"] = True
        least, most = max(least or 0, 0), SEED_MAX if most is None else min(most, SEED_MAX)
    for name, value in (("minimum", least), ("maximum", most), ("x-step", prop.step)):
        if value is not None:
            schema[name] = value
    return schema


def _is_required(prop: Property, overrides: Mapping[str, Any]) -> bool:
    has_value = overrides.get(prop.name) is not None or prop.default is not None
    return bool(prop.required) and not has_value and prop.type != "seed"


TITLE_CHARACTERS_MAX = 200
DESCRIPTION_CHARACTERS_MAX = 10_000
PREVIEW_URL_CHARACTERS_MAX = 2000
UPLOAD_BYTES_MAX = 16 * 1024**3
MEDIA_TYPES_MAX = 50
TAGS_MAX = 20
TAG = re.compile(r"[a-z0-9](?:[a-z0-9 -]{0,38}[a-z0-9])?")
STAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,49}")
MEDIA_TYPE = re.compile(r"(image|video|audio)/[a-z0-9][a-z0-9.+-]{0,99}")
PROVIDERS = ("self_hosted", "cloud")


@dataclass(frozen=True, slots=True)
class EffectSettings:
    """All fields of an effect that operators can set."""

    title: str = ""  # empty means the slug is used
    description: str = ""
    preview_url: str | None = None
    price_tokens: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    stage: str = "production"
    provider: str = "self_hosted"
    is_published: bool = False
    max_upload_bytes: int | None = None  # None means the limit from the settings
    media_types: tuple[str, ...] = ()  # empty means all types of its kind
    locked: tuple[str, ...] = ()  # properties that customers can neither see nor set
    keep_metadata: bool = False  # whether result files keep their embedded prompt and workflow
    tags: tuple[str, ...] = ()  # tags that customers can filter by
    # whether an existing result of the same customer for an identical job is reused
    reuse: bool = False


EXAMPLES_MAX = 6
EXAMPLE_NAME = re.compile(r"[0-9a-f]{32}\.[a-z0-9]{2,5}")
ExampleSide: TypeAlias = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """An image or video that shows the result of an effect. Its name is never reused."""

    name: str
    content_type: str
    size: int
    width: int | None = None
    height: int | None = None

    @property
    def key(self) -> str:
        return f"central/effects/{self.name}"


@dataclass(frozen=True, slots=True)
class EffectExample:
    """An example's input and output. Either may be missing."""

    before: ExampleFile | None = None
    after: ExampleFile | None = None

    @property
    def files(self) -> tuple[ExampleFile, ...]:
        return tuple(side for side in (self.before, self.after) if side)

    def with_side(self, side: ExampleSide, file: ExampleFile) -> "EffectExample":
        return replace(self, before=file) if side == "before" else replace(self, after=file)


@dataclass(frozen=True, slots=True)
class EffectDefinition:
    id: UUID
    slug: str
    workflow_id: int
    settings: EffectSettings
    last_processing_time_seconds: float | None
    typical_seconds: float | None
    created_at: datetime
    examples: tuple[EffectExample, ...] = ()

    @property
    def subject(self) -> str:
        return f"effect:{self.slug}"


@dataclass(frozen=True, slots=True)
class ResolvedEffect:
    """An effect with its workflow and the version that new jobs get."""

    effect: EffectDefinition
    workflow: RegisteredWorkflow
    version: WorkflowVersion

    @property
    def is_open(self) -> bool:
        """Checks whether customers may use the effect."""
        return self.effect.settings.is_published and self.workflow.is_active

    @property
    def properties(self) -> tuple[Property, ...]:
        """The properties that customers may set, with the effect's defaults. Excludes locked
        ones."""
        settings = self.effect.settings
        return tuple(
            replace(prop, default=settings.overrides[prop.name])
            if settings.overrides.get(prop.name) is not None
            else prop
            for prop in self.version.properties
            if prop.name not in settings.locked
        )

    @property
    def takes(self) -> PropertyType | None:
        """The kind of media that the effect is applied to. None means it accepts no media."""
        return primary_kind(self.version.properties)

    def check_upload(self, media_type: str, size_bytes: int, *, at_most_bytes: int) -> None:
        """Refuses an upload with the wrong type or size before any data is sent."""
        kind = self.takes
        if kind is None:
            raise InvalidInput("this effect doesn't accept media", field="content_type")
        allowed = self.effect.settings.media_types
        fits = media_type in allowed if allowed else media_type.startswith(f"{kind}/")
        if not fits:
            names = ", ".join(allowed) or f"{kind}/*"
            raise InvalidInput(
                f"this effect accepts {names}, not {shown(media_type)}", field="content_type"
            )
        limit = min(self.effect.settings.max_upload_bytes or at_most_bytes, at_most_bytes)
        if size_bytes > limit:
            raise LimitExceeded(
                f"this effect accepts at most {limit:,} bytes, not {size_bytes:,}",
                field="size",
                max_bytes=limit,
            )


def primary_kind(properties: Sequence[Property]) -> PropertyType | None:
    kinds = (prop.type for prop in properties if prop.name == PRIMARY_INPUT and prop.is_media)
    return next(kinds, None)


def check_new_effect(slug: str, settings: EffectSettings, properties: Sequence[Property]) -> None:
    check_slug(slug, "an effect")
    check_effect_settings(settings, properties)


def check_effect_settings(settings: EffectSettings, properties: Sequence[Property]) -> None:
    _check_texts(settings)
    for name, value, most in (
        ("price_tokens", settings.price_tokens, PRICE_TOKENS_MAX),
        ("max_upload_bytes", settings.max_upload_bytes or 0, UPLOAD_BYTES_MAX),
    ):
        if not 0 <= value <= most:
            raise InvalidInput(f"{name} must be between 0 and {most:,}, not {value}", field=name)
    if not STAGE.fullmatch(settings.stage):
        raise InvalidInput(
            f"a stage must consist of lower-case letters, digits, - and _, not {settings.stage!r}",
            field="stage",
        )
    if settings.provider not in PROVIDERS:
        raise InvalidInput(
            f"the provider must be {' or '.join(PROVIDERS)}, not {settings.provider!r}",
            field="provider",
        )
    _check_media_types(settings, properties)
    _check_tags(settings)
    _check_locked(settings, properties)
    for name in settings.overrides:
        problem = problem_with(name, settings.overrides[name], properties)
        if problem:
            raise InvalidValue(problem, field="overrides", property=name)


def problems_of(
    settings: EffectSettings, properties: Sequence[Property], before: Sequence[Property]
) -> Iterator[str]:
    """Yields the reasons why a version with these properties doesn't fit a published effect."""
    for name, value in settings.overrides.items():
        if problem := problem_with(name, value, properties):
            yield problem
    known = {prop.name for prop in properties} | {*settings.overrides}
    for name in settings.locked:
        if name not in known:
            yield f"the workflow has no property {shown(name)}, which the effect locks"
    for prop in before:
        if prop.name not in known and prop.name not in settings.locked:
            yield f"the workflow has no property {shown(prop.name)}, which customers can set"


def problem_with(name: str, override: Any, properties: Sequence[Property]) -> str | None:
    """Returns why an effect can't set this property to this value. Returns None if it can."""
    prop = next((candidate for candidate in properties if candidate.name == name), None)
    if prop is None:
        return f"the workflow has no property {shown(name)}"
    try:
        if override is not None:
            check_value(prop, override, is_operator_value=True)
    except InvalidValue as error:
        return error.message
    return None


def _check_texts(settings: EffectSettings) -> None:
    for name, text, most in (
        ("title", settings.title, TITLE_CHARACTERS_MAX),
        ("description", settings.description, DESCRIPTION_CHARACTERS_MAX),
        ("preview_url", settings.preview_url or "", PREVIEW_URL_CHARACTERS_MAX),
    ):
        if len(text) > most or not is_storable(text):
            raise InvalidInput(f"{name} can have at most {most:,} characters", field=name)
    if settings.preview_url and not settings.preview_url.startswith(("https://", "http://")):
        raise InvalidInput("preview_url must be an http or https URL", field="preview_url")


def _check_locked(settings: EffectSettings, properties: Sequence[Property]) -> None:
    known = {prop.name: prop for prop in properties}
    for name in settings.locked:
        prop = known.get(name)
        if prop is None:
            raise InvalidInput(f"the workflow has no property {shown(name)}", field="locked")
        if prop.is_primary_input:
            raise InvalidInput("the effect's media input can't be locked", field="locked")
        has_value = settings.overrides.get(name) is not None or prop.default is not None
        if prop.required and not has_value and prop.type != "seed":
            raise InvalidInput(
                f"{shown(name)} is locked but has no value; set it in overrides", field="locked"
            )


def _check_tags(settings: EffectSettings) -> None:
    if len(settings.tags) > TAGS_MAX:
        raise InvalidInput(f"an effect can have at most {TAGS_MAX} tags", field="tags")
    for tag in settings.tags:
        if not TAG.fullmatch(tag):
            raise InvalidInput(
                f"a tag must have 1 to 40 lower-case letters, digits, - and spaces, not {shown(tag)}",
                field="tags",
            )


def _check_media_types(settings: EffectSettings, properties: Sequence[Property]) -> None:
    kind = primary_kind(properties)
    if settings.media_types and kind is None:
        raise InvalidInput(
            "media_types is set, but the workflow has no media property named input",
            field="media_types",
        )
    if len(settings.media_types) > MEDIA_TYPES_MAX:
        raise InvalidInput(
            f"an effect can have at most {MEDIA_TYPES_MAX} media types", field="media_types"
        )
    for media_type in settings.media_types:
        if not MEDIA_TYPE.fullmatch(media_type) or not media_type.startswith(f"{kind}/"):
            raise InvalidInput(
                f"{shown(media_type)} is not a valid {kind} type", field="media_types"
            )


class RunTerms(NamedTuple):
    """The settings of a workflow and effect that the worker gets for a run."""

    run_limit_seconds: int
    keeps_metadata: bool  # False removes the prompt and workflow from output files
    output: OutputRule = "required"
    ai_mark: AiMark = "auto"


def underpriced(terms: FleetPrompts, slug: str, price_tokens: int) -> str | None:
    """Returns a warning if a prompt may cost less than a workflow, otherwise None."""
    per_second = terms.price_per_second
    least = terms.price_tokens if per_second is None else math.ceil(per_second)
    if least >= price_tokens:
        return None
    price = f"{least} tokens" if per_second is None else f"{per_second:g} tokens per second"
    return (
        f"Prompts cost {price}, less than the workflow {slug} ({price_tokens} tokens), which this "
        "fleet also runs. A prompt that contains the whole workflow costs the workflow's price, but "
        "a customer can insert a node into it and pay the lower price."
    )
