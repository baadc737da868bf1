"""Fleets and their workers: what they are, and the pure rules of who may run what."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from comfyfleet.fleets.offers import facts_hash
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.texts import is_storable
from comfyfleet.wire.messages import BackendFacts, Reading

# Together with "open-" and a dot they make the slug of the open workflow: at most 100 characters.
SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
STAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,29}")
WORKERS_MAX = 100_000
CAPABILITIES_MAX = 200
WORKER_ID_CHARACTERS_MAX = 200
AUTO, MANUAL = "auto", "manual"  # who joins is approved at once, or by an operator
FROM_FLEET = "fleet"  # the one registration source: workers can't be made by hand


class Lane(NamedTuple):
    """What the queue calls a lane; equal to its own as any tuple is."""

    workflow_id: int
    stage: str
    provider: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that can stand in for each other."""

    id: int
    slug: str
    stage: str
    secret_hash: str
    max_workers: int | None  # None: as many as the settings allow
    open_workflow_id: int | None
    object_info_key: str | None  # in the object store, as last reported
    object_info_hash: str | None
    created_at: datetime
    approval: str = AUTO

    @property
    def name(self) -> str:
        return f"{self.slug}/{self.stage}"

    @property
    def subject(self) -> str:
        return f"fleet:{self.name}"


@dataclass(frozen=True, slots=True)
class Worker:
    """One agent with its backend. What the backend has is read apart: it is large."""

    id: int
    worker_id: str
    fleet_id: int
    fleet_slug: str
    stage: str
    registration_source: str
    protocol_version: int
    capabilities: frozenset[str]
    providers: tuple[str, ...]
    max_concurrency: int
    current_load: int
    is_approved: bool
    is_draining: bool
    models_loaded: tuple[str, ...]
    last_seen_at: datetime
    created_at: datetime
    # The workflows that it serves of those of its fleet; None: all of them.
    workflow_ids: frozenset[int] | None = None
    revoked_at: datetime | None = None
    key_hash: str = field(default="", repr=False, compare=False)
    facts_hash: str | None = None  # of the node types and model files; None: not told
    refusals: Mapping[str, Any] | None = field(default=None, hash=False)
    next_key: str | None = field(default=None, repr=False, compare=False)  # to be told to it
    next_key_hash: str | None = field(default=None, repr=False, compare=False)

    @property
    def subject(self) -> str:
        return f"worker:{self.worker_id}"

    @property
    def fleet_name(self) -> str:
        return f"{self.fleet_slug}/{self.stage}"

    @property
    def affinities(self) -> frozenset[str]:
        """What a job can be bound to, and this worker fulfils."""
        return frozenset({self.subject, f"fleet:{self.fleet_name}"})

    @property
    def takes_jobs(self) -> bool:
        return self.is_approved and not self.is_draining


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker says of itself when it joins."""

    worker_id: str
    capabilities: frozenset[str] = frozenset()
    workflow_slugs: tuple[str, ...] | None = None
    providers: tuple[str, ...] = ("self_hosted",)
    max_concurrency: int = 1
    protocol_version: int = 1
    backend: BackendFacts | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a worker says of itself when it calls; None: not said this time."""

    load: int | None = None
    models_loaded: tuple[str, ...] | None = None
    capabilities: frozenset[str] | None = None
    providers: tuple[str, ...] | None = None
    max_concurrency: int | None = None
    reading: Reading | None = None
    backend: BackendFacts | None = None


@dataclass(frozen=True, slots=True)
class StoredReading:
    at: datetime
    reading: Reading


@dataclass(frozen=True, slots=True)
class Assigned:
    """A workflow that a fleet runs, with what decides who of the fleet may."""

    workflow_id: int
    slug: str
    required_capabilities: frozenset[str]
    is_active: bool
    is_paused: bool
    version: int = 1  # the one that new jobs get
    is_open: bool = False  # the fleet's own, for prompts of no registered workflow

    @property
    def is_runnable(self) -> bool:
        return self.is_active and not self.is_paused


class Standing(NamedTuple):
    """What decides whether a worker gets a job, besides its own row."""

    assigned: list[Assigned]  # to its fleet
    held: tuple[int, ...]  # dispatches that are leased to it
    in_maintenance: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """What changed when the workflows of a fleet were set."""

    workflow_ids: frozenset[int]
    added: frozenset[int] = field(default_factory=frozenset)
    removed: frozenset[int] = field(default_factory=frozenset)


def check_fleet_name(slug: str, stage: str) -> None:
    for value, pattern, name in ((slug, SLUG, "slug"), (stage, STAGE, "stage")):
        if not pattern.fullmatch(value):
            raise InvalidInput(
                f"the fleet's {name} must be lower-case letters, digits, - and _, not {value!r}",
                field=name,
            )


def own_id(fleet: Fleet, worker_id: str) -> str:
    """Of a worker whose id another fleet's worker has."""
    name = f"{fleet.slug}.{fleet.stage}:"
    return name + worker_id[: WORKER_ID_CHARACTERS_MAX - len(name)]


def fleet_in_id(worker_id: str) -> tuple[str, str] | None:
    """Slug and stage that such an id begins with; None: it has not that form."""
    name, colon, _ = worker_id.partition(":")
    slug, dot, stage = name.partition(".")
    return (slug, stage) if colon and dot else None


def check_approval(approval: str) -> None:
    if approval not in (AUTO, MANUAL):
        raise InvalidInput(
            f"a fleet's approval is {AUTO} or {MANUAL}, not {approval!r}", field="approval"
        )


def check_cap(max_workers: int | None) -> None:
    if max_workers is not None and not 0 <= max_workers <= WORKERS_MAX:
        raise InvalidInput(
            f"a fleet's cap must be 0 to {WORKERS_MAX:,} workers, not {max_workers}",
            field="max_workers",
        )


def check_capabilities(capabilities: Iterable[str]) -> None:
    named = list(capabilities)
    if len(named) > CAPABILITIES_MAX or not all(map(is_storable, named)):
        raise InvalidInput(
            f"a worker may name at most {CAPABILITIES_MAX} capabilities, as texts",
            field="capabilities",
        )


def after(worker: Worker, sighting: Sighting, now: datetime) -> Worker:
    """The worker as it is once it has been seen."""
    said = {
        "current_load": sighting.load,
        "models_loaded": sighting.models_loaded,
        "capabilities": sighting.capabilities,
        "providers": sighting.providers,
        "max_concurrency": sighting.max_concurrency,
    }
    changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    if sighting.backend is not None:
        changes |= {"facts_hash": facts_hash(sighting.backend), "refusals": None}
    return replace(worker, last_seen_at=max(now, worker.last_seen_at), **changes)
