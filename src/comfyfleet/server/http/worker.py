"""The workers' API: the endpoints under /api/worker, authentication by key, and long polls. If the
client of a poll disconnects, its job goes to another worker."""

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
    """Authenticates a worker before the request body is read. Switches to the worker's next key
    when that key is first used."""
    # Parsed here instead of by `_bearer`, which builds a model. That takes as long as reading the
    # worker.
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise Unauthenticated(
            "a worker's key is needed", hint="Send Authorization: Bearer KEY, as register gave it."
        )
    plane = plane_of(request)
    worker = await _authenticate(request, plane, key)
    key_hash = hash_key(key)
    if worker.key_hash == key_hash:
        return worker
    async with plane.central.transaction() as tx:
        worker = await fleets.take_next_key(tx, worker, key_hash)
    # Ends polls that still wait with the previous key, in this and other processes.
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
        raise Forbidden(f"this key is not the key of the worker {worker_id}")


class LongPollResponse(Response):
    """Responds when the work is done. Keeps no reference to the request, because thousands of polls
    wait at the same time."""

    media_type = "application/json"

    def __init__(self, work: Coroutine[Any, Any, BaseModel]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await cancel_on_disconnect(receive, self._work)
        # After a disconnect, the response isn't read.
        self.body = answer.model_dump_json().encode() if answer else b"{}"
        self.init_headers()
        await super().__call__(scope, receive, send)


async def cancel_on_disconnect(
    receive: Receive, work: Coroutine[Any, Any, BaseModel]
) -> BaseModel | None:
    """Runs work. If the client disconnects first, cancels the work, which returns its lease, and
    returns None."""
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
    plane: ControlPlane, worker: FleetWorker, said: Poll, read: ReadWithKey | None = None
) -> Polled:
    return with_requested_fields(
        await job_poll.poll(plane.context, worker, said, read), is_brief=said.is_brief
    )


def with_requested_fields(found: Polled, *, is_brief: bool) -> Polled:
    if found.job is None or is_brief:
        return found
    return found.model_copy(update={"job": with_plain_fields(found.job)})


class PollResponse(Response):
    """Parks the connection while the poll waits. Under another ASGI server, a coroutine waits
    instead."""

    def __init__(self, plane: ControlPlane, worker: FleetWorker, said: Poll) -> None:
        super().__init__()
        self._plane, self._worker, self._said = plane, worker, said

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        plane, worker, said = self._plane, self._worker, self._said
        connection, read = connection_of(scope), read_with_key(scope)
        if connection is None:
            await LongPollResponse(wait_for_job(plane, worker, said, read))(scope, receive, send)
            return
        session = PollSession(worker, said)
        polled = await cancel_on_lost_connection(
            connection, session.begin(plane.context, worker, said, read)
        )
        if polled is None:
            return
        if isinstance(polled, PollWait) and (parked := connection.park()) is not None:
            scope["state"][PARKED] = parked
            ParkedPoll(plane, session, parked, is_brief=said.is_brief).wait(polled)
            return
        if isinstance(polled, PollWait):
            session.end(plane.context)
            connection.leave_admission()
            await LongPollResponse(wait_for_job(plane, worker, said))(scope, receive, send)
            return
        await json_response(with_requested_fields(polled, is_brief=said.is_brief))(
            scope, receive, send
        )


async def cancel_on_lost_connection(
    connection: HttpConnection, work: Coroutine[Any, Any, T]
) -> T | None:
    """Runs work. If the connection is lost first, cancels the work, which returns its lease, and
    returns None."""
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
        """Called when the worker has disconnected. A job assigned to it goes to another worker."""
        self._polling.end(self._plane.context)
        if isinstance(self._pending, PollRequest):
            self._plane.queue.leave(self._pending)
        elif self._pending is not None:
            self._pending.cancel()

    def stopped(self) -> None:
        """Called when this process stops. Responds to the poll without a job, so that the worker
        polls again."""
        if not isinstance(self._pending, asyncio.Task):
            self.lost()
            self._answer(json_response(Polled(reason="the control plane stops")))

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
            except Exception as error:  # noqa: BLE001 — the worker gets an answer in any case
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
    plane: PlaneDep, said: Register, x_fleet_secret: Annotated[str, Header()] = ""
) -> Registered:
    """Registers a worker with the fleet's secret. The response's `token` is shown once."""
    return await register_worker(plane, said, x_fleet_secret)


@router.post("/poll", response_model=Polled)
async def poll(plane: PlaneDep, worker: WorkerDep, said: Poll) -> Response:
    """Requests a job and waits up to `wait_seconds` for it. Without a job, the response has the
    reason."""
    require_self(worker, said.worker_id)
    return PollResponse(plane, worker, said)


