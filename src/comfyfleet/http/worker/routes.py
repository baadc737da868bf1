"""Parse, one call, map: what happens is decided in `jobs` and `fleets`."""

import logging
from typing import Annotated

from fastapi import APIRouter, Header, Response
from fastapi.routing import APIRoute

from comfyfleet.dispatch.model import Requeue as Reason
from comfyfleet.fleets.model import Worker
from comfyfleet.http.direct import as_json
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.json_body import WorkerRoute
from comfyfleet.http.worker import joining
from comfyfleet.http.worker.auth import CallingWorker, require_self
from comfyfleet.http.worker.polls import PollAnswer, polled
from comfyfleet.http.worker.vanishing import Late
from comfyfleet.jobs import attempts, ending
from comfyfleet.jobs.beating import heartbeat as beat
from comfyfleet.jobs.complaints import presentable
from comfyfleet.jobs.refusals import backend_lacks
from comfyfleet.kernel.errors import FleetError, UnexpectedAnswer
from comfyfleet.plane import Plane
from comfyfleet.wire.messages import (
    Complete,
    Completed,
    Deregister,
    Done,
    Fail,
    Heartbeat,
    HeartbeatAnswer,
    Poll,
    Polled,
    Register,
    Registered,
    Requeue,
    reason_of,
)

router = APIRouter(prefix="/api/worker", tags=["worker"], route_class=WorkerRoute)
DONE = Done()
POLLS_ON = Completed(polls_on=True)
logger = logging.getLogger(__name__)


@router.post("/register")
async def register(
    plane: GivenPlane, said: Register, x_fleet_secret: Annotated[str, Header()] = ""
) -> Registered:
    """Joins a fleet by its secret. The answer's `token` is shown once."""
    return await joining.register(plane, said, x_fleet_secret)


@router.post("/poll", response_model=Polled)
async def poll(plane: GivenPlane, worker: CallingWorker, said: Poll) -> Response:
    """Asks for a job and waits up to `wait_seconds` for one; without one, says why."""
    require_self(worker, said.worker_id)
    return PollAnswer(plane, worker, said)


@router.post("/heartbeat")
async def heartbeat(plane: GivenPlane, worker: CallingWorker, said: Heartbeat) -> HeartbeatAnswer:
    """Extends the lease, reports start and progress, asks for fresh URLs, and hears of orders."""
    await joining.heard(plane, worker, said)
    return await beat(plane.sides, said, worker=worker)


@router.post("/complete", response_model=Completed)
async def complete(plane: GivenPlane, worker: CallingWorker, said: Complete) -> Response:
    """The result is accepted once; the same word with the same token is heard again.

    With a `poll`, the answer's `next` is what /poll would answer to it. A poll that waits to prefetch
    waits on as one with this lease less to do, and `polls_on` tells so.
    """
    await attempts.note_last(plane.sides, said, worker_id=worker.worker_id)
    await ending.complete(plane.sides, said, worker_id=worker.worker_id, fleet_id=worker.fleet_id)
    if said.model_change is not None:
        plane.meters.model_runs.labels(worker.fleet_name, said.model_change).inc()
    if said.poll is not None:
        return Late(_next(plane, worker, said.poll))
    return as_json(POLLS_ON if plane.queue.relieve(worker.worker_id) else DONE)


async def _next(plane: Plane, worker: Worker, said: Poll) -> Completed:
    """The lease has ended, so nothing that goes wrong here is told as if it had not."""
    try:
        require_self(worker, said.worker_id)
        return Completed(next=await polled(plane, worker, said))
    except FleetError as error:
        logger.info("no job was handed with the answer to complete: %s", error.message)
        return Completed()


@router.post("/fail")
async def fail(plane: GivenPlane, worker: CallingWorker, said: Fail) -> Done:
    """The application's fault: the job ends at once, whatever attempts remain."""
    await attempts.note_last(plane.sides, said, worker_id=worker.worker_id)
    await ending.fail(
        plane.sides,
        said.dispatch_id,
        said.lease_token,
        presentable(said.error),
        worker_id=worker.worker_id,
    )
    return DONE


@router.post("/requeue")
async def requeue(plane: GivenPlane, worker: CallingWorker, said: Requeue) -> Done:
    """Hands the lease back; whether that counts as an attempt depends on the reason."""
    reason, detail = reason_of(said)
    if reason == "backend_lacks":
        await backend_lacks(plane.sides, worker, said)
    else:
        await ending.requeue(
            plane.sides,
            said.dispatch_id,
            said.lease_token,
            Reason(reason),
            detail=detail,
            worker_id=worker.worker_id,
        )
    plane.meters.requeues.labels(worker.fleet_name, reason).inc()
    if said.code == UnexpectedAnswer.code:
        plane.meters.unexpected.labels(worker.fleet_name).inc()
    return DONE


@router.post("/deregister")
async def deregister(plane: GivenPlane, worker: CallingWorker, said: Deregister) -> Done:
    """Leaves the fleet; what is still leased goes back to the queue."""
    require_self(worker, said.worker_id)
    await joining.leave(plane, worker)
    return DONE


# At least once for each job, or all day long.
CALLED_OFTEN = tuple(
    each
    for each in router.routes
    if isinstance(each, APIRoute) and each.endpoint in (poll, heartbeat, complete, fail, requeue)
)
