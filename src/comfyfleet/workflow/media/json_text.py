"""JSON of unknown origin, read as ComfyUI's editor reads it.

The editor (`parseJsonWithNonFinite`) takes the bare NaN, Infinity and -Infinity that Python's `json.dumps`
writes and puts null in their place. Numbers too large for JavaScript become Infinity there, which it writes as
null again, so here they are null at once. Of equal keys the last one counts, as in JavaScript. Integers beyond
2^53 stay exact, where the editor would round them.
"""

import json
import math
import re
from itertools import accumulate
from typing import Any

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.media.limits import DEFAULT_LIMITS, Limits

# An integer of that many digits is surely finite as a JavaScript number.
FINITE_DIGITS_MAX = 308
SNIPPET_CHARACTERS_MAX = 30

_BYTE_ORDER_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_STRUCTURE = b'"[]{},'
_ALL_BUT_STRUCTURE = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
# Seen as signed bytes: +1 opens a level, -1 closes it, 0 is a comma.
_LEVELS = bytes.maketrans(b"[]{},", b"\x01\xff\x01\xff\x00")
# Half a character (an emoji cut in two) can be neither printed nor stored: U+FFFD takes its place.
_HALF = re.compile("[\ud800-\udfff]")
# Every escape is matched, so that the second half of an escaped backslash never looks like the start of one.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def parse_json(
    data: bytes | bytearray | memoryview | str, *, what: str, limits: Limits = DEFAULT_LIMITS
) -> Any:
    """The value of a JSON text; `what` names it in errors ("the workflow in cat.png").

    Raises InvalidInput or LimitExceeded and nothing else. All strings in the result can be encoded, all numbers
    are finite, and nothing is nested deeper than `limits.json_depth`.
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
    """Text in UTF-8, or in UTF-16 if it says so (PowerShell's `>` writes that)."""
    mark = next((mark for mark in _BYTE_ORDER_MARKS if data.startswith(mark)), b"")
    encoding = _BYTE_ORDER_MARKS.get(mark, "utf-8")
    try:
        return data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        place = len(mark) + error.start
        raise InvalidInput(
            f"{_sentence(what)} is not {encoding.upper()} text: the byte at {place:,} does not belong there.",
            offset=place,
        ) from None


def _check_size(size: int, *, what: str, limits: Limits) -> None:
    if size > limits.metadata_bytes:
        raise LimitExceeded(
            f"{_sentence(what)} has {size:,} bytes, more than the {limits.metadata_bytes:,} that we read.",
            limit=limits.metadata_bytes,
        )


def _check_structure(text: bytes, *, what: str, limits: Limits) -> None:
    """Refuse what would exhaust the stack or the memory, before anything is built from it."""
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
    """Brackets and commas that are not inside strings. Exact as far as the text is valid, and json stops there."""
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
    """Names of files stay as they are."""
    return what[:1].upper() + what[1:] if what.startswith(("the ", "a ")) else what
