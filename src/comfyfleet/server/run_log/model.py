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


def counters_needed(files: Iterable[BackendFile]) -> dict[tuple[str, str], int]:
    """How many numbers each prefix takes: by folder and prefix, the highest that the run used."""
    needed: dict[tuple[str, str], int] = {}
    for file in files:
        if counted := split_counter(file.path):
            key = file.folder, counted.prefix
            needed[key] = max(needed.get(key, 0), counted.counter)
    return needed


def path_after(file: BackendFile, used: Mapping[tuple[str, str], int]) -> str:
    """Its path when so many numbers of its prefix were used before."""
    counted = split_counter(file.path)
    if counted is None:
        return file.path
    return counted.at(used.get((file.folder, counted.prefix), 0) + counted.counter)


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


def _meta(node_id: str, data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "display_node": str(data.get("display_node") or node_id),
        "parent_node": None,
        "real_node_id": node_id,
    }
