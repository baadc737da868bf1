"""A backend refuses a prompt because it lacks a node type or a model: another worker is to run it."""

import json

from comfyfleet.dispatch.model import Dispatch, Requeue, Status
from comfyfleet.effects.models import models_of
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Worker
from comfyfleet.fleets.offers import Missing, ModelUse
from comfyfleet.jobs import store
from comfyfleet.jobs.complaints import presentable
from comfyfleet.jobs.ending import fail, held, requeue
from comfyfleet.jobs.shortage import ground_for, wanted_by
from comfyfleet.jobs.sides import Sides
from comfyfleet.wire import messages as wire

NOT_AVAILABLE = "not_available"
NOT_AVAILABLE_MESSAGE = "This is not available at the moment."


async def backend_lacks(sides: Sides, worker: Worker, said: wire.Requeue) -> None:
    """The worker gets no more such jobs; this one goes elsewhere, or fails if nobody could run it."""
    row = await held(sides, said.dispatch_id, said.lease_token, worker.worker_id)
    if row.status == Status.QUEUED:
        return  # said again
    missing = _missing(said)
    async with sides.central.begin() as tx:
        known = await fleets.get_worker(tx, worker.worker_id)
        await fleets.note_refusal(tx, known, missing, now=sides.clock())
    sides.queue.order([worker.worker_id])
    if await _another_can(sides, row, worker):
        reason = Requeue.BACKEND_LACKS
        await requeue(sides, row.id, said.lease_token, reason, detail=said.detail)
        return
    error = {
        "code": NOT_AVAILABLE,
        "exception_message": NOT_AVAILABLE_MESSAGE,
        "worker": worker.worker_id,
        "missing": missing.in_words(),
        "refusal": said.detail,
    }
    await fail(sides, row.id, said.lease_token, presentable(json.dumps(error)))


async def _another_can(sides: Sides, row: Dispatch, worker: Worker) -> bool:
    """Offline or busy, it may come back; revoked, it may not."""
    pool = await sides.pool_of(row.tenant_id)
    async with pool.look() as tx:
        job = await store.get(tx, row.tenant_id, row.job_id)
    models = () if job is None else models_of(job.asked.prompt)
    version = None if job is None else job.asked.workflow_version
    async with sides.central.look() as tx:
        ground = await ground_for(tx, sides, await wanted_by(tx, row.lane, models, version))
    bound = row.backend_affinity
    return any(
        ground.can_run(each) and each.is_approved and (bound is None or bound in each.affinities)
        for each in ground.workers
        if each.worker_id != worker.worker_id
    )


def _missing(said: wire.Requeue) -> Missing:
    if said.lacking is None:
        return Missing()
    models = tuple(ModelUse(*each) for each in said.lacking.models)
    return Missing(tuple(said.lacking.node_types), models)
