"""Passes 3 and 4: where an input is really fed from, through everything that only the editor knows.

A link is followed backwards through reroutes, Set/Get, the edges of subgraphs and bypassed nodes
until it ends at a node that is executed, at a value that an instance holds, or at nothing. It is one
loop without recursion, so a chain of any length is fine; one that comes back to where it was is
refused, as the editor refuses it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.behaviours import BEHAVIOURS, VALUE_CLASSES
from comfyfleet.workflow.model import ANY_TYPE, SUBGRAPH_INPUT_ID, UNASSIGNED, Link, Mode
from comfyfleet.workflow.places import join_places
from comfyfleet.workflow.scopes import Scope
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.slottypes import are_compatible
from comfyfleet.workflow.wiring import WiredNode


class Source(NamedTuple):
    """An output of a node that is executed."""

    node_id: str
    slot: int


class HostValue(NamedTuple):
    """A value held by an instance of a subgraph for one of its inputs."""

    value: Any


class _At(NamedTuple):
    """A step on the way: an input (to be followed) or an output (to be looked through)."""

    scope: Scope
    node: WiredNode
    slot: int
    is_output: bool
    wanted: str  # type of the input that asks; "" where the next input says it itself


Resolved = Source | HostValue | None


def is_inlined(node: WiredNode) -> bool:
    """A node that only holds a value and that the server lacks: its value is written where it leads."""
    return node.type is None and node.node.type in VALUE_CLASSES


class Resolver:
    """`inline_values`: whether values of primitives that the server lacks are written where they lead."""

    def __init__(self, scopes: Sequence[Scope], *, inline_values: bool = True) -> None:
        self._inline_values = inline_values
        self._known: dict[tuple[str, str, int, bool, str], Resolved] = {}
        self._setters: dict[str, dict[tuple[str, str], list[WiredNode]]] = {}
        self._first_scope: dict[str, Scope] = {}
        for scope in scopes:
            self._first_scope.setdefault(scope.wired.graph.id, scope)

    def resolve(self, scope: Scope, node: WiredNode, slot: int) -> Resolved:
        at: _At | Resolved = _At(scope, node, slot, is_output=False, wanted="")
        seen: dict[tuple[str, str, int, bool], str] = {}
        while isinstance(at, _At):
            key = (at.scope.prefix, at.node.node.id, at.slot, at.is_output)
            if (*key, at.wanted) in self._known:
                at = self._known[(*key, at.wanted)]
                break
            if key in seen:
                where = at.scope.place_of(at.node)
                raise InvalidWorkflow(f"{where}: the links through this node form a loop")
            seen[key] = at.wanted
            at = self._through_output(at) if at.is_output else self._along_link(at)
        # Whoever comes to one of these places later gets the answer at once: a long chain with
        # many consumers is walked once, not once for each.
        self._known.update(((*key, wanted), at) for key, wanted in seen.items())
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
            raise InvalidWorkflow(f"{where}: linked to node {slot.link.origin}, which is not there")
        wanted = at.wanted or slot.type
        return _At(at.scope, origin, slot.link.origin_slot, is_output=True, wanted=wanted)

    def _out_of_subgraph(self, scope: Scope, slot: Input, link: Link) -> _At | Resolved:
        host = scope.instance
        if host is None or scope.parent is None or not 0 <= link.origin_slot < len(host.inputs):
            raise InvalidWorkflow(
                f"{slot.name} is linked to input {link.origin_slot} of its subgraph, which is not there"
            )
        outer = host.inputs[link.origin_slot]
        if outer.link is not None:
            return _At(scope.parent, host, link.origin_slot, is_output=False, wanted="")
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
        return Source(f"{at.scope.prefix}{node.node.id}", at.slot)

    def _value_held(self, at: _At) -> _At | Resolved:
        linked = next((i for i, slot in enumerate(at.node.inputs) if slot.link is not None), None)
        if linked is not None:
            return _At(at.scope, at.node, linked, is_output=False, wanted=at.wanted)
        value = first_value(at.node)
        return None if value is None else HostValue(value)

    def _past_bypassed(self, at: _At) -> _At | None:
        outputs = at.node.outputs
        if not 0 <= at.slot < len(outputs):
            raise InvalidWorkflow(f"{at.scope.place_of(at.node)} has no output {at.slot}")
        slot = bypass_slot(at.node.inputs, at.slot, outputs[at.slot], at.wanted)
        return None if slot is None else _At(at.scope, at.node, slot, is_output=False, wanted="")

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
            reason = "its own input" if link.origin == SUBGRAPH_INPUT_ID else "a node that is gone"
            raise InvalidWorkflow(f"{where}: is wired straight to {reason}")
        return _At(inner, origin, link.origin_slot, is_output=True, wanted=at.wanted)

    def _past_virtual(self, at: _At) -> _At | None:
        behaviour = BEHAVIOURS[at.node.node.type]
        if behaviour.getter_of:
            return self._past_getter(at, behaviour.getter_of, outward=behaviour.looks_outward)
        if not 0 <= at.slot < len(at.node.inputs) or at.node.inputs[at.slot].link is None:
            return None
        return _At(at.scope, at.node, at.slot, is_output=False, wanted=at.wanted)

    def _past_getter(self, at: _At, setter_type: str, *, outward: bool) -> _At | None:
        """Goes on at the input of the setter, or, out of a subgraph, at what feeds that input."""
        name = first_value(at.node)
        if not name or not isinstance(name, str):
            return None
        for setter in self._setters_in(at.scope, setter_type, name):
            has_input = 0 <= at.slot < len(setter.inputs)
            at_setter = _At(at.scope, setter, at.slot, is_output=False, wanted=at.wanted)
            return at_setter if has_input else None
        around = at.scope.parent if outward else None
        found: list[tuple[Scope, WiredNode]] = []
        while around is not None:
            found.extend((around, node) for node in self._setters_in(around, setter_type, name))
            around = around.parent
        if len(found) != 1:  # of several around it the editor takes none
            return None
        scope, setter = found[0]
        return self._at_source(scope, setter, at)

    def _setters_in(self, scope: Scope, setter_type: str, name: str) -> list[WiredNode]:
        graph_id = scope.wired.graph.id
        if graph_id not in self._setters:
            self._setters[graph_id] = _setters(scope)
        return self._setters[graph_id].get((setter_type, name), [])

    def _at_source(self, scope: Scope, setter: WiredNode, at: _At) -> _At | None:
        link = setter.inputs[at.slot].link if 0 <= at.slot < len(setter.inputs) else None
        origin = scope.wired.nodes.get(link.origin) if link else None
        if link is None or origin is None:
            return None
        # The editor finds the node, not the instance: the first one is meant.
        first = self._first_scope[scope.wired.graph.id]
        return _At(first, origin, link.origin_slot, is_output=True, wanted=at.wanted)


def _setters(scope: Scope) -> dict[tuple[str, str], list[WiredNode]]:
    """The nodes of a graph that name a wire, by their type and that name."""
    found: dict[tuple[str, str], list[WiredNode]] = {}
    for node in scope.wired.nodes.values():
        behaviour = BEHAVIOURS.get(node.node.type)
        name = first_value(node)
        if behaviour is not None and behaviour.setter and isinstance(name, str):
            found.setdefault((node.node.type, name), []).append(node)
    return found


def first_value(node: WiredNode) -> Any:
    values = node.node.values
    return values[0] if isinstance(values, list) and values else None


def bypass_slot(inputs: Sequence[Input], slot: int, output_type: str, wanted: str) -> int | None:
    """Which input stands in for output `slot` of a bypassed node: chosen by type, never by slot alone,
    and whether or not it is linked."""
    if wanted in (ANY_TYPE, ""):
        return slot if len(inputs) > slot else 0
    if slot < len(inputs) and _fits(inputs[slot].type, output_type, wanted):
        return slot
    for index, candidate in enumerate(inputs):
        if candidate.type == wanted:
            return index
    for index, candidate in enumerate(inputs):
        if _fits(candidate.type, output_type, wanted):
            return index
    return None


def _fits(input_type: str, output_type: str, wanted: str) -> bool:
    return are_compatible(input_type, output_type) and are_compatible(input_type, wanted)
