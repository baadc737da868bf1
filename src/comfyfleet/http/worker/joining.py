"""Workers join, are heard of, and leave."""

from datetime import timedelta

from comfyfleet.audit import service as audit
from comfyfleet.db import Tx
from comfyfleet.dispatch.model import Requeue
from comfyfleet.fleets import instances
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet, Registration, Sighting, Worker
from comfyfleet.fleets.objectinfo import upload_slot
from comfyfleet.jobs.ending import requeue_all_of
from comfyfleet.jobs.polling import note_sighting
from comfyfleet.kernel.errors import InvalidInput, NotFound, Refused
from comfyfleet.kernel.keys import hashed, new_key
from comfyfleet.plane import Plane
from comfyfleet.wire.messages import PROTOCOL_VERSION, Heartbeat, Register, Registered


async def register(plane: Plane, said: Register, secret: str) -> Registered:
    if not 1 <= said.protocol_version <= PROTOCOL_VERSION:
        raise InvalidInput(
            f"protocol version {said.protocol_version} is not spoken here; "
            f"the newest is {PROTOCOL_VERSION}",
            field="protocol_version",
        )
    async with plane.central.look() as tx:
        fleet = await _fleet(tx, said, secret)
    fleets.check_secret(fleet, secret)
    unchecked = await _refuse_strangers(plane, said.worker_id)
    key = new_key()
    async with plane.central.begin() as tx:
        worker = await fleets.register(
            tx,
            fleet,
            _registration(said),
            hashed(key),
            cap=plane.settings.max_fleet_workers,
            now=plane.clock(),
            unseen_since=plane.clock() - timedelta(seconds=plane.settings.lost_after_seconds),
        )
        await _note(
            tx, plane, worker, "register", **({"unchecked": unchecked} if unchecked else {})
        )
        assigned = await fleets.workflows_of(tx, worker)
    # Of one that had the id before and has lost its key; this one knows nothing of its leases.
    await requeue_all_of(plane.sides, worker.worker_id, Requeue.EXPIRED)
    return Registered(
        worker_id=worker.worker_id,
        token=key,
        workflows_assigned=tuple(assigned),
        lease_seconds=plane.settings.lease_seconds,
        heartbeat_seconds=plane.settings.heartbeat_seconds,
        object_info_upload=await upload_slot(
            plane.store, fleet, said.backend, seconds=plane.settings.url_seconds
        )
        if worker.is_approved
        else None,
    )


async def _fleet(tx: Tx, said: Register, secret: str) -> Fleet:
    if said.fleet_slug is None:
        return await fleets.by_secret(tx, secret)
    try:
        return await fleets.get(tx, said.fleet_slug, said.stage)
    except NotFound:
        raise InvalidInput(
            f"there is no fleet {said.fleet_slug}/{said.stage}", field="fleet_slug"
        ) from None


def _registration(said: Register) -> Registration:
    return Registration(
        worker_id=said.worker_id,
        capabilities=frozenset(said.capabilities),
        workflow_slugs=said.workflow_slugs,
        providers=tuple(said.providers),
        max_concurrency=said.max_concurrency,
        protocol_version=said.protocol_version,
        backend=said.backend,
    )


async def _refuse_strangers(plane: Plane, worker_id: str) -> str | None:
    """An instance must be of a known auto-scaling group; why it could not be checked, if so."""
    if not plane.settings.validate_asg_instance or not instances.is_instance(worker_id):
        return None
    verdict = await instances.validate(worker_id)
    if not verdict.is_allowed:
        raise Refused(verdict.reason, field="worker_id")
    return verdict.reason if verdict.is_to_be_audited else None


async def heard(plane: Plane, worker: Worker, said: Heartbeat) -> None:
    """That it lives."""
    await note_sighting(plane.sides, worker, Sighting(reading=said.reading), plane.clock())


async def leave(plane: Plane, worker: Worker) -> None:
    await requeue_all_of(plane.sides, worker.worker_id, Requeue.SHUTDOWN)
    async with plane.central.begin() as tx:
        if await fleets.remove(tx, worker):
            await _note(tx, plane, worker, "deregister")


async def _note(tx: Tx, plane: Plane, worker: Worker, action: str, **details: object) -> None:
    await audit.record(
        tx,
        actor=worker.subject,
        action=action,
        subject=worker.subject,
        now=plane.clock(),
        details={"fleet": worker.fleet_name, **details},
    )
