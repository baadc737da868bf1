"""Comfy Cloud, API v1, as documented in August 2026: submit, websocket, job states, search and
cancel."""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlencode

import httpx
import websockets
from websockets.asyncio.client import ClientConnection, connect

from comfyfleet.comfy.answers import (
    list_in,
    mapping_in,
    number_at,
    parse_json,
    refusal_from,
    text_at,
    unexpected_answer,
)
from comfyfleet.comfy.backend import (
    Cancellation,
    Description,
    Fetched,
    MessageTap,
    OutputFile,
    Outputs,
    Prompt,
    Submitted,
    Uploaded,
)
from comfyfleet.comfy.calls import BackendCalls, parse_answer, upload_file
from comfyfleet.comfy.cloud_calls import (
    MARKER_KEY,
    call_by_id,
    call_once,
    call_repeatable,
    download,
    is_marked,
    marker_of,
    parse_error_body,
    with_marker,
)
from comfyfleet.comfy.events import Cached, Cancelled, End, Event, Failed, Reconnected, Succeeded
from comfyfleet.comfy.follow import cancellation_from, confirm_cancelled, follow_cloud_run
from comfyfleet.comfy.messages import (
    CURRENT_RUN,
    Inbox,
    Message,
    parse_failure,
    parse_log,
    parse_message,
)
from comfyfleet.comfy.run_location import Absent, Executing, InHistory, InQueue, RunLocation
from comfyfleet.comfy.server import describe_server, find_outputs
from comfyfleet.errors import (
    CancelUnconfirmed,
    CreditsExhausted,
    FleetError,
    OutcomeUnknown,
    PromptRefused,
    RunLost,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.http import Call

V1Phase = Literal["waiting", "running", "succeeded", "failed", "cancelled"]

# The states that end a job. New states appear without notice, and all of them mean that the job is
# still running.
END_PHASES: dict[str, V1Phase] = {
    "success": "succeeded",
    "error": "failed",
    "non_retryable_error": "failed",
    "lost": "failed",
    "cancelled": "cancelled",
}
# Failures of the cloud itself. `non_retryable_error` is a failure of the prompt.
RETRYABLE = frozenset({"error", "lost"})
WAITING = frozenset(
    {
        "submitted",
        "queued_limited",
        "queued_waiting",
        "allocated",
        "preparing",
        "pending_execution",
    }
)


def phase_of(state: str) -> V1Phase:
    if state in END_PHASES:
        return END_PHASES[state]
    return "waiting" if state in WAITING else "running"


def is_retryable(state: str) -> bool:
    return state in RETRYABLE


logger = logging.getLogger(__name__)

FRAME_BYTES_MAX = 256 * 1024 * 1024
# Maximum number of stored messages for runs that aren't followed yet. A quick run can end before
# its submit returns.
UNCLAIMED_MESSAGES_MAX = 500
SOCKET = Call("GET", "/ws")
SOCKET_ERRORS = (OSError, TimeoutError, websockets.WebSocketException)
HELLO = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
# The websockets library logs URLs. Ours contains the key, so the library gets a logger without
# handlers.
SILENT_LOGGER = logging.Logger("silent", level=logging.CRITICAL + 1)


class CloudSocket:
    """A websocket that delivers each message to its run.

    Never raises. Without a socket, runs are polled.
    """

    def __init__(self, calls: BackendCalls, key: str, client_id: str) -> None:
        self._calls = calls
        self._address = socket_address(calls.client.base_url, key, client_id)
        self._runs: dict[str, Inbox] = {}
        self._unclaimed: deque[tuple[str, Message]] = deque(maxlen=UNCLAIMED_MESSAGES_MAX)
        self._reader: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        return self._reader is not None and not self._reader.done()

    async def start(self) -> None:
        """Opens the socket, if possible."""
        async with self._opening:
            if self.is_open:
                return
            opened = await self._open()
            if opened is not None:
                self._reader = asyncio.create_task(self._read(opened), name="comfy-cloud-socket")

    def join(self, run_id: str) -> Inbox:
        inbox = self._runs.setdefault(run_id, Inbox())
        unclaimed = [*self._unclaimed]
        self._unclaimed.clear()
        for owner_id, message in unclaimed:
            if owner_id == run_id:
                inbox.put(message)
            else:
                self._unclaimed.append((owner_id, message))
        return inbox

    def leave(self, run_id: str) -> None:
        self._runs.pop(run_id, None)

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _open(self) -> ClientConnection | None:
        try:
            with self._calls.recorded(SOCKET):
                socket = await connect(
                    self._address,
                    open_timeout=self._calls.limits.connect_seconds,
                    close_timeout=1,
                    max_size=FRAME_BYTES_MAX,
                    logger=SILENT_LOGGER,
                )
            await socket.send(HELLO)
        except SOCKET_ERRORS as error:
            # The error's text may contain the URL, and therefore the key.
            logger.warning(
                "no WebSocket to the cloud; polling runs instead",
                extra={"reason": type(error).__name__},
            )
            return None
        return socket

    async def _read(self, socket: ClientConnection) -> None:
        current: ClientConnection | None = socket
        while current is not None:
            try:
                with contextlib.suppress(*SOCKET_ERRORS):
                    while True:
                        self._take(await current.recv())
            finally:
                await current.close()
            current = await self._reconnect()

    async def _reconnect(self) -> ClientConnection | None:
        """Opens a new socket. Returns None if no run is being followed or all retries failed. In
        that case, the next run tries again."""
        for attempt in range(1, self._calls.limits.max_retries + 1):
            if not self._runs:
                return None
            await self._calls.retry.back_off(attempt)
            if (socket := await self._open()) is not None:
                for run_id, inbox in self._runs.items():
                    inbox.put(Reconnected(run_id))
                return socket
        return None

    def _take(self, raw: str | bytes) -> None:
        try:
            with self._calls.count_unexpected("websocket"):
                message = parse_message(raw)
        except UnexpectedAnswer:
            # The error has been counted and logged. Polling still finds the run's state and
            # outputs.
            return
        # A user's jobs run concurrently, so a message without a run id can belong to any of them.
        run_id = getattr(message, "run_id", CURRENT_RUN)
        if run_id == CURRENT_RUN:
            return
        if inbox := self._runs.get(run_id):
            inbox.put(message)
        else:
            self._unclaimed.append((run_id, message))


def socket_address(base: httpx.URL, key: str, client_id: str) -> str:
    scheme = "wss" if base.scheme == "https" else "ws"
    query = urlencode({"clientId": client_id, "token": key})
    return f"{base.copy_with(scheme=scheme, path='/ws')}?{query}"


STATUS_ROUTE = "/job/{id}/status"
JOB_ROUTE = "/jobs/{id}"
QUEUE = Call("GET", "/queue")


@dataclass(frozen=True, slots=True)
class V1State:
    """A job's state as named by v1, and the cloud's message about a failure."""

    name: str
    error_message: str


@dataclass(frozen=True, slots=True)
class V1QueueRow:
    """A job in the queue. Items 3 and 4 have a different order than on a ComfyUI server."""

    number: float
    run_id: str
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class V1Queue:
    running: tuple[V1QueueRow, ...]
    pending: tuple[V1QueueRow, ...]


async def locate_v1_run(calls: BackendCalls, run_id: str) -> RunLocation:
    state = await fetch_state(calls, run_id)
    if state is None:
        return Absent()
    match phase_of(state.name):
        case "waiting":
            return _queue_position(await fetch_queue(calls), run_id)
        case "running":
            return Executing(None)
    detail = await fetch_detail(calls, run_id)
    # The state changes a moment before the details can be read. The job is over only when both are
    # available.
    return Executing(None) if detail is None else _history_entry(run_id, state, detail)


async def fetch_state(calls: BackendCalls, run_id: str) -> V1State | None:
    call = call_by_id("GET", STATUS_ROUTE, run_id)
    response = await call_repeatable(calls, call)
    if response.status_code == 404:
        return None
    with calls.count_unexpected(call.operation):
        answer = mapping_in(parse_answer(call, response), "the status of a job")
        name = text_at(answer, "status", "the status of a job")
        return V1State(name, str(answer.get("error_message") or ""))


async def fetch_detail(calls: BackendCalls, run_id: str) -> Mapping[str, Any] | None:
    call = call_by_id("GET", JOB_ROUTE, run_id)
    response = await call_repeatable(calls, call)
    if response.status_code == 404:
        return None
    with calls.count_unexpected(call.operation):
        return mapping_in(parse_answer(call, response), "a job")


async def find_ended(calls: BackendCalls, run_id: str) -> InHistory | None:
    location = await locate_v1_run(calls, run_id)
    return location if isinstance(location, InHistory) else None


async def fetch_queue(calls: BackendCalls) -> V1Queue:
    response = await call_repeatable(calls, QUEUE)
    with calls.count_unexpected(QUEUE.operation):
        answer = mapping_in(parse_answer(QUEUE, response), "the queue")
        return V1Queue(_rows(answer, "queue_running"), _rows(answer, "queue_pending"))


def _rows(answer: Mapping[str, Any], key: str) -> tuple[V1QueueRow, ...]:
    return tuple(map(_row, list_in(answer.get(key), f"{key!r}")))


def _row(row: object) -> V1QueueRow:
    items = list_in(row, "a row of the queue")
    if len(items) < 2 or not isinstance(items[0], int | float) or not isinstance(items[1], str):
        raise unexpected_answer("a row of the queue should be [number, prompt id, …]", row)
    return V1QueueRow(items[0], items[1], items)


def _queue_position(queue: V1Queue, run_id: str) -> InQueue:
    """Returns the queue position of a waiting job.

    A job that left the queue after its state was read has no jobs before it, apart from the running
    ones.
    """
    own = next((row.number for row in queue.pending if row.run_id == run_id), None)
    before = 0 if own is None else sum(row.number < own for row in queue.pending)
    running = queue.running[0].run_id if queue.running else None
    return InQueue(None, before + len(queue.running), running)


def _history_entry(run_id: str, state: V1State, detail: Mapping[str, Any]) -> InHistory:
    cached = _cached(detail)
    outputs = detail.get("outputs")
    return InHistory(
        _end(run_id, state, detail, cached),
        cached,
        {} if outputs is None else mapping_in(outputs, "the outputs of a job"),
    )


def _end(run_id: str, state: V1State, detail: Mapping[str, Any], cached: tuple[str, ...]) -> End:
    match phase_of(state.name):
        case "succeeded":
            return Succeeded(run_id, cached)
        case "cancelled":
            return Cancelled(run_id)
    return replace(_failure(run_id, state, detail), retryable=is_retryable(state.name))


def _failure(run_id: str, state: V1State, detail: Mapping[str, Any]) -> Failed:
    error = detail.get("execution_error")
    if isinstance(error, dict) and isinstance(error.get("exception_type"), str):
        failure = parse_failure({**error, "prompt_id": run_id})
        if isinstance(failure, Failed):
            return failure
    return Failed(
        run_id, state.error_message or f"the cloud reported {state.name!r} without a reason"
    )


def _cached(detail: Mapping[str, Any]) -> tuple[str, ...]:
    status = detail.get("execution_status")
    messages = status.get("messages") if isinstance(status, dict) else None
    log = parse_log(messages or [])
    return next((message.nodes for message in log if isinstance(message, Cached)), ())


# Maximum number of jobs in a search, because each one costs a request.
JOBS_SEARCHED_MAX = 100
ENDED = {
    "status": "completed,failed,cancelled",
    "sort_by": "create_time",
    "sort_order": "desc",
    "limit": str(JOBS_SEARCHED_MAX),
}
JOBS = Call("GET", "/jobs", params=ENDED)


@dataclass(frozen=True, slots=True)
class V1Search:
    """The result of a search. If `is_complete`, all jobs were searched, so a job that was not found
    doesn't exist.

    `others` contains ended jobs without the marker, which need not be fetched again.
    """

    run_id: str | None
    is_complete: bool = True
    others: frozenset[str] = frozenset()


async def search_by_marker(
    calls: BackendCalls, prompt_id: str, others: frozenset[str] = frozenset()
) -> V1Search:
    """Finds the job that has the marker.

    Searches the queue before the ended jobs, because a job moves from one to the other and never
    back.
    """
    queue = await fetch_queue(calls)
    for row in (*queue.running, *queue.pending):
        if is_marked(row.items, prompt_id):
            return V1Search(row.run_id)
    run_ids, is_complete = await _newest_ended(calls)
    for run_id in (run_id for run_id in run_ids if run_id not in others):
        detail = await fetch_detail(calls, run_id)
        if detail is not None and is_marked(detail, prompt_id):
            return V1Search(run_id)
    return V1Search(None, is_complete, others.union(run_ids))


async def _newest_ended(calls: BackendCalls) -> tuple[tuple[str, ...], bool]:
    response = await call_repeatable(calls, JOBS)
    with calls.count_unexpected(JOBS.operation):
        answer = mapping_in(parse_answer(JOBS, response), "a list of jobs")
        rows = list_in(answer.get("jobs"), "'jobs'")
        run_ids = tuple(text_at(mapping_in(row, "a job"), "id", "a job") for row in rows)
        return run_ids, not _has_more(answer)


def _has_more(answer: Mapping[str, Any]) -> bool:
    page = mapping_in(answer.get("pagination"), "'pagination'")
    return page.get("has_more") is not False


NO_SUCH_ROUTE = frozenset({404, 405, 501})


async def cancel_run(calls: BackendCalls, run_id: str) -> Cancellation:
    location = await locate_v1_run(calls, run_id)
    if isinstance(location, Absent):
        return Cancellation.NOT_FOUND
    if (confirmed := cancellation_from(location)) is not None:
        return confirmed
    await _ask_to_stop(calls, run_id)
    return await confirm_cancelled(calls, run_id, lambda: locate_v1_run(calls, run_id))


async def _ask_to_stop(calls: BackendCalls, run_id: str) -> None:
    answer = await call_repeatable(calls, call_by_id("POST", "/jobs/{id}/cancel", run_id))
    if answer.status_code not in NO_SUCH_ROUTE:
        return
    # Without this route, a single job can only be deleted while it waits in the queue.
    await call_repeatable(calls, Call("POST", "/queue", json={"delete": [run_id]}))
    running = [row.run_id for row in (await fetch_queue(calls)).running]
    if run_id not in running:
        return
    if running != [run_id]:
        raise CancelUnconfirmed(
            f"run {run_id} was not stopped: the cloud can only interrupt all running jobs of the "
            f"account together, which would affect {len(running) - 1} other(s)",
            run_id=run_id,
        )
    await call_repeatable(calls, Call("POST", "/interrupt"))


LIVE_RUNS_MAX = 1000


class CloudV1:
    """Comfy Cloud via API v1. The methods are described in Backend. `calls` send the key, and
    `storage` must not."""

    def __init__(
        self, calls: BackendCalls, storage: httpx.AsyncBaseTransport, socket: CloudSocket
    ) -> None:
        self._calls = calls
        self._storage = storage
        self._socket = socket
        # Runs whose messages are received from the beginning, and which have not been followed yet.
        self._live_runs: deque[str] = deque(maxlen=LIVE_RUNS_MAX)

    async def aclose(self) -> None:
        await self._socket.aclose()
        await self._calls.client.aclose()

    async def describe(self) -> Description:
        object_info = await self._json(Call("GET", "/object_info"), "the node types")
        return describe_server(object_info, await self._json(Call("GET", "/system_stats"), "stats"))

    async def queue_length(self) -> int:
        call = Call("GET", "/prompt")
        answer = await self._json(call, "the length of the queue")
        with self._calls.count_unexpected(call.operation):
            info = mapping_in(answer.get("exec_info"), "'exec_info'")
            return int(number_at(info, "queue_remaining", "'exec_info'"))

    async def upload(self, path: Path, *, name: str | None = None) -> Uploaded:
        return await upload_file(self._calls, path, name)

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        await self._socket.start()
        body = {
            "prompt": with_marker(prompt, prompt_id),
            "extra_data": {**(extra_data or {}), MARKER_KEY: marker_of(prompt_id)},
        }
        call = Call("POST", "/prompt", json=body)
        try:
            response = await call_once(self._calls, call)
            with self._calls.count_unexpected(call.operation):
                run_id, partly = parse_submitted(call, response, prompt)
        except (OutcomeUnknown, UnexpectedAnswer) as error:
            return await self._find_again(prompt_id, error)
        if partly is not None:
            await self._cancel_submitted(run_id, partly)
        if self._socket.is_open:
            self._live_runs.append(run_id)
        return Submitted(run_id)

    async def adopt(self, prompt_id: str) -> Submitted | None:
        search = await search_by_marker(self._calls, prompt_id)
        if search.run_id is not None:
            return Submitted(search.run_id, adopted=True)
        if not search.is_complete:
            raise OutcomeUnknown(
                "the run is not among the newest jobs of the account, and older ones can't be "
                "searched",
                prompt_id=prompt_id,
            )
        return None

    async def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncGenerator[Event]:
        await self._socket.start()
        inbox = self._socket.join(run_id)
        inbox.tap = tap
        events = follow_cloud_run(
            run_id,
            inbox,
            lambda: locate_v1_run(self._calls, run_id),
            self._calls,
            has_live_messages=self._has_live_messages(run_id),
        )
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._socket.leave(run_id)

    async def outputs(self, run_id: str) -> Outputs:
        record = await find_ended(self._calls, run_id)
        if record is None:
            raise RunLost(f"the cloud doesn't have a finished run {run_id}", run_id=run_id)
        return find_outputs(record.outputs, record.cached)

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        params = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
        call = Call("GET", "/view", params=params)
        return await download(self._calls, self._storage, call, to, bytes_max)

    async def cancel(self, run_id: str) -> Cancellation:
        return await cancel_run(self._calls, run_id)

    async def free(self) -> None:
        """Does nothing, because the cloud manages the memory of its own machines."""

    async def _cancel_submitted(self, run_id: str, partly: PromptRefused) -> NoReturn:
        """Cancels the accepted part of a partially refused prompt, if possible, because a partial
        result is useless. Always raises the refusal."""
        try:
            await self.cancel(run_id)
        except FleetError as error:
            raise partly from error
        raise partly

    def _has_live_messages(self, run_id: str) -> bool:
        if run_id not in self._live_runs:
            return False
        self._live_runs.remove(run_id)
        return self._socket.is_open

    async def _json(self, call: Call, what: str) -> Mapping[str, Any]:
        response = await call_repeatable(self._calls, call)
        with self._calls.count_unexpected(call.operation):
            return mapping_in(parse_answer(call, response), what)

    async def _find_again(
        self, prompt_id: str, error: OutcomeUnknown | UnexpectedAnswer
    ) -> Submitted:
        """Looks for a prompt whose submit was not confirmed.

        The prompt is never sent again, because it may still be on its way into the queue.
        """
        if 400 <= int(error.details.get("status") or 0) < 500:
            raise error
        search = V1Search(None)
        for attempt in range(1, self._calls.limits.max_retries + 2):
            with contextlib.suppress(ServerUnavailable, UnexpectedAnswer):
                search = await search_by_marker(self._calls, prompt_id, search.others)
            if search.run_id is not None:
                return Submitted(search.run_id, adopted=True)
            await self._calls.retry.back_off(attempt)
        raise OutcomeUnknown(
            f"the prompt was sent but not confirmed ({error.message}), and no job of the account "
            "has its marker. The job may still appear. If it does, adopt it by its id.",
            prompt_id=prompt_id,
        ) from error


def parse_submitted(
    call: Call, response: httpx.Response, prompt: Prompt
) -> tuple[str, PromptRefused | None]:
    """Returns the run id, and the refusal if only part of the prompt would run."""
    if response.status_code == 400:
        raise _refused(response, prompt)
    if response.status_code == 402:
        message = parse_error_body(response.content).message
        raise CreditsExhausted(f"Comfy Cloud requires payment: {message}")
    answer = mapping_in(parse_answer(call, response), "the answer to a prompt")
    run_id = text_at(answer, "prompt_id", "the answer to a prompt")
    partly = refusal_from(answer, prompt) if answer.get("node_errors") else None
    return run_id, partly


def _refused(response: httpx.Response, prompt: Prompt) -> PromptRefused:
    body = mapping_in(parse_json(response.content, "a refusal"), "a refusal")
    if "error" in body or "node_errors" in body:
        return refusal_from(body, prompt)
    return PromptRefused(str(body.get("message") or "The prompt was refused"), problems=())
