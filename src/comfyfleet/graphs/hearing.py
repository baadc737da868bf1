"""What became of a run's jobs, as the run is told it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.dispatch.model import Dispatch
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.files.service import FILES_AT_ONCE_MAX
from comfyfleet.graphs.catalogue import BackendState
from comfyfleet.graphs.events import (
    Cause,
    Event,
    JobCancelled,
    JobDone,
    JobFailed,
    JobProgressed,
    JobStarted,
    JobWaiting,
)
from comfyfleet.graphs.runs import Key
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.wire.messages import Progress
from comfyfleet.wire.values import clean, text_of

TIMED_OUT = "node timeout"  # the raw error of a job that took longer than its node allows
_PICTURES = "image/"


async def files_of(tx: Tx, tenant_id: UUID, jobs: Iterable[Job]) -> dict[UUID, File]:
    """What completed jobs have made, by id; a file that has expired since is left out."""
    wanted = [
        UUID(each["file_id"])
        for job in jobs
        if job.status == JobStatus.COMPLETED
        for each in (job.result_metadata or {}).get("outputs", ())
    ]
    found: dict[UUID, File] = {}
    for start in range(0, len(wanted), FILES_AT_ONCE_MAX):
        found |= await files.those_of(tx, tenant_id, wanted[start : start + FILES_AT_ONCE_MAX])
    return found


def told(
    key: Key,
    attempt: int,
    job: Job,
    dispatch: Dispatch | None,
    made: Mapping[UUID, File],
    backends: Iterable[BackendState],
) -> Iterator[Event]:
    """All of it each time: what a run has heard before changes nothing."""
    worker = dispatch.worker_id if dispatch else None
    if job.status == JobStatus.QUEUED:
        yield JobWaiting(key, attempt)
        return
    if worker and job.started_at:
        yield JobStarted(key, attempt, worker, job.started_at)
    if job.status == JobStatus.COMPLETED:
        yield JobDone(key, attempt, output_of(job, made), worker)
    elif job.status == JobStatus.CANCELLED:
        yield JobCancelled(key, attempt)
    elif job.status == JobStatus.FAILED:
        message = job.error_message or "Processing failed."
        cause = _cause(job, worker, backends)
        yield JobFailed(key, attempt, message, cause, worker, job.raw_error)


def _cause(job: Job, worker: str | None, backends: Iterable[BackendState]) -> Cause:
    if job.raw_error == TIMED_OUT:
        return Cause.TIMEOUT
    is_there = any(each.is_online for each in backends if each.worker_id == worker)
    return Cause.ERROR if is_there or worker is None else Cause.BACKEND_LOST


def progressed(key: Key, attempt: int, progress: Progress) -> JobProgressed:
    step = f"{progress.step} of {progress.steps}" if progress.step and progress.steps else None
    words = [f"node {progress.node}" if progress.node else None, step]
    current = ", ".join(filter(None, words)) or None
    return JobProgressed(key, attempt, (progress.percent or 0.0) / 100, current)


def output_of(job: Job, made: Mapping[UUID, File]) -> dict[str, Any]:
    """`{images, files, width, height, text, json, values, …}`; files by reference."""
    result = job.result_metadata or {}
    outputs = [
        _reference(each, made[UUID(each["file_id"])])
        for each in result.get("outputs", ())
        if UUID(each["file_id"]) in made
    ]
    pictures = [each for each in outputs if each["mime_type"].startswith(_PICTURES)]
    first = pictures[0] if pictures else {}
    return {
        "images": pictures,
        "files": outputs,
        "width": first.get("width") or 0,
        "height": first.get("height") or 0,
        **shown_by(job),
        "prompt_id": job.provider_job_id or "",
        "execution_time": result.get("execution_seconds") or 0.0,
    }


def shown_by(job: Job) -> dict[str, Any]:
    """What nodes showed. `values` has each by its name, and all of one node under that node's id."""
    shown, text = job.values, text_of(job.values) or ""
    by_name: dict[str, Any] = {}
    for each in shown:
        by_name.setdefault(each.name, each.value)
    by_node: dict[str, Any] = {}
    if len({each.node_id for each in shown}) > 1:
        for each in shown:
            by_node.setdefault(each.node_id, {}).setdefault(each.name, each.value)
    return {"text": text, "json": _meant(text), "values": {**by_node, **by_name}}


def _meant(text: str) -> Any:
    """A number, a boolean, a list or an object that was shown as text; None for plain words."""
    try:
        return clean(json.loads(text)) if text else None
    except (ValueError, RecursionError):
        return None


def _reference(output: Mapping[str, Any], file: File) -> dict[str, Any]:
    sizes = {name: output[name] for name in ("width", "height") if output.get(name)}
    return {**reference(file), **sizes}


def reference(file: File) -> dict[str, Any]:
    """A file as values of a run name it. Its path is a name for people, not where it lies."""
    return {
        "file_id": str(file.id),
        "filename": file.filename,
        "path": f"{file.id}/{file.filename}",
        "mime_type": file.mime_type,
        "size": file.size,
    }
