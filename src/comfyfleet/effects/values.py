"""A property's value: from the workflow's default, the effect's override, the user's word. Pure."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

from comfyfleet.effects.model import SEED_MAX, Property
from comfyfleet.kernel.errors import InvalidValue
from comfyfleet.kernel.texts import problem_with_text

TEXT_CHARACTERS_MAX = 1_000_000
SHOWN_CHARACTERS_MAX = 60
SHOWN_CHOICES_MAX = 20


def resolve(
    properties: Iterable[Property],
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    seed: int,
) -> dict[str, Any]:
    """Each property that has a value, with it: checked, files as UUIDs. None means: not given."""
    named = {each.name: each for each in properties}
    for given in (values, overrides):
        _refuse_unknown(named, given)
    resolved: dict[str, Any] = {}
    for name, each in named.items():
        value = _first(values.get(name), overrides.get(name), each.default)
        if value is None and each.type == "seed":
            value = seed_within(each, seed)
        if value is not None:
            is_ours = values.get(name) is None
            resolved[name] = checked(each, value, is_ours=is_ours)
        elif each.required:
            raise InvalidValue(f"the property {name} needs a value", property=name)
    return resolved


def checked(each: Property, value: Any, *, is_ours: bool = False) -> Any:
    """The value as it goes into the prompt. `is_ours`: the operator's own, so it may name a file that
    the backend has, where a user's must be an upload."""
    problem_free = _CHECKS[each.type](each, value, is_ours)
    _check_range(each, problem_free)
    return problem_free


def seed_within(each: Property, seed: int) -> int:
    least, most = int(each.minimum or 0), int(SEED_MAX if each.maximum is None else each.maximum)
    return least + seed % (most - least + 1)


def wrong(each: Property, problem: str) -> InvalidValue:
    return InvalidValue(f"the property {each.name}: {problem}", property=each.name)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else f"{text[:SHOWN_CHARACTERS_MAX]}…"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _refuse_unknown(named: Mapping[str, Property], given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in named:
            known = ", ".join(named) or "none"
            raise InvalidValue(
                f"there is no property {shown(name)}; there are: {known}", property=name
            )


def _text(each: Property, value: Any, _is_ours: bool) -> str:
    if not isinstance(value, str):
        raise wrong(each, f"{shown(value)} is no text")
    if len(value) > TEXT_CHARACTERS_MAX:
        raise wrong(each, f"the text has more than {TEXT_CHARACTERS_MAX:,} characters")
    problem = problem_with_text(value)
    if problem:
        raise wrong(each, problem)
    return value


def _number(each: Property, value: Any, _is_ours: bool) -> int | float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_finite(value):
        raise wrong(each, f"{shown(value)} is no number")
    number: int | float = value
    return number


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _integer(each: Property, value: Any, is_ours: bool) -> int:
    number = _number(each, value, is_ours)
    if number != int(number):
        raise wrong(each, f"{shown(value)} is no whole number")
    return int(number)


def _boolean(each: Property, value: Any, _is_ours: bool) -> bool:
    if not isinstance(value, bool):
        raise wrong(each, f"{shown(value)} is neither true nor false")
    return value


def _choice(each: Property, value: Any, _is_ours: bool) -> Any:
    """True is not 1 here, though Python says so."""
    choices = each.choices or ()
    for choice in choices:
        if choice == value and isinstance(choice, bool) == isinstance(value, bool):
            return choice
    more = ", …" if len(choices) > SHOWN_CHOICES_MAX else ""
    listed = ", ".join(shown(choice) for choice in choices[:SHOWN_CHOICES_MAX]) + more
    raise wrong(each, f"{shown(value)} is not among the choices: {listed}")


def _seed(each: Property, value: Any, is_ours: bool) -> int:
    seed = _integer(each, value, is_ours)
    if not 0 <= seed <= SEED_MAX:
        raise wrong(each, f"a seed is 0 to {SEED_MAX}, not {shown(value)}")
    return seed


def _file(each: Property, value: Any, is_ours: bool) -> UUID | str:
    if isinstance(value, UUID):
        return value
    try:
        return UUID(value)
    except (ValueError, TypeError, AttributeError):
        if is_ours and isinstance(value, str) and value and problem_with_text(value) is None:
            return value
        raise wrong(each, f"{shown(value)} is no file's id") from None


def _check_range(each: Property, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or each.choices is not None:
        return
    if each.minimum is not None and value < each.minimum:
        raise wrong(each, f"{shown(value)} is below the minimum of {shown(each.minimum)}")
    if each.maximum is not None and value > each.maximum:
        raise wrong(each, f"{shown(value)} is above the maximum of {shown(each.maximum)}")


_CHECKS: Mapping[str, Callable[[Property, Any, bool], Any]] = {
    "text": _text,
    "number": _number,
    "integer": _integer,
    "boolean": _boolean,
    "choice": _choice,
    "seed": _seed,
    "image": _file,
    "video": _file,
    "audio": _file,
}
