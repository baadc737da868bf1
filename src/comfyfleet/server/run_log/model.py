"""Logged messages, and names of files as ComfyUI would give them. Pure."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from comfyfleet.api.values import DeliveredOutput

Event: TypeAlias = tuple[str, dict[str, Any]]
FOLDERS = ("input", "output", "temp")
# In place of a folder: an upload whose name another has taken.
REPLACED = "replaced"
PATH_CHARACTERS_MAX = 500
# ComfyUI_00001_.png, video_00012.mp4: what comes before the counter, the counter, what comes after.
_COUNTED = re.compile(r"(?P<prefix>.*_)(?P<counter>\d{2,9})(?P<rest>_?(?:\.[^./]*)?)")


# Our own types beside ComfyUI's: frames that are binary there, and prompts that were taken back.
TEXT, PICTURE, REMOVED = "comfyfleet_text", "comfyfleet_picture", "comfyfleet_removed"
ENDS = ("execution_success", "execution_error", "execution_interrupted")
COMPLETED, FAILED, CANCELLED = "completed", "failed", "cancelled"
FAILED_TYPE = "comfyfleet.JobFailed"


class RunEnd(NamedTuple):
    """How a run ended, for what its backend has not told. `status`: completed, failed or cancelled."""

    status: str
    prompt: Mapping[str, Any] = {}
    error: str | None = None


class LoggedRun(NamedTuple):
    """Whose run it is, and under which lease it ran."""

    tenant_id: UUID
    user_id: UUID
    job_id: UUID
    lease_number: int
    client_id: str | None = None
    prompt_id: str = ""  # as the client knows it


@dataclass(frozen=True, slots=True)
class LoggedEvents:
    """One report of a worker. `record` comes with the last one, and is what history shows."""

    id: int
    job_id: UUID
    lease_number: int
    client_id: str | None
    prompt_id: str
    events: Sequence[Event]
    record: Mapping[str, Any] | None
    created_at: datetime

    @property
    def is_last(self) -> bool:
        """Its job has ended with it."""
        return self.record is not None


class LogLook(NamedTuple):
    """Of one moment: how many prompts wait or run, and what was told since the last look."""

    active: int
    rows: list[LoggedEvents]


class UserFile(NamedTuple):
    """A file under the name that its user knows: an upload, or an output of a job."""

    folder: str
    path: str
    file_id: UUID | None = None
    job_id: UUID | None = None
    output: str | None = None

    @property
    def subfolder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def filename(self) -> str:
        return self.path.rpartition("/")[2]


class BackendFile(NamedTuple):
    """Where a backend had a file, inside the job's own folder there."""

    folder: str
    subfolder: str
    filename: str

    @property
    def path(self) -> str:
        return f"{self.subfolder}/{self.filename}" if self.subfolder else self.filename


class CountedName(NamedTuple):
    prefix: str
    counter: int
    digits: int
    rest: str

    def at(self, counter: int) -> str:
        return f"{self.prefix}{counter:0{self.digits}}{self.rest}"


def split_counter(path: str) -> CountedName | None:
    """None: the name has no counter."""
    found = _COUNTED.fullmatch(path)
    if found is None:
        return None
    counter = found["counter"]
    return CountedName(found["prefix"], int(counter), len(counter), found["rest"])


def delivered_files(outputs: Iterable[DeliveredOutput]) -> dict[BackendFile, str]:
    """The name of the output, by where the backend had it."""
    return {
        BackendFile(each.folder, each.subfolder or "", each.filename or each.name): each.name
        for each in outputs
        if each.folder in FOLDERS
    }


