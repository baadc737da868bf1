"""What a person typed becomes a value of the declared type."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.kernel.errors import FleetError, InvalidValue
from comfyfleet.workflow.media.json_text import parse_json
from comfyfleet.workflow.model import ANY_TYPE
from comfyfleet.workflow.nodetypes import DYNAMIC_COMBO, MATCH_TYPE
from comfyfleet.workflow.setting.problems import choices_of, takes_several, unwrapped
from comfyfleet.workflow.setting.wording import shown
from comfyfleet.workflow.specs import InputSpec, input_spec

_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
# Types whose values are texts, so that a colour such as 000000 is no number.
_TEXT_TYPES = ("STRING", "MARKDOWN", "TEXTAREA", "COLOR")
# The type that a value has where the server's declaration leaves it open.
_TYPES_OF_VALUES: Mapping[type, str] = {bool: "BOOLEAN", int: "INT", float: "FLOAT", str: "STRING"}


def read_value(declared: Any, value: Any, current: Any = None) -> Any:
    """A text becomes a value of the declared type; any other value only has to be JSON.

    `current` is the value until now, which tells the type where the declaration doesn't.
    """
    spec = input_spec("", declared if declared is not None else [ANY_TYPE])
    if spec.type in (ANY_TYPE, MATCH_TYPE):
        spec = input_spec("", [_type_of(current)])
    is_choice = spec.type in ("COMBO", DYNAMIC_COMBO)
    if not isinstance(value, str):
        return _listed(spec, _json_copy(value)) if is_choice else _json_copy(value)
    text = _encodable(value)
    return (
        _chosen(spec, text) if is_choice else _READERS.get(spec.widget_type, _read_json)(spec, text)
    )


def wrapped(value: Any) -> Any:
    """A list would be taken for a link; the server unwraps it."""
    return {"__value__": value} if isinstance(value, list) else value


def _type_of(value: Any) -> str:
    return _TYPES_OF_VALUES.get(type(unwrapped(value)), ANY_TYPE)


def _json_copy(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise InvalidValue("the value can't be written as JSON") from None


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue("the text holds half a character (a lone surrogate)") from None
    return text


def _read_int(_: InputSpec, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = _number(text)
        if number is None or not number.is_integer():
            raise InvalidValue(f"{shown(text)} is not a whole number") from None
        return int(number)


def _read_float(_: InputSpec, text: str) -> float:
    number = _number(text)
    if number is None:
        raise InvalidValue(f"{shown(text)} is not a number")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_boolean(_: InputSpec, text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise InvalidValue(f"{shown(text)} is neither true nor false")
    return word in _YES


def _read_text(_: InputSpec, text: str) -> str:
    return text


def _read_json(spec: InputSpec, text: str) -> Any:
    try:
        return parse_json(text, what="the value")
    except FleetError:
        if {ANY_TYPE, "STRING"}.isdisjoint(spec.type.split(",")):
            raise InvalidValue(f"{shown(text)} is not JSON, as {spec.type} wants it") from None
        return text


def _chosen(spec: InputSpec, text: str) -> Any:
    """The choice that is written so: choices can be numbers, too."""
    if takes_several(spec) and text.lstrip().startswith("["):
        return _read_json(spec, text)
    choices = choices_of(spec) or ()
    if text in choices:
        return text
    return next((choice for choice in choices if shown(choice) == text), text)


def _listed(spec: InputSpec, value: Any) -> Any:
    """The number 5 chooses "5", where that is how it is listed."""
    choices = choices_of(spec) or ()
    return shown(value) if value not in choices and shown(value) in choices else value


_READERS: Mapping[str, Callable[[InputSpec, str], Any]] = {
    "INT": _read_int,
    "FLOAT": _read_float,
    "BOOLEAN": _read_boolean,
    **dict.fromkeys(_TEXT_TYPES, _read_text),
}
