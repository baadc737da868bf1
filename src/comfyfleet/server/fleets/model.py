"""Defines fleets, workers, backend offers and workflow requirements, and the rules for which
workers may run which lanes. All functions are pure."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from comfyfleet.api.admin import FleetPrompts
from comfyfleet.api.values import is_storable
from comfyfleet.api.worker import BackendFacts, Reading
from comfyfleet.errors import InvalidInput

# Descriptions of the backend problems that workers report.
BACKEND_PROBLEMS: Mapping[str, str] = {
    "down": "its ComfyUI doesn't answer",
    "hung": "its ComfyUI is stuck",
    "poisoned": "its GPU is in an error state that only a restart of ComfyUI clears",
    "closed": "its backend refuses the account",
    "disk_full": "its disk is full",
}
REFUSED_NAMES_MAX = 1_000
# Time after which a refusal expires, because an operator may have installed the missing parts.
REFUSALS_KEPT = timedelta(minutes=15)


class ModelUse(NamedTuple):
    """A model file that a prompt uses. `input` has the form `Class.input`, or is empty if
    unknown."""

    input: str
    file: str


@dataclass(frozen=True, slots=True)
class MissingRequirements:
    """The node types and models that a backend lacks."""

    node_types: tuple[str, ...] = ()
    models: tuple[ModelUse, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.models)

    def in_words(self) -> str:
        parts = [f"node {name}" for name in self.node_types]
        return ", ".join([*parts, *(f"model {use.file}" for use in self.models)])


@dataclass(frozen=True, slots=True)
class WorkflowRequirements:
    """The node types and models that a workflow version or a job requires."""

    node_types: tuple[str, ...] = ()
    models: tuple[ModelUse, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusals:
    """Node types and models that a backend has refused, although it lists them or has no list."""

    node_types: frozenset[str] = frozenset()
    models: frozenset[ModelUse] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.models)


@dataclass(frozen=True, slots=True)
class BackendOffer:
    """The node types and model files that a backend provides. Offers with the same key are
    equal."""

    key: str
    node_types: frozenset[str] = frozenset()
    model_files: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    refusals: Refusals = field(default_factory=Refusals)

    def lacks(self, node_types: Iterable[str], models: Iterable[ModelUse]) -> MissingRequirements:
        """Returns the required node types and models that the backend lacks. If the backend has
        reported no list for them, only refused ones count as missing."""
        return MissingRequirements(
            tuple(name for name in node_types if self._lacks_type(name)),
            tuple(use for use in models if self._lacks_model(use)),
        )

    def lacks_choice(self, choice: ModelUse) -> bool:
        """Checks whether the backend lacks a file for an input whose node class is unknown."""

        def is_same_input(name: str) -> bool:
            return name.rpartition(".")[2] == choice.input

        lists = [files for name, files in self.model_files.items() if is_same_input(name)]
        is_unlisted = bool(lists) and not any(choice.file in files for files in lists)
        refused = (use for use in self.refusals.models if is_same_input(use.input))
        return is_unlisted or any(use.file == choice.file for use in refused)

    def _lacks_type(self, name: str) -> bool:
        is_unlisted = bool(self.node_types) and name not in self.node_types
        return is_unlisted or name in self.refusals.node_types

    def _lacks_model(self, use: ModelUse) -> bool:
        offered = self.model_files.get(use.input)
        is_unlisted = offered is not None and use.file not in offered
        return is_unlisted or use in self.refusals.models


NO_REFUSALS = Refusals()


def backend_offer(
    facts: BackendFacts | None, refusals: Refusals = NO_REFUSALS, key: str = ""
) -> BackendOffer:
    if facts is None:
        return BackendOffer(key, refusals=refusals)
    files = {name: frozenset(offered) for name, offered in facts.model_files.items()}
    return BackendOffer(key, frozenset(facts.node_types), files, refusals)


def facts_hash(facts: BackendFacts) -> str:
    """Returns a hash of a backend's node types and models. Versions and uploaded files don't affect
    it."""
    files = {name: sorted(offered) for name, offered in facts.model_files.items()}
    content = json.dumps([sorted(facts.node_types), files], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def refusals_in(kept: Mapping[str, Any] | None, now: datetime) -> Refusals:
    """Reads the refusals in a worker's row. Ignores expired ones."""
    if not kept or datetime.fromisoformat(kept["at"]) + REFUSALS_KEPT <= now:
        return Refusals()
    models = frozenset(ModelUse(*use) for use in kept["models"])
    return Refusals(frozenset(kept["node_types"]), models)


