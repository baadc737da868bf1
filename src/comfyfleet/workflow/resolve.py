"""Writes the values of primitives to the widgets that they are linked to, and finds the nodes that
feed inputs through parts that only the editor knows.

A link is followed backwards through reroutes, Set and Get nodes, the edges of subgraphs, and
bypassed nodes. It ends at a node that is executed, at a value of an instance, or at nothing. This
is a loop without recursion, so the length of a chain doesn't matter. A chain that returns to its
start is refused, as in the editor.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow
from comfyfleet.workflow.model import (
    ANY_TYPE,
    SUBGRAPH_INPUT_ID,
    UNASSIGNED,
    Link,
    Mode,
    join_places,
)
from comfyfleet.workflow.node_behaviours import BEHAVIOURS, PRIMITIVE, VALUE_CLASSES
from comfyfleet.workflow.node_inputs import Input, Widget
from comfyfleet.workflow.subgraphs import GraphScope
from comfyfleet.workflow.widget_values import rebranched
from comfyfleet.workflow.wire import WiredGraph, WiredNode, are_compatible

# The range and step that the editor assumes if the server declares none.
DEFAULT_MIN, DEFAULT_MAX, DEFAULT_FLOAT_STEP = 0, 2048, 0.5
RUN_REPLACE = "Run widget replace on values"


def apply_primitives(wired: WiredGraph, fill: Callable[[str], str]) -> WiredGraph:
    """Writes the values of primitives to their targets. `fill` fills in patterns for primitives
    that have this enabled."""
    primitives = [node for node in wired.nodes.values() if node.node.type == PRIMITIVE]
    if not primitives:
        return wired
    nodes = dict(wired.nodes)
    targets_by_primitive = _targets({node.node.id for node in primitives}, wired)
    for primitive in primitives:
        targets = targets_by_primitive.get(primitive.node.id)
        if not targets:
            continue
        value = _value_of(primitive, *targets[0])
        nodes[primitive.node.id] = primitive._replace(values={"value": value})
        if isinstance(value, str) and primitive.node.properties.get(RUN_REPLACE):
            value = fill(value)
        for target, slot in targets:
            nodes[target.node.id] = _with_value(nodes[target.node.id], slot, value)
    return WiredGraph(wired.graph, nodes)


def _targets(
    primitive_ids: Collection[str], wired: WiredGraph
) -> dict[str, list[tuple[WiredNode, Input]]]:
    """Returns the targets of each primitive, in the order of the file's links. The first target
    determines the primitive's type."""
    order = {link_id: index for index, link_id in enumerate(wired.graph.links)}
    targets_by_id: dict[str, list[tuple[int, WiredNode, Input]]] = {}
    for node in wired.nodes.values():
        for slot in node.inputs:
            if slot.link is not None and slot.link.origin in primitive_ids:
                place = order.get(slot.link.id, 0)
                targets_by_id.setdefault(slot.link.origin, []).append((place, node, slot))
    for targets in targets_by_id.values():
        targets.sort(key=lambda target: target[0])
    return {
        key: [(node, slot) for _, node, slot in targets] for key, targets in targets_by_id.items()
    }


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
    return math.nan if typed is None else typed  # NaN rather than null, which would count as zero


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
    """Returns the value that a widget has after a user enters `value`."""
    if widget.kind == "int":
        number = _as_number(value)
        return None if number is None else _rounded_int(number, widget.options)
    return _rounded_float(value, widget.options) if widget.kind == "float" else value


