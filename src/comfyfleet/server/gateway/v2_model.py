"""Formats jobs, progress and assets for Comfy API v2. This module does no I/O."""

import base64
import math
import mimetypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.worker import RunPreview
from comfyfleet.protocol.payloads import Record
from comfyfleet.server.gateway.model import gateway_data, prompt_id_of
from comfyfleet.server.jobs.model import Job, JobStatus
from comfyfleet.server.media.model import File
from comfyfleet.server.run_log.model import Event, UserFile, file_named

JOBS_PATH, ASSETS_PATH = "/api/v2/jobs", "/api/v2/assets"
STATUSES: Mapping[JobStatus, str] = {
    JobStatus.QUEUED: "queued",
    JobStatus.PROCESSING: "running",
    JobStatus.COMPLETED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.CANCELLED: "canceled",
}
CANCELING, EXPIRED = "canceling", "expired"
# Our own job status for each status of the API.
OWN_STATUSES: Mapping[str, JobStatus] = {
    **{status: own for own, status in STATUSES.items()},
    CANCELING: JobStatus.PROCESSING,
    EXPIRED: JobStatus.FAILED,
}
# The first characters of the error that a worker reports if it stops a run at its time limit.
RUN_LIMIT_ERROR = '{"code": "run_limit"'
ENDED = frozenset({"succeeded", "failed", "canceled", "expired"})
# The retention period in days that is reported if jobs are kept forever. Clients require a date.
KEPT_DAYS = 365
URL_VALID = timedelta(hours=24)
OUTPUT_TYPES = {
    "images": "image",
    "gifs": "video",
    "video": "video",
    "audio": "audio",
    "text": "text",
    "latents": "latent",
}
TEXT, PICTURE = "comfyfleet_text", "comfyfleet_picture"


def time_text(moment: datetime) -> str:
    """Formats a time in ISO 8601 with the suffix `Z`, which strict parsers require."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _time_or_none(moment: datetime | None) -> str | None:
    return None if moment is None else time_text(moment)


def status_of(job: Job, *, is_cancelling: bool = False) -> str:
    """Returns the API's status for a job. `is_cancelling` must be set if the worker was sent a stop
    request.
    """
    if job.status == JobStatus.FAILED and (job.raw_error or "").startswith(RUN_LIMIT_ERROR):
        return EXPIRED
    if is_cancelling and job.shown_status == JobStatus.PROCESSING:
        return CANCELING
    return STATUSES[job.shown_status]


@dataclass
class LoggedProgress:
    """The progress of a run, calculated from its messages so far."""

    prompt: Mapping[str, Any]
    done: set[str] = field(default_factory=set)
    current: str | None = None
    step: int | None = None
    steps: int | None = None

    def take(self, event: Event) -> bool:
        """Processes a message. Returns whether it changed the progress."""
        kind, data = event
        if kind == "execution_start":
            self.done, self.current = set(), None
        elif kind == "execution_cached":
            cached = data.get("nodes")
            self.done |= {str(node) for node in (cached if isinstance(cached, list) else ())}
        elif kind == "executing":
            self._begin(_text(data.get("display_node") or data.get("node")))
        elif kind == "executed":
            self.done.add(str(data.get("display_node") or data.get("node")))
        elif kind == "progress":
            self._begin(_text(data.get("node")))
            self.step, self.steps = _whole(data.get("value")), _whole(data.get("max"))
        elif kind == "progress_state":
            nodes = data.get("nodes")
            self._take_state(nodes if isinstance(nodes, Mapping) else {})
        else:
            return False
        return True

    def _begin(self, node_id: str | None) -> None:
        if node_id != self.current:
            self.current, self.step, self.steps = node_id, None, None

    def _take_state(self, nodes: Mapping[str, Any]) -> None:
        for node_id, node in nodes.items():
            if not isinstance(node, Mapping):
                continue
            shown = str(node.get("display_node_id") or node_id)
            if node.get("state") == "finished":
                self.done.add(shown)
            elif node.get("state") == "running":
                self._begin(shown)
                self.step, self.steps = _whole(node.get("value")), _whole(node.get("max"))

    def snapshot(self) -> dict[str, Any]:
        """Returns the current progress of the whole run, in the API's format."""
        done = len(self.done & self.prompt.keys())
        total = max(len(self.prompt), 1)
        part = 0.0
        if self.current not in self.done and self.step is not None and self.steps:
            part = min(max(self.step / self.steps, 0.0), 1.0)
        class_type = self.prompt.get(self.current or "", {}).get("class_type")
        is_counted = self.step is not None and (self.steps or 0) > 1
        return {
            "value": min((done + part) / total, 1.0),
            "nodes_done": done,
            "nodes_total": len(self.prompt),
            "current_node": self.current,
            "current_node_class": class_type,
            "step": self.step,
            "steps": self.steps,
            "message": f"{class_type} {self.step}/{self.steps}" if is_counted else class_type,
        }


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: object) -> int | None:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return int(value) if is_number else None  # type: ignore[call-overload]


