"""Lists the backends that a customer may use. If machines are hidden from the customer, it lists
fleets instead.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta

from comfyfleet.api.backends import Backends, BackendSeen
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import BackendSummary, Fleet, FleetWorker, StoredReading
from comfyfleet.server.gateway.offers import offer_to
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.tenants.model import Caller, Tenant

# The stage in which graphs and pipelines run the workflows that they name.
STAGE = "production"
BACKENDS_MAX = 500
EFFECTS_PER_READ = 100
EFFECTS_MAX = 2_000


def sees_backends(plane: ControlPlane, tenant: Tenant) -> bool:
    return tenant.sees_backends(plane.settings.show_backends)


async def visible_backends(plane: ControlPlane, caller: Caller) -> Backends:
    """Returns the machines that the tenant may use, or the fleets if it may not see machines."""
    usable = await usable_fleets(plane, caller)
    now = plane.clock()
    seen_since = now - timedelta(seconds=plane.settings.offline_after_seconds)
    async with plane.central.read() as tx:
        depths = await dispatch.count_bound(tx)
        workers = await _workers_by_fleet(tx, usable)
        ids = [worker.worker_id for mine in workers.values() for worker in mine]
        readings = await fleets.latest_readings(tx, ids)
        facts = await fleets.backends_of(tx, ids)
    machines = {
        fleet_id: [
            _machine(
                worker,
                depths.get(worker.subject, 0),
                readings.get(worker.worker_id),
                facts.get(worker.worker_id),
                is_online=worker.takes_jobs and worker.last_seen_at >= seen_since,
            )
            for worker in mine
        ]
        for fleet_id, mine in workers.items()
    }
    if sees_backends(plane, caller.tenant):
        rows = [machine for fleet in usable for machine in machines.get(fleet.id, ())]
        is_whole = len(ids) < BACKENDS_MAX
        return Backends(backends=tuple(rows), is_whole=is_whole)
    rows = [
        _fleet(fleet, machines.get(fleet.id, ()), depths.get(fleet.subject, 0)) for fleet in usable
    ]
    return Backends(backends=tuple(rows[:BACKENDS_MAX]), is_whole=len(rows) <= BACKENDS_MAX)


async def usable_fleets(plane: ControlPlane, caller: Caller) -> list[Fleet]:
    """Returns the fleets that run published effects, offered workflows or this tenant's prompts.

    If an operator has restricted the tenant's prompts to certain fleets, only those are returned.
    The others belong to other tenants.
    """
    offer = await offer_to(plane, caller)
    mine = {fleet.id for fleet in offer.fleets}
    named = caller.tenant.prompts.fleets
    async with plane.central.read() as tx:
        lanes = await _offered_lanes(tx)
        assigned = await fleets.assignments(tx)
        every = await fleets.list_fleets(tx)
    return [
        fleet
        for fleet in every
        if (named is None or fleet.name in named)
        and (
            fleet.id in mine
            or any(
                (assignment.workflow_id, fleet.stage) in lanes
                for assignment in assigned.get(fleet.id, ())
            )
        )
    ]


async def _offered_lanes(tx: Tx) -> set[tuple[int, str]]:
    """Returns all pairs of workflow id and stage for which customers can start jobs."""
    lanes = {(workflow.id, STAGE) for workflow, _ in await catalog.offered_workflows(tx)}
    after: str | None = None
    for _ in range(EFFECTS_MAX // EFFECTS_PER_READ):
        page = await catalog.list_published(tx, after_slug=after, limit=EFFECTS_PER_READ)
        lanes |= {(entry.workflow.id, entry.effect.settings.stage) for entry in page}
        if len(page) < EFFECTS_PER_READ:
            break
        after = page[-1].effect.slug
    return lanes


async def _workers_by_fleet(tx: Tx, usable: Iterable[Fleet]) -> dict[int, list[FleetWorker]]:
    """Reads up to BACKENDS_MAX workers and returns the approved ones by fleet id."""
    workers_by_fleet: dict[int, list[FleetWorker]] = {}
    limit = BACKENDS_MAX
    for fleet in usable:
        if limit <= 0:
            break
        workers = await fleets.workers_of(tx, fleet, limit=limit)
        workers_by_fleet[fleet.id] = [worker for worker in workers if worker.is_approved]
        limit -= len(workers)
    return workers_by_fleet


def _machine(
    worker: FleetWorker,
    depth: int,
    stored: StoredReading | None,
    facts: BackendSummary | None,
    *,
    is_online: bool,
) -> BackendSeen:
    total = facts.gpu_memory_bytes if facts else None
    used = None
    if stored is not None and stored.reading.gpu_memory_total_bytes is not None:
        total, used = stored.reading.gpu_memory_total_bytes, stored.reading.gpu_memory_used_bytes
    return BackendSeen(
        name=worker.subject,
        fleet=worker.fleet_name,
        is_online=is_online,
        queue_depth=depth,
        device=facts.gpu if facts else None,
        memory_total_bytes=total,
        memory_free_bytes=None if total is None or used is None else max(0, total - used),
    )


def _fleet(fleet: Fleet, machines: Sequence[BackendSeen], depth: int) -> BackendSeen:
    """Returns a fleet as a single backend, with the memory of its largest GPU."""
    largest = max(machines, key=lambda machine: machine.memory_total_bytes or 0, default=None)
    return BackendSeen(
        name=fleet.subject,
        fleet=fleet.name,
        is_online=any(machine.is_online for machine in machines),
        queue_depth=depth + sum(machine.queue_depth for machine in machines),
        memory_total_bytes=largest.memory_total_bytes if largest else None,
        memory_free_bytes=largest.memory_free_bytes if largest else None,
    )
