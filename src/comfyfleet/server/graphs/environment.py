"""Reads the effects and workflows that graphs and pipelines can use, and caches the states of
backends."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.api.graph_model import GraphDefinition, WorkflowNode
from comfyfleet.errors import NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import RegisteredWorkflow
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import AssignedWorkflow, BackendOffer, FleetWorker
from comfyfleet.server.graphs.catalogue import (
    BackendState,
    GraphCatalogue,
    WorkflowFacts,
    WorkReference,
    catalogue_of,
    facts_of,
    facts_of_effect,
)
from comfyfleet.server.graphs.run import Environment
from comfyfleet.server.jobs.context import JobContext, online_since
from comfyfleet.server.jobs.submit import WorkflowCache
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import Tenant

OFFERS_MAX = 500


async def read_catalogue(tx: Tx, named: Iterable[WorkReference]) -> GraphCatalogue:
    """Reads the effects and workflows in `named`. Leaves out unknown names and names that aren't
    offered."""
    references = {
        (reference.effect, reference.workflow if reference.effect is None else "")
        for reference in named
    }
    facts: list[WorkflowFacts] = []
    for effect, workflow in sorted(references, key=str):
        facts += await (_of_workflow(tx, workflow) if effect is None else _of_effect(tx, effect))
    return catalogue_of(tuple(facts))


async def with_offered_names(tx: Tx, catalogue: GraphCatalogue) -> GraphCatalogue:
    """Adds the names of all offered effects and workflows, for suggestions in error messages."""
    return replace(
        catalogue,
        workflow_names=tuple(await catalog.offered_slugs(tx)),
        effect_names=tuple(await catalog.published_slugs(tx)),
    )


async def all_offered(tx: Tx) -> list[WorkflowFacts]:
    """Reads all offered effects and workflows, each in the default version for new jobs."""
    offered = [
        facts_of_effect(effect) for effect in await catalog.list_published(tx, limit=OFFERS_MAX)
    ]
    slugs = (await catalog.offered_slugs(tx))[:OFFERS_MAX]
    for slug in slugs:
        offered += [facts for facts in await _of_workflow(tx, slug) if facts.is_current]
    return offered


async def _of_workflow(tx: Tx, slug: str) -> list[WorkflowFacts]:
    try:
        workflow = await catalog.workflow_by_slug(tx, slug)
    except NotFound:
        return []
    return await versions_offered(tx, workflow) if workflow.is_offered else []


async def versions_offered(tx: Tx, workflow: RegisteredWorkflow) -> list[WorkflowFacts]:
    seconds = await dispatch.typical_seconds(tx, workflow.id)
    return [
        facts_of(workflow, version, typical_seconds=seconds)
        for version in await catalog.versions_of(tx, workflow)
    ]


async def _of_effect(tx: Tx, slug: str) -> list[WorkflowFacts]:
    offer = await catalog.find_published(tx, slug)
    if offer is None:
        return []
    seconds = await dispatch.typical_seconds(tx, offer.workflow.id)
    return [facts_of_effect(offer, typical_seconds=seconds)]


# The provider for jobs of graphs. Only an effect can select a cloud provider.
PROVIDER = "self_hosted"
MEMORY_READING_TTL = timedelta(minutes=5)
BACKENDS_TTL = timedelta(seconds=1)


async def read_graph_catalogue(
    tx: Tx, graph: GraphDefinition, context: JobContext
) -> GraphCatalogue:
    """Reads the part of the catalog that the graph refers to, and the backends."""
    nodes = [node for node in graph.nodes.values() if isinstance(node, WorkflowNode)]
    catalogue = await with_offered_names(tx, await read_catalogue(tx, nodes))
    return replace(catalogue, backends=await read_backends(tx, context))


async def read_backends(
    tx: Tx, context: JobContext, *, seen_since: datetime | None = None
) -> tuple[BackendState, ...]:
    """Reads all registered self-hosted workers, including offline ones."""
    now = context.clock()
    if seen_since is None:
        seen_since = now - timedelta(seconds=context.settings.offline_after_seconds)
    assigned = await fleets.assignments(tx)
    depths = await dispatch.count_bound(tx)
    workers = await fleets.workers_of(tx)
    offers = await context.caches.eligibility.offers(tx, workers, now=now)
    return tuple(
        [
            _state(
                worker,
                await context.caches.eligibility.able(
                    tx, offers.get(worker.worker_id), assigned.get(worker.fleet_id, [])
                ),
                depths,
                await _free_memory(tx, worker, now),
                seen_since,
                offers.get(worker.worker_id),
            )
            for worker in workers
            if PROVIDER in worker.providers
        ]
    )


async def _free_memory(tx: Tx, worker: FleetWorker, now: datetime) -> int:
    recent = await fleets.readings(tx, worker.worker_id, since=now - MEMORY_READING_TTL, limit=1)
    if not recent:
        return 0
    reading = recent[0].reading
    return (reading.gpu_memory_total_bytes or 0) - (reading.gpu_memory_used_bytes or 0)


def _state(
    worker: FleetWorker,
    able: Iterable[AssignedWorkflow],
    depths: Mapping[str, int],
    free_memory: int,
    seen_since: datetime,
    offer: BackendOffer | None,
) -> BackendState:
    """Builds a backend's state. Its workflows include paused ones, because their jobs will run
    after the pause."""
    return BackendState(
        worker.worker_id,
        fleet=worker.fleet_name,
        is_online=worker.takes_jobs and worker.last_seen_at >= seen_since,
        workflows=frozenset(
            workflow.slug
            for workflow in able
            if workflow.is_active
            and (worker.workflow_ids is None or workflow.workflow_id in worker.workflow_ids)
            and workflow.required_capabilities <= worker.capabilities
        ),
        capabilities=worker.capabilities,
        queue_depth=depths.get(worker.subject, 0),
        free_gpu_memory_bytes=max(0, free_memory),
        offer=offer,
    )


class EnvironmentCache:
    """Caches the backends for a second, because each step of each run needs them."""

    def __init__(self) -> None:
        self._backends: tuple[BackendState, ...] = ()
        self._at: datetime | None = None
        self._began: datetime | None = None
        self._tenants: dict[UUID, Tenant] = {}
        self._lookup: WorkflowCache | None = None
        self._starts_within: Mapping[str, int] = {}
        self._lately_online: dict[Hashable, tuple[BackendState, datetime]] = {}

    def lookup(self, context: JobContext) -> WorkflowCache:
        """Returns the cache of workflows. It is cleared whenever the backends are read."""
        self._lookup = self._lookup or WorkflowCache(context)
        return self._lookup

    async def now(
        self, context: JobContext, tenant_id: UUID, *, fresh: bool = False
    ) -> Environment:
        now = context.clock()
        if fresh or self._at is None or now - self._at > BACKENDS_TTL:
            self._began = self._began or now
            async with context.central.read() as tx:
                seen_since = await online_since(tx, now, context.settings)
                self._backends = await read_backends(tx, context, seen_since=seen_since)
                self._starts_within = await fleets.starts_within(tx)
                # A tenant's priority range may change, so tenants are cached only as long as
                # backends.
                self._tenants.clear()
                self._lookup = None
            self._at = now
            longest = max([context.settings.no_backend_seconds, *self._starts_within.values()])
            self._note_online(now, timedelta(seconds=longest))
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            async with context.central.read() as tx:
                tenant = await tenants.get_tenant(tx, tenant_id)
            self._tenants[tenant_id] = tenant
        return Environment(
            now,
            self._backends,
            in_queue_max=context.settings.max_queued_per_graph_run,
            priority_min=tenant.min_priority,
            priority_max=tenant.max_priority,
            lately_online=tuple(self._lately_online.values()),
            watched_since=self._began,
            no_backend_seconds=context.settings.no_backend_seconds,
            executions_max=context.settings.max_executions_per_graph_run,
            starts_within=self._starts_within,
        )

    def _note_online(self, now: datetime, retention: timedelta) -> None:
        """Records when each kind of backend was last online. Deletes times that are older than the
        retention period."""
        for backend in self._backends:
            if backend.is_online:
                offered = backend.offer.key if backend.offer else None
                self._lately_online[backend.workflows, offered] = backend, now
        self._lately_online = {
            what: seen for what, seen in self._lately_online.items() if now - seen[1] <= retention
        }
