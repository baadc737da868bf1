"""The workers' API under /api/worker, with authentication by key and long polls.

If a worker disconnects during a poll, the job that was assigned to it goes to another worker.
"""

import asyncio
import logging
from collections.abc import Coroutine
from heapq import nsmallest
from typing import Annotated, Any, TypeAlias, TypeVar

from fastapi import APIRouter, Depends, Header, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from comfyfleet.api.route_calls import RouteAnswer, RoutePoll, RoutePolled
from comfyfleet.api.worker import (
    NAMED_MAX,
    Complete,
    Completed,
    Deregister,
    Done,
    FactsReport,
    FactsReported,
    Fail,
    FailAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Poll,
    Polled,
    Register,
    Registered,
    Requeue,
    reason_of,
    with_plain_fields,
)
from comfyfleet.errors import (
    FleetError,
    Forbidden,
    Unauthenticated,
    UnexpectedAnswer,
)
from comfyfleet.log_context import bind_ids
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import FleetWorker
from comfyfleet.server.http.connections import (
    PARKED,
    HttpConnection,
    ParkedConnection,
    connection_of,
)
from comfyfleet.server.http.deps import PlaneDep, plane_of
from comfyfleet.server.http.direct_routes import json_response
from comfyfleet.server.http.errors import HANDLED_ERRORS, response_to_any_error
from comfyfleet.server.http.middleware import POLL, SECRET_HEADER, caller_of, response_to_failure
from comfyfleet.server.http.request_body import WorkerRoute
from comfyfleet.server.jobs import finish
from comfyfleet.server.jobs import heartbeat as job_heartbeat
from comfyfleet.server.jobs import poll as job_poll
from comfyfleet.server.jobs.finish import requeue_elsewhere
from comfyfleet.server.jobs.heartbeat import heartbeat as beat
from comfyfleet.server.jobs.poll import PollSession, PollWait, ReadWithKey
from comfyfleet.server.jobs.user_messages import to_user_message
from comfyfleet.server.queue.model import DispatchLease
from comfyfleet.server.queue.model import RequeueReason as Reason
from comfyfleet.server.queue.waiters import PollRequest
from comfyfleet.server.registration import deregister_worker, note_heartbeat, register_worker
from comfyfleet.server.secrets import hash_key

_bearer = HTTPBearer(auto_error=False, scheme_name="worker key")


async def authenticate_worker(request: Request) -> FleetWorker:
    """Authenticates a worker before the request body is read.

    When the worker first uses its next key, that key replaces the current one.
    """
    # The header isn't parsed with `_bearer`, because building its model takes as long as reading
    # the worker from the database.
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated(
            "a worker's key is required",
            hint="Send Authorization: Bearer KEY, with the token from /api/worker/register.",
        )
    plane = plane_of(request)
    worker = await _authenticate(request, plane, key)
    key_hash = hash_key(key)
    if worker.key_hash == key_hash:
        return worker
    async with plane.central.transaction() as tx:
        worker = await fleets.take_next_key(tx, worker, key_hash)
    # Ends polls in all processes that still wait with the previous key.
    plane.queue.order([worker.worker_id])
    return worker


async def _authenticate(request: Request, plane: ControlPlane, key: str) -> FleetWorker:
    """Authenticates a worker. For a poll, the same statement also reads the facts that decide which
    jobs the worker gets."""
    async with plane.central.read() as tx:
        if request.scope["path"] != POLL:
            return await fleets.authenticate_worker(tx, key)
        as_of = plane.queue.dismissals
        worker, standing = await fleets.authenticate_with_standing(tx, key)
    request.state.read_with_key = ReadWithKey(standing, as_of)
    return worker


def read_with_key(scope: Scope) -> ReadWithKey | None:
    facts: ReadWithKey | None = scope["state"].get("read_with_key")
    return facts


async def authenticate_fleet(request: Request) -> None:
    """Checks that a fleet has this secret. The body, which is read later, names the fleet."""
    async with plane_of(request).central.read() as tx:
        await fleets.check_known_secret(tx, request.headers.get(SECRET_HEADER, ""))


