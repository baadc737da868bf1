"""Reads untrusted files within a budget: parts of a file by offset, its text entries, and JSON as
ComfyUI's editor parses it.

The editor (`parseJsonWithNonFinite`) accepts the bare NaN, Infinity and -Infinity that Python's
`json.dumps` writes, and replaces them with null. In JavaScript, numbers that are too large become
Infinity, which is written as null again, so they become null here right away. If keys are equal,
the last one counts, as in JavaScript. Integers above 2^53 stay exact, although the editor would
round them.
"""

import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from comfyfleet.errors import InvalidInput, LimitExceeded

# Workflows with pasted images reach a few MiB. The editor itself reads 64 MiB of a video.
METADATA_BYTES_MAX = 64 * 1024 * 1024
# libpng writes 8 KiB chunks, so this is enough for a PNG of 1.6 GB. Walking the chunks takes well
# under a second.
CHUNKS_MAX = 200_000
TEXTS_MAX = 10_000
# Far below Python's recursion limit, so that callers can walk the result recursively.
JSON_DEPTH_MAX = 200
# The limit for brackets and commas. Parsing "[],[],…" takes twenty times its size in memory, so
# limiting the size is not enough. The node definitions of a server with many custom nodes have
# 200,000.
JSON_VALUES_MAX = 2_000_000


@dataclass(frozen=True, slots=True)
class FileLimits:
    metadata_bytes: int = METADATA_BYTES_MAX
    chunks: int = CHUNKS_MAX
    texts: int = TEXTS_MAX
    json_depth: int = JSON_DEPTH_MAX
    json_values: int = JSON_VALUES_MAX


DEFAULT_LIMITS = FileLimits()


class Budget:
    """The steps left for one file. All loops share them, so that nested loops don't multiply their
    limits."""

    def __init__(self, limits: FileLimits) -> None:
        self.limits = limits
        self._steps_left = limits.chunks

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(
                f"The file has more parts than the limit of {self.limits.chunks:,}.",
                limit=self.limits.chunks,
            )

    def steps(self) -> Iterator[None]:
        while True:
            self.step()
            yield


class Damaged(InvalidInput):
    """Raised if the file is inconsistent or ends too early. Parts that were read before still
    count."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start` to `end` of a buffer. The buffer may be a video of many gigabytes, so only
    parts of it are copied.

    All spans share one memoryview instead of slicing it. A slice that a traceback keeps alive would
    prevent the caller from closing their mmap.
    """

    view: memoryview
    start: int
    end: int

    @classmethod
    def of(cls, data: bytes | memoryview) -> "Span":
        return cls(memoryview(data), 0, len(data))

    def __len__(self) -> int:
        return self.end - self.start

    def cut(self, offset: int, length: int | None = None) -> "Span":
        """Returns the part from `offset` on, up to the end or with `length` bytes."""
        length = len(self) - offset if length is None else length
        if length < 0 or offset + length > len(self):
            available = max(0, len(self) - offset)
            raise Damaged(
                f"damaged or truncated at byte {self.start + offset:,}, "
                f"where only {available:,} of {max(0, length):,} bytes follow"
            )
        return Span(self.view, self.start + offset, self.start + offset + length)

    def take(self, offset: int, length: int) -> bytes:
        """Returns a copy of exactly `length` bytes."""
        part = self.cut(offset, length)
        return bytes(part.view[part.start : part.end])

    def peek(self, offset: int, length: int) -> bytes:
        """Returns a copy of up to `length` bytes, fewer at the end of the span."""
        start = min(self.start + offset, self.end)
        return bytes(self.view[start : min(start + length, self.end)])

    def number(self, offset: int, size: int, order: Literal["big", "little"] = "big") -> int:
        return int.from_bytes(self.take(offset, size), order)

    def copy(self, limits: FileLimits) -> bytes:
        """Returns a copy of the whole span if its size is plausible for metadata."""
        if len(self) > limits.metadata_bytes:
            raise LimitExceeded(
                f"The metadata at byte {self.start:,} has {len(self):,} bytes, "
                f"more than the limit of {limits.metadata_bytes:,}.",
                limit=limits.metadata_bytes,
            )
        return self.take(0, len(self))


