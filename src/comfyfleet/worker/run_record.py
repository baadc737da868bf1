"""The record of a run: the backend's own messages, kept for clients that speak ComfyUI's protocol."""

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.api.worker import RUN_EVENTS_MAX, RunEvent
from comfyfleet.comfy.backend import Outputs
from comfyfleet.comfy.events import Event, NodeText, Preview

# Our own types, beside ComfyUI's: what it sends as binary frames.
TEXT, PICTURE = "comfyfleet_text", "comfyfleet_picture"
ENDS = frozenset({"execution_success", "execution_error", "execution_interrupted"})
# Nodes whose pictures are results, which nobody may lose; those of others are previews.
SENDS_RESULTS = frozenset({"SaveImageWebsocket"})
PICTURE_BYTES_MAX = 8 * 1024 * 1024
# A worker's request has at most 16 MiB.
REPORT_BYTES_MAX = 4 * 1024 * 1024
LAST_BYTES_MAX = 12 * 1024 * 1024
REPORT_EVENTS_MAX = 2_000
# Each `progress_state` names all nodes so far: of a long prompt they are not kept one and all.
REPLACED_BYTES_MIN = 1024 * 1024
UNTOLD_EVENTS_MAX = 20_000
UNTOLD_BYTES_MAX = 64 * 1024 * 1024
# Of these many can be left out: the next one tells all that they told.
REPLACEABLE = frozenset({"progress_state", "progress"})
NOT_OF_THE_RUN = frozenset({"status", "feature_flags", "crystools.monitor"})


class RecordedEvent(NamedTuple):
    event: RunEvent
    size: int  # about as many bytes as it has on its way

    @property
    def is_replaceable(self) -> bool:
        return self.event[0] in REPLACEABLE

    @property
    def names_file(self) -> bool:
        return _names_file(self.event)

    @property
    def waits(self) -> bool:
        """For the last report: its file is not delivered yet, or the run may begin again elsewhere."""
        return self.event[0] in ENDS or self.names_file

    @property
    def is_preview(self) -> bool:
        return self.event[0] == PICTURE and bool(self.event[1].get("is_preview"))


# A message that names a file waits until that is delivered. Those after it wait as long, so that they come in
# order; in a run that goes on for longer they are told first, so that its progress can be seen.
ORDER_SECONDS_MAX = 2.0