def with_refusal(
    kept: Mapping[str, Any] | None, missing: MissingRequirements, now: datetime
) -> dict[str, Any]:
    """Adds a refusal to the stored ones and returns the new value for the worker's row."""
    before = refusals_in(kept, now)
    models = sorted({*before.models, *missing.models})[:REFUSED_NAMES_MAX]
    return {
        "at": now.isoformat(),
        "node_types": sorted({*before.node_types, *missing.node_types})[:REFUSED_NAMES_MAX],
        "models": [list(use) for use in models],
    }


def requirements_of(
    node_types: Iterable[str],
    models: Iterable[Iterable[str]],
    properties: Iterable[Mapping[str, Any]],
) -> WorkflowRequirements:
    """Returns the requirements that all jobs of a workflow version share. Models that a job may
    choose are left out, because they are checked for each job."""
    declared = list(properties)
    bound = {str(prop["binding"]).rpartition(".")[2] for prop in declared if prop.get("binding")}
    filled = [str(prop.get("default")) for prop in declared if prop.get("placeholder")]
    fixed = (
        use
        for use in (ModelUse(*model) for model in models)
        if use.input.partition(".")[2] not in bound
        and not any(text in use.file for text in filled if text)
    )
    return WorkflowRequirements(tuple(node_types), tuple(fixed))


# Patterns of a fleet's slug and stage. Together with "open-" and a dot, they form the slug of the
# fleet's open workflow, which is limited to 100 characters.
SLUG = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
STAGE = re.compile(r"[a-z0-9][a-z0-9_-]{0,29}")
WORKERS_MAX = 100_000
CAPABILITIES_MAX = 200
WORKER_ID_CHARACTERS_MAX = 200
# New workers are approved automatically or by an operator.
AUTO, MANUAL = "auto", "manual"
FROM_FLEET = "fleet"  # the only supported registration source


class FleetLane(NamedTuple):
    """A lane of the queue. It is a tuple, so it compares equal to the queue's own lane type, which
    this package can't import."""

    workflow_id: int
    stage: str
    provider: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """A group of workers that run the same workflows."""

    id: int
    slug: str
    stage: str
    secret_hash: str
    max_workers: int | None  # None means that the settings' default cap applies
    open_workflow_id: int | None
    object_info_key: str | None  # the object store's key of the object_info that was reported last
    object_info_hash: str | None
    created_at: datetime
    approval: str = AUTO
    gateway: Mapping[str, Any] | None = None  # price, node types and limits for open prompts
    starts_within_seconds: int | None = None  # startup time of machines that start on demand

    @property
    def name(self) -> str:
        return f"{self.slug}/{self.stage}"

    @property
    def prompts(self) -> FleetPrompts | None:
        """The fleet's terms for prompts of ComfyUI clients, or None if it runs no such prompts."""
        terms = None if self.gateway is None else FleetPrompts.model_validate(self.gateway)
        return terms if terms is not None and terms.is_open else None

    @property
    def is_in_order(self) -> bool:
        """Whether each client sees its prompts run one after another, including prompts that run as
        registered workflows."""
        return FleetPrompts.model_validate(self.gateway or {}).in_order

    @property
    def subject(self) -> str:
        return f"fleet:{self.name}"


