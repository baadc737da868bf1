"""Bodies of ComfyUI's protocol: submitted prompts, parsed as leniently as in ComfyUI and with the
same errors, and the queue and history in the form of jobs for `/api/jobs`. All functions are
pure."""

import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from comfyfleet.errors import InvalidInput
from comfyfleet.protocol.validation import Fault, Prompt, fault


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt in the queue. Smaller numbers run first."""

    number: float
    prompt_id: str
    prompt: Prompt
    extra_data: Mapping[str, Any]
    outputs: tuple[str, ...]

    @property
    def client_id(self) -> Any:
        return self.extra_data.get("client_id")

    def row(self) -> list[Any]:
        """Returns the item in the form of `/queue` and `/history`."""
        return [self.number, self.prompt_id, self.prompt, self.extra_data, list(self.outputs)]


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of a run and its displayed outputs."""

    success: bool
    messages: Sequence[tuple[str, Mapping[str, Any]]]
    outputs: Mapping[str, Any]
    meta: Mapping[str, Any]


Record = Mapping[str, Any]


def history_record(item: QueuedPrompt, outcome: RunOutcome) -> Record:
    """Returns a history item in the form of `/history`."""
    return {
        "prompt": item.row(),
        "outputs": outcome.outputs,
        "status": {
            "status_str": "success" if outcome.success else "error",
            "completed": outcome.success,
            "messages": outcome.messages,
        },
        "meta": outcome.meta,
    }


class UnforeseenInput(InvalidInput):
    """Invalid input that ComfyUI doesn't handle. ComfyUI responds with 500, so we do too, because
    clients expect it."""

    code = "trouble"


class MalformedBody(UnforeseenInput):
    code = "malformed_body"


Job = dict[str, Any]
T = TypeVar("T")

STATUSES = ("pending", "in_progress", "completed", "failed", "cancelled")
SORT_KEYS = ("created_at", "execution_duration")
PREVIEWABLE = frozenset({"images", "video", "audio", "3d", "text"})
MODEL_EXTENSIONS = (".obj", ".fbx", ".gltf", ".glb", ".usdz")
TEXT_EXTENSIONS = (".txt", ".md", ".json")
PREVIEW_TEXT_CHARACTERS_MAX = 1024


class InvalidQuery(InvalidInput):
    """Raised for an invalid parameter of the job list."""

    code = "invalid_query"


@dataclass(frozen=True, slots=True)
class JobQuery:
    statuses: Sequence[str] = STATUSES
    workflow_id: str | None = None
    sort_by: str = "created_at"
    descending: bool = True
    limit: int | None = None
    offset: int = 0


def read_query(params: Mapping[str, str]) -> JobQuery:
    sort_by = params.get("sort_by", "created_at").lower()
    sort_order = params.get("sort_order", "desc").lower()
    statuses = read_statuses(params.get("status"))
    if sort_by not in SORT_KEYS:
        raise InvalidQuery("sort_by must be 'created_at' or 'execution_duration'")
    if sort_order not in ("asc", "desc"):
        raise InvalidQuery("sort_order must be 'asc' or 'desc'")
    limit = _read_integer(params, "limit")
    if limit is not None and limit <= 0:
        raise InvalidQuery("limit must be a positive integer")
    return JobQuery(
        statuses=statuses,
        workflow_id=params.get("workflow_id") or None,
        sort_by=sort_by,
        descending=sort_order == "desc",
        limit=limit,
        offset=max(_read_integer(params, "offset") or 0, 0),
    )


def read_statuses(text: str | None) -> Sequence[str]:
    if not text:
        return STATUSES
    statuses = [part.strip().lower() for part in text.split(",") if part.strip()]
    unknown = [status for status in statuses if status not in STATUSES]
    if unknown:
        raise InvalidQuery(
            f"Invalid status value(s): {', '.join(unknown)}. Valid values: {', '.join(STATUSES)}"
        )
    return statuses