class RecordTurns:
    """Which run of a backend tells now: the next begins while the files of the one before are delivered, and
    clients know only one run at a time."""

    def __init__(self) -> None:
        self._records: list[RunRecord] = []

    def begin(self, record: "RunRecord") -> bool:
        """Whether it may tell at once."""
        if record not in self._records:
            self._records.append(record)
        return self._before(record) is None

    def end(self, record: "RunRecord") -> None:
        """Its last report is out, or there will be none."""
        if record in self._records:
            self._records.remove(record)
            record.has_ended.set()

    async def wait_for(self, record: "RunRecord") -> None:
        """Until those that began before it have ended, or for as long as order is worth."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORDER_SECONDS_MAX):
                while (before := self._before(record)) is not None:
                    await before.has_ended.wait()

    def _before(self, record: "RunRecord") -> "RunRecord | None":
        first = self._records[0] if self._records else None
        return first if first is not record and record in self._records else None


class RunRecord:
    """`folder`: the job's own on the backend, which no client gets to see."""

    def __init__(
        self,
        prompt: Mapping[str, Any],
        folder: str,
        *,
        wants_previews: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompt = prompt
        self._folder = folder
        self._wants_previews = wants_previews
        self._clock = clock
        self._untold: list[RecordedEvent] = []
        self._bytes = 0
        self._file_named_at: float | None = None
        self._shown_names: dict[str, str] = {}
        self.has_ended = asyncio.Event()
        self.may_tell = True  # it is this run's turn

    def _keep(self, untold: list[RecordedEvent]) -> None:
        self._untold = untold
        self._bytes = _size(untold)

    def take(self, raw: str) -> None:
        """A text message, as the backend sent it."""
        message = json.loads(raw)
        kind, data = message.get("type"), message.get("data")
        if not isinstance(kind, str) or not isinstance(data, dict) or kind in NOT_OF_THE_RUN:
            return
        # The end is told by the control plane, once the result is there.
        if kind != "executing" or data.get("node") is not None:
            self._add((kind, self._hide(data)), len(raw))

    def show_as(self, names: Mapping[str, str]) -> None:
        """Names that files have on the backend, and those that the client knows them by."""
        self._shown_names = dict(names)

    def _hide(self, value: Any) -> Any:
        for name, shown in self._shown_names.items():
            value = replace_text(value, name, shown)
        return hide_folder(value, self._folder)

    def note(self, event: Event) -> None:
        """What came as a binary frame."""
        match event:
            case NodeText(node_id=node_id, text=text):
                self._add((TEXT, {"node": node_id, "text": text}), len(text))
            case Preview(node_id=str(node_id)) if self._sends_results(node_id):
                picture = _picture(event)
                self._add((PICTURE, picture), len(picture["base64"]))
            case Preview() if self._wants_previews:
                # The newest tells all: nobody has to keep up with the others.
                self._keep([each for each in self._untold if not each.is_preview])
                picture = {**_picture(event), "is_preview": True}
                self._add((PICTURE, picture), len(picture["base64"]))

    def pop_live(self) -> tuple[RunEvent, ...]:
        """As many as one report holds of those that can be told at once: a file that a message names
        is delivered with the result."""
        told: list[RecordedEvent] = []
        size = 0
        for each in self._live():
            is_full = len(told) >= REPORT_EVENTS_MAX or size + each.size > REPORT_BYTES_MAX
            if told and is_full:
                break
            told.append(each)
            size += each.size
        if told:
            gone = {id(each) for each in told}
            self._keep([each for each in self._untold if id(each) not in gone])
        return tuple(each.event for each in told)

    def _live(self) -> Sequence[RecordedEvent]:
        if not self.may_tell:
            return ()
        first = next((i for i, each in enumerate(self._untold) if each.waits), None)
        if first is None:
            return self._untold
        since = self._clock() if self._file_named_at is None else self._file_named_at
        if self._clock() - since > ORDER_SECONDS_MAX:
            return [each for each in self._untold if not each.waits]
        return self._untold[:first]

    def tell_all(self) -> None:
        """Now, whatever the order: there is more than the last report holds."""
        self.may_tell, self._file_named_at = True, -math.inf

    def put_back(self, events: Sequence[RunEvent]) -> None:
        """Those that could not be told."""
        again = [RecordedEvent(each, len(json.dumps(each))) for each in events]
        self._keep([*again, *self._untold])

    def pop_all(self) -> tuple[RunEvent, ...]:
        """What goes with the last report; what it can't hold is left out."""
        told = _fitting(self._untold)
        self._keep([])
        return tuple(each.event for each in told)

    @property
    def has_live(self) -> bool:
        return bool(self._live())

    @property
    def is_too_much(self) -> bool:
        """Whether there is more than the last report holds."""
        return len(self._untold) > REPORT_EVENTS_MAX or self._bytes > REPORT_BYTES_MAX

    def history(self, outputs: Outputs) -> dict[str, Any] | None:
        if outputs.history is None:
            return None
        hidden: dict[str, Any] = self._hide(outputs.history)
        # Without it the control plane makes one of the messages.
        return hidden if len(json.dumps(hidden)) <= REPORT_BYTES_MAX else None

    def _sends_results(self, node_id: str) -> bool:
        return self._prompt.get(node_id, {}).get("class_type") in SENDS_RESULTS

    def _add(self, event: RunEvent, size: int) -> None:
        new, count = RecordedEvent(event, size), len(self._untold)
        is_much = count > REPORT_EVENTS_MAX or self._bytes > REPLACED_BYTES_MIN
        if is_much and new.is_replaceable:
            self._keep([each for each in self._untold if each.event[0] != event[0]])
        is_all = count > UNTOLD_EVENTS_MAX or self._bytes > UNTOLD_BYTES_MAX
        if not is_all or event[0] not in (TEXT, PICTURE):
            self._untold.append(new)
            self._bytes += size
        if self._file_named_at is None and new.names_file:
            self._file_named_at = self._clock()


def _size(events: Sequence[RecordedEvent]) -> int:
    return sum(each.size for each in events)


def _fitting(events: Sequence[RecordedEvent]) -> Sequence[RecordedEvent]:
    if len(events) > RUN_EVENTS_MAX or _size(events) > LAST_BYTES_MAX:
        events = [each for each in events if not each.is_replaceable]
    if _size(events) > LAST_BYTES_MAX:
        events = [each for each in events if each.event[0] not in (TEXT, PICTURE)]
    while events and _size(events) > LAST_BYTES_MAX:
        events = events[1:]
    return events[-RUN_EVENTS_MAX:]


def asks_for_previews(extra_data: Mapping[str, Any]) -> bool:
    """`default` is whatever the backend was started with."""
    method = extra_data.get("preview_method")
    return method is not None and method != "none"


def replace_text(value: Any, old: str, new: str) -> Any:
    """The same value with another text in all of its texts."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {key: replace_text(each, old, new) for key, each in value.items()}
    return [replace_text(each, old, new) for each in value] if isinstance(value, list) else value


def hide_folder(value: Any, folder: str) -> Any:
    """The same value without the folder's name in any of its texts."""
    if isinstance(value, str):
        plain = value.replace(f"{folder}/", "").replace(folder.replace("/", "\\"), "")
        return plain.replace(folder, "")
    if isinstance(value, Mapping):
        return {key: hide_folder(each, folder) for key, each in value.items()}
    return [hide_folder(each, folder) for each in value] if isinstance(value, list) else value


def _picture(preview: Preview) -> dict[str, Any]:
    data = preview.data if len(preview.data) <= PICTURE_BYTES_MAX else b""
    return {
        "node": preview.node_id,
        "content_type": preview.content_type,
        "metadata": {
            name: value
            for name, value in preview.metadata.items()
            if name.endswith("node_id") and (value is None or isinstance(value, str))
        },
        "base64": base64.b64encode(data).decode(),
    }


def _names_file(event: RunEvent) -> bool:
    kind, data = event
    output = data.get("output") if kind == "executed" else None
    if not isinstance(output, dict):
        return False
    return any(
        isinstance(each, dict) and "filename" in each
        for listed in output.values()
        if isinstance(listed, list)
        for each in listed
    )
