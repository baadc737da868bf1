"""What a graph is judged against: the registered workflows, and the workers that could run them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from comfyfleet.effects.model import Property, Version, Workflow


@dataclass(frozen=True, slots=True)
class WorkflowFacts:
    """One version of a registered workflow."""

    slug: str
    version: int
    properties: tuple[Property, ...] = ()
    price_tokens: int = 0
    typical_seconds: float | None = None
    required_capabilities: frozenset[str] = frozenset()
    is_current: bool = True  # the version that new jobs get, if none is named

    def property_named(self, name: str) -> Property | None:
        return next((each for each in self.properties if each.name == name), None)


@dataclass(frozen=True, slots=True)
class BackendState:
    """A worker, as it is at this moment."""

    worker_id: str
    fleet: str = ""  # SLUG/STAGE
    is_online: bool = True
    workflows: frozenset[str] = frozenset()  # slugs that it may run and is able to run
    capabilities: frozenset[str] = frozenset()
    queue_depth: int = 0
    free_gpu_memory_bytes: int = 0

    @property
    def name(self) -> str:
        return f"worker:{self.worker_id}"

    def is_meant_by(self, affinity: str) -> bool:
        return affinity in (self.name, f"fleet:{self.fleet}")


@dataclass(frozen=True, slots=True)
class Catalogue:
    workflows: Mapping[str, tuple[WorkflowFacts, ...]] = field(default_factory=dict)
    backends: tuple[BackendState, ...] = ()

    def find(self, slug: str, version: int | None) -> WorkflowFacts | None:
        """None for the version: the one that new jobs get."""
        versions = self.workflows.get(slug, ())
        if version is None:
            return max(versions, key=lambda each: (each.is_current, each.version), default=None)
        return next((each for each in versions if each.version == version), None)


def catalogue_of(
    workflows: tuple[WorkflowFacts, ...], backends: tuple[BackendState, ...] = ()
) -> Catalogue:
    by_slug: dict[str, tuple[WorkflowFacts, ...]] = {}
    for each in workflows:
        by_slug[each.slug] = (*by_slug.get(each.slug, ()), each)
    return Catalogue(by_slug, backends)


def facts_of(
    workflow: Workflow, version: Version, *, typical_seconds: float | None = None
) -> WorkflowFacts:
    return WorkflowFacts(
        workflow.slug,
        version.version,
        version.properties,
        workflow.price_tokens,
        typical_seconds,
        workflow.required_capabilities,
        is_current=version.version == workflow.version,
    )
