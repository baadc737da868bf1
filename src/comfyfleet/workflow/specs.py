"""An input of a node class as the server declares it in `object_info`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.model import made

COMBO = "COMBO"
UNKNOWN = "UNKNOWN"
NO_OPTIONS: Mapping[str, Any] = {}


class InputSpec(NamedTuple):
    name: str
    type: str
    options: Mapping[str, Any] = NO_OPTIONS
    choices: list[Any] | None = None
    forced: bool = False  # to be a socket, whatever its type
    widget_type: str = ""  # the type that decides about its widget

    def option(self, name: str, default: Any) -> Any:
        value = self.options.get(name)
        return default if value is None else value


def input_spec(name: str, declared: Any, *, optional: bool = False) -> InputSpec:
    """From `[type or choices, options]`; the choices of a combo are in either place."""
    if not isinstance(declared, list) or not declared:
        return InputSpec(name, UNKNOWN, widget_type=UNKNOWN)
    kind = declared[0]
    if len(declared) == 1 and isinstance(kind, str):
        choices: list[Any] | None = [] if kind == COMBO else None
        return made(InputSpec, (name, kind, NO_OPTIONS, choices, False, kind))
    options = declared[1] if len(declared) > 1 and isinstance(declared[1], dict) else NO_OPTIONS
    choices = None
    if isinstance(kind, list):
        choices, kind = kind, COMBO
    elif kind == COMBO:
        listed = options.get("options")
        choices = listed if isinstance(listed, list) else []
    elif not isinstance(kind, str):
        kind = UNKNOWN
    # An optional input that is a socket by default was the older way to say so.
    forced = bool(options.get("forceInput") or (optional and options.get("defaultInput")))
    fields = (name, kind, options, choices, forced, options.get("widgetType") or kind)
    return made(InputSpec, fields)
