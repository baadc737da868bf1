"""Registered workflows, their properties with checked values, and effects made from them. Pure."""

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
    """A named, typed input of a workflow, bound to `node.input` or to a placeholder text in the
    document."""

    name: str
    type: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    # None: files are required, and placeholders without a default.
    required: bool | None = None
    description: str = ""
    label: str | None = None  # None: made from the name
    format: PropertyFormat | None = None  # how people enter it, where its type leaves that open

    @property
    def is_media(self) -> bool:
        return self.type in MEDIA_TYPES

    @property
    def is_primary_input(self) -> bool:
        return self.is_media and self.name == PRIMARY_INPUT

    @property
    def kind(self) -> str:
        """How people enter it: its format, or else its type."""
        return self.format or self.type

    @property
    def place(self) -> str:
        """Where the value goes, for messages."""
        return f"binding {self.binding}" if self.binding else f"placeholder {self.placeholder!r}"


@dataclass(frozen=True, slots=True)
class RegisteredWorkflow:
    id: int
    slug: str
    version: int  # the one that new jobs get; 0 for an open workflow, which has none
    required_capabilities: frozenset[str]
    price_tokens: int | None  # in graphs and pipelines; None: it is not offered there
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
        """Whether customers may name it in graphs and pipelines."""
        return self.is_active and not self.is_open and self.price_tokens is not None


@dataclass(frozen=True, slots=True)
class WorkflowVersion:
    """One version of a workflow; never changed, as jobs refer to it."""

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
    """Terms of all versions of a workflow; None leaves a term as it is, or at its default."""

    required_capabilities: frozenset[str] | None = None
    run_limit_seconds: int | None = None
    price_tokens: int | None = None  # offers it to customers; 0: free on purpose
    is_withdrawn: bool | None = None  # True: no longer offered
    output: OutputRule | None = None
    ai_mark: AiMark | None = None