def preview_of(event: Event) -> dict[str, Any] | None:
    """Returns the preview image in a message, or None if it is a different message."""
    kind, data = event
    if kind != PICTURE or not data.get("base64"):
        return None
    return {
        "node_id": str(data.get("node") or ""),
        "content_type": str(data.get("content_type") or "image/jpeg"),
        "data_base64": data["base64"],
    }


def preview_body(preview: RunPreview) -> dict[str, Any]:
    return {
        "node_id": preview.node_id or "",
        "content_type": preview.content_type,
        "data_base64": preview.base64,
    }


class Reader(NamedTuple):
    """The client for which a response is built. `base` is the URL at which it reaches this
    server.
    """

    base: str
    now: datetime
    kept_days: int = 0  # Retention period of jobs and files in days. 0 means forever.

    def asset_url(self, file: File) -> str:
        return f"{self.base}{ASSETS_PATH}/{file.id}/content"

    def job_url(self, prompt_id: str) -> str:
        return f"{self.base}{JOBS_PATH}/{prompt_id}"


class JobFacts(NamedTuple):
    """The data in a job's response that isn't stored in its row. `record` is the history record,
    which is incomplete for a running job.
    """

    record: Record | None = None
    names: Iterable[UserFile] = ()
    files: Mapping[UUID, File] = {}
    progress: Mapping[str, Any] | None = None
    queue_position: int | None = None
    is_cancelling: bool = False


def job_body(job: Job, facts: JobFacts, reader: Reader) -> dict[str, Any]:
    data = gateway_data(job)
    prompt_id = prompt_id_of(job)
    url = reader.job_url(prompt_id)
    retention = timedelta(days=reader.kept_days or KEPT_DAYS)
    messages = messages_of(facts.record)
    started = job.started_at if job.shown_status != JobStatus.QUEUED else None
    body = {
        "id": prompt_id,
        "status": status_of(job, is_cancelling=facts.is_cancelling),
        "created_at": time_text(job.submitted_at),
        "started_at": _time_or_none(started),
        "completed_at": _time_or_none(job.completed_at),
        "expires_at": time_text(job.submitted_at + retention),
        "queue_position": facts.queue_position,
        "progress": facts.progress,
        "outputs": list(outputs_of(job, facts, reader)),
        "outputs_reused": bool((messages.get("execution_cached") or {}).get("nodes")),
        "error": error_of(job, messages),
        "metrics": {
            "queue_ms": _milliseconds(job.submitted_at, started),
            "execution_ms": _milliseconds(started, job.completed_at),
        },
        "urls": {"self": url, "events": f"{url}/events", "cancel": f"{url}/cancel"},
    }
    optional = {name: data[name] for name in ("metadata", "priority") if data.get(name) is not None}
    return body | optional