async def current_worker(
    request: Request, _described: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> FleetWorker:
    return caller_of(request, FleetWorker)


WorkerDep: TypeAlias = Annotated[FleetWorker, Depends(current_worker)]


def require_self(worker: FleetWorker, worker_id: str | None) -> None:
    if worker_id not in {None, worker.worker_id}:
        raise Forbidden(f"this key doesn't belong to worker {worker_id}")


class LongPollResponse(Response):
    """A response that is sent when the work is done.

    It keeps no reference to the request, to save memory while thousands of polls wait.
    """

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, BaseModel]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await cancel_on_disconnect(receive, self._work)
        # After a disconnect, the client doesn't read this response.
        self.body = answer.model_dump_json().encode() if answer else b"{}"
        self.init_headers()
        await super().__call__(scope, receive, send)


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, BaseModel]
) -> BaseModel | None:
    """Runs the work and returns its result, or None if the client disconnects first.

    In that case, the work is canceled, which releases its lease.
    """
    working = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
            return None
        return working.result()
    finally:
        disconnected.cancel()
        working.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


T = TypeVar("T")
logger = logging.getLogger(__name__)


async def wait_for_job(
    plane: ControlPlane, worker: FleetWorker, body: Poll, read: ReadWithKey | None = None
) -> Polled:
    return with_requested_fields(
        await job_poll.poll(plane.context, worker, body, read), is_brief=body.is_brief
    )


def with_requested_fields(found: Polled, *, is_brief: bool) -> Polled:
    if found.job is None or is_brief:
        return found
    return found.model_copy(update={"job": with_plain_fields(found.job)})


class PollResponse(Response):
    """The response to a poll. It parks the connection while the poll waits.

    Under another ASGI server, a coroutine waits instead.
    """

    def __init__(self, plane: ControlPlane, worker: FleetWorker, body: Poll) -> None:
        super().__init__()
        self._plane, self._worker, self._body = plane, worker, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, worker, body = self._plane, self._worker, self._body
        connection, read = connection_of(scope), read_with_key(scope)
        if connection is None:
            await LongPollResponse(wait_for_job(plane, worker, body, read))(scope, receive, send)
            return
        session = PollSession(worker, body)
        polled = await cancel_on_lost_connection(
            connection, session.begin(plane.context, worker, body, read)
        )
        if polled is None:
            return
        if isinstance(polled, PollWait) and (parked := connection.park()) is not None:
            scope["state"][PARKED] = parked
            ParkedPoll(plane, session, parked, is_brief=body.is_brief).wait(polled)
            return
        if isinstance(polled, PollWait):
            session.end(plane.context)
            connection.leave_admission()
            await LongPollResponse(wait_for_job(plane, worker, body))(scope, receive, send)
            return
        await json_response(with_requested_fields(polled, is_brief=body.is_brief))(
            scope, receive, send
        )


async def cancel_on_lost_connection(
    connection: HttpConnection, work: Coroutine[Any, Any, T]
) -> T | None:
    """Runs the work and returns its result, or None if the connection is lost first.

    In that case, the work is canceled, which releases its lease.
    """
    working = asyncio.current_task()
    if working is None or connection.is_lost:
        work.close()
        return None
    connection.on_lost = working.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.is_lost:
            raise
        working.uncancel()
        return None
    finally:
        connection.on_lost = None


