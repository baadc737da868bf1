"""Registers and deregisters workers, with their keys and audit entries, and requeues their jobs."""

from datetime import datetime, timedelta

from comfyfleet.api.worker import (
    PROTOCOL_VERSION,
    Heartbeat,
    Register,
    Registered,
)
from comfyfleet.errors import (
    InvalidInput,
    NotFound,
    Refused,
    WorkerOffline,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.fleets import ec2
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, FleetWorker, Sighting, WorkerRegistration
from comfyfleet.server.fleets.object_info import upload_slot
from comfyfleet.server.jobs.finish import requeue_worker
from comfyfleet.server.jobs.poll import note_sighting
from comfyfleet.server.notifications.service import find_audit_entries, record_audit
from comfyfleet.server.pipelines.run_state import request_wake
from comfyfleet.server.queue.model import RequeueReason
from comfyfleet.server.secrets import hash_key, new_key


async def register_worker(plane: ControlPlane, message: Register, secret: str) -> Registered:
    if not 1 <= message.protocol_version <= PROTOCOL_VERSION:
        raise InvalidInput(
            f"protocol version {message.protocol_version} isn't supported; "
            f"the latest version is {PROTOCOL_VERSION}",
            field="protocol_version",
        )
    async with plane.central.read() as tx:
        fleet = await _fleet(tx, message, secret)
    fleets.check_secret(fleet, secret)
    unchecked = await _refuse_strangers(plane, message.worker_id)
    key = new_key()
    async with plane.central.transaction() as tx:
        worker = await fleets.register_worker(
            tx,
            fleet,
            _registration(message),
            hash_key(key),
            cap=plane.settings.max_fleet_workers,
            now=plane.clock(),
            unseen_since=plane.clock() - timedelta(seconds=plane.settings.lost_after_seconds),
        )
        await _audit(
            tx, plane, worker, "register", **({"unchecked": unchecked} if unchecked else {})
        )
        assigned = await fleets.workflows_of(tx, worker)
    # If an earlier worker with this id lost its key, it may still hold leases. The new worker
    # doesn't know about them, so they are requeued.
    await requeue_worker(plane.context, worker.worker_id, RequeueReason.EXPIRED)
    request_wake(plane.context)
    return Registered(
        worker_id=worker.worker_id,
        token=key,
        workflows_assigned=tuple(assigned),
        lease_seconds=plane.settings.lease_seconds,
        heartbeat_seconds=plane.settings.heartbeat_seconds,
        object_info_upload=await upload_slot(
            plane.store, fleet, message.backend, seconds=plane.settings.url_seconds
        )
        if worker.is_approved
        else None,
    )


async def _fleet(tx: Tx, message: Register, secret: str) -> Fleet:
    if message.fleet_slug is None:
        return await fleets.fleet_by_secret(tx, secret)
    try:
        return await fleets.get_fleet(tx, message.fleet_slug, message.stage)
    except NotFound:
        raise InvalidInput(
            f"fleet {message.fleet_slug}/{message.stage} was not found", field="fleet_slug"
        ) from None


def _registration(message: Register) -> WorkerRegistration:
    return WorkerRegistration(
        worker_id=message.worker_id,
        capabilities=frozenset(message.capabilities),
        workflow_slugs=message.workflow_slugs,
        providers=tuple(message.providers),
        max_concurrency=message.max_concurrency,
        protocol_version=message.protocol_version,
        backend=message.backend,
    )


async def _refuse_strangers(plane: ControlPlane, worker_id: str) -> str | None:
    """Raises Refused for an EC2 instance that isn't in a known auto-scaling group.

    If the check is enabled but couldn't be performed, returns the reason for the audit log.
    """
    if not plane.settings.validate_asg_instance or not ec2.is_instance(worker_id):
        return None
    verdict = await ec2.check_instance(worker_id)
    if not verdict.is_allowed:
        raise Refused(verdict.reason, field="worker_id")
    return verdict.reason if verdict.is_to_be_audited else None


async def note_heartbeat(plane: ControlPlane, worker: FleetWorker, message: Heartbeat) -> None:
    """Records a worker's heartbeat and its latest reading."""
    await note_sighting(plane.context, worker, Sighting(reading=message.reading), plane.clock())


# A worker that has left its fleet is reported as offline for this long. After that, it is unknown.
KNOWN_FOR = timedelta(days=7)


async def require_worker(tx: Tx, worker_id: str, *, now: datetime) -> FleetWorker:
    """Returns a registered worker or raises an error.

    The error is WorkerOffline if the worker left its fleet recently, for example for a restart, and
    otherwise NotFound.
    """
    worker = await fleets.find_worker(tx, worker_id)
    if worker is not None:
        return worker
    departures = await find_audit_entries(
        tx, action="deregister", subject=f"worker:{worker_id}", since=now - KNOWN_FOR, limit=1
    )
    if not departures:
        raise NotFound(f"worker {worker_id} was not found")
    raise WorkerOffline(
        f"Worker {worker_id} is offline. It left its fleet at"
        f" {departures[0].at:%Y-%m-%d %H:%M} UTC.",
        hint="Retry when the worker is back online.",
    )


async def deregister_worker(plane: ControlPlane, worker: FleetWorker) -> None:
    await requeue_worker(plane.context, worker.worker_id, RequeueReason.SHUTDOWN)
    async with plane.central.transaction() as tx:
        if await fleets.remove_worker(tx, worker):
            await _audit(tx, plane, worker, "deregister")


async def _audit(
    tx: Tx, plane: ControlPlane, worker: FleetWorker, action: str, **details: object
) -> None:
    who, now = worker.subject, plane.clock()
    await record_audit(tx, who, action, who, now, fleet=worker.fleet_name, **details)
