"""Registered workflows: what they are, what they take, and what a job of theirs needs."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias
from uuid import UUID

from comfyfleet.fleets.offers import ModelUse
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.texts import is_storable

PropertyType: TypeAlias = Literal[
    "text", "number", "integer", "boolean", "choice", "seed", "image", "video", "audio"
]
PROPERTY_TYPES: tuple[PropertyType, ...] = (
    "text", "number", "integer", "boolean", "choice", "seed", "image", "video", "audio",
)  # fmt: skip
MEDIA_TYPES = frozenset({"image", "video", "audio"})
PRIMARY_INPUT = "input"
SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
OPEN_PREFIX = "open-"
SEED_MAX = 2**64 - 1
RUN_LIMIT_SECONDS_MAX = 7 * 24 * 3600
PRICE_TOKENS_MAX = 2**31 - 1

Kind: TypeAlias = Literal["workflow", "prompt"]


@dataclass(frozen=True, slots=True)
class Property:
    """A named, typed input, bound to `node.input` or to a text that stands in the document."""

    name: str
    type: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    # None: a file is, and so is what would otherwise leave its placeholder in the prompt.
    required: bool | None = None
    description: str = ""

    @property
    def is_media(self) -> bool:
        return self.type in MEDIA_TYPES

    @property
    def is_primary_input(self) -> bool:
        return self.is_media and self.name == PRIMARY_INPUT

    @property
    def place(self) -> str:
        """For messages."""
        return f"binding {self.binding}" if self.binding else f"placeholder {self.placeholder!r}"


@dataclass(frozen=True, slots=True)
class Workflow:
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

    @property
    def subject(self) -> str:
        return f"workflow:{self.slug}"

    @property
    def is_offered(self) -> bool:
        """Whether customers may name it in graphs and pipelines."""
        return self.is_active and not self.is_open and self.price_tokens is not None


@dataclass(frozen=True, slots=True)
class Version:
    """Never changed once it is there: jobs name it."""

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
class Terms:
    """What is said of a workflow as a whole; None: as before, or the default."""

    required_capabilities: frozenset[str] | None = None
    run_limit_seconds: int | None = None
    price_tokens: int | None = None  # offers it to customers; 0: free on purpose
    is_withdrawn: bool | None = None  # True: it is offered no more


@dataclass(frozen=True, slots=True)
class Draft:
    """A version that was checked and is not yet registered."""

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

    @property
    def document_key(self) -> str:
        """Named by content, and so written before any number is known or row exists."""
        return f"central/workflows/{self.slug}/{self.document_hash}.json"


@dataclass(frozen=True, slots=True)
class AssetRef:
    """A file that the worker must hand to its backend, and where the name that it gets goes."""

    name: str
    file_id: UUID
    kind: PropertyType
    binding: str | None = None
    placeholder: str | None = None
    is_primary_input: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """All that a job keeps of its workflow: later versions don't touch it."""

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


def check_terms(terms: Terms) -> None:
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
