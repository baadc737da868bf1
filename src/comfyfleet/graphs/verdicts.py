"""What a condition says of a value. A field that is missing is a result, and is told; never a crash."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from comfyfleet.graphs.conditions import (
    AllOf,
    AnyOf,
    Compare,
    Exists,
    Expression,
    FileExists,
    Literal,
    Not,
    Path,
)

NOTES_MAX = 10


class Missing:
    """Stands for a field that isn't there; equal to nothing, not even to null."""


MISSING = Missing()


class Verdict(NamedTuple):
    value: bool
    notes: tuple[str, ...] = ()  # fields that were missing, values that could not be compared


def judge(expression: Expression, value: Any) -> Verdict:
    """Every part is looked at, so that the notes don't depend on which part was enough."""
    notes: list[str] = []
    truth = _truth(_value(expression, value, notes))
    return Verdict(truth, tuple(dict.fromkeys(notes))[:NOTES_MAX])


def follow(value: Any, segments: tuple[str, ...]) -> Any:
    """The field at the end of a path, or MISSING."""
    for segment in segments:
        value = _field(value, segment)
        if value is MISSING:
            return MISSING
    return value


def _field(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        return len(value) if name == "count" else _first_picture(value, name)
    if isinstance(value, list | tuple):
        if name == "count":
            return len(value)
        if name.isdecimal() and len(name) < 10 and int(name) < len(value):
            return value[int(name)]
    return MISSING


def _first_picture(value: Mapping[str, Any], name: str) -> Any:
    """`image_path` is short for the path of the first picture."""
    pictures = value.get("images")
    if name != "image_path" or not isinstance(pictures, list | tuple) or not pictures:
        return MISSING
    first = pictures[0]
    return first.get("path", MISSING) if isinstance(first, Mapping) else first


def _value(expression: Expression, root: Any, notes: list[str]) -> Any:
    match expression:
        case Literal(value):
            return value
        case Path():
            return _noted(expression, root, notes)
        case Exists(path):
            return follow(root, path.segments) is not MISSING
        case FileExists(path):
            return _is_file(_noted(path, root, notes), root)
        case Not(part):
            return not _truth(_value(part, root, notes))
        case AllOf(parts):
            return all(_truths(parts, root, notes))
        case AnyOf(parts):
            return any(_truths(parts, root, notes))
        case Compare(name, left, right):
            return _compared(name, _value(left, root, notes), _value(right, root, notes), notes)


def _truths(parts: tuple[Expression, ...], root: Any, notes: list[str]) -> list[bool]:
    return [_truth(_value(part, root, notes)) for part in parts]


def _noted(path: Path, root: Any, notes: list[str]) -> Any:
    found = follow(root, path.segments)
    if found is MISSING:
        notes.append(f"{path} is missing")
    return found


def _truth(value: Any) -> bool:
    return value is not MISSING and bool(value)


def _is_file(value: Any, root: Any) -> bool:
    """A file of this value, by itself or by its path; a text that only looks like one is none."""
    if isinstance(value, Mapping):
        return "file_id" in value
    return isinstance(value, str) and value in _file_names(root)


def _file_names(value: Any) -> set[str]:
    names: set[str] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Mapping):
            if "file_id" in current:
                names |= {str(current[key]) for key in ("file_id", "path") if key in current}
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
    return names


_ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def _compared(name: str, left: Any, right: Any, notes: list[str]) -> bool:
    """A comparison with what is missing is false, and so `!=`, its opposite, is true."""
    if name in ("==", "!="):
        return same(left, right) is (name == "==")
    if left is MISSING or right is MISSING:
        return False
    if name == "in":
        return _holds(right, left, notes)
    if name == "contains":
        return _holds(left, right, notes)
    if _are_ordered(left, right):
        return _ORDERED[name](left, right)
    notes.append(f"{_kind(left)} can't be compared with {_kind(right)} by {name}")
    return False


def _are_ordered(left: Any, right: Any) -> bool:
    if isinstance(left, str):
        return isinstance(right, str)
    return _is_number(left) and _is_number(right)


def same(left: Any, right: Any) -> bool:
    """1 equals 1.0, and neither equals true."""
    if left is MISSING or right is MISSING or isinstance(left, bool) is not isinstance(right, bool):
        return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(same(one, other) for one, other in pairs)
    return bool(left == right)


def _holds(container: Any, item: Any, notes: list[str]) -> bool:
    if isinstance(container, str) and isinstance(item, str):
        return item in container
    if isinstance(container, list | tuple):
        return any(same(each, item) for each in container)
    if isinstance(container, Mapping) and isinstance(item, str):
        return item in container
    notes.append(f"{_kind(container)} can't hold {_kind(item)}")
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list | tuple) else "an object"
