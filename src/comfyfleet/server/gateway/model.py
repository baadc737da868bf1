"""Prompts of the gateway as ComfyUI shows them: in its queue, in its history, among its jobs. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from comfyfleet.protocol.payloads import QueuedPrompt, Record
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.run_log.model import Event, LoggedEvents

CLIENT_ID_CHARACTERS_MAX = 200
FAILED = "comfyfleet.JobFailed"


def job_id_of(tenant_id: UUID, user_id: UUID, prompt_id: str) -> UUID:
    """The job of a client's prompt: the same id again is the same job, of this user alone."""
    return uuid5(user_id, f"{tenant_id}/{prompt_id}")


def gateway_data(job: Job) -> Mapping[str, Any]:
    """What came with the prompt: `prompt_id`, `number`, `client_id`, `extra_data`, `outputs`."""
    return job.asked.gateway or {}


def prompt_id_of(job: Job) -> str:
    return str(gateway_data(job)["prompt_id"])


def is_running(job: Job) -> bool:
    return job.shown_status == JobStatus.PROCESSING


def queued_prompt(job: Job) -> QueuedPrompt:
    """As queue and history show it: whole, and with the names that its client gave."""
    data = gateway_data(job)
    return QueuedPrompt(
        number=data["number"],
        prompt_id=data["prompt_id"],
        prompt=data.get("prompt") or job.asked.prompt,
        extra_data=data.get("extra_data") or {},
        outputs=tuple(data.get("outputs") or ()),
    )


def history_entry(job: Job, record: Mapping[str, Any]) -> Record:
    return {"prompt": queued_prompt(job).row(), **record}


def record_of_end(job: Job, told: Iterable[Event]) -> dict[str, Any]:
    """Of a job that ended without a report of its run: cancelled, or given up."""
    messages: list[Any] = [[kind, data] for kind, data in told if kind.startswith("execution_")]
    events = end_events(job, told)
    return {
        "outputs": {},
        "meta": {},
        "status": {
            "status_str": "success" if job.status == JobStatus.COMPLETED else "error",
            "completed": job.status == JobStatus.COMPLETED,
            "messages": [*messages, *([kind, data] for kind, data in events)],
        },
    }


def end_events(job: Job, told: Iterable[Event]) -> list[Event]:
    """The last message of a run whose backend has not told it."""
    node_id = _current_node(told)
    node_type = job.asked.prompt.get(node_id or "", {}).get("class_type")
    ended = job.completed_at
    data: dict[str, Any] = {
        "prompt_id": prompt_id_of(job),
        "node_id": node_id,
        "node_type": node_type,
        "executed": sorted(_executed(told)),
        "timestamp": int(ended.timestamp() * 1000) if ended else 0,
    }
    if job.status == JobStatus.CANCELLED:
        return [("execution_interrupted", data)]
    if job.status != JobStatus.FAILED:
        return [("execution_success", {name: data[name] for name in ("prompt_id", "timestamp")})]
    failure = {
        "exception_message": job.error_message or "The prompt failed.",
        "exception_type": FAILED,
        "traceback": [],
        "current_inputs": {},
        "current_outputs": [],
    }
    return [("execution_error", {**data, **failure})]


def _current_node(told: Iterable[Event]) -> str | None:
    nodes = [data.get("node") for kind, data in told if kind == "executing"]
    return str(nodes[-1]) if nodes and nodes[-1] is not None else None


def _executed(told: Iterable[Event]) -> set[str]:
    return {str(data.get("node")) for kind, data in told if kind == "executed"}


def events_in(rows: Iterable[LoggedEvents]) -> list[Event]:
    return [event for row in rows for event in row.events]


class UserdataEntry(NamedTuple):
    """A file that an editor stores on its server, without its content."""

    path: str
    size: int
    created_at: datetime
    modified_at: datetime


class StoredUserdata(NamedTuple):
    entry: UserdataEntry
    data: bytes