def _as_number(value: Any) -> int | float | None:
    """Converts a value to a number like JavaScript, or returns None if that is impossible."""
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
    # Halves are rounded up, based on the exact binary value, as in JavaScript.
    exact = Decimal(_half_up(number / unit) * unit)
    rounded = float(exact.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
    least: float = options.get("min", DEFAULT_MIN)
    most: float = options.get("max", DEFAULT_MAX)
    return min(max(rounded, least), most)


def _half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class InputSource(NamedTuple):
    """An output of a node that is executed."""

    node_id: str
    slot: int


class HostValue(NamedTuple):
    """A value that an instance of a subgraph has for one of its inputs."""

    value: Any


class _At(NamedTuple):
    """A step while following a link: an input, whose link is followed, or an output, whose node is
    passed through."""

    scope: GraphScope
    node: WiredNode
    slot: int
    is_output: bool
    wanted_type: str  # type of the input that is resolved; empty if the next input determines it


Resolved = InputSource | HostValue | None


def is_inlined(node: WiredNode) -> bool:
    """Checks whether a node only holds a value and is unknown to the server. Its value is then
    written to the inputs that it feeds."""
    return node.type is None and node.node.type in VALUE_CLASSES


class Resolver:
    """Finds the sources of inputs. `inline_values` controls whether values of primitives that the
    server lacks are written to the inputs that they feed."""

    def __init__(self, scopes: Sequence[GraphScope], *, inline_values: bool = True) -> None:
        self._inline_values = inline_values
        self._known: dict[tuple[str, str, int, bool, str], Resolved] = {}
        self._setters: dict[str, dict[tuple[str, str], list[WiredNode]]] = {}
        self._first_scope: dict[str, GraphScope] = {}
        for scope in scopes:
            self._first_scope.setdefault(scope.wired.graph.id, scope)

    def resolve(self, scope: GraphScope, node: WiredNode, slot: int) -> Resolved:
        at: _At | Resolved = _At(scope, node, slot, is_output=False, wanted_type="")
        seen: dict[tuple[str, str, int, bool], str] = {}
        while isinstance(at, _At):
            key = (at.scope.prefix, at.node.node.id, at.slot, at.is_output)
            if (*key, at.wanted_type) in self._known:
                at = self._known[(*key, at.wanted_type)]
                break
            if key in seen:
                where = at.scope.place_of(at.node)
                raise InvalidWorkflow(f"{where}: the links through this node form a loop")
            seen[key] = at.wanted_type
            at = self._through_output(at) if at.is_output else self._along_link(at)
        # Cache the result for all visited steps, so that a long chain with many consumers is only
        # walked once.
        self._known.update(((*key, wanted_type), at) for key, wanted_type in seen.items())
        return at

    def _along_link(self, at: _At) -> _At | Resolved:
        if not 0 <= at.slot < len(at.node.inputs):
            raise InvalidWorkflow(f"{at.scope.place_of(at.node)} has no input {at.slot}")
        slot = at.node.inputs[at.slot]
        if slot.link is None or slot.link.origin == UNASSIGNED:
            return None
        if slot.link.origin == SUBGRAPH_INPUT_ID and at.scope.parent is not None:
            return self._out_of_subgraph(at.scope, slot, slot.link)
        origin = at.scope.wired.nodes.get(slot.link.origin)
        if origin is None:
            where = join_places(at.scope.place_of(at.node), f"input {slot.name}")
            raise InvalidWorkflow(
                f"{where} is linked to node {slot.link.origin}, which doesn't exist"
            )
        wanted_type = at.wanted_type or slot.type
        return _At(at.scope, origin, slot.link.origin_slot, is_output=True, wanted_type=wanted_type)

    def _out_of_subgraph(self, scope: GraphScope, slot: Input, link: Link) -> _At | Resolved:
        host = scope.instance
        if host is None or scope.parent is None or not 0 <= link.origin_slot < len(host.inputs):
            raise InvalidWorkflow(
                f"{slot.name} is linked to input {link.origin_slot} of its subgraph, which doesn't exist"
            )
        outer = host.inputs[link.origin_slot]
        if outer.link is not None:
            return _At(scope.parent, host, link.origin_slot, is_output=False, wanted_type="")
        return HostValue(host.values[outer.widget]) if outer.widget is not None else None

    def _through_output(self, at: _At) -> _At | Resolved:
        node = at.node
        mode = node.node.mode
        if mode == Mode.MUTED:
            return None
        if mode == Mode.BYPASSED:
            return self._past_bypassed(at)
        if node.definition is not None:
            return self._into_subgraph(at)
        if node.is_virtual:
            return self._past_virtual(at)
        if self._inline_values and is_inlined(node):
            return self._value_held(at)
        return InputSource(f"{at.scope.prefix}{node.node.id}", at.slot)

    def _value_held(self, at: _At) -> _At | Resolved:
        linked = next((i for i, slot in enumerate(at.node.inputs) if slot.link is not None), None)
        if linked is not None:
            return _At(at.scope, at.node, linked, is_output=False, wanted_type=at.wanted_type)
        value = first_value(at.node)
        return None if value is None else HostValue(value)

    def _past_bypassed(self, at: _At) -> _At | None:
        outputs = at.node.outputs
        if not 0 <= at.slot < len(outputs):
            raise InvalidWorkflow(f"{at.scope.place_of(at.node)} has no output {at.slot}")
        slot = bypass_slot(at.node.inputs, at.slot, outputs[at.slot], at.wanted_type)
        return (
            None if slot is None else _At(at.scope, at.node, slot, is_output=False, wanted_type="")
        )

    def _into_subgraph(self, at: _At) -> _At | None:
        inner = at.scope.children[at.node.node.id]
        ports = inner.wired.graph.outputs
        if not 0 <= at.slot < len(ports):
            raise InvalidWorkflow(f"{at.scope.place_of(at.node)} has no output {at.slot}")
        links = inner.wired.graph.links
        link = next((links[key] for key in ports[at.slot].links if key in links), None)
        if link is None:
            return None
        origin = inner.wired.nodes.get(link.origin)
        if origin is None:
            where = join_places(at.scope.place_of(at.node), f"output {ports[at.slot].name}")
            reason = "its own input" if link.origin == SUBGRAPH_INPUT_ID else "a missing node"
            raise InvalidWorkflow(f"{where} is linked directly to {reason}")
        return _At(inner, origin, link.origin_slot, is_output=True, wanted_type=at.wanted_type)

    def _past_virtual(self, at: _At) -> _At | None:
        behaviour = BEHAVIOURS[at.node.node.type]
        if behaviour.getter_of:
            return self._past_getter(at, behaviour.getter_of, outward=behaviour.looks_outward)
        if not 0 <= at.slot < len(at.node.inputs) or at.node.inputs[at.slot].link is None:
            return None
        return _At(at.scope, at.node, at.slot, is_output=False, wanted_type=at.wanted_type)

    def _past_getter(self, at: _At, setter_type: str, *, outward: bool) -> _At | None:
        """Continues at the input of the setter. If the setter is outside the subgraph, continues at
        the node that feeds that input."""
        name = first_value(at.node)
        if not name or not isinstance(name, str):
            return None
        for setter in self._setters_in(at.scope, setter_type, name):
            has_input = 0 <= at.slot < len(setter.inputs)
            at_setter = _At(at.scope, setter, at.slot, is_output=False, wanted_type=at.wanted_type)
            return at_setter if has_input else None
        around = at.scope.parent if outward else None
        candidates: list[tuple[GraphScope, WiredNode]] = []
        while around is not None:
            candidates.extend(
                (around, node) for node in self._setters_in(around, setter_type, name)
            )
            around = around.parent
        # if several enclosing graphs have a setter of this name, the editor uses none
        if len(candidates) != 1:
            return None
        scope, setter = candidates[0]
        return self._at_source(scope, setter, at)

    def _setters_in(self, scope: GraphScope, setter_type: str, name: str) -> list[WiredNode]:
        graph_id = scope.wired.graph.id
        if graph_id not in self._setters:
            self._setters[graph_id] = _setters(scope)
        return self._setters[graph_id].get((setter_type, name), [])

    def _at_source(self, scope: GraphScope, setter: WiredNode, at: _At) -> _At | None:
        link = setter.inputs[at.slot].link if 0 <= at.slot < len(setter.inputs) else None
        origin = scope.wired.nodes.get(link.origin) if link else None
        if link is None or origin is None:
            return None
        # The editor identifies the node, but not the instance, so the first instance is used.
        first = self._first_scope[scope.wired.graph.id]
        return _At(first, origin, link.origin_slot, is_output=True, wanted_type=at.wanted_type)


def _setters(scope: GraphScope) -> dict[tuple[str, str], list[WiredNode]]:
    """Returns the setter nodes of a graph by their type and the name that they set."""
    setters: dict[tuple[str, str], list[WiredNode]] = {}
    for node in scope.wired.nodes.values():
        behaviour = BEHAVIOURS.get(node.node.type)
        name = first_value(node)
        if behaviour is not None and behaviour.setter and isinstance(name, str):
            setters.setdefault((node.node.type, name), []).append(node)
    return setters


def first_value(node: WiredNode) -> Any:
    values = node.node.values
    return values[0] if isinstance(values, list) and values else None


def bypass_slot(
    inputs: Sequence[Input], slot: int, output_type: str, wanted_type: str
) -> int | None:
    """Returns the input that stands in for output `slot` of a bypassed node.

    The input is chosen by type, whether or not it is linked. The slot number alone only decides if
    the type is unknown.
    """
    if wanted_type in (ANY_TYPE, ""):
        return slot if len(inputs) > slot else 0
    if slot < len(inputs) and _fits(inputs[slot].type, output_type, wanted_type):
        return slot
    for index, candidate in enumerate(inputs):
        if candidate.type == wanted_type:
            return index
    for index, candidate in enumerate(inputs):
        if _fits(candidate.type, output_type, wanted_type):
            return index
    return None


def _fits(input_type: str, output_type: str, wanted_type: str) -> bool:
    return are_compatible(input_type, output_type) and are_compatible(input_type, wanted_type)
