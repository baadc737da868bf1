"""Part of pass 3: primitives write their value into the widgets that they are linked to directly.

The value is the primitive's own saved one, brought into the range of its first target, and then
rounded by each target as if a person had typed it there.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from comfyfleet.workflow.behaviours import PRIMITIVE
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.values import rebranched
from comfyfleet.workflow.widgettypes import Widget
from comfyfleet.workflow.wiring import WiredGraph, WiredNode

# What the editor assumes where the server states no range.
DEFAULT_MIN, DEFAULT_MAX, DEFAULT_FLOAT_STEP = 0, 2048, 0.5
RUN_REPLACE = "Run widget replace on values"


def apply_primitives(wired: WiredGraph, fill: Callable[[str], str]) -> WiredGraph:
    """`fill` fills in patterns, for primitives that are set to do so."""
    primitives = [node for node in wired.nodes.values() if node.node.type == PRIMITIVE]
    if not primitives:
        return wired
    nodes = dict(wired.nodes)
    for primitive in primitives:
        targets = list(_targets(primitive.node.id, wired))
        if not targets:
            continue
        value = _value_of(primitive, *targets[0])
        nodes[primitive.node.id] = primitive._replace(values={"value": value})
        if isinstance(value, str) and primitive.node.properties.get(RUN_REPLACE):
            value = fill(value)
        for target, slot in targets:
            nodes[target.node.id] = _with_value(nodes[target.node.id], slot, value)
    return WiredGraph(wired.graph, nodes)


def _targets(primitive_id: str, wired: WiredGraph) -> Iterator[tuple[WiredNode, Input]]:
    """In the order of the file's links: the first decides about the primitive's type."""
    found = [
        (slot.link.id, node, slot)
        for node in wired.nodes.values()
        for slot in node.inputs
        if slot.link is not None and slot.link.origin == primitive_id
    ]
    order = {link_id: index for index, link_id in enumerate(wired.graph.links)}
    found.sort(key=lambda entry: order.get(entry[0], 0))
    return ((node, slot) for _, node, slot in found)


def _value_of(primitive: WiredNode, node: WiredNode, slot: Input) -> Any:
    widget = _widget(node, slot)
    if widget is None:
        return None
    saved = primitive.node.values
    own_type = primitive.node.outputs[0] if primitive.node.outputs else ""
    value = node.values[widget.name]
    if isinstance(saved, list) and saved and own_type == widget.input_type:
        value = saved[0]
    if widget.kind not in ("int", "float"):
        return value
    least, most = widget.options.get("min"), widget.options.get("max")
    typed = as_typed(widget, _within(value, least, most))
    return math.nan if typed is None else typed  # as no number: null would count as zero


def _within(value: Any, least: Any, most: Any) -> Any:
    if not _is_number(value):
        return value
    if _is_number(least):
        value = max(value, least)
    return min(value, most) if _is_number(most) else value


def _widget(node: WiredNode, slot: Input) -> Widget | None:
    if slot.widget is None:
        return None
    return next((widget for widget in node.widgets if widget.name == slot.widget), None)


def _with_value(node: WiredNode, slot: Input, value: Any) -> WiredNode:
    widget = _widget(node, slot)
    if widget is None:
        return node
    values = {**node.values, widget.name: as_typed(widget, value)}
    if widget.children is None:
        return node._replace(values=values)
    widgets, values = rebranched(node.widgets, values, widget)
    return node._replace(widgets=widgets, values=values)


def as_typed(widget: Widget, value: Any) -> Any:
    """The value that a widget takes when one is entered by hand."""
    if widget.kind == "int":
        number = _as_number(value)
        return None if number is None else _rounded_int(number, widget.options)
    return _rounded_float(value, widget.options) if widget.kind == "float" else value


def _as_number(value: Any) -> int | float | None:
    """As JavaScript reads a value as a number; None where it can't."""
    if value is None or value == "":
        return 0
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if isinstance(value, bool) else value


def _rounded_int(value: float, options: Mapping[str, Any]) -> int | float:
    step = options.get("step") or 1
    if step == 1:
        return value if isinstance(value, int) else _half_up(value)
    offset = math.fmod(options.get("min") or 0, step)
    result = float(_half_up((value - offset) / step) * step + offset)
    return int(result) if result.is_integer() else result


def _rounded_float(value: Any, options: Mapping[str, Any]) -> Any:
    step = options.get("step") or DEFAULT_FLOAT_STEP
    digits = max(0, -math.floor(math.log10(step))) if step > 0 else 0
    unit = options.get("round") or (10**-digits if digits else None)
    number = _as_number(value)
    if not unit or number is None:
        return value
    # Half goes up, on the exact binary value, as JavaScript does it.
    exact = Decimal(_half_up(number / unit) * unit)
    rounded = float(exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
    least: float = options.get("min", DEFAULT_MIN)
    most: float = options.get("max", DEFAULT_MAX)
    return min(max(rounded, least), most)


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