def _read_integer(params: Mapping[str, str], name: str) -> int | None:
    if name not in params:
        return None
    try:
        return int(params[name])
    except ValueError as error:
        raise InvalidQuery(f"{name} must be an integer") from error


def list_jobs(
    query: JobQuery,
    running: Iterable[QueuedPrompt],
    waiting: Iterable[QueuedPrompt],
    history: Mapping[str, Record],
) -> dict[str, Any]:
    """Returns the requested page of jobs and its position."""
    page, total = select_jobs(query, all_jobs(running, waiting, history), lambda job: job)
    return {"jobs": page, "pagination": pagination(query, len(page), total)}


def select_jobs(
    query: JobQuery, listed: Iterable[T], job_of: Callable[[T], Mapping[str, Any]]
) -> tuple[list[T], int]:
    """Returns the requested page, and the total number of matching jobs."""
    matching = [item for item in listed if _is_wanted(job_of(item), query)]
    sort_key = _duration if query.sort_by == "execution_duration" else _age
    matching.sort(key=lambda item: sort_key(job_of(item)), reverse=query.descending)
    end = None if query.limit is None else query.offset + query.limit
    return matching[query.offset : end], len(matching)


def pagination(query: JobQuery, count: int, total: int) -> dict[str, Any]:
    """Describes the position of a page with `count` jobs in the whole list."""
    return {
        "offset": query.offset,
        "limit": query.limit,
        "total": total,
        "has_more": query.offset + count < total,
    }


def all_jobs(
    running: Iterable[QueuedPrompt], waiting: Iterable[QueuedPrompt], history: Mapping[str, Record]
) -> Iterator[Job]:
    yield from (waiting_job(item, "in_progress") for item in running)
    yield from (waiting_job(item, "pending") for item in waiting)
    yield from (ended_job(prompt_id, entry) for prompt_id, entry in history.items())


def _is_wanted(job: Mapping[str, Any], query: JobQuery) -> bool:
    if job["status"] not in query.statuses:
        return False
    return query.workflow_id is None or job.get("workflow_id") == query.workflow_id


def _age(job: Mapping[str, Any]) -> int:
    return int(job.get("create_time", 0))


def _duration(job: Mapping[str, Any]) -> int:
    start, end = job.get("execution_start_time", 0), job.get("execution_end_time", 0)
    return int(end - start) if start and end else 0


def waiting_job(item: QueuedPrompt, status: str) -> Job:
    return _without_none(
        {
            "id": item.prompt_id,
            "status": status,
            "priority": item.number,
            "create_time": item.extra_data.get("create_time"),
            "outputs_count": 0,
            "workflow_id": _workflow_id(item.extra_data),
        }
    )


def ended_job(prompt_id: str, entry: Record) -> Job:
    number, _, _, extra_data, _ = entry["prompt"]
    messages = dict(entry["status"]["messages"])
    end: Mapping[str, Any] = next((messages[name] for name in END_EVENTS if name in messages), {})
    count, preview = _summarise(entry["outputs"])
    return _without_none(
        {
            "id": prompt_id,
            "status": _status(entry, messages),
            "priority": number,
            "create_time": extra_data.get("create_time"),
            "execution_start_time": messages.get("execution_start", {}).get("timestamp"),
            "execution_end_time": end.get("timestamp"),
            "execution_error": messages.get("execution_error"),
            "outputs_count": count,
            "preview_output": preview,
            "workflow_id": _workflow_id(extra_data),
        }
    )


END_EVENTS = ("execution_success", "execution_error", "execution_interrupted")


def detailed_job(prompt_id: str, entry: Record) -> Job:
    _, _, prompt, extra_data, _ = entry["prompt"]
    return {
        **ended_job(prompt_id, entry),
        "outputs": entry["outputs"],
        "execution_status": entry["status"],
        "workflow": {"prompt": prompt, "extra_data": extra_data},
    }


