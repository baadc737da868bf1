"""The record of a run: the backend's own messages, stored for clients that speak ComfyUI's
protocol."""

import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.api.values import DeliveredOutput
from comfyfleet.api.worker import RUN_EVENTS_MAX, Job, RunEvent, UnheardReport
from comfyfleet.comfy import NodeProblem
from comfyfleet.comfy.backend import Outputs
from comfyfleet.comfy.events import Event, Failed, NodeText, Preview
from comfyfleet.comfy.messages import BLOCKED
from comfyfleet.errors import PromptRefused, RunFailed
from comfyfleet.media import SNIFF_BYTES, picture_size, sniff_type
from comfyfleet.worker.failures import TRACEBACK_LINE_CHARACTERS_MAX, TRACEBACK_LINES_MAX
from comfyfleet.worker.run_progress import node_ids

# Message types that the worker adds for data that ComfyUI sends as binary frames.
TEXT, PICTURE = "comfyfleet_text", "comfyfleet_picture"
OWN_TYPES = "comfyfleet_"
ENDS = frozenset({"execution_success", "execution_error", "execution_interrupted"})
# Nodes whose images are results and must not be lost. Images of other nodes are previews.
SENDS_RESULTS = frozenset({"SaveImageWebsocket"})
PROBLEMS_MAX, REFUSAL_CHARACTERS_MAX = 20, 10_000
PICTURE_BYTES_MAX = 8 * 1024 * 1024
# Maximum width or height in pixels of the previews that ComfyUI's samplers send.
PREVIEW_PIXELS_MAX = 512
# Limits in bytes for one report and for the final report. The control plane accepts requests of up
# to 16 MiB from workers.
REPORT_BYTES_MAX = 4 * 1024 * 1024
LAST_BYTES_MAX = 12 * 1024 * 1024
REPORT_EVENTS_MAX = 2_000
# If the unreported messages are larger than this, only the newest `progress_state` and `progress`
# are kept. Each `progress_state` names all nodes so far, which takes a lot of memory for long
# prompts.
REPLACED_BYTES_MIN = 1024 * 1024
UNREPORTED_EVENTS_MAX = 20_000
UNREPORTED_BYTES_MAX = 64 * 1024 * 1024
# Messages that can be dropped, because the next one contains the same information.
REPLACEABLE = frozenset({"progress_state", "progress"})
NOT_OF_THE_RUN = frozenset({"status", "feature_flags", "crystools.monitor"})
# ComfyUI's own progress messages. All other messages may contain a node's results.
OF_PROGRESS = ENDS | {
    "execution_start",
    "execution_cached",
    "executing",
    "progress",
    "progress_state",
}
# Maximum length of the error message of a failed run whose results are held. Such a run isn't
# charged, so its message must not reveal much of a result that a node quotes in it.
UNPAID_CHARACTERS_MAX = 1_000
# An error message that is larger than this is sent without the node's inputs and outputs, because
# the final report couldn't contain it. Its texts are cut to these lengths.
ERROR_BYTES_MAX = REPORT_BYTES_MAX
ERROR_CHARACTERS_MAX = 50_000
EXECUTED = "executed"
KEPT_ALWAYS = OF_PROGRESS | {EXECUTED}


# Identifies a file in a run's own folder on the backend: output or temp, subfolder, and name.
FileKey: TypeAlias = tuple[str, str, str]


class RecordedEvent(NamedTuple):
    event: RunEvent
    size: int  # approximate bytes when sent
    is_held: bool = False  # whether it contains a result that hasn't been charged yet
    at: float = 0.0  # arrival time by the record's clock
    files: frozenset[FileKey] = frozenset()  # the files that the message names

    @property
    def is_replaceable(self) -> bool:
        return self.event[0] in REPLACEABLE


# A message that names a file waits until the file is delivered. To keep the order, later messages
# wait too. After this many seconds, they are sent anyway, so that progress stays visible.
ORDER_SECONDS_MAX = 2.0


# The number of the first report is a random number of this many bits, because a worker that is
# restarted during the same lease must not reuse earlier numbers.
FIRST_NUMBER_BITS = 62


class LiveReport(NamedTuple):
    """The messages in a heartbeat. The report is repeated unchanged until the control plane
    responds."""

    number: int
    events: tuple[RunEvent, ...]
    outputs: tuple[DeliveredOutput, ...]


