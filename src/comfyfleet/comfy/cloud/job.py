"""A job of API v2, parsed at the border."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

from comfyfleet.comfy.shapes import list_in, mapping_in, text_at

JobStatus = Literal["queued", "running", "succeeded", "failed", "expired", "canceling", "canceled"]
T = TypeVar("T")

STATUSES = frozenset(get_args(JobStatus))
ENDED = frozenset({"succeeded", "failed", "expired", "canceled"})


@dataclass(frozen=True, slots=True)
class JobOutput:
    """A file that a job made; `url` is good until it expires, `asset_id` as long as the job is."""

    node_id: str
    name: str
    kind: str
    asset_id: str
    url: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class JobFault:
    code: str
    message: str
    node_id: str | None
    class_type: str | None
    traceback: str | None


@dataclass(frozen=True, slots=True)
class JobProgress:
    """A whole snapshot, never a difference."""

    value: float
    node_id: str | None
    step: int | None
    steps: int | None


@dataclass(frozen=True, slots=True)
class Job:
    job_id: str
    status: JobStatus
    outputs: tuple[JobOutput, ...]
    fault: JobFault | None
    events_url: str | None
    cancel_url: str | None
    queue_position: int | None
    is_reused: bool

    @property
    def is_over(self) -> bool:
        return self.status in ENDED


def parse_job(answer: object) -> Job:
    job = mapping_in(answer, "a job")
    urls = job.get("urls")
    links: Mapping[str, Any] = urls if isinstance(urls, Mapping) else {}
    fault = job.get("error")
    return Job(
        job_id=text_at(job, "id", "a job"),
        status=parse_status(job),
        outputs=_parse_outputs(job.get("outputs")),
        fault=None if fault is None else _parse_fault(fault),
        events_url=_optional(links.get("events"), str),
        cancel_url=_optional(links.get("cancel"), str),
        queue_position=_optional(job.get("queue_position"), int),
        is_reused=job.get("outputs_reused") is True,
    )


def parse_status(holder: Mapping[str, Any]) -> JobStatus:
    """Words that v2 does not have are in flight: only the four ends end a job."""
    status = text_at(holder, "status", "a job")
    return cast(JobStatus, status) if status in STATUSES else "running"


def _parse_outputs(answer: object) -> tuple[JobOutput, ...]:
    rows = [] if answer is None else list_in(answer, "a list of outputs")
    return tuple(parse_output(row) for row in rows)


def parse_output(answer: object) -> JobOutput:
    output = mapping_in(answer, "an output")
    return JobOutput(
        node_id=text_at(output, "node_id", "an output"),
        name=text_at(output, "name", "an output"),
        kind=_optional(output.get("type"), str) or "file",
        asset_id=text_at(output, "id", "an output"),
        url=text_at(output, "url", "an output"),
        # Some servers say 0 for what they have not measured.
        size_bytes=_optional(output.get("size_bytes"), int) or None,
    )


def parse_progress(answer: object) -> JobProgress:
    progress = mapping_in(answer, "progress")
    value = progress.get("value")
    return JobProgress(
        value=float(value) if isinstance(value, int | float) else 0.0,
        node_id=_optional(progress.get("current_node"), str),
        step=_optional(progress.get("step"), int),
        steps=_optional(progress.get("steps"), int),
    )


def _parse_fault(answer: object) -> JobFault:
    fault = mapping_in(answer, "an error of a job")
    return JobFault(
        code=_optional(fault.get("code"), str) or "failed",
        message=_optional(fault.get("message"), str) or "",
        node_id=_optional(fault.get("node_id"), str),
        class_type=_optional(fault.get("class_type"), str),
        traceback=_optional(fault.get("traceback"), str),
    )


def _optional(value: object, kind: type[T]) -> T | None:
    """What is only told to people is left out when it is odd, rather than ending a run."""
    return value if isinstance(value, kind) else None