class ParkedPoll:
    """A poll that waits without a coroutine, to save memory."""

    __slots__ = ("_is_brief", "_parked", "_pending", "_plane", "_polling")

    def __init__(
        self, plane: ControlPlane, session: PollSession, parked: ParkedConnection, *, is_brief: bool
    ) -> None:
        self._plane, self._polling, self._parked = plane, session, parked
        self._is_brief = is_brief
        self._pending: PollRequest | asyncio.TimerHandle | asyncio.Task[None] | None = None
        parked.waiting = self

    def wait(self, wait: PollWait) -> None:
        if wait.waiter is None:
            loop = asyncio.get_running_loop()
            self._pending = loop.call_later(wait.seconds, self._resume, None)
            return
        self._pending = request = self._plane.queue.ask(
            wait.waiter, wait_seconds=wait.seconds, as_of=wait.as_of
        )
        request.future.add_done_callback(self._resume)

    def lost(self) -> None:
        """Ends the poll after the worker has disconnected. Its job goes to another worker."""
        self._polling.end(self._plane.context)
        if isinstance(self._pending, PollRequest):
            self._plane.queue.leave(self._pending)
        elif self._pending is not None:
            self._pending.cancel()

    def stopped(self) -> None:
        """Answers the poll without a job when this process stops, so that the worker polls
        again."""
        if not isinstance(self._pending, asyncio.Task):
            self.lost()
            self._answer(json_response(Polled(reason="the control plane is stopping")))

    def _resume(self, waited: "asyncio.Future[DispatchLease | None] | None") -> None:
        if self._parked.waiting is self:
            self._pending = self._parked.run(self._proceed(waited))

    async def _proceed(self, waited: "asyncio.Future[DispatchLease | None] | None") -> None:
        with bind_ids(request_id=self._parked.request_id):
            try:
                lease = None if waited is None else waited.result()
                polled = await self._polling.resume(self._plane.context, lease)
            except HANDLED_ERRORS as error:
                self._answer(response_to_any_error(error, POLL, self._plane.meters))
            except Exception as error:  # noqa: BLE001 — the worker must always get a response
                self._answer(response_to_failure(error, "POST", POLL, self._parked.request_id))
            else:
                self._handle_result(polled)

    def _answer(self, response: Response) -> None:
        self._polling.end(self._plane.context)
        self._parked.answer(response)

    def _handle_result(self, found: Polled | PollWait) -> None:
        if not isinstance(found, PollWait):
            self._answer(json_response(with_requested_fields(found, is_brief=self._is_brief)))
        elif self._parked.is_stopping:
            self._pending = None
            self.stopped()
        else:
            self.wait(found)


router = APIRouter(prefix="/api/worker", tags=["worker"], route_class=WorkerRoute)
DONE = Done()
POLLS_ON = Completed(polls_on=True)


@router.post("/register")
async def register(
    plane: PlaneDep, body: Register, x_fleet_secret: Annotated[str, Header()] = ""
) -> Registered:
    """Registers a worker with the fleet's secret. The response contains the worker's `token`, which
    is shown only once."""
    return await register_worker(plane, body, x_fleet_secret)


@router.post("/poll", response_model=Polled)
async def poll(plane: PlaneDep, worker: WorkerDep, body: Poll) -> Response:
    """Requests a job and waits up to `wait_seconds` for one. If there is no job, the response
    contains the reason."""
    require_self(worker, body.worker_id)
    return PollResponse(plane, worker, body)


@router.post("/heartbeat")
async def heartbeat(plane: PlaneDep, worker: WorkerDep, body: Heartbeat) -> HeartbeatAnswer:
    """Extends the lease, reports the start and progress of the job, and requests new URLs. The
    response contains orders from operators, such as a cancellation."""
    await note_heartbeat(plane, worker, body)
    return await beat(plane.context, body, worker=worker)


@router.post("/complete", response_model=Completed)
async def complete(plane: PlaneDep, worker: WorkerDep, body: Complete) -> Response:
    """Reports a job's result. Repeated calls with the same lease token have no further effect and
    get the same response.

    If the request contains a `poll`, the response's `next` contains the next job, as returned by
    /poll. If the worker already has a poll waiting to prefetch a job, that poll continues with one
    lease fewer, and `polls_on` is true.
    """
    worker_id = worker.worker_id
    async with finish.lease_kept(plane.context, body, worker_id):
        lease = await job_heartbeat.note_last(plane.context, body, worker_id=worker_id)
        await finish.complete(
            plane.context, body, worker_id=worker_id, fleet_id=worker.fleet_id, lease=lease
        )
    if body.model_change is not None:
        plane.meters.model_runs.labels(worker.fleet_name, body.model_change).inc()
    if body.poll is not None:
        return LongPollResponse(_poll_next(plane, worker, body.poll))
    return json_response(POLLS_ON if plane.queue.end_prefetch_wait(worker.worker_id) else DONE)