def affinity_of(worker_id: str) -> str:
    """Returns the affinity of jobs that only this worker can run."""
    return f"worker:{worker_id}"


@dataclass(frozen=True, slots=True)
class FleetWorker:
    """A worker and its backend. The backend's facts are read separately, because they are large."""

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
    # The workflows of its fleet that the worker serves. None means all of them.
    workflow_ids: frozenset[int] | None = None
    revoked_at: datetime | None = None
    key_hash: str = field(default="", repr=False, compare=False)
    facts_hash: str | None = None  # hash of node types and model files, or None if not reported
    refusals: Mapping[str, Any] | None = field(default=None, hash=False)
    # The worker's next key, which is sent to the worker until it uses it.
    next_key: str | None = field(default=None, repr=False, compare=False)
    next_key_hash: str | None = field(default=None, repr=False, compare=False)
    # The reason why its backend can't run jobs, as reported by the worker. None means no problem.
    backend_problem: str | None = None

    @property
    def subject(self) -> str:
        return affinity_of(self.worker_id)

    @property
    def fleet_name(self) -> str:
        return f"{self.fleet_slug}/{self.stage}"

    @property
    def affinities(self) -> frozenset[str]:
        """The affinities whose jobs this worker may run."""
        return frozenset({self.subject, f"fleet:{self.fleet_name}"})

    @property
    def problem(self) -> str | None:
        """The description of the backend's problem, or None if none was reported."""
        if self.backend_problem is None:
            return None
        return BACKEND_PROBLEMS.get(self.backend_problem, self.backend_problem)

    @property
    def takes_jobs(self) -> bool:
        return self.is_approved and not self.is_draining and self.backend_problem is None

    def state_at(self, now: datetime, *, offline_after_seconds: int) -> str:
        """Returns online, faulty, offline, draining, pending or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        if not self.is_approved:
            return "pending"
        if now - self.last_seen_at > timedelta(seconds=offline_after_seconds):
            return "offline"
        if self.backend_problem is not None:
            return "faulty"
        return "draining" if self.is_draining else "online"

    def load_with(self, leases: int) -> int:
        """Returns the worker's load if it holds this many leases. The result is at most
        `max_concurrency`. `current_load` may be outdated, because it was set by the last poll."""
        return min(leases, self.max_concurrency)

    def silent_since(self, now: datetime, *, unseen_seconds_max: float) -> datetime | None:
        """Returns when the worker was last seen, or None if its next report isn't overdue yet. An
        overdue worker counts as offline only after some more time.
        """
        is_missed = now - self.last_seen_at > 2 * sighting_interval(unseen_seconds_max)
        return self.last_seen_at if is_missed else None


@dataclass(frozen=True, slots=True)
class WorkerRegistration:
    """The data that a worker sends when it registers."""

    worker_id: str
    capabilities: frozenset[str] = frozenset()
    workflow_slugs: tuple[str, ...] | None = None
    providers: tuple[str, ...] = ("self_hosted",)
    max_concurrency: int = 1
    protocol_version: int = 1
    backend: BackendFacts | None = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """The data that a worker reports when it polls or sends a heartbeat. None means that a field
    was not reported."""

    load: int | None = None
    models_loaded: tuple[str, ...] | None = None
    capabilities: frozenset[str] | None = None
    providers: tuple[str, ...] | None = None
    max_concurrency: int | None = None
    reading: Reading | None = None
    backend: BackendFacts | None = None
    backend_problem: str | None = None  # an empty string means no problem


@dataclass(frozen=True, slots=True)
class StoredReading:
    at: datetime
    reading: Reading


@dataclass(frozen=True, slots=True)
class AssignedWorkflow:
    """A workflow that is assigned to a fleet, with its requirements for workers."""

    workflow_id: int
    slug: str
    required_capabilities: frozenset[str]
    is_active: bool
    is_paused: bool
    version: int = 1  # the version that new jobs use
    is_open: bool = False  # whether it is the fleet's open workflow

    @property
    def is_runnable(self) -> bool:
        return self.is_active and not self.is_paused


class BackendSummary(NamedTuple):
    """The fields of a worker's backend that are shown in lists."""

    kind: str | None
    version: str | None
    gpu: str | None
    gpu_memory_bytes: int | None


