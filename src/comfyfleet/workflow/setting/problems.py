"""Why ComfyUI's server would refuse a literal value of an input.

The server turns values into the declared type as Python does (`int("5")` passes, `int("5.5")` does not), then looks
at the range and the choices. A node class can check an input by itself instead; `object_info` says so only of files
to be uploaded and of choices that are fetched from elsewhere, so these are not held against a list here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comfyfleet.workflow.nodetypes import DYNAMIC_COMBO
from comfyfleet.workflow.setting.wording import LISTED_MAX, hint, listed, quoted, shown
from comfyfleet.workflow.specs import InputSpec, input_spec

# Choices that the declared list does not settle: the file may have come since, or lies in another folder.
_OPEN_CHOICES = (
    "image_upload", "animated_image_upload", "video_upload", "audio_upload", "file_upload", "remote",
)  # fmt: skip


def problem_with(declared: Any, value: Any) -> str | None:
    """`declared` is an entry of `input.required` or `input.optional`: `[type or choices, options]`."""
    spec = input_spec("", declared)
    value = unwrapped(value)
    coerce = _COERCIONS.get(spec.type)
    if coerce is not None:
        value, problem = _coerced(coerce, value, spec.type)
        if problem:
            return problem
    return _range_problem(spec.options, value) or _choice_problem(spec, value)


def unwrapped(value: Any) -> Any:
    """Lists stand wrapped in a prompt, lest they be taken for links."""
    return value["__value__"] if isinstance(value, dict) and "__value__" in value else value


def choices_of(spec: InputSpec) -> list[Any] | None:
    """What can be chosen, or None if it is no choice or the list doesn't settle it."""
    if spec.type == DYNAMIC_COMBO:
        options = spec.options.get("options")
        branches = options if isinstance(options, list) else []
        return [branch.get("key") for branch in branches if isinstance(branch, dict)]
    if spec.choices is None or any(spec.options.get(name) for name in _OPEN_CHOICES):
        return None
    return spec.choices


def takes_several(spec: InputSpec) -> bool:
    return bool(spec.options.get("multiselect") or spec.options.get("multi_select"))


_COERCIONS: Mapping[str, Callable[[Any], Any]] = {"INT": int, "FLOAT": float}
_NUMBER_NAMES = {"INT": "a whole number", "FLOAT": "a number"}


def _coerced(coerce: Callable[[Any], Any], value: Any, name: str) -> tuple[Any, str | None]:
    try:
        return coerce(value), None
    except (TypeError, ValueError, OverflowError):
        return value, f"{shown(value)} is not {_NUMBER_NAMES[name]}"


def _range_problem(options: Mapping[str, Any], value: Any) -> str | None:
    least, most = _bound(options, "min"), _bound(options, "max")
    if least is None and most is None:
        return None
    if not isinstance(value, int | float):
        return f"{shown(value)} is not a number"
    if least is not None and value < least:
        return f"{shown(value)} is below the minimum of {shown(least)}"
    if most is not None and value > most:
        return f"{shown(value)} is above the maximum of {shown(most)}"
    return None


def _bound(options: Mapping[str, Any], name: str) -> float | None:
    bound = options.get(name)
    is_number = isinstance(bound, int | float) and not (
        isinstance(bound, float) and math.isnan(bound)
    )
    return bound if is_number else None


def _choice_problem(spec: InputSpec, value: Any) -> str | None:
    choices = choices_of(spec)
    if choices is None:
        return None
    several = takes_several(spec) and isinstance(value, list)
    wrong = [one for one in (value if several else [value]) if one not in choices]
    if not wrong:
        return None
    if not choices:
        return f"{shown(wrong[0])} can't be chosen: the server has nothing to choose from"
    return f"{shown(wrong[0])} is not {_among(wrong[0], choices)}"


def _among(wanted: Any, choices: Sequence[Any]) -> str:
    names = [choice if isinstance(choice, str) else shown(choice) for choice in choices]
    if len(names) <= LISTED_MAX:
        return f"among the choices: {listed(map(quoted, names), len(names))}"
    text = wanted if isinstance(wanted, str) else shown(wanted)
    return f"among the {len(names)} choices{hint(text, names)}"
