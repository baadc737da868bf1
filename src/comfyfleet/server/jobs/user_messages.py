"""Converts backend errors to messages that customers may read. The original text is stored for
operators.

A backend's message is shown to customers only if it consists of plain words and numbers, without
names of files, hosts, models, workers or programs. All other errors are replaced by one of the
sentences below.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from comfyfleet.server.jobs.model import Failure

MESSAGE_CHARACTERS_MAX = 300
RAW_CHARACTERS_MAX = 50_000
# Maximum number of characters that are searched, because the regular expressions below are slow on
# long texts.
READ_CHARACTERS_MAX = 4_000
JSON_DEPTH_MAX = 6
JSON_VALUES_MAX = 1_000
JSON_OBJECTS_MAX = 20  # maximum number of positions that are tried as the start of an object
UNKNOWN = "Processing failed."
UNAVAILABLE = "This is not available at the moment."
OUT_OF_MEMORY = "Out of memory."
TOO_LONG = "It took too long."
_DECODER = json.JSONDecoder()
_FIELDS = ("exception_message", "error_message")
# Match `RuntimeError: …`, `torch.OutOfMemoryError: …`, `"message": "…"` and `error: …`.
_ERROR_LINES = (
    re.compile(
        r"^(?:[A-Za-z_][\w.]{0,99}\.)?[A-Z]\w{0,99}(?:Error|Exception|Failure):[ \t]*(?P<message>\S.*)$",
        re.M,
    ),
    re.compile(
        r"""["'](?:exception_message|error_message|message)["']\s?:\s?["'](?P<message>[^"'\n]+)"""
    ),
    re.compile(r"^error\s?:[ \t]*(?P<message>\S.*)$", re.I | re.M),
)
# Matches traceback lines and lines without words, which don't help customers.
_NOISE = re.compile(r"Traceback \(most recent call last\)|File \"|at \S+ \(|\W*$")
# Matches errors about a model or node type that the backend lacks. Only the operator can fix them,
# and their messages contain internal names.
_LACKING = re.compile(
    r"value.not.in.list|missing_node_type|failed.validation|is not installed"
    r"|does not exist|model .{0,100}not found|\.(?:safetensors|ckpt|gguf|pth?|bin)\b",
    re.I,
)
_KNOWN = (
    (_LACKING, UNAVAILABLE),
    (re.compile(r"out of memory|outofmemory|CUBLAS_STATUS_ALLOC", re.I), OUT_OF_MEMORY),
    (re.compile(r"timed? ?out\b", re.I), TOO_LONG),
)
_WORD = re.compile(
    r"[(\"']*(?:[A-Za-z]?[a-z]{0,19}(?:[-'][a-z]{1,19}){0,3}|[A-Z]{2,8}"
    r"|\d{1,9}(?:[.,]\d{1,6})?(?:%|x\d{1,5}| ?[KMG]i?B|m?s)?)[)\"'.,;:!?…]*"
)
_HIDDEN = "…"
_REPEATED = re.compile(f"{_HIDDEN}(?: {_HIDDEN})+")
_QUOTED_PATH = re.compile(r"""(['"])[^'"]*[/\\][^'"]*\1""")
_DASHES = ("-", "–", "—", "…")


def to_user_message(error: str | Mapping[str, Any]) -> Failure:
    raw = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False, default=str)
    document = _document(error)
    start = raw[:READ_CHARACTERS_MAX]
    text = _head_and_tail(raw)
    message = (
        _message_in(document)
        or _message_inside(text)
        or _matched(text)
        or (None if document else _first_line(start))
    )
    return Failure(_sentence(message or "", start), raw[:RAW_CHARACTERS_MAX] or None)


def to_plain_sentence(text: str) -> str:
    """Returns a sentence that may be shown to customers. Text that contains anything but plain
    words is replaced by UNKNOWN or another fixed sentence.
    """
    return _sentence(text, text[:READ_CHARACTERS_MAX])


def redact(text: str) -> str:
    """Replaces everything except plain words and numbers with an ellipsis. This removes paths,
    hosts, names and code.
    """
    words = _QUOTED_PATH.sub(_HIDDEN, _short(text[:READ_CHARACTERS_MAX])).split()
    shown = [word if word in _DASHES or _WORD.fullmatch(word) else _HIDDEN for word in words]
    return _REPEATED.sub(_HIDDEN, " ".join(shown))


def _sentence(message: str, raw: str) -> str:
    line = _short(message[:READ_CHARACTERS_MAX])
    if line and _is_plain(line) and not _LACKING.search(line):
        return line
    return next(
        (ours for shape, ours in _KNOWN if shape.search(line) or shape.search(raw)), UNKNOWN
    )


def _is_plain(line: str) -> bool:
    return all(word in _DASHES or _WORD.fullmatch(word) for word in line.split())


def _head_and_tail(raw: str) -> str:
    """Returns the start and the end of a long text, because a traceback names the error at its
    end.
    """
    if len(raw) <= READ_CHARACTERS_MAX:
        return raw
    half = READ_CHARACTERS_MAX // 2
    return f"{raw[:half]}\n{raw[-half:]}"


def _document(error: str | Mapping[str, Any]) -> Any:
    if not isinstance(error, str):
        return error
    if len(error) > RAW_CHARACTERS_MAX:
        return None
    try:
        document = json.loads(error)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict | list) else None


def _message_inside(text: str) -> str | None:
    """Returns the message of the first JSON object in the text that contains one."""
    for brace in islice(re.finditer(r"\{", text), JSON_OBJECTS_MAX):
        try:
            document, _ = _DECODER.raw_decode(text, brace.start())
        except (ValueError, RecursionError):
            continue
        if message := _message_in(document):
            return message
    return None


def _message_in(document: Any) -> str | None:
    """Returns the first message in a JSON document. The outermost fields are searched first."""
    for field in _FIELDS:
        for message in _values(document, field):
            return message
    return None


def _values(document: Any, field: str) -> Iterator[str]:
    """Yields the values of a field in a JSON document, the outermost first. Limits the depth and
    the number of values.
    """
    level = [document]
    for _ in range(JSON_DEPTH_MAX):
        for value in level:
            text = value.get(field) if isinstance(value, Mapping) else None
            if isinstance(text, str) and text.strip():
                yield text.strip()
        level = [inner for value in level for inner in _inside(value)][:JSON_VALUES_MAX]


def _inside(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())[:JSON_VALUES_MAX]
    return list(value[:JSON_VALUES_MAX]) if isinstance(value, list | tuple) else []


def _matched(raw: str) -> str | None:
    for shape in _ERROR_LINES:
        match = shape.search(raw)
        if match:
            return match["message"].strip()
    return None


def _first_line(raw: str) -> str | None:
    lines = (line.strip() for line in raw.splitlines())
    return next((line for line in lines if line and not _NOISE.match(line)), None)


def _short(text: str) -> str:
    line = " ".join(text.split())
    limit = MESSAGE_CHARACTERS_MAX
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
