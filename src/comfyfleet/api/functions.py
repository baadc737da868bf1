"""What expressions calculate: arithmetic, and the functions that may stand behind a bar."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

TEXT_CHARACTERS_MAX = 100_000  # of a text that an expression makes


class WrongValueError(Exception):
    """A function can't take these values; its text is for people."""


def bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        raise WrongValueError(f"a text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    is_large = isinstance(value, int) and value.bit_length() > 64
    if is_large or (isinstance(value, float) and not math.isfinite(value)):
        raise WrongValueError("a number is too large")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def kind_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list | tuple) else "an object"


_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}


def calculate(name: str, left: Any, right: Any) -> Any:
    """Calculates with numbers; `+` also joins two texts or two lists."""
    if name == "+" and isinstance(left, str) and isinstance(right, str):
        return left + right
    if name == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return [*left, *right]
    if not is_number(left) or not is_number(right):
        raise WrongValueError(f"{name} can't take {kind_name(left)} and {kind_name(right)}")
    try:
        return _ARITHMETIC[name](left, right)
    except ZeroDivisionError:
        raise WrongValueError("a number is divided by zero") from None
    except OverflowError:
        raise WrongValueError("a number is too large") from None


def _as_text(value: Any) -> str:
    """Writes a value as it stands in a text."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise WrongValueError(f"{kind_name(value)} can't be written into a text")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongValueError(f"a text is needed here, not {kind_name(value)}")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise WrongValueError(f"a list is needed here, not {kind_name(value)}")
    return list(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongValueError(f"a whole number is needed here, not {kind_name(value)}")
    return value


def _numbers(*values: Any) -> list[Any]:
    found = _items(values[0]) if len(values) == 1 else list(values)
    if not found or not all(map(is_number, found)):
        raise WrongValueError("numbers are needed here")
    return found


def _number(value: Any) -> Any:
    if is_number(value):
        return value
    try:
        return int(_text(value)) if re.fullmatch(r"\s*-?\d{1,30}\s*", value) else float(value)
    except ValueError:
        raise WrongValueError(f"{value!r:.40} is no number") from None


def _rounded(value: Any, digits: Any = 0) -> Any:
    if not is_number(value) or not 0 <= _whole(digits) <= 15:
        raise WrongValueError("round takes a number and 0 to 15 digits")
    return round(value) if digits == 0 else round(value, digits)


def _joined(items: Any, between: Any = ", ") -> str:
    texts = [_as_text(each) for each in _items(items)]
    if sum(map(len, texts)) + len(texts) * len(_text(between)) > TEXT_CHARACTERS_MAX:
        raise WrongValueError(f"a text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    return _text(between).join(texts)


def _split(text: Any, at: Any = ",") -> list[str]:
    if not _text(at):
        raise WrongValueError("split needs a text to split at")
    return [each.strip() for each in _text(text).split(at)]


def _replaced(text: Any, old: Any, new: Any) -> str:
    grown = _text(text).count(_text(old)) * len(_text(new)) if old else TEXT_CHARACTERS_MAX
    if len(text) + grown > TEXT_CHARACTERS_MAX:
        raise WrongValueError("replace needs a text to replace, and makes too long a one")
    return str(text.replace(old, new))


def _sorted(items: Any) -> list[Any]:
    found = _items(items)
    if not all(map(is_number, found)) and not all(isinstance(each, str) for each in found):
        raise WrongValueError("only numbers, or only texts, can be sorted")
    return sorted(found)


def _length(value: Any) -> int:
    if not isinstance(value, str | list | tuple | Mapping):
        raise WrongValueError(f"{kind_name(value)} has no length")
    return len(value)


def _first(value: Any, count: Any = None) -> Any:
    """Returns the first item, or the first items or characters."""
    if count is not None:
        found = value if isinstance(value, str) else _items(value)
        return found[: max(0, _whole(count))]
    if not _items(value):
        raise WrongValueError("the list is empty")
    return value[0]


def _last(value: Any) -> Any:
    if not _items(value):
        raise WrongValueError("the list is empty")
    return value[-1]


def _mean(*values: Any) -> float:
    found = _numbers(*values)
    return float(sum(found) / len(found))


class Function(NamedTuple):
    work: Callable[..., Any]
    least: int = 1  # arguments, with what stands before the bar
    most: int = 1


def _never(*_: Any) -> NoReturn:
    raise AssertionError("is evaluated by the evaluation itself")


FUNCTIONS: Mapping[str, Function] = {
    "abs": Function(lambda value: abs(_numbers(value, 0)[0])),
    "default": Function(_never, 2, 2),
    "first": Function(_first, 1, 2),
    "if": Function(_never, 3, 3),
    "join": Function(_joined, 1, 2),
    "last": Function(_last),
    "length": Function(_length),
    "lower": Function(lambda value: _text(value).lower()),
    "max": Function(lambda *values: max(_numbers(*values)), 1, 20),
    "mean": Function(_mean, 1, 20),
    "min": Function(lambda *values: min(_numbers(*values)), 1, 20),
    "number": Function(_number),
    "replace": Function(_replaced, 3, 3),
    "reverse": Function(lambda value: _items(value)[::-1]),
    "round": Function(_rounded, 1, 2),
    "sort": Function(_sorted),
    "split": Function(_split, 1, 2),
    "sum": Function(lambda *values: sum(_numbers(*values)), 1, 20),
    "text": Function(_as_text),
    "trim": Function(lambda value: _text(value).strip()),
    "upper": Function(lambda value: _text(value).upper()),
}