class BackendKind(NamedTuple):
    """The workers of a fleet whose backends report the same object_info."""

    fleet_id: int
    object_info_hash: str
    first_worker: int  # row id of one of the workers
    workers: int
    last_seen_at: datetime


class WorkerStanding(NamedTuple):
    """The facts outside a worker's row that decide whether the worker gets a job."""

    assigned: list[AssignedWorkflow]  # workflows of the worker's fleet
    held: tuple[int, ...]  # dispatches that are leased to the worker
    in_maintenance: bool


@dataclass(frozen=True, slots=True)
class FleetAssignment:
    """The workflows of a fleet after a change, and the workflows that the change added and
    removed."""

    workflow_ids: frozenset[int]
    added: frozenset[int] = field(default_factory=frozenset)
    removed: frozenset[int] = field(default_factory=frozenset)


def check_fleet_name(slug: str, stage: str) -> None:
    for value, pattern, name in ((slug, SLUG, "slug"), (stage, STAGE, "stage")):
        if not pattern.fullmatch(value):
            raise InvalidInput(
                f"a {name} may only contain lower-case letters, digits, - and _, not {value!r}",
                field=name,
            )


def prefixed_worker_id(fleet: Fleet, worker_id: str) -> str:
    """Prefixes a worker's id with the name of its fleet, because a worker of another fleet has the
    same id."""
    name = f"{fleet.slug}.{fleet.stage}:"
    return name + worker_id[: WORKER_ID_CHARACTERS_MAX - len(name)]


def fleet_prefix_of(worker_id: str) -> tuple[str, str] | None:
    """Returns the fleet's slug and stage from a worker id's prefix, or None if the id has no
    prefix."""
    name, colon, _ = worker_id.partition(":")
    slug, dot, stage = name.partition(".")
    return (slug, stage) if colon and dot else None


def check_approval(approval: str) -> None:
    if approval not in (AUTO, MANUAL):
        raise InvalidInput(
            f"a fleet's approval must be {AUTO} or {MANUAL}, not {approval!r}", field="approval"
        )


STARTS_WITHIN_SECONDS_MAX = 24 * 3600


def check_starts_within(seconds: int | None) -> None:
    if seconds is not None and not 1 <= seconds <= STARTS_WITHIN_SECONDS_MAX:
        raise InvalidInput(
            f"starts_within_seconds must be from 1 to {STARTS_WITHIN_SECONDS_MAX:,}, not {seconds}",
            field="starts_within_seconds",
        )


def check_cap(max_workers: int | None) -> None:
    if max_workers is not None and not 0 <= max_workers <= WORKERS_MAX:
        raise InvalidInput(
            f"max_workers must be from 0 to {WORKERS_MAX:,}, not {max_workers}",
            field="max_workers",
        )


def check_capabilities(capabilities: Iterable[str]) -> None:
    named = list(capabilities)
    if len(named) > CAPABILITIES_MAX or not all(map(is_storable, named)):
        raise InvalidInput(
            f"a worker may have at most {CAPABILITIES_MAX} capabilities, which must be strings",
            field="capabilities",
        )


def apply_sighting(worker: FleetWorker, sighting: Sighting, now: datetime) -> FleetWorker:
    """Returns the worker, updated with the data that it has reported."""
    reported = {
        "current_load": sighting.load,
        "models_loaded": sighting.models_loaded,
        "capabilities": sighting.capabilities,
        "providers": sighting.providers,
        "max_concurrency": sighting.max_concurrency,
    }
    changes: dict[str, Any] = {name: value for name, value in reported.items() if value is not None}
    if sighting.backend is not None:
        changes |= {"facts_hash": facts_hash(sighting.backend), "refusals": None}
    if sighting.backend_problem is not None:
        changes |= {"backend_problem": sighting.backend_problem or None}
    return replace(worker, last_seen_at=max(now, worker.last_seen_at), **changes)


