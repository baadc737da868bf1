"""Parses object_infos of any size without holding the global interpreter lock for long.

A worker may upload tens of megabytes. The standard library's C parser holds the lock until it is
finished. So it is only used for short node types, one at a time. Longer ones are parsed by the
slower Python version, which lets other threads run. All limits are checked before parsing, except
for the size and depth of a node type.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from typing import Any

from comfyfleet.api.worker import OBJECT_INFO_BYTES_MAX
from comfyfleet.errors import InvalidInput

VALUES_MAX = 1_000_000  # maximum number of values in all node types together
NODE_VALUES_MAX = 200_000  # maximum number of values in one node type
ESCAPES_MAX = 200_000
TEXT_BYTES_MAX = 1024 * 1024
DEPTH_MAX = 100
CHUNK = 2**20  # maximum number of bytes that a single call into C code processes
# A node type of up to this many characters is parsed by a single call. The smaller limit is tried
# first.
WHOLE_CHARACTERS = (8 * 1024, 64 * 1024)

_fast = json.JSONDecoder()
_in_steps = json.JSONDecoder()
_in_steps.scan_once = json.scanner.py_make_scanner(_in_steps)  # type: ignore[attr-defined]


def parse_object_info(data: bytes) -> dict[str, Any]:
    """Parses an object_info, which contains node classes by name. Raises InvalidInput if the data
    is invalid or too large.
    """
    if len(data) > OBJECT_INFO_BYTES_MAX:
        raise InvalidInput(f"an object_info may have at most {OBJECT_INFO_BYTES_MAX:,} bytes")
    if sum(_count_values(part) for part in _parts(data)) > VALUES_MAX:
        raise InvalidInput(f"an object_info may have at most {VALUES_MAX:,} values")
    if sum(part.count(b"\\") for part in _parts(data)) > ESCAPES_MAX:
        raise InvalidInput(f"an object_info may have at most {ESCAPES_MAX:,} escape sequences")
    if _has_long_text(data):
        raise InvalidInput(f"a string in an object_info may have at most {TEXT_BYTES_MAX:,} bytes")
    try:
        return dict(_entries(_decoded(data)))
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise InvalidInput(f"the object_info is not valid JSON: {error}") from None


def _parts(data: bytes) -> Iterator[bytes]:
    return (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def _count_values(part: bytes) -> int:
    """Returns an upper bound for the number of values. Commas and brackets in strings are counted
    as well.
    """
    return part.count(b",") + part.count(b"[") + part.count(b"{")


def _has_long_text(data: bytes) -> bool:
    """Whether there are more than TEXT_BYTES_MAX bytes between two quotes or after the last one."""
    start = 0
    while len(data) - start > TEXT_BYTES_MAX:
        quote = data.rfind(b'"', start, start + TEXT_BYTES_MAX + 1)
        if quote < 0:
            return True
        start = quote + 1
    return False


def _decoded(data: bytes) -> str:
    decoder = codecs.getincrementaldecoder(json.detect_encoding(data))()
    return "".join([*map(decoder.decode, _parts(data)), decoder.decode(b"", True)])


def _entries(text: str) -> Iterator[tuple[str, Any]]:
    at = _expect(text, 0, "{")
    at = _skip(text, at)
    if text[at : at + 1] == "}":
        return _require_end(text, at + 1)
    while True:
        at = _expect(text, at, '"')
        name, at = scanstring(text, at, True)
        value, at = _value(text, _skip(text, _expect(text, at, ":")))
        if not isinstance(value, dict) or not isinstance(value.get("input", {}), dict):
            raise InvalidInput(
                "each node class in an object_info must be an object whose `input` is an object"
            )
        yield name, value
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return _require_end(text, at + 1)
        at = _skip(text, _expect(text, at, ","))


def _value(text: str, at: int) -> tuple[Any, int]:
    """Parses a node type and returns it with the position after it."""
    for length in WHOLE_CHARACTERS:
        part = text[at : at + length]
        try:
            value, size = _fast.raw_decode(part)
        except ValueError:
            continue  # the node type is longer than this part, or invalid
        _check_size(value, part[:size])
        return value, at + size
    try:
        value, end = _in_steps.scan_once(text, at)  # type: ignore[attr-defined]
    except StopIteration:
        raise json.JSONDecodeError("a value is missing", "", 0) from None
    _check_size(value, text[at:end])
    return value, int(end)


def _check_size(value: Any, text: str) -> None:
    if text.count(",") + text.count("[") + text.count("{") > NODE_VALUES_MAX:
        raise InvalidInput(
            f"a node type in an object_info may have at most {NODE_VALUES_MAX:,} values"
        )
    if text.count("[") + text.count("{") > DEPTH_MAX:
        _check_depth(value)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return
    raise _too_deep()


def _inside(value: Any) -> list[Any]:
    values = value.values() if isinstance(value, dict) else value
    return [item for item in values if isinstance(item, dict | list)]


def _too_deep() -> InvalidInput:
    return InvalidInput(f"an object_info may be nested at most {DEPTH_MAX} levels deep")


_match: Callable[[str, int], Any] = WHITESPACE.match


def _skip(text: str, at: int) -> int:
    return int(_match(text, at).end())


def _expect(text: str, at: int, character: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != character:
        raise json.JSONDecodeError(f"{character!r} is missing", text[:0], 0)
    return at + 1


def _require_end(text: str, at: int) -> None:
    if _skip(text, at) != len(text):
        raise InvalidInput("the object_info is not valid JSON: there is more data after its end")
