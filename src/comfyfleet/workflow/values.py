"""Pass 5: the saved `widgets_values` are dealt out to a node's widgets, strictly in order.

One counter goes over the widgets that are stored. There is no guessing: a list that is one short
is read shifted, as the editor reads it. A choice with branches of its own puts the widgets of the
chosen branch right behind itself.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.behaviours import (
    CUSTOM_COMBO,
    OLD_SAMPLER_PREFIX,
    SAMPLER_CLASSES,
)
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import Node, made
from comfyfleet.workflow.nodetypes import DYNAMIC_GROUP, NodeType
from comfyfleet.workflow.packs import compared_images, deal_named, listed_loras, named_values
from comfyfleet.workflow.widgettypes import LOADING, Widget


class Dealt(NamedTuple):
    """The widgets that a node has, given its values, and the value of each."""

    widgets: tuple[Widget, ...]
    values: dict[str, Any]
    slots: int  # places in widgets_values that the widgets take


def deal_values(node_type: NodeType, node: Node, *, limits: Limits = DEFAULT_LIMITS) -> Dealt:
    saved, overrides = node.values, node.overrides
    if node_type.is_plain and isinstance(saved, list) and None not in saved and not overrides:
        values = dict(zip(node_type.stored, saved, strict=False))
        if len(saved) < len(node_type.stored):
            values = {**node_type.defaults, **values}
        if node_type.name in SAMPLER_CLASSES:
            _cut_old_prefix(values)
        return made(Dealt, (node_type.widgets, values, len(node_type.stored)))
    positional = positional_values(node_type, saved)
    special = _deal_special(node_type, node, positional)
    if special is not None:
        return special
    widgets: list[Widget] = []
    values = {}
    position = _deal(list(reversed(node_type.widgets)), positional, widgets, values, limits)
    if node_type.name in SAMPLER_CLASSES:
        _cut_old_prefix(values)
    if overrides:
        values.update((name, overrides[name]) for name in overrides if name in values)
    return Dealt(tuple(widgets), values, position)


def _deal_special(node_type: NodeType, node: Node, positional: Sequence[Any]) -> Dealt | None:
    """For the classes that have their own way with values."""
    if node_type.name == CUSTOM_COMBO:
        return _deal_custom_combo(node_type, positional)
    behaviour = node_type.behaviour
    if behaviour is None:
        return None
    if behaviour.lists_loras:
        widgets, values = listed_loras(node_type, node.values, node.properties)
        return Dealt(widgets, values, len(positional))
    named = named_values(node_type, positional or node.values) if behaviour.named_values else None
    return Dealt(*deal_named(node_type, named), len(named)) if named is not None else None


def _deal(
    pending: list[Widget],
    positional: Sequence[Any],
    widgets: list[Widget],
    values: dict[str, Any],
    limits: Limits,
) -> int:
    position = 0
    available = len(positional)
    while pending:
        widget = pending.pop()
        widgets.append(widget)
        if not widget.is_widget:
            continue
        value = widget.default
        if widget.stored:
            if position < available and widget.kind != "viewport":
                value = positional[position]
            position += 1
        dealt = value is not None
        if widget.kind == "comparer":
            value = compared_images(value)
        if widget.kind == "remote":
            value = _listed(value, widget)
        elif value is None and widget.choices:
            value = widget.choices[0]
        elif value is None and widget.kind == "multiselect":
            value = ""
        values[widget.name] = value
        if widget.children is not None:
            pending.extend(reversed(_children(widget, value, dealt=dealt, limits=limits)))
    return position


def _listed(value: Any, widget: Widget) -> Any:
    """The choices come from elsewhere: a value that is not among them gives way to the first."""
    choices = widget.choices or ()
    return value if value in choices else choices[0] if choices else LOADING


def _children(widget: Widget, value: Any, *, dealt: bool, limits: Limits) -> list[Widget]:
    """A null choice becomes the first one only after all values are dealt: its branch gets none."""
    if isinstance(value, int | float) and value > limits.dynamic_rows_max:
        raise LimitExceeded(f"{widget.name}: {value} rows, at most {limits.dynamic_rows_max}")
    children = widget.children(value) if widget.children else []
    return children if dealt else [child._replace(stored=False) for child in children]


def rebranched(
    widgets: Sequence[Widget], values: Mapping[str, Any], choice: Widget
) -> tuple[tuple[Widget, ...], dict[str, Any]]:
    """The widgets and values of a node after a choice got another value: its branch starts anew."""
    prefix = f"{choice.name}."
    before = [widget for widget in widgets if not widget.name.startswith(prefix)]
    place = before.index(choice) + 1
    branch: list[Widget] = []
    fresh: dict[str, Any] = {}
    children = choice.children(values[choice.name]) if choice.children else []
    _deal(children[::-1], (), branch, fresh, DEFAULT_LIMITS)
    kept = {name: value for name, value in values.items() if not name.startswith(prefix)}
    return (*before[:place], *branch, *before[place:]), {**kept, **fresh}


def positional_values(node_type: NodeType, saved: Any) -> Sequence[Any]:
    """`widgets_values` as a list, with the slots of inputs that became sockets taken out."""
    if isinstance(saved, list) and not _may_hold_sockets(node_type, saved):
        return saved
    if isinstance(saved, str):
        return list(saved)  # what JavaScript makes of a text where a list should be
    if not isinstance(saved, list | dict):
        return ()
    aligned = _without_sockets(node_type, saved)
    if aligned is not None:
        return aligned
    return saved if isinstance(saved, list) else ()


def _may_hold_sockets(node_type: NodeType, saved: list[Any]) -> bool:
    if any(spec.forced for spec in node_type.specs):
        return True
    return any(not widget.stored and widget.is_widget for widget in node_type.widgets)


def _without_sockets(node_type: NodeType, saved: list[Any] | dict[str, Any]) -> list[Any] | None:
    """Old files keep a value for an input that is forced to be a socket now, if lengths tell so."""
    if any(spec.type == DYNAMIC_GROUP for spec in node_type.specs):
        return None
    widgets = _initial_widgets(node_type)
    is_socket = _forced_sockets(node_type, widgets)
    if isinstance(saved, dict):
        compacted = list(saved.values())
    else:
        if True not in is_socket and len(saved) == sum(widget.stored for widget in widgets):
            return saved
        compacted = [
            value
            for index, value in enumerate(saved)
            if index >= len(widgets) or widgets[index].stored
        ]
        if len(compacted) != len(is_socket):
            compacted = saved
    if len(compacted) != len(is_socket):
        return None
    return [value for value, socket in zip(compacted, is_socket, strict=True) if not socket]


def _forced_sockets(node_type: NodeType, widgets: Sequence[Widget]) -> list[bool]:
    """For each place of an old list: is it an input that is now forced to be a socket?"""
    names = {widget.name for widget in widgets}
    not_stored = {widget.name for widget in widgets if not widget.stored}
    places: list[bool] = []
    for spec in node_type.specs:
        forced = spec.forced
        if spec.name in not_stored or not (forced or spec.name in names):
            continue
        places.append(forced)
        if spec.options.get("control_after_generate"):
            places.append(False)
    return places


def _initial_widgets(node_type: NodeType) -> list[Widget]:
    return [widget for widget in as_laid_out(node_type) if widget.is_widget]


def as_laid_out(node_type: NodeType) -> list[Widget]:
    """Sockets and widgets of a new node, every choice at its default and before its branch's
    inputs are moved behind it: at first they stand in front."""
    laid_out: list[Widget] = []
    pending = list(reversed(node_type.widgets))
    while pending:
        widget = pending.pop()
        if widget.children is None:
            laid_out.append(widget)
            continue
        pending.append(widget._replace(children=None))
        pending.extend(reversed(widget.children(widget.default)))
    return laid_out


def _cut_old_prefix(values: dict[str, Any]) -> None:
    sampler = values.get("sampler_name")
    if isinstance(sampler, str) and sampler.startswith(OLD_SAMPLER_PREFIX):
        values["sampler_name"] = sampler.removeprefix(OLD_SAMPLER_PREFIX)


def _deal_custom_combo(node_type: NodeType, positional: Sequence[Any]) -> Dealt:
    """Its options are widgets that the editor adds one by one, as long as the last is filled."""
    choice = next(widget for widget in node_type.widgets if widget.is_widget)
    values: dict[str, Any] = {choice.name: positional[0] if positional else choice.default}
    widgets = [choice, Widget("index", "index", socket=False)]
    options: list[Any] = []
    while not options or options[-1]:
        place = len(options) + 2
        options.append(positional[place] if place < len(positional) else "")
        widgets.append(Widget(f"option{len(options)}", "text", "", socket=False))
        values[widgets[-1].name] = options[-1]
    if values[choice.name] is None and options[0]:
        values[choice.name] = str(options[0])
    values["index"] = option_index(values, values[choice.name])
    return Dealt(tuple(widgets), values, len(options) + 2)


def option_index(values: Mapping[str, Any], choice: Any) -> int:
    """Which option of a custom combo is chosen; -1 if none."""
    options = [value for name, value in values.items() if name.startswith("option")]
    return options.index(choice) if choice in options else -1