class CounterRange(NamedTuple):
    """The numbers that a run used of one prefix on its backend. In its own folder they begin with 1; that of
    temporary files is shared."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first + 1


def counters_used(files: Iterable[BackendFile]) -> dict[tuple[str, str], CounterRange]:
    """By folder and prefix."""
    used: dict[tuple[str, str], CounterRange] = {}
    for file in files:
        if counted := split_counter(file.path):
            key, number = (file.folder, counted.prefix), counted.counter
            begin = number if file.folder == "temp" else 1
            first, last = used.get(key, CounterRange(begin, number))
            used[key] = CounterRange(min(first, number), max(last, number))
    return used


def path_after(
    file: BackendFile,
    ranges: Mapping[tuple[str, str], CounterRange],
    before: Mapping[tuple[str, str], int],
) -> str:
    """Its path when so many numbers of its prefix were used before."""
    counted = split_counter(file.path)
    if counted is None:
        return file.path
    key = file.folder, counted.prefix
    return counted.at(before.get(key, 0) + counted.counter - ranges[key].first + 1)


def with_other_files(
    value: Any, renamed: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
) -> Any:
    """The same JSON, where each object that names a file is replaced by what `renamed` makes of it."""
    if isinstance(value, Mapping):
        if "filename" in value and "type" in value:
            return renamed(value) or value
        return {key: with_other_files(each, renamed) for key, each in value.items()}
    return [with_other_files(each, renamed) for each in value] if isinstance(value, list) else value


def with_prompt_id(value: Any, prompt_id: str) -> Any:
    """The same JSON, where each `prompt_id` is the client's."""
    if isinstance(value, Mapping):
        return {
            key: prompt_id if key == "prompt_id" else with_prompt_id(each, prompt_id)
            for key, each in value.items()
        }
    return [with_prompt_id(each, prompt_id) for each in value] if isinstance(value, list) else value


def file_named(value: Mapping[str, Any]) -> BackendFile:
    """What an output of a node names."""
    subfolder = str(value.get("subfolder") or "").replace("\\", "/").strip("/")
    return BackendFile(str(value.get("type")), subfolder, str(value.get("filename")))


def record_from(
    events: Iterable[Event], history: Mapping[str, Any] | None, *, is_success: bool
) -> dict[str, Any]:
    """What history shows of a run: as the backend had it, else made of its messages."""
    if history and isinstance(history.get("status"), Mapping):
        return {name: history.get(name) or {} for name in ("outputs", "meta", "status")}
    outputs: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    messages: list[list[Any]] = []
    for kind, data in events:
        if kind == "executed" and data.get("output") is not None:
            node_id = str(data.get("node"))
            outputs[node_id] = data["output"]
            meta[node_id] = _meta(node_id, data)
        elif kind.startswith("execution_"):
            messages.append([kind, data])
    status = "success" if is_success else "error"
    return {
        "outputs": outputs,
        "meta": meta,
        "status": {"status_str": status, "completed": is_success, "messages": messages},
    }


def is_ended(events: Iterable[Event]) -> bool:
    return any(kind in ENDS for kind, _ in events)


def events_since_start(events: Sequence[Event]) -> list[Event]:
    """Those of the run's last beginning: a run may have had to begin again elsewhere."""
    starts = [index for index, (kind, _) in enumerate(events) if kind == "execution_start"]
    return list(events[starts[0] if starts else 0 :])


def missing_events(
    prompt_id: str, end: RunEnd, heard: Sequence[Event], at: datetime
) -> list[Event]:
    """What ComfyUI would have told and the backend has not: a beginning, an end."""
    if is_ended(heard):
        return []
    opening = {"prompt_id": prompt_id, "timestamp": int(at.timestamp() * 1000)}
    has_begun = any(kind == "execution_start" for kind, _ in heard)
    first: list[Event] = [] if has_begun else [("execution_start", opening)]
    return [*first, end_event(prompt_id, end, heard, at)]


def end_event(prompt_id: str, end: RunEnd, heard: Iterable[Event], at: datetime) -> Event:
    heard = list(heard)
    node_id = current_node(heard)
    timestamp = int(at.timestamp() * 1000)
    if end.status == COMPLETED:
        return "execution_success", {"prompt_id": prompt_id, "timestamp": timestamp}
    data: dict[str, Any] = {
        "prompt_id": prompt_id,
        "node_id": node_id,
        "node_type": end.prompt.get(node_id or "", {}).get("class_type"),
        "executed": sorted(_executed(heard)),
    }
    if end.status == CANCELLED:
        return "execution_interrupted", {**data, "timestamp": timestamp}
    failure = {
        "exception_message": end.error or "The prompt failed.",
        "exception_type": FAILED_TYPE,
        "traceback": [],
        "current_inputs": {},
        "current_outputs": [],
        "timestamp": timestamp,
    }
    return "execution_error", {**data, **failure}


def current_node(heard: Iterable[Event]) -> str | None:
    nodes = [data.get("node") for kind, data in heard if kind == "executing"]
    return str(nodes[-1]) if nodes and nodes[-1] is not None else None


def _executed(heard: Iterable[Event]) -> set[str]:
    return {str(data.get("node")) for kind, data in heard if kind == "executed"}


def _meta(node_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "display_node": str(data.get("display_node") or node_id),
        "parent_node": None,
        "real_node_id": node_id,
    }