@router.post("/heartbeat")
async def heartbeat(plane: PlaneDep, worker: WorkerDep, said: Heartbeat) -> HeartbeatAnswer:
    """Extends the lease, reports start and progress, and requests new URLs. The response contains
    operators' orders."""
    await note_heartbeat(plane, worker, said)
    return await beat(plane.context, said, worker=worker)


@router.post("/complete", response_model=Completed)
async def complete(plane: PlaneDep, worker: WorkerDep, said: Complete) -> Response:
    """Accepts the result once. A repeated call with the same token gets the same response.

    With a `poll`, the response's `next` is what /poll would return. A poll that waits to prefetch
    continues as the poll of a worker with one lease fewer, and `polls_on` is true.
    """
    worker_id = worker.worker_id
    async with finish.lease_kept(plane.context, said, worker_id):
        lease = await job_heartbeat.note_last(plane.context, said, worker_id=worker_id)
        await finish.complete(
            plane.context, said, worker_id=worker_id, fleet_id=worker.fleet_id, lease=lease
        )
    if said.model_change is not None:
        plane.meters.model_runs.labels(worker.fleet_name, said.model_change).inc()
    if said.poll is not None:
        return LongPollResponse(_poll_next(plane, worker, said.poll))
    return json_response(POLLS_ON if plane.queue.end_prefetch_wait(worker.worker_id) else DONE)


async def _poll_next(plane: ControlPlane, worker: FleetWorker, said: Poll) -> Completed:
    """Polls for the next job. Errors are not raised, because the lease has already ended."""
    try:
        require_self(worker, said.worker_id)
        return Completed(next=await wait_for_job(plane, worker, said))
    except FleetError as error:
        logger.info("complete accepted, but its poll for the next job failed: %s", error.message)
        return Completed()


@router.post("/fail")
async def fail(plane: PlaneDep, worker: WorkerDep, said: Fail) -> FailAnswer:
    """Fails the job immediately, regardless of the remaining attempts. The response names unknown
    fields."""
    async with finish.lease_kept(plane.context, said, worker.worker_id):
        await job_heartbeat.note_last(plane.context, said, worker_id=worker.worker_id)
        await finish.fail(
            plane.context,
            said.dispatch_id,
            said.lease_token,
            to_user_message(said.error),
            worker_id=worker.worker_id,
            message=said,
        )
    unknown = nsmallest(NAMED_MAX, said.model_extra or ())
    return FailAnswer(ignored_fields=tuple(name[:100] for name in unknown))


@router.post("/requeue")
async def requeue(plane: PlaneDep, worker: WorkerDep, said: Requeue) -> Done:
    """Returns the lease. Whether this counts as an attempt depends on the reason."""
    reason, detail = reason_of(said)
    if reason == "backend_lacks":
        await requeue_elsewhere(plane.context, worker, said)
    else:
        await finish.requeue(
            plane.context,
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


@router.post("/facts")
async def report_facts(plane: PlaneDep, worker: WorkerDep, said: FactsReport) -> FactsReported:
    """Reports the backend's nodes and models, in response to `facts_wanted`."""
    require_self(worker, said.worker_id)
    return await job_poll.note_facts(plane.context, worker, said)


@router.post("/deregister")
async def deregister(plane: PlaneDep, worker: WorkerDep, said: Deregister) -> Done:
    """Removes the worker from its fleet and requeues its leases."""
    require_self(worker, said.worker_id)
    await deregister_worker(plane, worker)
    return DONE


@router.post("/routes", response_model=RoutePolled)
async def poll_routes(plane: PlaneDep, worker: WorkerDep, said: RoutePoll) -> Response:
    """Requests a call of a custom node's route and waits up to `wait_seconds` for it. The worker
    must send the call to the backend once, and return the response with /routes/answer."""
    require_self(worker, said.worker_id)
    return LongPollResponse(_next_route_call(plane, worker, said))


async def _next_route_call(
    plane: ControlPlane, worker: FleetWorker, said: RoutePoll
) -> RoutePolled:
    return RoutePolled(call=await plane.routes.take(worker, said.prefixes, said.wait_seconds))


@router.post("/routes/answer")
async def answer_route(plane: PlaneDep, worker: WorkerDep, said: RouteAnswer) -> Done:
    """Returns the backend's response to the caller. The result is 404 if the caller no longer waits
    for it."""
    require_self(worker, said.worker_id)
    await plane.routes.answer(said)
    return DONE


# Routes that are called at least once per job, or permanently.
CALLED_OFTEN = tuple(
    route
    for route in router.routes
    if isinstance(route, APIRoute) and route.endpoint in (poll, heartbeat, complete, fail, requeue)
)


__all__ = ["CALLED_OFTEN", "authenticate_fleet", "authenticate_worker", "router"]