class LastReport(NamedTuple):
    """The part of the final report that comes from the run's record."""

    events: tuple[RunEvent, ...] = ()
    number: int | None = None
    unheard: UnheardReport | None = None

    @property
    def all_events(self) -> tuple[RunEvent, ...]:
        return (*(self.unheard.events if self.unheard else ()), *self.events)


class RecordTurns:
    """Decides which run of a backend may report messages. The next run may start while files of the
    previous one are still being delivered, but clients expect one run at a time."""

    def __init__(self) -> None:
        self._records: list[RunRecord] = []

    def begin(self, record: "RunRecord") -> bool:
        """Adds a run, and returns whether it may report messages immediately."""
        if record not in self._records:
            self._records.append(record)
        return self._before(record) is None

    def end(self, record: "RunRecord") -> None:
        """Removes a run whose last report was sent or will never be sent."""
        if record in self._records:
            self._records.remove(record)
            record.has_ended.set()

    async def wait_for(self, record: "RunRecord") -> None:
        """Waits until earlier runs have ended, but no longer than ORDER_SECONDS_MAX."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORDER_SECONDS_MAX):
                while (before := self._before(record)) is not None:
                    await before.has_ended.wait()

    def _before(self, record: "RunRecord") -> "RunRecord | None":
        first = self._records[0] if self._records else None
        return first if first is not record and record in self._records else None


class RunRecord:
    """Records a run's messages. `folder` is the job's own folder on the backend, whose name is
    hidden from clients."""

    def __init__(
        self,
        prompt: Mapping[str, Any],
        folder: str,
        *,
        holds_results: bool = False,
        numbers_reports: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompt = prompt
        self._folder = folder
        self._holds_results = holds_results
        self._numbers_reports = numbers_reports
        self._last_number = secrets.randbits(FIRST_NUMBER_BITS)
        self._unheard: LiveReport | None = None
        self._clock = clock
        self._unreported: list[RecordedEvent] = []
        self._bytes = 0
        self._delivered: dict[FileKey, DeliveredOutput] = {}
        self._reports_all = False
        self.told_outputs = False
        self._shown_names: dict[str, str] = {}
        self.has_ended = asyncio.Event()
        self.may_report = True  # whether it is this run's turn to report messages

    def _keep(self, events: list[RecordedEvent]) -> None:
        self._unreported = events
        self._bytes = _size(events)

    def take(self, raw: str) -> None:
        """Records a JSON message from the backend if it belongs to the run. Private names in it are
        replaced."""
        message = json.loads(raw)
        kind, data = message.get("type"), message.get("data")
        if not isinstance(kind, str) or not isinstance(data, dict) or kind in NOT_OF_THE_RUN:
            return
        if kind.startswith(OWN_TYPES):
            return
        # The control plane reports the end itself when the result is available.
        if kind != "executing" or data.get("node") is not None:
            self._add((kind, self._hide(data)), len(raw))

    def show_as(self, names: Mapping[str, str]) -> None:
        """Sets the file names that clients see. `names` maps names on the backend to names for
        clients."""
        self._shown_names = dict(names)

    def _hide(self, value: Any) -> Any:
        for name, shown in self._shown_names.items():
            value = replace_text(value, name, shown)
        return hide_folder(value, self._folder)

    def note(self, event: Event) -> bool:
        """Records a message from a binary frame. Returns False for a preview, which is temporary
        and isn't recorded."""
        match event:
            case NodeText(node_id=node_id, text=text):
                self._add((TEXT, {"node": node_id, "text": text}), len(text))
            case Preview() if self.is_result(event):
                picture = _picture(event)
                size = len(picture["base64"])
                self._add((PICTURE, picture), size, is_held=self._holds_results)
            case _:
                return False
        return True

    def note_failure(self, error: Exception, at: float) -> None:
        """Records why the run failed, unless the backend's own message about it was received."""
        match error:
            case PromptRefused():
                self.refuse(error, at)
            case RunFailed() if isinstance(failed := error.details.get("failed"), Failed):
                self._fail(failed, at)

    def _fail(self, failed: Failed, at: float) -> None:
        is_known = any(_is_failure(recorded.event) for recorded in self._unreported)
        if is_known or failed.exception_type is None:
            return
        data: dict[str, Any] = {
            "prompt_id": "",
            "node_id": failed.node_id,
            "node_type": failed.node_type,
            "executed": [],
            "exception_message": failed.message,
            "exception_type": failed.exception_type,
            "traceback": list(failed.traceback),
            "current_inputs": {},
            "current_outputs": [],
            "timestamp": int(at * 1000),
        }
        self._add(("execution_error", self._hide(data)), len(json.dumps(data)))

    def refuse(self, error: PromptRefused, at: float) -> None:
        """Records that the backend refused the prompt, with the backend's reason. The prompt never
        ran."""
        self._holds_results = False  # A refused prompt has no results.
        timestamp = int(at * 1000)
        self._add(("execution_start", {"prompt_id": "", "timestamp": timestamp}), 0)
        data = {"prompt_id": "", **_refusal(error), "timestamp": timestamp}
        self._add(("execution_error", self._hide(data)), len(data["exception_message"]))

    def add_output(self, output: DeliveredOutput) -> None:
        """Adds a file that has been delivered, so that messages that name it can be reported."""
        self._delivered[key_of(output)] = output

    def drop_output(self, output: DeliveredOutput) -> None:
        """Removes a file that the control plane refused. The final report will contain it again."""
        self._delivered.pop(key_of(output), None)

    def outputs_in(self, events: Sequence[RunEvent]) -> tuple[DeliveredOutput, ...]:
        """Returns the delivered files that these events name."""
        named = dict.fromkeys(key for event in events for key in sorted(files_in(event)))
        return tuple(self._delivered[key] for key in named if key in self._delivered)

    def next_report(self) -> LiveReport | None:
        """Returns the previous report if it hasn't been answered yet. Otherwise, returns a new one
        with the messages that can be reported now, or None if there are no messages."""
        if self._unheard is None and (events := self.pop_live()):
            self._unheard = LiveReport(self._next_number(), events, self.outputs_in(events))
        return self._unheard

    def note_answer(self) -> None:
        """Drops the last report, because the control plane has stored it."""
        self._unheard = None

    def note_silence(self, *, is_refused: bool) -> None:
        """Handles a report that failed. If there was no response, the control plane may still have
        stored it.

        The report is repeated with the same number, so that it is stored only once. A refused
        report was not stored, so its messages are sent again in a new report, without the refused
        files. A control plane that doesn't support numbers gets the messages again too, because
        duplicate messages are better than lost ones.
        """
        report = self._unheard
        if report is None:
            return
        if is_refused:
            for output in report.outputs:
                self.drop_output(output)
        if is_refused or not self._numbers_reports:
            self._unheard = None
            self.put_back(report.events)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def pop_live(self) -> tuple[RunEvent, ...]:
        """Removes and returns the messages that can be reported now, up to the limits for a
        report."""
        events: list[RecordedEvent] = []
        size = 0
        for event in self._live():
            is_full = len(events) >= REPORT_EVENTS_MAX or size + event.size > REPORT_BYTES_MAX
            if events and is_full:
                break
            events.append(event)
            size += event.size
        if events:
            removed = {id(event) for event in events}
            self._keep([event for event in self._unreported if id(event) not in removed])
        return tuple(recorded.event for recorded in events)

    def _live(self) -> Sequence[RecordedEvent]:
        if not self.may_report:
            return ()
        first = next((i for i, event in enumerate(self._unreported) if self._waits(event)), None)
        if first is None:
            return self._unreported
        is_late = self._clock() - self._unreported[first].at > ORDER_SECONDS_MAX
        if is_late or self._reports_all:
            return [event for event in self._unreported if not self._waits(event)]
        return self._unreported[:first]

    def _waits(self, recorded: RecordedEvent) -> bool:
        """Checks whether an event must wait for its files or for the final report. Uncharged
        results and the end of a run are sent with the final report, because the run may be repeated
        elsewhere."""
        is_late = recorded.is_held or recorded.event[0] in ENDS
        return is_late or not recorded.files <= self._delivered.keys()

    def report_all(self) -> None:
        """Allows messages to be sent out of order, because too many remain for the final report."""
        self.may_report = self._reports_all = True

    def release_results(self) -> None:
        """Releases the held results of a successful run, which is charged with its final report."""
        self._keep([event._replace(is_held=False) for event in self._unreported])
        self._holds_results = False

    def drop_results(self) -> None:
        """Drops the held results of a failed run, which isn't charged."""
        rest = [event for event in self._unreported if not event.is_held]
        self._keep([_without_values(event) for event in rest] if self._holds_results else rest)

    def put_back(self, events: Sequence[RunEvent]) -> None:
        """Puts messages that could not be reported back in front of all others."""
        again = [self._recorded(event, len(json.dumps(event))) for event in events]
        self._keep([*again, *self._unreported])

    def pop_last(self) -> LastReport:
        """Removes and returns the messages for the final report. Messages beyond its limits are
        dropped."""
        unheard, self._unheard = self._unheard, None
        if unheard is None:
            return LastReport(self.pop_all(), self._next_number())
        used_bytes = sum(len(json.dumps(event)) for event in unheard.events)
        return LastReport(
            self.pop_all(LAST_BYTES_MAX - used_bytes),
            self._next_number(),
            UnheardReport(number=unheard.number, events=unheard.events),
        )

    def pop_all(self, bytes_max: int | None = None) -> tuple[RunEvent, ...]:
        """Removes all unreported messages, and returns the ones that fit into the final report."""
        events = _fitting(self._unreported, LAST_BYTES_MAX if bytes_max is None else bytes_max)
        self._keep([])
        return tuple(recorded.event for recorded in events)

    @property
    def has_live(self) -> bool:
        return bool(self._live())

    @property
    def is_too_much(self) -> bool:
        """Whether the messages are too many or too large for one report."""
        return len(self._unreported) > REPORT_EVENTS_MAX or self._bytes > REPORT_BYTES_MAX

    def history(self, outputs: Outputs) -> dict[str, Any] | None:
        if outputs.history is None:
            return None
        hidden: dict[str, Any] = self._hide(outputs.history)
        # If the history is too large, the control plane creates one from the messages.
        return hidden if len(json.dumps(hidden)) <= REPORT_BYTES_MAX else None

    def is_result(self, picture: Preview) -> bool:
        """Checks whether an image is a result rather than a preview. While results are held, a
        large image from any node counts as a result."""
        node = self._prompt.get(picture.node_id or "", {})
        return node.get("class_type") in SENDS_RESULTS or (
            self._holds_results and _is_large(picture.data)
        )

    def _add(self, event: RunEvent, size: int, *, is_held: bool = False) -> None:
        if event[0] == "execution_error" and size > ERROR_BYTES_MAX:
            event = (event[0], _brief(event[1], ERROR_CHARACTERS_MAX))
            size = len(json.dumps(event))
        new, count = self._recorded(event, size, is_held=is_held), len(self._unreported)
        is_much = count > REPORT_EVENTS_MAX or self._bytes > REPLACED_BYTES_MIN
        if is_much and new.is_replaceable:
            self._keep([other for other in self._unreported if other.event[0] != event[0]])
        is_all = count > UNREPORTED_EVENTS_MAX or self._bytes > UNREPORTED_BYTES_MAX
        if not is_all or event[0] in KEPT_ALWAYS:
            self._unreported.append(new)
            self._bytes += size

    def _recorded(self, event: RunEvent, size: int, *, is_held: bool = False) -> RecordedEvent:
        """Creates a record of an event. While results are held, events that may contain a result
        are held as well."""
        kind, data = event
        shows = bool(data.get("output")) if kind == EXECUTED else kind not in OF_PROGRESS
        held = is_held or (self._holds_results and shows)
        return RecordedEvent(event, size, held, self._clock(), files_in(event))