def _status(entry: Record, messages: Mapping[str, Any]) -> str:
    if entry["status"]["status_str"] == "success":
        return "completed"
    return "cancelled" if "execution_interrupted" in messages else "failed"


def _workflow_id(extra_data: Mapping[str, Any]) -> Any:
    """Returns the id of the saved workflow, or None if a level of the path is not an object."""
    value: Any = extra_data
    for key in ("extra_pnginfo", "workflow", "id"):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _without_none(job: Job) -> Job:
    return {key: value for key, value in job.items() if value is not None}


def _summarise(outputs: Mapping[str, Any]) -> tuple[int, Job | None]:
    """Returns the number of files, and the job's preview: a saved file, or otherwise any file."""
    count = 0
    candidates: list[Job] = []
    for node_id, media, value in _each_output(outputs):
        count += isinstance(value, Mapping)
        preview = _preview_of(media, value)
        if preview:
            candidates.append({**preview, "nodeId": node_id, "mediaType": media})
    saved = (preview for preview in candidates if preview.get("type") == "output")
    return count, next(saved, candidates[0] if candidates else None)


def _each_output(outputs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for node_id, by_media in outputs.items():
        for media, values in by_media.items():
            if media != "animated" and isinstance(values, list | tuple):
                yield from ((node_id, media, value) for value in values)


def _preview_of(media: str, value: Any) -> Job | None:
    if isinstance(value, Mapping):
        return dict(value) if _is_previewable(media, value) else None
    if media != "text" or value is None:
        return None
    text = str(value)
    if len(text) <= PREVIEW_TEXT_CHARACTERS_MAX:
        return {"content": text}
    return {"content": text[:PREVIEW_TEXT_CHARACTERS_MAX], "truncated": True}


def _is_previewable(media: str, value: Mapping[str, Any]) -> bool:
    if media in PREVIEWABLE:
        return True
    if str(value.get("format", "")).startswith(("video/", "audio/")):
        return True
    name = str(value.get("filename", "")).lower()
    return name.endswith(MODEL_EXTENSIONS + TEXT_EXTENSIONS)


SECRETS = ("auth_token_comfy_org", "api_key_comfy_org")
# Minimum and maximum length of a client's key. Keys are redacted wherever they occur in text, so
# they must be longer than common words and must not contain characters that quoting would escape.
SECRET_CHARACTERS_MIN, SECRET_CHARACTERS_MAX = 16, 2_000
_SECRET = re.compile(r"(?=.*[0-9])[A-Za-z0-9._~+/=:-]+")
ABSENT: Final = object()

NO_PROMPT = fault("no_prompt", "No prompt provided", "No prompt provided")
INVALID_PROMPT_ID = fault(
    "invalid_prompt_id",
    "prompt_id must be a valid UUID",
    "prompt_id must be a UUID string in canonical lowercase hyphenated form; "
    "omit it to let the server generate one",
)


class RefusedPrompt(InvalidInput):
    """Raised if no part of the prompt will run."""

    code = "refused_prompt"

    def __init__(self, error: Fault, node_errors: Mapping[str, Any] | None = None) -> None:
        super().__init__(error["message"])
        self.body = {"error": error, "node_errors": node_errors or {}}


@dataclass(frozen=True, slots=True)
class PromptSubmission:
    """A submitted body that contains a well-formed prompt."""

    prompt: Prompt
    prompt_id: str | None
    extra_data: Mapping[str, Any]
    targets: Collection[str] | None
    # The client's keys for paid services. They are never stored, logged or displayed.
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)


def body_field(body: object, name: str) -> Any:
    """Returns `body[name]`, or ABSENT if the field is missing. As in ComfyUI, the field also counts
    as missing if the body is a list or string that doesn't contain the name."""
    if isinstance(body, dict):
        return body.get(name, ABSENT)
    if isinstance(body, list | str) and name not in body:
        return ABSENT
    raise MalformedBody(f"expected a JSON object, not {type(body).__name__}")


