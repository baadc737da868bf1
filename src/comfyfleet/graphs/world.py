"""What the graphs of a tenant are judged against just now: workflows, and workers that could run them."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Assigned, Worker
from comfyfleet.fleets.offers import Offer
from comfyfleet.graphs.catalogue import BackendState, Catalogue
from comfyfleet.graphs.events import Surroundings
from comfyfleet.graphs.model import Graph, WorkflowNode
from comfyfleet.graphs.offers import offered, with_names
from comfyfleet.jobs.ordering import Lookup
from comfyfleet.jobs.sides import Sides
from comfyfleet.tenants import service as tenants
from comfyfleet.tenants.model import Tenant

# Jobs of graphs go to workers that we have; a cloud is asked for by effects only.
PROVIDER = "self_hosted"
READING_FRESH = timedelta(minutes=5)
FRESH = timedelta(seconds=1)


async def catalogue_for(tx: Tx, graph: Graph, sides: Sides) -> Catalogue:
    """As much of it as the graph asks for."""
    nodes = [each for each in graph.nodes.values() if isinstance(each, WorkflowNode)]
    found = await with_names(tx, await offered(tx, nodes))
    return replace(found, backends=await backends(tx, sides))


async def backends(
    tx: Tx, sides: Sides, *, seen_since: datetime | None = None
) -> tuple[BackendState, ...]:
    """Every worker that is registered, those that are offline among them."""
    now = sides.clock()
    if seen_since is None:
        seen_since = now - timedelta(seconds=sides.settings.offline_after_seconds)
    assigned = await fleets.assignments(tx)
    depths = await dispatch.bound(tx)
    workers = await fleets.workers_of(tx)
    offers = await sides.abilities.offers(tx, workers, now=now)
    return tuple(
        [
            _state(
                worker,
                await sides.abilities.able(
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


async def _free_memory(tx: Tx, worker: Worker, now: datetime) -> int:
    found = await fleets.readings(tx, worker.worker_id, since=now - READING_FRESH, limit=1)
    if not found:
        return 0
    reading = found[0].reading
    return (reading.gpu_memory_total_bytes or 0) - (reading.gpu_memory_used_bytes or 0)


def _state(
    worker: Worker,
    able: Iterable[Assigned],
    depths: Mapping[str, int],
    free_memory: int,
    seen_since: datetime,
    offer: Offer | None,
) -> BackendState:
    """`able`: what its backend can run. One that is paused counts: its jobs will be run here."""
    return BackendState(
        worker.worker_id,
        fleet=worker.fleet_name,
        is_online=worker.takes_jobs and worker.last_seen_at >= seen_since,
        workflows=frozenset(
            each.slug
            for each in able
            if each.is_active
            and (worker.workflow_ids is None or each.workflow_id in worker.workflow_ids)
            and each.required_capabilities <= worker.capabilities
        ),
        capabilities=worker.capabilities,
        queue_depth=depths.get(worker.subject, 0),
        free_gpu_memory_bytes=max(0, free_memory),
        offer=offer,
    )


class World:
    """Backends, looked at once a second at most: each step of each run would ask otherwise."""

    def __init__(self) -> None:
        self._backends: tuple[BackendState, ...] = ()
        self._at: datetime | None = None
        self._began: datetime | None = None
        self._tenants: dict[UUID, Tenant] = {}
        self._lookup: Lookup | None = None
        self._lately_online: dict[Hashable, tuple[BackendState, datetime]] = {}

    def lookup(self, sides: Sides) -> Lookup:
        """What nodes name, as old as the backends are."""
        self._lookup = self._lookup or Lookup(sides)
        return self._lookup

    async def now(self, sides: Sides, tenant_id: UUID, *, fresh: bool = False) -> Surroundings:
        now = sides.clock()
        if fresh or self._at is None or now - self._at > FRESH:
            async with sides.central.look() as tx:
                self._backends = await backends(tx, sides, seen_since=self._seen_since(sides))
                # Its range of priorities may be changed, so it is not kept for long either.
                self._tenants.clear()
                self._lookup = None
            self._at = now
            self._note_online(now, timedelta(seconds=sides.settings.no_backend_seconds))
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            async with sides.central.look() as tx:
                tenant = await tenants.get(tx, tenant_id)
            self._tenants[tenant_id] = tenant
        return Surroundings(
            now,
            self._backends,
            in_queue_max=sides.settings.max_queued_per_graph_run,
            priority_min=tenant.min_priority,
            priority_max=tenant.max_priority,
            lately_online=tuple(self._lately_online.values()),
            watched_since=self._began,
            no_backend_seconds=sides.settings.no_backend_seconds,
        )

    def _note_online(self, now: datetime, kept: timedelta) -> None:
        """One of those that can run the same; who was there longer ago makes no difference."""
        for each in self._backends:
            if each.is_online:
                offered = each.offer.key if each.offer else None
                self._lately_online[each.workflows, offered] = each, now
        self._lately_online = {
            what: seen for what, seen in self._lately_online.items() if now - seen[1] <= kept
        }

    def _seen_since(self, sides: Sides) -> datetime:
        """While we were away nobody could be seen: who was there before is given time to come back."""
        now, settings = sides.clock(), sides.settings
        self._began = self._began or now
        usual = timedelta(seconds=settings.offline_after_seconds)
        if now - self._began < usual:
            return now - max(usual, timedelta(seconds=settings.remove_worker_after_seconds))
        return now - usual
