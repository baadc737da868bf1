"""What a workflow takes: every value that no link decides, and which of them matter."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from comfyfleet.workflow.inspection.model import Role, Taken
from comfyfleet.workflow.inspection.names import is_media_file, is_model_file, words_of
from comfyfleet.workflow.inspection.saved import is_control
from comfyfleet.workflow.inspection.shorthands import Shorthands
from comfyfleet.workflow.inspection.view import SeenNode
from comfyfleet.workflow.limits import DEFAULT_LIMITS
from comfyfleet.workflow.nodetypes import NodeType
from comfyfleet.workflow.widgettypes import ABSENT, Widget

UPLOAD_FLAGS = (
    "image_upload", "video_upload", "audio_upload", "animated_image_upload", "file_upload",
)  # fmt: skip
# Kinds of widgets that show something or do something: nobody sets their value.
NOT_SET_BY_PEOPLE = frozenset(("view", "button", "comparer", "viewport", "index", "control"))
TEXT_WORDS = frozenset(("text", "prompt", "positive", "negative", "lyrics", "tags"))
NUMBER_WORDS: tuple[tuple[Role, frozenset[str]], ...] = (
    ("seed", frozenset(("seed",))),
    ("steps", frozenset(("steps",))),
    ("size", frozenset(("width", "height", "length", "megapixels", "resolution"))),
)


def taken(nodes: Iterable[SeenNode], shorthands: Shorthands) -> Iterator[Taken]:
    for node in nodes:
        if not node.is_active:
            continue
        widgets = widgets_of_values(node.type, node.values) if node.type else {}
        for name, value in node.values.items():
            widget = widgets.get(name)
            if widget is not None and widget.kind in NOT_SET_BY_PEOPLE:
                continue
            # Extensions add inputs that no class declares; what is no plain value is theirs alone.
            if widget is not None or isinstance(value, str | int | float):
                each = _taken(node, name, value, widget)
                yield replace(each, shorthands=shorthands.get((node.ref.id, name), ()))
        yield from _unnamed(node)


def _unnamed(node: SeenNode) -> Iterator[Taken]:
    """Values of an old file, of which only their place is known."""
    values = node.unnamed_values
    for index, value in enumerate(values):
        followed_by = values[index + 1] if index + 1 < len(values) else None
        if is_control(value) or not isinstance(value, str | int | float):
            continue
        role = role_of("seed" if is_control(followed_by) else "", value, None)
        if role is None and isinstance(value, str) and " " in value.strip():
            role = "text"
        yield Taken(None, node.ref, None, _type_of(value), value, role)


def widgets_of_values(node_type: NodeType, values: Mapping[str, Any]) -> dict[str, Widget]:
    """The widgets of a node by name, those that its choices bring included."""
    found: dict[str, Widget] = {}
    pending = list(reversed(node_type.widgets))
    while pending:
        widget = pending.pop()
        if not widget.is_widget:
            continue
        found[widget.name] = widget
        if widget.children is not None:
            pending.extend(reversed(widget.children(_bounded(values.get(widget.name)))))
    return found


def _bounded(value: Any) -> Any:
    """A number may be one of rows, each of which brings inputs."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    is_number = isinstance(value, int | float)
    return min(value, DEFAULT_LIMITS.dynamic_rows_max) if is_number else value


def _taken(node: SeenNode, name: str, value: Any, widget: Widget | None) -> Taken:
    address = f"{node.ref.id}.{name}"
    # A primitive calls its only input so: what it is for says its title.
    role = role_of(node.ref.title if name == "value" else name, value, widget)
    exposed = node.exposed[name].name if name in node.exposed else None
    if widget is None:
        guessed = _type_of(value)
        return Taken(address, node.ref, name, guessed, value, role, exposed)
    options = widget.options
    return Taken(
        address,
        node.ref,
        name,
        "COMBO" if widget.choices is not None else widget.input_type or widget.kind.upper(),
        value,
        role,
        exposed,
        default=None if widget.default is ABSENT else widget.default,
        min=_number(options.get("min")),
        max=_number(options.get("max")),
        step=_number(options.get("step")),
        choices=None if widget.choices is None else tuple(widget.choices),
        multiline=widget.kind == "multiline",
    )


def role_of(label: str, value: Any, widget: Widget | None) -> Role | None:
    if is_file_input(value, widget):
        return "file"
    if is_model_file(value):
        return "model"
    if isinstance(value, str):
        return "text" if _is_prose(label, widget) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return _role_of_number(label)


def is_file_input(value: Any, widget: Widget | None) -> bool:
    if widget is not None and any(widget.options.get(flag) for flag in UPLOAD_FLAGS):
        return True
    is_chosen = widget is None or widget.choices is not None
    return is_chosen and is_media_file(value)


def _is_prose(label: str, widget: Widget | None) -> bool:
    if widget is not None and widget.input_type != "STRING":
        return False
    if widget is not None and widget.options.get("dynamicPrompts"):
        return True
    return bool(words_of(label) & TEXT_WORDS)


def _role_of_number(label: str) -> Role | None:
    words = words_of(label)
    return next((role for role, hints in NUMBER_WORDS if words & hints), None)


def _type_of(value: Any) -> str:
    """A type in the server's words for a value of which only the value is known."""
    names: dict[type, str] = {bool: "BOOLEAN", int: "INT", float: "FLOAT", str: "STRING"}
    return names.get(type(value), "UNKNOWN")


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