LABEL_BYTES_MAX = 128
# Savers that can't choose a key put it before the value: `workflow:{…}`, `Prompt: {…}`.
_LABEL = re.compile(r"\s*([A-Za-z][\w.-]{0,31})\s*:\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Text:
    key: str
    value: Span | str | dict[str, Any]
    encodings: tuple[str, ...] = ("utf-8",)
    deflated: bool = False

    @property
    def is_workflow_or_prompt(self) -> bool:
        return self.key.lower() in ("workflow", "prompt")


def labelled(key: str, value: Span, encoding: str = "utf-8") -> Text:
    """Splits a label such as `workflow:` off the value. Without a label, the text is stored under
    `key`."""
    head = value.peek(0, LABEL_BYTES_MAX).decode(encoding, "ignore")
    label = _LABEL.match(head)
    if not label:
        return Text(key, value, (encoding,))
    return Text(label[1], value.cut(len(label[0].encode(encoding))), (encoding,))


def looks_like_json(text: Text) -> bool:
    """Checks whether an entry is worth decoding. Compressed entries with unknown keys are not."""
    if isinstance(text.value, Span):
        head = text.value.peek(0, LABEL_BYTES_MAX).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")
        return not text.deflated and head.startswith(b"{")
    return isinstance(text.value, dict) or text.value.lstrip().startswith("{")


def read(text: Text, limits: FileLimits) -> str | dict[str, Any]:
    if not isinstance(text.value, Span):
        return text.value
    data = text.value.copy(limits)
    if text.deflated:
        data = _inflate(data, text.key, limits)
    return _decode(data, text).removeprefix("\ufeff").rstrip("\0")


def _inflate(data: bytes, key: str, limits: FileLimits) -> bytes:
    try:
        # One byte more than allowed distinguishes an entry of exactly this size from a longer one.
        plain = zlib.decompressobj().decompress(data, limits.metadata_bytes + 1)
    except zlib.error as error:
        raise InvalidInput(f"The compressed text {key!r} is damaged: {error}.") from None
    if len(plain) > limits.metadata_bytes:
        raise LimitExceeded(
            f"The compressed text {key!r} has more than {limits.metadata_bytes:,} bytes.",
            limit=limits.metadata_bytes,
        )
    return plain


def _decode(data: bytes, text: Text) -> str:
    for encoding in text.encodings:
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise InvalidInput(f"The text {text.key!r} is not {' or '.join(text.encodings).upper()}.")


# An integer with up to this many digits is always finite as a JavaScript number.
FINITE_DIGITS_MAX = 308
SNIPPET_CHARACTERS_MAX = 30

_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_STRUCTURE = b'"[]{},'
_ALL_BUT_STRUCTURE = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
# Changes of the nesting level as signed bytes: +1 opens a level, -1 closes it, and commas are 0.
_LEVELS = bytes.maketrans(b"[]{},", b"\x01\xff\x01\xff\x00")
# A lone surrogate (half of an emoji, for example) can be neither printed nor stored. It is replaced
# by U+FFFD.
_HALF = re.compile("[\ud800-\udfff]")
# Matches whole escape sequences, so that the second half of an escaped backslash is never mistaken
# for the start of another escape.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def parse_json(
    data: bytes | bytearray | memoryview | str, *, what: str, limits: FileLimits = DEFAULT_LIMITS
) -> Any:
    """Parses a JSON text. `what` names it in errors ("the workflow in cat.png").

    Raises only InvalidInput or LimitExceeded. In the result, all strings can be encoded, all
    numbers are finite, and the nesting is limited to `limits.json_depth`.
    """
    _check_size(len(data), what=what, limits=limits)
    text = _HALF.sub("\ufffd", data) if isinstance(data, str) else decode(bytes(data), what=what)
    _check_structure(text.encode(), what=what, limits=limits)
    try:
        return json.loads(
            _without_escaped_halves(text),
            parse_int=_integer,
            parse_float=_decimal,
            parse_constant=lambda _: None,
        )
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{_sentence(what)} is not valid JSON: {_reason(error, text)}.",
            line=error.lineno,
            column=error.colno,
        ) from None


def decode(data: bytes, *, what: str) -> str:
    """Decodes UTF-8, or UTF-16 with a byte order mark, which PowerShell's `>` writes."""
    mark = next((mark for mark in _BYTE_ORDER_MARKS if data.startswith(mark)), b"")
    encoding = _BYTE_ORDER_MARKS.get(mark, "utf-8")
    try:
        return data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        place = len(mark) + error.start
        raise InvalidInput(
            f"{_sentence(what)} is not {encoding.upper()} text: the byte at {place:,} is invalid.",
            offset=place,
        ) from None


def _check_size(size: int, *, what: str, limits: FileLimits) -> None:
    if size > limits.metadata_bytes:
        raise LimitExceeded(
            f"{_sentence(what)} has {size:,} bytes, more than the limit of {limits.metadata_bytes:,}.",
            limit=limits.metadata_bytes,
        )


def _check_structure(text: bytes, *, what: str, limits: FileLimits) -> None:
    """Refuses JSON that would exhaust the stack or the memory, before any values are built from
    it."""
    brackets_and_commas = _outside_strings(text)
    if len(brackets_and_commas) > limits.json_values:
        raise LimitExceeded(
            f"{_sentence(what)} has more than {limits.json_values:,} values.",
            limit=limits.json_values,
        )
    levels = memoryview(brackets_and_commas.translate(_LEVELS)).cast("b")
    if max(accumulate(levels), default=0) > limits.json_depth:
        raise LimitExceeded(
            f"{_sentence(what)} is nested deeper than {limits.json_depth} levels.",
            limit=limits.json_depth,
        )


def _outside_strings(text: bytes) -> bytes:
    """Returns the brackets and commas outside of strings.

    The result is exact up to the first error in the text, where json stops anyway.
    """
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(plain.translate(None, delete=_ALL_BUT_STRUCTURE).split(b'"')[::2])


def _without_escaped_halves(text: str) -> str:
    if "\\ud" not in text and "\\uD" not in text:
        return text
    return _ESCAPE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)


def _integer(digits: str) -> int | None:
    if len(digits) > FINITE_DIGITS_MAX and math.isinf(float(digits)):
        return None
    return int(digits)


def _decimal(digits: str) -> float | None:
    number = float(digits)
    return None if math.isinf(number) else number


def _reason(error: json.JSONDecodeError, text: str) -> str:
    if error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip()):
        return "it ends too early (was it cut short?)"
    snippet = text[error.pos : error.pos + SNIPPET_CHARACTERS_MAX]
    problem = error.msg[0].lower() + error.msg[1:].removesuffix(" at")
    return f"{problem} in line {error.lineno}, column {error.colno}, at {snippet!a}"


def _sentence(what: str) -> str:
    """Capitalizes a message, except if it begins with a file name."""
    return what[:1].upper() + what[1:] if what.startswith(("the ", "a ")) else what