def _refusal(error: PromptRefused) -> dict[str, Any]:
    """Returns the reason for a refusal in the format of ComfyUI's message about a failed node."""
    details = error.details.get("problems") or ()
    problems = [problem for problem in details if isinstance(problem, NodeProblem)]
    first = problems[0] if problems else None
    lines = [_reason(problem) for problem in problems[:PROBLEMS_MAX]] or [error.message]
    return {
        "node_id": first.node_id if first else None,
        "node_type": first.class_type if first else None,
        "executed": [],
        "exception_message": "\n".join(lines)[:REFUSAL_CHARACTERS_MAX],
        "exception_type": first.kind if first else str(error.details.get("kind") or error.code),
        "traceback": [],
        "current_inputs": {},
        "current_outputs": [],
    }


def _reason(problem: NodeProblem) -> str:
    """Returns the problem's message and details. The list of choices is removed, because it may
    name other users' files."""
    details = problem.details
    if problem.kind == "value_not_in_list":
        details = details.partition(" not in ")[0]
    return f"{problem.message}: {details}" if details else problem.message


def _without_values(recorded: RecordedEvent) -> RecordedEvent:
    """Shortens the message of an error event and removes the node's inputs and outputs. Returns
    other events unchanged."""
    kind, data = recorded.event
    if kind != "execution_error":
        return recorded
    brief = _brief(data, UNPAID_CHARACTERS_MAX)
    return recorded._replace(event=(kind, brief), size=len(json.dumps(brief)))