@dataclass(frozen=True, slots=True)
class WorkflowDraft:
    """A version that was checked and is not registered yet."""

    slug: str
    kind: Kind
    document: bytes
    document_hash: str
    properties: tuple[Property, ...]
    output_node_id: str | None
    node_types: tuple[str, ...]
    models: tuple[ModelUse, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what will be known later
    shows_text_only: bool = False  # its output nodes take no media and save no files

    @property
    def document_key(self) -> str:
        """The object key, derived from the content, so the document can be stored before its row
        exists."""
        return f"central/workflows/{self.slug}/{self.document_hash}.json"


@dataclass(frozen=True, slots=True)
class AssetRef:
    """A file that the worker uploads to its backend, and the input that gets the resulting name."""

    name: str
    file_id: UUID
    kind: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    is_primary_input: bool = False


@dataclass(frozen=True, slots=True)
class JobPayload:
    """What a job keeps of its workflow version; later versions don't change it."""

    prompt: dict[str, Any]
    assets: tuple[AssetRef, ...]
    properties: dict[str, Any]  # as resolved, files by their ids
    model_key: str | None
    model_set: str | None


def check_slug(slug: str, of: str = "a workflow") -> None:
    if not SLUG.fullmatch(slug):
        raise InvalidInput(
            f"{of}'s slug must be lower-case letters, digits, ., - and _, not {slug!r}",
            field="slug",
        )


def check_terms(terms: WorkflowTerms) -> None:
    if not all(each and is_storable(each) for each in terms.required_capabilities or ()):
        raise InvalidInput("a capability must be a text", field="required_capabilities")
    if terms.is_withdrawn and terms.price_tokens is not None:
        raise InvalidInput("a workflow that is withdrawn has no price", field="price_tokens")
    limits = (
        ("run_limit_seconds", terms.run_limit_seconds, 1, RUN_LIMIT_SECONDS_MAX),
        ("price_tokens", terms.price_tokens, 0, PRICE_TOKENS_MAX),
    )
    for name, value, least, most in limits:
        if value is not None and not least <= value <= most:
            raise InvalidInput(f"{name} must be {least} to {most:,}, not {value}", field=name)


# Input names of loaders of large models; the most certain first.
HEAVY_INPUTS = (
    ("ckpt_name", "unet_name"),
    ("checkpoint", "checkpoint_name", "diffusion_model", "diffusion_model_name", "gguf_name"),
    ("model_name", "model", "model_path"),
)
# Classes of loaders that call a light model `model_name`.
LIGHT_CLASSES = ("upscale", "lora", "vae", "clip", "controlnet", "style", "gligen", "photomaker")
KEY_CHARACTERS_MAX = 300
VALUE_DEPTH_MAX = 4


def models_of(prompt: Mapping[str, Any]) -> tuple[ModelUse, ...]:
    """Returns the model files that a prompt names, in its order and without duplicates."""
    found = (
        ModelUse(f"{node.get('class_type', '')}.{name}", file)
        for node in prompt.values()
        for name, value in node.get("inputs", {}).items()
        for file in _files_in(value, VALUE_DEPTH_MAX)
    )
    return tuple(dict.fromkeys(found))


def models_chosen(
    properties: Iterable[Property], values: Mapping[str, Any]
) -> tuple[ModelUse, ...]:
    """Returns the model files that property values name; the node class of their inputs is not
    known here."""
    given = (
        (each.binding.rpartition(".")[2], _first_text(values.get(each.name), each.default))
        for each in properties
        if each.binding and not each.is_media
    )
    return tuple(ModelUse(name, value) for name, value in given if is_model_file(value))


def model_key(models: Iterable[ModelUse]) -> str | None:
    """Returns the largest model of a job, as far as input names tell; workers avoid loading it
    twice."""
    uses = list(models)
    heavy = next((use for tier in HEAVY_INPUTS for use in uses if is_heavy(use, tier)), None)
    chosen = heavy or next(iter(uses), None)
    if chosen is None:
        return None
    is_short = len(chosen.file) <= KEY_CHARACTERS_MAX
    return chosen.file if is_short else hashlib.sha256(chosen.file.encode()).hexdigest()


def model_set(models: Iterable[ModelUse]) -> str | None:
    """Returns a hash that is equal for prompts with the same files for the same inputs, in any
    order."""
    uses = sorted(set(models))
    return hashlib.sha256(json.dumps(uses).encode()).hexdigest() if uses else None


def prompt_needs(prompt: Mapping[str, Any]) -> WorkflowRequirements:
    """Returns the node types and model files that a prompt needs."""
    types = {str(node.get("class_type", "")) for node in prompt.values()}
    return WorkflowRequirements(tuple(sorted(types)), models_of(prompt))


def needs_hash(needs: WorkflowRequirements) -> str:
    """Like `model_set`, for prompts whose node types no workflow names; never equal to one of those."""
    told = json.dumps([needs.node_types, sorted(set(needs.models))])
    return hashlib.sha256(told.encode()).hexdigest()


def missing_on_backend(version: WorkflowVersion, facts: BackendFacts) -> MissingRequirements:
    """Returns what the backend lacks. A model counts as present if its input is not in the
    backend's lists."""
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
    """Returns the checked value of each property that has one, with files as UUIDs; None is the
    same as no value."""
    named = {each.name: each for each in properties}
    for given in (values, overrides):
        refuse_unknown(given, named, named)
    resolved: dict[str, Any] = {}
    for name, each in named.items():
        value = _first_given(values.get(name), overrides.get(name), each.default)
        if value is None and each.type == "seed":
            value = seed_within(each, seed)
        if value is not None:
            is_operator_value = values.get(name) is None
            resolved[name] = check_value(each, value, is_operator_value=is_operator_value)
        elif each.required:
            raise InvalidValue(f"the property {name} needs a value", property=name)
    return resolved


def check_value(each: Property, value: Any, *, is_operator_value: bool = False) -> Any:
    """Returns the value as it goes into the prompt.

    `is_operator_value` marks an operator's value, which may name a file on the backend; a customer's must be
    an upload.
    """
    checked = _CHECKS[each.type](each, value, is_operator_value)
    _check_range(each, checked)
    return checked


def seed_within(each: Property, seed: int) -> int:
    least, most = int(each.minimum or 0), int(SEED_MAX if each.maximum is None else each.maximum)
    return least + seed % (most - least + 1)


def value_error(each: Property, problem: str) -> InvalidValue:
    return InvalidValue(f"the property {each.name}: {problem}", property=each.name)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}…"


