"""Finds a run on a ComfyUI server by reading its queue and its history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from comfyfleet.comfy.answers import list_in, mapping_at, mapping_in, unexpected_answer
from comfyfleet.comfy.calls import BackendCalls
from comfyfleet.comfy.events import Cached, Cancelled, End, Failed, Succeeded
from comfyfleet.comfy.messages import parse_log
from comfyfleet.transport.http import Call

QUEUE = Call("GET", "/queue")
HISTORY_ROUTE = "/history/{id}"


@dataclass(frozen=True, slots=True)
class InQueue:
    """The run is waiting. `ahead` is the number of prompts before it, and `running` is the id of
    the executing run."""

    client_id: str | None
    ahead: int
    running: str | None


@dataclass(frozen=True, slots=True)
class Executing:
    client_id: str | None


@dataclass(frozen=True, slots=True)
class InHistory:
    end: End
    cached: tuple[str, ...]
    outputs: Mapping[str, Any]
    # The whole history entry without its prompt.
    entry: Mapping[str, Any] = field(default_factory=dict, compare=False)
    # The type and data of the server's own message about the end, if the entry contains it.
    end_message: tuple[str, Mapping[str, Any]] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Absent:
    """The server doesn't have the run. It was never accepted, was deleted, or was lost in a
    restart."""


RunLocation: TypeAlias = InQueue | Executing | InHistory | Absent


async def locate_run(calls: BackendCalls, run_id: str) -> RunLocation:
    """Finds a run in the queue or the history. The queue is read first, because a run moves from
    the queue directly to the history, and never back."""
    answer = await calls.ask_json(QUEUE)
    with calls.count_unexpected(QUEUE.operation):
        location = _in_queue(answer, run_id)
    return location or await find_in_history(calls, run_id) or Absent()


async def find_in_history(calls: BackendCalls, run_id: str) -> InHistory | None:
    call = Call("GET", HISTORY_ROUTE, path=f"/history/{run_id}")
    answer = await calls.ask_json(call)
    with calls.count_unexpected(call.operation):
        return parse_history(answer, run_id)


async def submitted_prompt(
    calls: BackendCalls, run_id: str
) -> tuple[Mapping[str, Any], Sequence[str]] | None:
    """Returns the prompt of a run and the ids of its output nodes, or None if the server doesn't
    return them."""
    queue = await calls.ask_json(QUEUE)
    history = await calls.ask_json(Call("GET", HISTORY_ROUTE, path=f"/history/{run_id}"))
    with calls.count_unexpected(QUEUE.operation):
        data = mapping_in(queue, "the queue")
        waiting = [*(data.get("queue_running") or []), *(data.get("queue_pending") or [])]
        ended_as = mapping_in(history, "the history").get(run_id) or {}
    rows = (*waiting, ended_as.get("prompt") if isinstance(ended_as, dict) else None)
    for row in rows:
        match row:
            case [_, row_id, dict(prompt), _, [*outputs], *_] if row_id == run_id:
                return prompt, [str(output) for output in outputs]
    return None


def _in_queue(answer: object, run_id: str) -> InQueue | Executing | None:
    data = mapping_in(answer, "the queue")
    running = [_row(row) for row in list_in(data.get("queue_running"), "'queue_running'")]
    pending = [_row(row) for row in list_in(data.get("queue_pending"), "'queue_pending'")]
    for row in running:
        if row[1] == run_id:
            return Executing(_client_id(row))
    for row in pending:
        if row[1] == run_id:
            # Count by number, because the pending rows form a heap and aren't sorted.
            ahead = len(running) + sum(other[0] < row[0] for other in pending)
            return InQueue(_client_id(row), ahead, running[0][1] if running else None)
    return None


def _row(row: object) -> Sequence[Any]:
    items = list_in(row, "a row of the queue")
    if len(items) < 2 or not isinstance(items[0], int | float) or not isinstance(items[1], str):
        raise unexpected_answer("a row of the queue should be [number, prompt id, …]", row)
    return items


def _client_id(row: Sequence[Any]) -> str | None:
    extra_data = row[3] if len(row) > 3 else None
    client_id = extra_data.get("client_id") if isinstance(extra_data, dict) else None
    return client_id if isinstance(client_id, str) else None


def parse_history(answer: object, run_id: str) -> InHistory | None:
    item = mapping_in(answer, "the history").get(run_id)
    if item is None:
        return None
    data = mapping_in(item, "a history item")
    status = data.get("status")
    status_fields: Mapping[str, Any] = (
        mapping_in(status, "'status' of a history item") if status else {}
    )
    raw_log = status_fields.get("messages") or []
    log = parse_log(raw_log)
    cached = next((message.nodes for message in log if isinstance(message, Cached)), ())
    # The messages take precedence, because the status may be that of the previous run.
    ends = [
        (message, (kind, data))
        for message, (kind, data) in zip(log, raw_log, strict=True)
        if isinstance(message, Succeeded | Failed | Cancelled)
    ]
    end, end_message = ends[-1] if ends else (_end_by_status(run_id, status_fields), None)
    if isinstance(end, Succeeded):
        end = Succeeded(run_id, cached)
    entry = {name: value for name, value in data.items() if name != "prompt"}
    outputs = mapping_at(data, "outputs", "a history item")
    return InHistory(end, cached, outputs, entry, end_message)


def _end_by_status(run_id: str, status: Mapping[str, Any]) -> End:
    """Returns the end of a run whose history has no messages, based on its status."""
    match status.get("status_str"):
        case "success":
            return Succeeded(run_id)
        case "error":
            return Failed(run_id, "the server reported that the run failed, without a reason")
    raise unexpected_answer("the status of a history item should be success or error", dict(status))
