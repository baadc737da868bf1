"""The operations of expressions: arithmetic, and the functions that may follow a `|`."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

TEXT_CHARACTERS_MAX = 100_000  # limit for strings that expressions produce


class WrongValueError(Exception):
    """Raised if a function can't process its arguments. The text is intended for users."""


def bounded(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_CHARACTERS_MAX:
        raise WrongValueError(f"the text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    is_large = isinstance(value, int) and value.bit_length() > 64
    if is_large or (isinstance(value, float) and not math.isfinite(value)):
        raise WrongValueError("the number is too large")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite_number(value: Any) -> bool:
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def kind_name(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
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
    """Applies an operator to two numbers. `+` also joins two strings or two lists."""
    if name == "+" and isinstance(left, str) and isinstance(right, str):
        return left + right
    if name == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return [*left, *right]
    if not is_number(left) or not is_number(right):
        raise WrongValueError(f"{name} doesn't support {kind_name(left)} and {kind_name(right)}")
    try:
        return _ARITHMETIC[name](left, right)
    except ZeroDivisionError:
        raise WrongValueError("division by zero") from None
    except OverflowError:
        raise WrongValueError("the number is too large") from None


def _as_text(value: Any) -> str:
    """Returns the string for a value that is inserted into a template."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str | int | float):
        raise WrongValueError(f"{kind_name(value)} can't be converted to text")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise WrongValueError(f"expected text, not {kind_name(value)}")
    return value


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise WrongValueError(f"expected a list, not {kind_name(value)}")
    return list(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise WrongValueError(f"expected a whole number, not {kind_name(value)}")
    return value


def _numbers(*values: Any) -> list[Any]:
    items = _items(values[0]) if len(values) == 1 else list(values)
    if not items or not all(map(is_number, items)):
        raise WrongValueError("expected numbers")
    return items


def _number(value: Any) -> Any:
    if is_number(value):
        return value
    try:
        return int(_text(value)) if re.fullmatch(r"\s*-?\d{1,30}\s*", value) else float(value)
    except ValueError:
        raise WrongValueError(f"{value!r:.40} is not a number") from None


def _rounded(value: Any, digits: Any = 0) -> Any:
    if not is_number(value) or not 0 <= _whole(digits) <= 15:
        raise WrongValueError("round expects a number and 0 to 15 digits")
    return round(value) if digits == 0 else round(value, digits)


def _joined(items: Any, between: Any = ", ") -> str:
    texts = [_as_text(item) for item in _items(items)]
    if sum(map(len, texts)) + len(texts) * len(_text(between)) > TEXT_CHARACTERS_MAX:
        raise WrongValueError(f"the text is longer than {TEXT_CHARACTERS_MAX:,} characters")
    return _text(between).join(texts)


def _split(text: Any, at: Any = ",") -> list[str]:
    if not _text(at):
        raise WrongValueError("split requires a separator")
    return [part.strip() for part in _text(text).split(at)]


def _replaced(text: Any, old: Any, new: Any) -> str:
    grown = _text(text).count(_text(old)) * len(_text(new)) if old else TEXT_CHARACTERS_MAX
    if len(text) + grown > TEXT_CHARACTERS_MAX:
        raise WrongValueError(
            "replace requires text to search for, and its result must not be too long"
        )
    return str(text.replace(old, new))


def _sorted(items: Any) -> list[Any]:
    values = _items(items)
    if not all(map(is_number, values)) and not all(isinstance(value, str) for value in values):
        raise WrongValueError("only lists of numbers or lists of strings can be sorted")
    return sorted(values)


def _length(value: Any) -> int:
    if not isinstance(value, str | list | tuple | Mapping):
        raise WrongValueError(f"{kind_name(value)} has no length")
    return len(value)


def _first(value: Any, count: Any = None) -> Any:
    """Returns the first item, or the first items or characters."""
    if count is not None:
        items = value if isinstance(value, str) else _items(value)
        return items[: max(0, _whole(count))]
    if not _items(value):
        raise WrongValueError("the list is empty")
    return value[0]


def _last(value: Any) -> Any:
    if not _items(value):
        raise WrongValueError("the list is empty")
    return value[-1]


def _mean(*values: Any) -> float:
    numbers = _numbers(*values)
    return float(sum(numbers) / len(numbers))


class Function(NamedTuple):
    work: Callable[..., Any]
    least: int = 1  # minimum number of arguments, including the value before the `|`
    most: int = 1


def _never(*_: Any) -> NoReturn:
    raise AssertionError("the evaluator handles this function itself")


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