def _first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def refuse_unknown(given: Iterable[str], names: Container[str], settable: Iterable[str]) -> None:
    """Raises InvalidValue for a name that no property has. The error lists those that can be set."""
    for name in given:
        if name not in names:
            known = ", ".join(settable) or "none"
            raise InvalidValue(
                f"there is no property {shown(name)}; there are: {known}", property=name
            )


def _text(each: Property, value: Any, _is_operator_value: bool) -> str:
    if not isinstance(value, str):
        raise value_error(each, f"{shown(value)} is no text")
    if len(value) > TEXT_CHARACTERS_MAX:
        raise value_error(each, f"the text has more than {TEXT_CHARACTERS_MAX:,} characters")
    problem = problem_with_text(value)
    if problem:
        raise value_error(each, problem)
    if each.format == "colour" and not COLOUR.fullmatch(value):
        raise value_error(each, f"{shown(value)} is no colour such as #ffcc00")
    return value


def _number(each: Property, value: Any, _is_operator_value: bool) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_finite(value):
        raise value_error(each, f"{shown(value)} is no number")
    number: int | float = value
    return number


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _integer(each: Property, value: Any, is_operator_value: bool) -> int:
    number = _number(each, value, is_operator_value)
    if number != int(number):
        raise value_error(each, f"{shown(value)} is no whole number")
    if each.format == "colour" and not 0 <= number <= COLOUR_MAX:
        raise value_error(each, f"a colour is 0 to {COLOUR_MAX}, not {shown(value)}")
    return int(number)


def _boolean(each: Property, value: Any, _is_operator_value: bool) -> bool:
    if not isinstance(value, bool):
        raise value_error(each, f"{shown(value)} is neither true nor false")
    return value


def _choice(each: Property, value: Any, _is_operator_value: bool) -> Any:
    """Finds the value among the choices. Python treats True and 1 as equal, so their types are
    compared too."""
    choices = each.choices or ()
    for choice in choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    more = ", …" if len(choices) > SHOWN_CHOICES_MAX else ""
    listed = ", ".join(shown(choice) for choice in choices[:SHOWN_CHOICES_MAX]) + more
    raise value_error(each, f"{shown(value)} is not among the choices: {listed}")


def _seed(each: Property, value: Any, is_operator_value: bool) -> int:
    seed = _integer(each, value, is_operator_value)
    if not 0 <= seed <= SEED_MAX:
        raise value_error(each, f"a seed is 0 to {SEED_MAX}, not {shown(value)}")
    return seed


def _file(each: Property, value: Any, is_operator_value: bool) -> UUID | str:
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
        raise value_error(each, f"{shown(value)} is no file's id") from None