def read_number(body: object) -> tuple[float | None, bool]:
    """Returns the queue number that the client requests, and whether the prompt should be first."""
    number = body_field(body, "number")
    if number is ABSENT:
        return None, bool(body_field(body, "front")) and body_field(body, "front") is not ABSENT
    try:
        return float(number), False
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedBody(f"number: {error}") from error


def parse_submission(body: object) -> PromptSubmission:
    prompt = body_field(body, "prompt")
    if prompt is ABSENT:
        raise RefusedPrompt(NO_PROMPT)
    return PromptSubmission(
        prompt_id=_read_prompt_id(body_field(body, "prompt_id")),
        prompt=_read_prompt(prompt),
        extra_data=_read_extra_data(body),
        secrets=_read_secrets(body),
        targets=_read_targets(body_field(body, "partial_execution_targets")),
    )


def is_canonical_id(value: object) -> bool:
    """Checks whether a value is a UUID in ComfyUI's form: lowercase, with hyphens."""
    try:
        return isinstance(value, str) and str(uuid.UUID(value)) == value
    except ValueError:
        return False


def _read_prompt_id(value: Any) -> str | None:
    if value is ABSENT or value is None:
        return None
    if not is_canonical_id(value):
        raise RefusedPrompt(INVALID_PROMPT_ID)
    return str(value)


def _read_prompt(value: Any) -> Prompt:
    if not isinstance(value, dict):
        raise MalformedBody("prompt must be an object")
    for node_id, node in value.items():
        if not _is_node(node):
            raise MalformedBody(f"node {node_id} is malformed")
        if isinstance(node.get("inputs"), list):
            raise _inputs_as_list(node_id, node)
    return value


def _inputs_as_list(node_id: str, node: Mapping[str, Any]) -> RefusedPrompt:
    """Returns the error that ComfyUI sends for a node whose inputs are a list."""
    class_type = node.get("class_type")
    class_type = class_type[:200] if isinstance(class_type, str) else class_type
    details = "inputs must be an object, not a list"
    node_fault = fault("exception_during_validation", "Exception when validating node", details)
    entry = {"errors": [node_fault], "dependent_outputs": [node_id[:200]], "class_type": class_type}
    message = "Prompt outputs failed validation"
    line = f"{node_fault['message']}: {details}"
    error = fault("prompt_outputs_failed_validation", message, line)
    return RefusedPrompt(error, {node_id[:200]: entry})


def _is_node(node: object) -> bool:
    if not isinstance(node, dict) or not isinstance(node.get("inputs", {}), dict | list):
        return False
    named = isinstance(node.get("class_type"), str | int | float | None)
    return named and isinstance(node.get("_meta", {}), dict)


def _read_extra_data(body: object) -> Mapping[str, Any]:
    extra = body_field(body, "extra_data")
    if extra is ABSENT:
        extra = {}
    if not isinstance(extra, dict):
        raise MalformedBody("extra_data must be an object")
    client_id = body_field(body, "client_id")
    extra_data = extra if client_id is ABSENT else {**extra, "client_id": client_id}
    return {key: value for key, value in extra_data.items() if key not in SECRETS}


def _read_secrets(body: object) -> Mapping[str, str]:
    extra = body_field(body, "extra_data")
    secrets = (
        {name: extra[name] for name in SECRETS if name in extra} if extra is not ABSENT else {}
    )
    return {
        name: secret
        for name, secret in secrets.items()
        if isinstance(secret, str) and _is_key(secret)
    }


def _is_key(text: str) -> bool:
    is_fitting = SECRET_CHARACTERS_MIN <= len(text) <= SECRET_CHARACTERS_MAX
    return is_fitting and _SECRET.fullmatch(text) is not None


def _read_targets(value: Any) -> Collection[str] | None:
    if value is ABSENT or value is None:
        return None
    if not isinstance(value, list | dict | str):
        raise MalformedBody("partial_execution_targets must be a list")
    return value