def list_item(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a job as an entry of a list. Adds two timestamps under the names that clients expect
    in lists."""
    changed = body["completed_at"] or body["started_at"] or body["created_at"]
    return {**body, "create_time": body["created_at"], "update_time": changed}


def _milliseconds(begin: datetime | None, end: datetime | None) -> int | None:
    if begin is None or end is None:
        return None
    return max(int((end - begin).total_seconds() * 1000), 0)


def messages_of(record: Record | None) -> dict[str, Mapping[str, Any]]:
    """Returns the last message of each type."""
    messages = ((record or {}).get("status") or {}).get("messages") or ()
    return dict(messages)


def error_of(job: Job, messages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if job.status != JobStatus.FAILED:
        return None
    error = messages.get("execution_error") or {}
    node_id = error.get("node_id")
    trace = error.get("traceback")
    return {
        "code": "job_failed" if node_id is None else "node_execution_error",
        "message": str(error.get("exception_message") or job.error_message or "The job failed."),
        "node_id": _text(node_id),
        "class_type": _text(error.get("node_type")),
        "traceback": "".join(map(str, trace)) if isinstance(trace, list) and trace else None,
    }


def outputs_of(job: Job, facts: JobFacts, reader: Reader) -> Iterator[dict[str, Any]]:
    """Yields a job's output files in the order of its nodes. Deleted files are left out."""
    by_output = {output.name: output.file_id for output in job.outputs}
    by_name = {
        (named.folder, named.path): facts.files.get(file_id)
        for named in facts.names
        # Before the job is completed, only the names contain the file ids.
        if (file_id := named.file_id or by_output.get(named.output or "")) is not None
    }
    for node_id, listed in ((facts.record or {}).get("outputs") or {}).items():
        for key, values in listed.items():
            for value in values if isinstance(values, list) else ():
                if not isinstance(value, Mapping) or "filename" not in value:
                    continue
                named = file_named(value)
                file = by_name.get((named.folder, named.path))
                if file is not None:
                    shown = {
                        "node_id": node_id,
                        "name": named.filename,
                        "type": output_type(key, file.mime_type),
                        "job_id": prompt_id_of(job),
                    }
                    yield shown | _content(file, reader)


def output_type(key: str, media_type: str) -> str:
    """Returns the type of an output. For video and audio, the media type takes precedence over the
    key, because ComfyUI's nodes also list videos under `images`.
    """
    family = media_type.partition("/")[0]
    if family in ("video", "audio"):
        return family
    if key in OUTPUT_TYPES:
        return OUTPUT_TYPES[key]
    return family if family in ("image", "text") else "file"


def _content(file: File, reader: Reader) -> dict[str, Any]:
    return {
        "id": str(file.id),
        "content_type": file.mime_type,
        "size_bytes": file.size or 0,
        "hash": f"blake3:{file.content_hash}" if file.content_hash else None,
        "url": reader.asset_url(file),
        "url_expires_at": time_text(reader.now + URL_VALID),
    }


def asset_body(
    file: File,
    path: str,
    reader: Reader,
    *,
    created_new: bool | None = None,
    prompt_id: str | None = None,
) -> dict[str, Any]:
    body = {
        **_content(file, reader),
        "file_path": path,
        "created_at": time_text(file.created_at),
        "expires_at": _time_or_none(expiry_of(file)),
    }
    if created_new is not None:
        body["created_new"] = created_new
    return body if prompt_id is None else {**body, "job_id": prompt_id}


EXPIRES_AT, TAGS = "expires_at", "tags"


def expiry_of(file: File) -> datetime | None:
    expiry = file.metadata.get(EXPIRES_AT)
    return datetime.fromisoformat(expiry) if isinstance(expiry, str) else None


def is_editor_format(workflow: Mapping[str, Any]) -> bool:
    """Checks whether the workflow is in the editor's format, as opposed to a prompt."""
    return isinstance(workflow.get("nodes"), list) and "links" in workflow


REFERENCE = "core/ASSET"


def references_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields all asset references in a JSON value, at any depth."""
    if isinstance(value, Mapping):
        if value.get("__type") == REFERENCE:
            yield value
        else:
            for entry in value.values():
                yield from references_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from references_in(entry)


class AssetReference(NamedTuple):
    """A reference to an asset by id, or by hash if it has no id. `path` selects one of the asset's
    names.
    """

    id: str | None
    hash: str | None
    path: str | None

    @property
    def shown(self) -> str:
        return self.id or self.hash or "(no id)"


def parse_reference(reference: Mapping[str, Any]) -> AssetReference:
    info = reference.get("info")
    named = info if isinstance(info, Mapping) else {}
    values = (named.get(name) for name in ("id", "hash", "file_path"))
    return AssetReference(*(value if isinstance(value, str) else None for value in values))


def with_names(value: Any, names: Mapping[AssetReference, str]) -> Any:
    """Returns a copy of the workflow with its asset references replaced by file names."""
    if isinstance(value, Mapping):
        if value.get("__type") == REFERENCE:
            return names[parse_reference(value)]
        return {key: with_names(entry, names) for key, entry in value.items()}
    return [with_names(entry, names) for entry in value] if isinstance(value, list) else value


class EventPlace(NamedTuple):
    """A reader's position in a job's events. The reports of the run come first, then the outputs,
    and then the end.
    """

    row: int = 0
    outputs: int = 0
    is_over: bool = False


END = "end"


def parse_place(text: str | None) -> EventPlace:
    """Parses a `Last-Event-ID` header. An unknown value means that the stream starts at the first
    event."""
    if not text:
        return EventPlace()
    if text == END:
        return EventPlace(is_over=True)
    head, dot, count = text.partition(".")
    if head == END and dot and count.isdecimal() and len(count) < 10:
        return EventPlace(outputs=int(count))
    return EventPlace(row=int(text)) if text.isdecimal() and len(text) < 19 else EventPlace()


def encode_cursor(job: Job) -> str:
    place = f"{job.submitted_at.isoformat()} {job.id}"
    return base64.urlsafe_b64encode(place.encode()).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[datetime, UUID] | None:
    """Decodes a cursor. Returns None if the cursor isn't valid."""
    try:
        place = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        moment, _, job_id = place.partition(" ")
        at = datetime.fromisoformat(moment)
        return (at, UUID(job_id)) if at.tzinfo else None
    except ValueError:
        return None


def guessed_type(name: str, declared: str | None) -> str:
    plain = (declared or "").partition(";")[0].strip()
    return plain or mimetypes.guess_type(name)[0] or "application/octet-stream"