def _brief(data: Mapping[str, Any], characters_max: int) -> dict[str, Any]:
    """Returns the data of an error event without the node's inputs and outputs, and with shortened
    texts."""
    traceback = data.get("traceback")
    lines = traceback[-TRACEBACK_LINES_MAX:] if isinstance(traceback, list) else []
    return {
        **data,
        "exception_message": _cut(str(data.get("exception_message") or ""), characters_max),
        "traceback": [_cut(str(line), TRACEBACK_LINE_CHARACTERS_MAX) for line in lines],
        "current_inputs": {},
        "current_outputs": [],
    }


def _is_failure(event: RunEvent) -> bool:
    """Checks whether the event is the backend's message about the run's failure. The message about
    a blocked node has the same type."""
    kind, data = event
    return kind == "execution_error" and data.get("exception_type") != BLOCKED


def _cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else f"{text[:characters_max]}…"


def _is_large(picture: bytes) -> bool:
    """Checks whether an image is larger than a preview. An image of unknown size counts as
    large."""
    kind = sniff_type(picture[:SNIFF_BYTES])
    size = picture_size(kind, picture) if kind else None
    return size is None or max(size) > PREVIEW_PIXELS_MAX


def _size(events: Sequence[RecordedEvent]) -> int:
    return sum(event.size for event in events)


