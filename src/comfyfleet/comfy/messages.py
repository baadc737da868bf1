"""Parses ComfyUI's websocket messages (versions 0.7.0 to 0.28.0), and provides the inbox that a
run's follower reads.

Most messages become an event of a run. A message without a run id gets the empty run id: the server
runs one prompt at a time, so the message belongs to the running one.
"""

import asyncio
import re
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from comfyfleet.comfy.answers import (
    list_in,
    mapping_at,
    mapping_in,
    number_at,
    parse_json,
    text_at,
    texts_at,
    unexpected_answer,
)
from comfyfleet.comfy.backend import MessageTap
from comfyfleet.comfy.events import (
    Blocked,
    Cached,
    Cancelled,
    Event,
    Failed,
    NodeDone,
    NodeStarted,
    NodeText,
    Preview,
    Progress,
    Started,
    Succeeded,
)

CURRENT_RUN = ""
BLOCKED = "ExecutionBlocked"
# Errors that are not the prompt's fault. The GPU has too little memory, or the ComfyUI process
# doesn't work until it is restarted.
OUT_OF_MEMORY = "OutOfMemoryError"
BROKEN = ("illegal memory access", "device-side assert")
# Matches the exception types of Python and of GPU libraries, by the last part of their name or by
# their package.
_SYSTEM_TYPE = re.compile(
    r"(?:[\w.]+\.)?(?:RuntimeError|OSError|MemoryError|AcceleratorError|OutOfMemoryError"
    r"|OOM_EXCEPTION|CUDARuntimeError|CUDADriverError)"
    r"|(?:torch|triton|cupy|cupy_backends|pycuda)\.[\w.]+"
)
# Matches a prefix that PyTorch adds to a library's message, such as `CUDA error: ` or
# `[enforce fail at alloc.cpp:7] data. `.
_HEAD = re.compile(
    r"(?:\[enforce fail at [^\]\n]{0,200}\][^\n:]{0,40}\. "
    r"|(?:CUDA|HIP|XPU|cuDNN|cuBLAS|Triton)(?: driver)?(?: error| Error \[CUDA\]): "
    r"|an? (?=illegal memory access))"
)
_HEADS_MAX = 3
CONTENT_TYPES = {1: "image/jpeg", 2: "image/png"}
UINT32 = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The number of waiting and running prompts. The server sends it to every client."""

    remaining: int


@dataclass(frozen=True, slots=True)
class NodeStates:
    """The finished nodes of a run."""

    run_id: str
    done: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunOver:
    """The last message of a run, regardless of its result. From this point on, the run is in the
    history."""

    run_id: str


@dataclass(frozen=True, slots=True)
class UnknownMessage:
    """A message from another version of ComfyUI or from a custom node. It is ignored."""

    kind: str


Message: TypeAlias = Event | QueueStatus | NodeStates | RunOver | UnknownMessage
Data: TypeAlias = Mapping[str, Any]


def system_texts(exception_type: str | None, message: str) -> tuple[str, ...]:
    """Returns the message with and without the prefixes that PyTorch adds. Returns nothing if a
    node may have written the message.

    A node's own error may quote any text of the prompt. So a message counts only if the exception
    has a type that PyTorch, its GPU libraries or the operating system raise.
    """
    if not _SYSTEM_TYPE.fullmatch(exception_type or ""):
        return ()
    texts = [message]
    while len(texts) <= _HEADS_MAX and (head := _HEAD.match(texts[-1])):
        texts.append(texts[-1][head.end() :])
    return tuple(texts)


def parse_message(raw: str | bytes) -> Message:
    """Parses a message. Raises UnexpectedAnswer if a message of a known type is malformed."""
    if isinstance(raw, bytes):
        return _parse_frame(raw)
    message = mapping_in(parse_json(raw, "a websocket message"), "a websocket message")
    kind = text_at(message, "type", "a websocket message")
    parse = PARSERS.get(kind)
    if parse is None:
        return UnknownMessage(kind)
    return parse(mapping_at(message, "data", f"{kind!r}"))


def parse_failure(data: Data) -> Failed | Blocked:
    what = "'execution_error'"
    exception_type = text_at(data, "exception_type", what)
    run_id, node_id = text_at(data, "prompt_id", what), _optional(data, "node_id")
    node_type = _optional(data, "node_type")
    message = str(data.get("exception_message") or exception_type).strip()
    if exception_type == BLOCKED:
        return Blocked(run_id, node_id or "", node_type or "", message)
    trace = data.get("traceback")
    lines = tuple(map(str, trace)) if isinstance(trace, list) else ()
    is_broken = any(text.startswith(BROKEN) for text in system_texts(exception_type, message))
    retryable = exception_type.endswith(OUT_OF_MEMORY) or is_broken
    return Failed(run_id, message, node_id, node_type, exception_type, lines, retryable)


def _status(data: Data) -> Message:
    info = mapping_at(mapping_at(data, "status", "'status'"), "exec_info", "'status'")
    return QueueStatus(int(number_at(info, "queue_remaining", "'exec_info'")))


def _started(data: Data) -> Message:
    return Started(text_at(data, "prompt_id", "'execution_start'"))


def _cached(data: Data) -> Message:
    what = "'execution_cached'"
    return Cached(text_at(data, "prompt_id", what), texts_at(data, "nodes", what))


def _executing(data: Data) -> Message:
    run_id = _optional(data, "prompt_id") or CURRENT_RUN
    if data.get("node") is None:
        return RunOver(run_id)
    node_id = text_at(data, "node", "'executing'")
    return NodeStarted(run_id, node_id, _optional(data, "display_node") or node_id)


def _progress(data: Data) -> Message:
    what = "'progress'"
    return Progress(
        _optional(data, "prompt_id") or CURRENT_RUN,
        _optional(data, "node") or "",
        number_at(data, "value", what),
        number_at(data, "max", what),
    )


def _progress_state(data: Data) -> Message:
    what = "'progress_state'"
    nodes = mapping_at(data, "nodes", what)
    done = (
        node_id
        for node_id, state in nodes.items()
        if mapping_in(state, f"a node of {what}").get("state") == "finished"
    )
    return NodeStates(text_at(data, "prompt_id", what), tuple(done))


def _executed(data: Data) -> Message:
    what = "'executed'"
    output = data.get("output")
    return NodeDone(
        text_at(data, "prompt_id", what),
        text_at(data, "node", what),
        None if output is None else mapping_in(output, f"the output of {what}"),
    )


def _succeeded(data: Data) -> Message:
    return Succeeded(text_at(data, "prompt_id", "'execution_success'"))


def _interrupted(data: Data) -> Message:
    run_id = text_at(data, "prompt_id", "'execution_interrupted'")
    return Cancelled(run_id, _optional(data, "node_id"))


PARSERS: Mapping[str, Callable[[Data], Message]] = {
    "status": _status,
    "execution_start": _started,
    "execution_cached": _cached,
    "executing": _executing,
    "progress": _progress,
    "progress_state": _progress_state,
    "executed": _executed,
    "execution_success": _succeeded,
    "execution_error": parse_failure,
    "execution_interrupted": _interrupted,
}


def parse_log(messages: object) -> tuple[Message, ...]:
    """Parses the messages of a run in the history: `[[type, data], …]`, in order."""
    return tuple(map(_parse_logged, list_in(messages, "'messages' of a history item")))


def _parse_logged(entry: object) -> Message:
    pair = list_in(entry, "a message of a history item")
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise unexpected_answer("a message of a history item should be [type, data]", entry)
    parse = PARSERS.get(pair[0])
    return (
        parse(mapping_in(pair[1], f"the data of {pair[0]!r}")) if parse else UnknownMessage(pair[0])
    )


def _parse_frame(raw: bytes) -> Message:
    kind, rest = _read_uint32(raw)
    match kind:
        case 1:
            picture_format, picture = _read_uint32(rest)
            content_type = CONTENT_TYPES.get(picture_format, "application/octet-stream")
            return Preview(CURRENT_RUN, None, content_type, picture)
        case 3:
            node_id, text = _read_sized(rest)
            return NodeText(CURRENT_RUN, _decode(node_id), _decode(text))
        case 4:
            return _preview_with_metadata(rest)
    return UnknownMessage(f"binary {kind}")


def _preview_with_metadata(rest: bytes) -> Message:
    what = "the metadata of a preview"
    header, picture = _read_sized(rest)
    data = mapping_in(parse_json(header, what), what)
    return Preview(
        _optional(data, "prompt_id") or CURRENT_RUN,
        _optional(data, "node_id"),
        _optional(data, "image_type") or "application/octet-stream",
        picture,
        data,
    )


def _read_uint32(raw: bytes) -> tuple[int, bytes]:
    if len(raw) < UINT32.size:
        raise unexpected_answer("a binary frame is too short", raw)
    return UINT32.unpack_from(raw)[0], raw[UINT32.size :]


def _read_sized(raw: bytes) -> tuple[bytes, bytes]:
    size, rest = _read_uint32(raw)
    if size > len(rest):
        raise unexpected_answer("a binary frame is shorter than its stated length", raw)
    return rest[:size], rest[size:]


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise unexpected_answer("a binary frame should contain UTF-8", raw) from error


def _optional(data: Data, key: str) -> str | None:
    """Returns the value as a string. Custom nodes send numbers where a string is expected."""
    value = data.get(key)
    return None if value is None else str(value)


MESSAGES_MAX = 1000
# Limit in bytes for all messages in an inbox. A single frame may be just as large.
MESSAGES_BYTES_MAX = 256 * 1024 * 1024


class Inbox:
    """A queue of messages. If the reader is slow, progress and previews are dropped, but never
    anything else."""

    def __init__(self) -> None:
        self.tap: MessageTap | None = None
        self._messages: deque[tuple[Message, str | None]] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()

    def put(self, message: Message, raw: str | None = None) -> None:
        size = _size_of(message, raw)
        is_full = len(self._messages) >= MESSAGES_MAX or self._bytes + size > MESSAGES_BYTES_MAX
        if is_full and isinstance(message, Progress | Preview | NodeText | NodeStates):
            return
        self._messages.append((message, raw))
        self._bytes += size
        self._arrived.set()

    async def get(self, timeout_seconds: float) -> Message | None:
        """Returns the next message, or None after the timeout."""
        if not self._messages:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._arrived.wait()
            except TimeoutError:
                return None
        return self.pop()

    def pop(self) -> Message | None:
        """Returns the next message that has already arrived, or None."""
        if not self._messages:
            return None
        message, raw = self._messages.popleft()
        self._bytes -= _size_of(message, raw)
        if self.tap is not None and raw is not None:
            self.tap(raw)
        return message


def _size_of(message: Message, raw: str | None) -> int:
    """Returns the size of a message's text or image."""
    return len(message.data) if isinstance(message, Preview) else len(raw or "")