def _check_range(each: Property, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or each.choices is not None:
        return
    if each.minimum is not None and value < each.minimum:
        raise value_error(each, f"{shown(value)} is below the minimum of {shown(each.minimum)}")
    if each.maximum is not None and value > each.maximum:
        raise value_error(each, f"{shown(value)} is above the maximum of {shown(each.maximum)}")


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
    """Returns a JSON Schema of the `properties` that customers may send.

    An override is shown as the default; locked properties are left out.
    """
    shown = [each for each in properties if not each.is_primary_input and each.name not in locked]
    return {
        "$schema": DIALECT,
        "type": "object",
        "properties": {each.name: _property_schema(each, overrides) for each in shown},
        "required": [each.name for each in shown if _is_required(each, overrides)],
        "additionalProperties": False,
    }


def _property_schema(each: Property, overrides: Mapping[str, Any]) -> dict[str, Any]:
    title = each.label or each.name.replace("_", " ").strip().capitalize()
    schema = {"title": title, "x-kind": each.kind, **_type_schema(each)}
    if each.description:
        schema["description"] = each.description
    default = overrides.get(each.name)
    if default is None:
        default = each.default
    # Our default of a file names one on the backend, which customers can't send.
    if default is not None and not each.is_media:
        schema["default"] = default
    return schema


def _type_schema(each: Property) -> dict[str, Any]:
    if each.type == "choice":
        return {"enum": list(each.choices or ())}
    if each.is_media:
        return {"type": "string", "format": "uuid", "x-media": each.type}
    if each.type == "text":
        colour = {"pattern": COLOUR.pattern} if each.format == "colour" else {}
        return {"type": "string", "maxLength": TEXT_CHARACTERS_MAX, **colour}
    if each.type == "boolean":
        return {"type": "boolean"}
    return _number_schema(each)


def _number_schema(each: Property) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number" if each.type == "number" else "integer"}
    least, most = each.minimum, each.maximum
    if each.format == "colour":
        least, most = max(least or 0, 0), COLOUR_MAX if most is None else min(most, COLOUR_MAX)
    if each.type == "seed":
        schema["x-seed"] = True
        least, most = max(least or 0, 0), SEED_MAX if most is None else min(most, SEED_MAX)
    for name, value in (("minimum", least), ("maximum", most), ("x-step", each.step)):
        if value is not None:
            schema[name] = value
    return schema


def _is_required(each: Property, overrides: Mapping[str, Any]) -> bool:
    has_value = overrides.get(each.name) is not None or each.default is not None
    return bool(each.required) and not has_value and each.type != "seed"


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
    """All fields of an effect that an operator sets."""

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
    tags: tuple[str, ...] = ()  # by which customers choose
    reuse: bool = False  # whether a result that its customer has already is taken instead of run


EXAMPLES_MAX = 6
EXAMPLE_NAME = re.compile(r"[0-9a-f]{32}\.[a-z0-9]{2,5}")
ExampleSide: TypeAlias = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class ExampleFile:
    """A picture or video that shows what an effect does. Its name is never used for another one."""

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
    """What went in, and what came out of it; either may be missing."""

    before: ExampleFile | None = None
    after: ExampleFile | None = None

    @property
    def files(self) -> tuple[ExampleFile, ...]:
        return tuple(each for each in (self.before, self.after) if each)

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
        """Whether customers may use it."""
        return self.effect.settings.is_published and self.workflow.is_active

    @property
    def properties(self) -> tuple[Property, ...]:
        """The properties that customers may set, with the effect's defaults; locked ones are left
        out."""
        settings = self.effect.settings
        return tuple(
            replace(each, default=settings.overrides[each.name])
            if settings.overrides.get(each.name) is not None
            else each
            for each in self.version.properties
            if each.name not in settings.locked
        )

    @property
    def takes(self) -> PropertyType | None:
        """The kind of media that the effect is applied to; None if it takes none."""
        return primary_kind(self.version.properties)

    def check_upload(self, media_type: str, size_bytes: int, *, at_most_bytes: int) -> None:
        """Refuses an upload of the wrong type or size before any byte is sent."""
        wanted = self.takes
        if wanted is None:
            raise InvalidInput("this effect takes no media", field="content_type")
        allowed = self.effect.settings.media_types
        fits = media_type in allowed if allowed else media_type.startswith(f"{wanted}/")
        if not fits:
            names = ", ".join(allowed) or f"{wanted}/*"
            raise InvalidInput(
                f"this effect takes {names}, not {shown(media_type)}", field="content_type"
            )
        limit = min(self.effect.settings.max_upload_bytes or at_most_bytes, at_most_bytes)
        if size_bytes > limit:
            raise LimitExceeded(
                f"this effect takes at most {limit:,} bytes, not {size_bytes:,}",
                field="size",
                max_bytes=limit,
            )


def primary_kind(properties: Sequence[Property]) -> PropertyType | None:
    found = (each.type for each in properties if each.name == PRIMARY_INPUT and each.is_media)
    return next(found, None)


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
            raise InvalidInput(f"{name} must be 0 to {most:,}, not {value}", field=name)
    if not STAGE.fullmatch(settings.stage):
        raise InvalidInput(
            f"a stage is lower-case letters, digits, - and _, not {settings.stage!r}", field="stage"
        )
    if settings.provider not in PROVIDERS:
        raise InvalidInput(
            f"a provider is {' or '.join(PROVIDERS)}, not {settings.provider!r}", field="provider"
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
    """Yields why a version with these properties doesn't fit a published effect."""
    for name, value in settings.overrides.items():
        if problem := problem_with(name, value, properties):
            yield problem
    known = {each.name for each in properties} | {*settings.overrides}
    for name in settings.locked:
        if name not in known:
            yield f"the workflow has no property {shown(name)}, which it locks"
    for each in before:
        if each.name not in known and each.name not in settings.locked:
            yield f"the workflow has no property {shown(each.name)}, which customers may set"


def problem_with(name: str, override: Any, properties: Sequence[Property]) -> str | None:
    """Returns why an effect can't set this property to this value; None if it can."""
    found = next((each for each in properties if each.name == name), None)
    if found is None:
        return f"the workflow has no property {shown(name)}"
    try:
        if override is not None:
            check_value(found, override, is_operator_value=True)
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
            raise InvalidInput(f"{name} must have at most {most:,} characters", field=name)
    if settings.preview_url and not settings.preview_url.startswith(("https://", "http://")):
        raise InvalidInput("preview_url must be an http or https URL", field="preview_url")


def _check_locked(settings: EffectSettings, properties: Sequence[Property]) -> None:
    known = {each.name: each for each in properties}
    for name in settings.locked:
        found = known.get(name)
        if found is None:
            raise InvalidInput(f"the workflow has no property {shown(name)}", field="locked")
        if found.is_primary_input:
            raise InvalidInput("what the effect is applied to can't be locked", field="locked")
        has_value = settings.overrides.get(name) is not None or found.default is not None
        if found.required and not has_value and found.type != "seed":
            raise InvalidInput(
                f"{shown(name)} is locked, and has no value: set it in overrides", field="locked"
            )


def _check_tags(settings: EffectSettings) -> None:
    if len(settings.tags) > TAGS_MAX:
        raise InvalidInput(f"at most {TAGS_MAX} tags", field="tags")
    for each in settings.tags:
        if not TAG.fullmatch(each):
            raise InvalidInput(
                f"a tag is 1 to 40 lower-case letters, digits, - and spaces, not {shown(each)}",
                field="tags",
            )


def _check_media_types(settings: EffectSettings, properties: Sequence[Property]) -> None:
    kind = primary_kind(properties)
    if settings.media_types and kind is None:
        raise InvalidInput(
            "media_types are named, and the workflow has no media property named input",
            field="media_types",
        )
    if len(settings.media_types) > MEDIA_TYPES_MAX:
        raise InvalidInput(f"at most {MEDIA_TYPES_MAX} media types", field="media_types")
    for each in settings.media_types:
        if not MEDIA_TYPE.fullmatch(each) or not each.startswith(f"{kind}/"):
            raise InvalidInput(f"{shown(each)} is no type of {kind}", field="media_types")


class RunTerms(NamedTuple):
    """What a worker is told about a run: from the job's workflow and effect."""

    run_limit_seconds: int
    keeps_metadata: bool  # false: its outputs lose their prompt and workflow
    output: OutputRule = "required"
    ai_mark: AiMark = "auto"


def underpriced(terms: FleetPrompts, slug: str, price_tokens: int) -> str | None:
    """Returns a warning if a prompt may cost less than a workflow; None if it can't."""
    per_second = terms.price_per_second
    least = terms.price_tokens if per_second is None else math.ceil(per_second)
    if least >= price_tokens:
        return None
    said = f"{least} tokens" if per_second is None else f"{per_second:g} tokens per second"
    return (
        f"Prompts cost {said}, less than the workflow {slug} ({price_tokens} tokens), which this "
        "fleet also runs. A prompt that contains the whole workflow costs the workflow's price, but "
        "a customer can insert a node into it and pay the lower price."
    )