def _fitting(events: Sequence[RecordedEvent], bytes_max: int) -> Sequence[RecordedEvent]:
    if len(events) > RUN_EVENTS_MAX or _size(events) > bytes_max:
        events = [recorded for recorded in events if not recorded.is_replaceable]
    if _size(events) > bytes_max:
        events = [recorded for recorded in events if recorded.event[0] not in (TEXT, PICTURE)]
    return _without_oldest(events, bytes_max)[-RUN_EVENTS_MAX:]


def _without_oldest(events: Sequence[RecordedEvent], bytes_max: int) -> Sequence[RecordedEvent]:
    """Drops the oldest messages until the rest fits. The end of the run is never dropped."""
    excess_bytes, remaining = _size(events) - bytes_max, []
    for recorded in events:
        if excess_bytes > 0 and recorded.event[0] not in ENDS:
            excess_bytes -= recorded.size
        else:
            remaining.append(recorded)
    return remaining


def record_of(job: Job, folder: str) -> RunRecord | None:
    """Creates the record of a job's run. Returns None if the job doesn't need one."""
    if not job.records_run:
        return None
    return RunRecord(
        job.prompt,
        folder,
        holds_results=job.holds_results,
        numbers_reports=job.numbers_reports,
    )


def replace_text(value: Any, old: str, new: str) -> Any:
    """Replaces `old` with `new` in all strings of a nested value."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {key: replace_text(item, old, new) for key, item in value.items()}
    return [replace_text(item, old, new) for item in value] if isinstance(value, list) else value


def hide_folder(value: Any, folder: str) -> Any:
    """Removes the folder's name from all strings of a nested value."""
    if isinstance(value, str):
        plain = value.replace(f"{folder}/", "").replace(folder.replace("/", "\\"), "")
        return plain.replace(folder, "")
    if isinstance(value, Mapping):
        return {key: hide_folder(item, folder) for key, item in value.items()}
    return [hide_folder(item, folder) for item in value] if isinstance(value, list) else value


def _picture(preview: Preview) -> dict[str, Any]:
    data = preview.data if len(preview.data) <= PICTURE_BYTES_MAX else b""
    return {
        "node": preview.node_id,
        "content_type": preview.content_type,
        "metadata": node_ids(preview),
        "base64": base64.b64encode(data).decode(),
    }


def files_in(event: RunEvent) -> frozenset[FileKey]:
    """Returns the output and temp files that an `executed` event names. Input files are left out,
    because they are not delivered."""
    kind, data = event
    output = data.get("output") if kind == "executed" else None
    if not isinstance(output, dict):
        return frozenset()
    return frozenset(
        _key(str(file.get("type") or "output"), str(file.get("subfolder") or ""), file["filename"])
        for files in output.values()
        if isinstance(files, list)
        for file in files
        if isinstance(file, dict) and isinstance(file.get("filename"), str)
        if file.get("type") in ("output", "temp", None)
    )


def key_of(output: DeliveredOutput) -> FileKey:
    folder = output.folder or "output"
    return _key(folder, output.subfolder or "", output.filename or output.name)


def _key(folder: str, subfolder: str, filename: str) -> FileKey:
    return folder, subfolder.replace("\\", "/").strip("/"), filename
