"""The catalog for validating a graph: available effects and workflows, and workers that can run
them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from comfyfleet.server.catalog.model import (
    Property,
    RegisteredWorkflow,
    ResolvedEffect,
    WorkflowVersion,
    models_chosen,
)
from comfyfleet.server.fleets.model import BackendOffer, ModelUse

NAMES_TOLD_MAX = 5
CLOSENESS = 0.4  # Minimum similarity of suggested names, from 0 to 1, as calculated by difflib.


class WorkReference(Protocol):
    """A node's or step's reference to an effect. Without an effect, it refers to a workflow."""

    @property
    def workflow(self) -> str: ...
    @property
    def effect(self) -> str | None: ...
    @property
    def version(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class EffectTerms:
    """The settings that a job inherits from its effect."""

    id: UUID
    slug: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    locked: tuple[str, ...] = ()
    stage: str = "production"
    provider: str = "self_hosted"
    # The accepted media types of the input. Empty means all types of its kind.
    media_types: tuple[str, ...] = ()
    max_upload_bytes: int | None = None

    @property
    def request_fields(self) -> dict[str, Any]:
        """The fields that the effect sets in a job request."""
        names = ("overrides", "locked", "stage", "provider", "media_types", "max_upload_bytes")
        return {"effect_id": self.id, **{name: getattr(self, name) for name in names}}


class BackendNeed(NamedTuple):
    """A job's requirements for a backend: its workflow and the models that it selects."""

    slug: str
    choices: tuple[ModelUse, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkflowFacts:
    """The facts about one version of a registered workflow, or about an effect."""

    slug: str
    version: int
    properties: tuple[Property, ...] = ()
    price_tokens: int = 0
    typical_seconds: float | None = None
    required_capabilities: frozenset[str] = frozenset()
    is_current: bool = True  # True for the version that new jobs use by default.
    effect: EffectTerms | None = None  # None means that this is a workflow, not an effect.
    locked_choices: tuple[ModelUse, ...] = ()  # Models in properties that the effect locks.

    @property
    def name(self) -> str:
        """The name that customers use."""
        return self.effect.slug if self.effect else self.slug

    def property_named(self, name: str) -> Property | None:
        return next((prop for prop in self.properties if prop.name == name), None)

    def need_for(self, values: Mapping[str, Any]) -> BackendNeed:
        """Returns the backend requirements of a job with these property values."""
        return BackendNeed(
            self.slug, (*self.locked_choices, *models_chosen(self.properties, values))
        )


@dataclass(frozen=True, slots=True)
class BackendState:
    """The current state of a worker."""

    worker_id: str
    fleet: str = ""  # The fleet's name in the form SLUG/STAGE.
    is_online: bool = True
    # The slugs of the workflows that the worker is allowed and able to run.
    workflows: frozenset[str] = frozenset()
    capabilities: frozenset[str] = frozenset()
    queue_depth: int = 0
    free_gpu_memory_bytes: int = 0
    offer: BackendOffer | None = None  # None means that the worker's models are unknown.

    def is_able(self, need: BackendNeed) -> bool:
        """Checks whether the backend meets the requirements, regardless of whether it is online."""
        if need.slug not in self.workflows:
            return False
        return self.offer is None or not any(map(self.offer.lacks_choice, need.choices))

    @property
    def name(self) -> str:
        return f"worker:{self.worker_id}"

    def is_target_of(self, affinity: str) -> bool:
        return affinity in (self.name, f"fleet:{self.fleet}")


@dataclass(frozen=True, slots=True)
class GraphCatalogue:
    workflows: Mapping[str, tuple[WorkflowFacts, ...]] = field(default_factory=dict)
    backends: tuple[BackendState, ...] = ()
    effects: Mapping[str, WorkflowFacts] = field(default_factory=dict)
    # All available names, for suggestions in error messages.
    workflow_names: tuple[str, ...] = ()
    effect_names: tuple[str, ...] = ()

    def facts_for(self, named: WorkReference) -> WorkflowFacts | None:
        if named.effect is not None:
            return self.effects.get(named.effect)
        return self.find(named.workflow, named.version)

    def why_unknown(self, named: WorkReference) -> str:
        """Returns the error message for an unknown name. The message is the same whether the name
        doesn't exist or isn't offered, so that names can't be guessed."""
        if named.effect is not None:
            return _unknown("effect", named.effect, self.effect_names)
        versions = sorted(facts.version for facts in self.workflows.get(named.workflow, ()))
        if versions:
            known = ", ".join(map(str, versions))
            return (
                f"workflow {named.workflow!r} has no version {named.version}; "
                f"available versions: {known}"
            )
        return _unknown("workflow", named.workflow, self.workflow_names)

    def find(self, slug: str, version: int | None) -> WorkflowFacts | None:
        """Finds a version of a workflow. None stands for the version that new jobs use."""
        versions = self.workflows.get(slug, ())
        if version is None:
            return max(versions, key=lambda facts: (facts.is_current, facts.version), default=None)
        return next((facts for facts in versions if facts.version == version), None)


def _unknown(kind: str, name: str, offered: Iterable[str]) -> str:
    names = list(offered)
    message = f"{kind} {name!r} isn't available"
    close = get_close_matches(name, names, n=NAMES_TOLD_MAX, cutoff=CLOSENESS)
    shown = close or names[:NAMES_TOLD_MAX]
    if not shown:
        return f"{message}; no {kind} is offered"
    more = ", …" if len(names) > len(shown) else ""
    return f"{message}; use one of {', '.join(shown)}{more}"


def catalogue_of(
    workflows: tuple[WorkflowFacts, ...], backends: tuple[BackendState, ...] = ()
) -> GraphCatalogue:
    """Builds a catalog. Entries with an effect become effects, and the others workflows."""
    by_slug: dict[str, tuple[WorkflowFacts, ...]] = {}
    effects: dict[str, WorkflowFacts] = {}
    for facts in workflows:
        if facts.effect:
            effects[facts.effect.slug] = facts
        else:
            by_slug[facts.slug] = (*by_slug.get(facts.slug, ()), facts)
    return GraphCatalogue(
        by_slug, backends, effects, tuple(sorted(by_slug)), tuple(sorted(effects))
    )


def facts_of(
    workflow: RegisteredWorkflow, version: WorkflowVersion, *, typical_seconds: float | None = None
) -> WorkflowFacts:
    return WorkflowFacts(
        workflow.slug,
        version.version,
        version.properties,
        workflow.price_tokens or 0,
        typical_seconds,
        workflow.required_capabilities,
        is_current=version.version == workflow.version,
    )


def facts_of_effect(
    offer: ResolvedEffect, *, typical_seconds: float | None = None
) -> WorkflowFacts:
    settings = offer.effect.settings
    return WorkflowFacts(
        offer.workflow.slug,
        offer.version.version,
        offer.properties,
        settings.price_tokens,
        offer.effect.typical_seconds or typical_seconds,
        offer.workflow.required_capabilities,
        effect=EffectTerms(
            offer.effect.id,
            offer.effect.slug,
            settings.overrides,
            settings.locked,
            settings.stage,
            settings.provider,
            settings.media_types,
            settings.max_upload_bytes,
        ),
        locked_choices=models_chosen(
            [prop for prop in offer.version.properties if prop.name in settings.locked],
            settings.overrides,
        ),
    )
