"""Jobs, queue and history in the shapes of Comfy Cloud. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from comfyfleet.engine.cloud.account import CloudJob
from comfyfleet.engine.history import Record
from comfyfleet.engine.jobs import Job
from comfyfleet.engine.queue import Item

ENDED = ("completed", "failed", "cancelled")
RAW_ENDED = {"completed": "success", "failed": "error", "cancelled": "cancelled"}


def cancelled_job(job_id: str, job: CloudJob) -> Job:
    """A job that was taken back before it ran."""
    return {
        "id": job_id,
        "status": "cancelled",
        "create_time": job.created_ms,
        "execution_end_time": job.cancelled_ms,
        "outputs_count": 0,
    }


def cloud_job(job: Job) -> Job:
    """A job of the engine as the cloud lists it: created in seconds, counted when over."""
    shown = {**job, "create_time": job["create_time"] // 1000}
    shown.pop("priority", None)
    if shown["status"] not in ENDED:
        shown.pop("outputs_count", None)
    return shown


def cloud_detail(job: Job, meta: Mapping[str, Any] | None, prompt: Mapping[str, Any]) -> Job:
    updated_ms = job.get("execution_end_time") or job["create_time"]
    detail = {**cloud_job(job), "update_time": updated_ms // 1000, "workflow": prompt}
    return detail if meta is None else {**detail, "execution_meta": meta}


def raw_status(job_id: str, job: Job, waiting: Sequence[str]) -> dict[str, Any]:
    """The light status, with one of the internal states that clients must cope with."""
    error = job.get("execution_error", {})
    updated = _moment(job.get("execution_end_time") or job["create_time"])
    return {
        "id": job_id,
        "status": _raw_state(job_id, job["status"], waiting),
        "created_at": _moment(job["create_time"]),
        "updated_at": updated,
        "last_state_update": updated,
        "assigned_inference": None if job["status"] == "pending" else "engine",
        "error_message": error.get("exception_message"),
    }


def _raw_state(job_id: str, status: str, waiting: Sequence[str]) -> str:
    if status == "in_progress":
        return "executing"
    if status == "pending":
        return "pending_execution" if waiting[:1] == [job_id] else "queued_waiting"
    return RAW_ENDED[status]


def _moment(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()


def queue_row(position: int, item: Item) -> list[Any]:
    """Not the order of a ComfyUI: outputs before what it knows of the submission."""
    create_time = item.extra_data.get("create_time")
    return [
        position,
        item.prompt_id,
        item.prompt,
        list(item.outputs),
        {"create_time": create_time},
    ]


def history_entry(job_id: str, record: Record) -> dict[str, Any]:
    """The light form: without the prompt, and without the workflow that came with it."""
    number, _, _, extra_data, _ = record["prompt"]
    shown = {key: value for key, value in extra_data.items() if key != "extra_pnginfo"}
    return {
        "prompt_id": job_id,
        "create_time": extra_data.get("create_time"),
        "prompt": {"priority": number, "prompt_id": job_id, "extra_data": shown},
        **_results(record),
    }


def history_detail(job_id: str, record: Record) -> dict[str, Any]:
    number, _, prompt, extra_data, outputs = record["prompt"]
    return {
        "prompt": {
            "priority": number,
            "prompt_id": job_id,
            "prompt": prompt,
            "extra_data": extra_data,
            "outputs_to_execute": outputs,
        },
        **_results(record),
    }


def _results(record: Record) -> dict[str, Any]:
    return {key: record[key] for key in ("outputs", "status", "meta")}