async def _poll_next(plane: ControlPlane, worker: FleetWorker, body: Poll) -> Completed:
    """Polls for the next job. Errors are logged and not raised, because the result has already been
    accepted."""
    try:
        require_self(worker, body.worker_id)
        return Completed(next=await wait_for_job(plane, worker, body))
    except FleetError as error:
        logger.info("result accepted, but the poll for the next job failed: %s", error.message)
        return Completed()


@router.post("/fail")
async def fail(plane: PlaneDep, worker: WorkerDep, body: Fail) -> FailAnswer:
    """Reports that the job failed. The job isn't retried, even if it has attempts left. The
    response lists unknown fields of the request."""
    async with finish.lease_kept(plane.context, body, worker.worker_id):
        await job_heartbeat.note_last(plane.context, body, worker_id=worker.worker_id)
        await finish.fail(
            plane.context,
            body.dispatch_id,
            body.lease_token,
            to_user_message(body.error),
            worker_id=worker.worker_id,
            message=body,
        )
    unknown = nsmallest(NAMED_MAX, body.model_extra or ())
    return FailAnswer(ignored_fields=tuple(name[:100] for name in unknown))


@router.post("/requeue")
async def requeue(plane: PlaneDep, worker: WorkerDep, body: Requeue) -> Done:
    """Returns the job to the queue. The reason determines whether this counts as an attempt."""
    reason, detail = reason_of(body)
    if reason == "backend_lacks":
        await requeue_elsewhere(plane.context, worker, body)
    else:
        await finish.requeue(
            plane.context,
            body.dispatch_id,
            body.lease_token,
            Reason(reason),
            detail=detail,
            worker_id=worker.worker_id,
        )
    plane.meters.requeues.labels(worker.fleet_name, reason).inc()
    if body.code == UnexpectedAnswer.code:
        plane.meters.unexpected.labels(worker.fleet_name).inc()
    return DONE


@router.post("/facts")
async def report_facts(plane: PlaneDep, worker: WorkerDep, body: FactsReport) -> FactsReported:
    """Reports the backend's nodes and models after the control plane requested them with
    `facts_wanted`."""
    require_self(worker, body.worker_id)
    return await job_poll.note_facts(plane.context, worker, body)


@router.post("/deregister")
async def deregister(plane: PlaneDep, worker: WorkerDep, body: Deregister) -> Done:
    """Removes the worker from its fleet and requeues its leases."""
    require_self(worker, body.worker_id)
    await deregister_worker(plane, worker)
    return DONE


@router.post("/routes", response_model=RoutePolled)
async def poll_routes(plane: PlaneDep, worker: WorkerDep, body: RoutePoll) -> Response:
    """Requests a call to a custom node's route and waits up to `wait_seconds` for one. The worker
    must send the call to the backend once and return the response with /routes/answer."""
    require_self(worker, body.worker_id)
    return LongPollResponse(_next_route_call(plane, worker, body))


async def _next_route_call(
    plane: ControlPlane, worker: FleetWorker, body: RoutePoll
) -> RoutePolled:
    return RoutePolled(call=await plane.routes.take(worker, body.prefixes, body.wait_seconds))


@router.post("/routes/answer")
async def answer_route(plane: PlaneDep, worker: WorkerDep, body: RouteAnswer) -> Done:
    """Returns the backend's response to the caller of the route. Fails with 404 if the caller is no
    longer waiting."""
    require_self(worker, body.worker_id)
    await plane.routes.answer(body)
    return DONE


# Routes that workers call for every job or all the time. They bypass FastAPI.
CALLED_OFTEN = tuple(
    route
    for route in router.routes
    if isinstance(route, APIRoute) and route.endpoint in (poll, heartbeat, complete, fail, requeue)
)


__all__ = ["CALLED_OFTEN", "authenticate_fleet", "authenticate_worker", "router"]