# Minimum intervals between writes of a worker's sightings and of its readings.
SEEN_WRITE_EVERY = timedelta(seconds=10)
READING_EVERY = timedelta(seconds=30)


def may_run(worker: FleetWorker, workflow: AssignedWorkflow) -> bool:
    """Whether a worker may run a workflow of its fleet. Draining, unapproved and revoked workers
    may not run any workflow."""
    return (
        worker.takes_jobs
        and workflow.is_runnable
        and (worker.workflow_ids is None or workflow.workflow_id in worker.workflow_ids)
        and workflow.required_capabilities <= worker.capabilities
    )


def lanes(
    worker: FleetWorker, workflows: Iterable[AssignedWorkflow], providers: Iterable[str]
) -> frozenset[FleetLane]:
    """Returns the lanes from which a worker may get jobs. Only assigned workflows have lanes."""
    named = tuple(providers)
    return frozenset(
        FleetLane(workflow.workflow_id, worker.stage, provider)
        for workflow in workflows
        if may_run(worker, workflow)
        for provider in named
    )


def why_no_lanes(worker: FleetWorker, workflows: Iterable[AssignedWorkflow]) -> str:
    """Returns the first reason why a worker gets no jobs. The reasons are checked in the order in
    which an operator would check them."""
    mine = [
        workflow
        for workflow in workflows
        if worker.workflow_ids is None or workflow.workflow_id in worker.workflow_ids
    ]
    if not worker.is_approved:
        return "this worker waits for an operator's approval"
    if worker.is_draining:
        return "this worker is draining"
    if worker.problem is not None:
        return f"this worker reports that {worker.problem}"
    if not mine:
        return "no workflow is assigned to this worker"
    if not any(workflow.is_runnable for workflow in mine):
        return "all workflows assigned to this worker are paused or inactive"
    return "this worker doesn't meet the requirements of its workflows"


def workers_by_lane(
    workers: Iterable[FleetWorker], assigned: Mapping[int, Iterable[AssignedWorkflow]]
) -> dict[FleetLane, frozenset[str]]:
    """Returns the workers of each lane. `assigned` contains the workflows by fleet id."""
    ids_by_lane: dict[FleetLane, set[str]] = {}
    for worker in workers:
        for lane in lanes(worker, assigned.get(worker.fleet_id, ()), worker.providers):
            ids_by_lane.setdefault(lane, set()).add(worker.worker_id)
    return {lane: frozenset(ids) for lane, ids in ids_by_lane.items()}


def sighting_interval(unseen_seconds_max: float) -> timedelta:
    """Returns the maximum delay before a waiting worker is marked as seen. The same maximum applies
    to writing a sighting. The sum of both delays stays below the limit after which a worker counts
    as offline."""
    return timedelta(seconds=unseen_seconds_max / 3)


def is_worth_writing(
    worker: FleetWorker, sighting: Sighting, now: datetime, every: timedelta = SEEN_WRITE_EVERY
) -> bool:
    """Checks whether a report must be written now. Load and models change often, so changes of only
    these values wait until the next write is due."""
    is_due = now - worker.last_seen_at >= min(every, SEEN_WRITE_EVERY)
    if sighting.backend is not None or is_due:
        return True
    seen = apply_sighting(worker, sighting, now)
    return _eligibility(seen) != _eligibility(worker)


def _eligibility(worker: FleetWorker) -> tuple[object, ...]:
    """Returns the reported values that decide which jobs a worker may get."""
    return (
        worker.capabilities,
        worker.providers,
        worker.max_concurrency,
        worker.backend_problem,
    )
