"""Where a run is on API v1, and what became of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comfyfleet.comfy.calls import Call, Calls, json_of
from comfyfleet.comfy.cloud.patience import ask
from comfyfleet.comfy.cloud.routes import about
from comfyfleet.comfy.cloud.states import is_retryable, phase_of
from comfyfleet.comfy.events import Cached, Cancelled, End, Failed, Succeeded
from comfyfleet.comfy.messages import parse_failure, parse_log
from comfyfleet.comfy.places import Absent, Ended, Place, Running, Waiting
from comfyfleet.comfy.shapes import list_in, mapping_in, text_at, unexpected

STATUS_ROUTE = "/job/{id}/status"
JOB_ROUTE = "/jobs/{id}"
QUEUE = Call("GET", "/queue")


@dataclass(frozen=True, slots=True)
class State:
    """One of the cloud's raw words, and its own sentence about a failure."""

    word: str
    error_message: str


@dataclass(frozen=True, slots=True)
class Row:
    """A job in the queue. Items 3 and 4 have another order than on a ComfyUI."""

    number: float
    run_id: str
    items: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Queue:
    running: tuple[Row, ...]
    pending: tuple[Row, ...]


async def look(calls: Calls, run_id: str) -> Place:
    state = await state_of(calls, run_id)
    if state is None:
        return Absent()
    match phase_of(state.word):
        case "waiting":
            return _waiting(await queue_of(calls), run_id)
        case "running":
            return Running(None)
    detail = await detail_of(calls, run_id)
    # The state is told a moment before the rest can be had: not over before both are there.
    return Running(None) if detail is None else _ended(run_id, state, detail)


async def state_of(calls: Calls, run_id: str) -> State | None:
    call = about("GET", STATUS_ROUTE, run_id)
    response = await ask(calls, call)
    if response.status_code == 404:
        return None
    with calls.reading(call.operation):
        answer = mapping_in(json_of(call, response), "the status of a job")
        word = text_at(answer, "status", "the status of a job")
        return State(word, str(answer.get("error_message") or ""))


async def detail_of(calls: Calls, run_id: str) -> Mapping[str, Any] | None:
    call = about("GET", JOB_ROUTE, run_id)
    response = await ask(calls, call)
    if response.status_code == 404:
        return None
    with calls.reading(call.operation):
        return mapping_in(json_of(call, response), "a job")


async def ended(calls: Calls, run_id: str) -> Ended | None:
    place = await look(calls, run_id)
    return place if isinstance(place, Ended) else None


async def queue_of(calls: Calls) -> Queue:
    response = await ask(calls, QUEUE)
    with calls.reading(QUEUE.operation):
        answer = mapping_in(json_of(QUEUE, response), "the queue")
        return Queue(_rows(answer, "queue_running"), _rows(answer, "queue_pending"))


def _rows(answer: Mapping[str, Any], key: str) -> tuple[Row, ...]:
    return tuple(map(_row, list_in(answer.get(key), f"{key!r}")))


def _row(row: object) -> Row:
    items = list_in(row, "a row of the queue")
    if len(items) < 2 or not isinstance(items[0], int | float) or not isinstance(items[1], str):
        raise unexpected("a row of the queue should be [number, prompt id, …]", row)
    return Row(items[0], items[1], items)


def _waiting(queue: Queue, run_id: str) -> Waiting:
    """A job that has left the queue since its state was told has nobody ahead."""
    own = next((row.number for row in queue.pending if row.run_id == run_id), None)
    before = 0 if own is None else sum(row.number < own for row in queue.pending)
    running = queue.running[0].run_id if queue.running else None
    return Waiting(None, before + len(queue.running), running)


def _ended(run_id: str, state: State, detail: Mapping[str, Any]) -> Ended:
    cached = _cached(detail)
    outputs = detail.get("outputs")
    return Ended(
        _end(run_id, state, detail, cached),
        cached,
        {} if outputs is None else mapping_in(outputs, "the outputs of a job"),
    )


def _end(run_id: str, state: State, detail: Mapping[str, Any], cached: tuple[str, ...]) -> End:
    match phase_of(state.word):
        case "succeeded":
            return Succeeded(run_id, cached)
        case "cancelled":
            return Cancelled(run_id)
    return replace(_failure(run_id, state, detail), retryable=is_retryable(state.word))


def _failure(run_id: str, state: State, detail: Mapping[str, Any]) -> Failed:
    told = detail.get("execution_error")
    if isinstance(told, dict) and isinstance(told.get("exception_type"), str):
        failure = parse_failure({**told, "prompt_id": run_id})
        if isinstance(failure, Failed):
            return failure
    return Failed(run_id, state.error_message or f"the cloud says {state.word!r}, and no more")


def _cached(detail: Mapping[str, Any]) -> tuple[str, ...]:
    status = detail.get("execution_status")
    messages = status.get("messages") if isinstance(status, dict) else None
    log = parse_log(messages or [])
    return next((message.nodes for message in log if isinstance(message, Cached)), ())
