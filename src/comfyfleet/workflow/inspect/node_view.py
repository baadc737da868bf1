"""Provides a uniform view of the nodes in a workflow or prompt, with their saved values."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.conversion import ShownAt, instances_showing
from comfyfleet.workflow.emit import title_of
from comfyfleet.workflow.inspect.results import NodeRef
from comfyfleet.workflow.model import Mode, Node, Prompt
from comfyfleet.workflow.node_behaviours import PRIMITIVE, is_virtual
from comfyfleet.workflow.node_inputs import ABSENT, Input
from comfyfleet.workflow.object_info import NodeType, NodeTypes
from comfyfleet.workflow.parse import parse_node
from comfyfleet.workflow.subgraphs import GraphScope
from comfyfleet.workflow.wire import WiredGraph, WiredNode

_GROUP_PREFIX = re.compile("^workflow[>/]")
# In a file, a seed is followed by one of these values, which specifies how it changes after a run.
# No other unnamed values occur between the values of named inputs.
CONTROL_VALUES = ("fixed", "increment", "decrement", "randomize")
# Maximum number of unnamed values after the named ones. Loaders have one, for their upload button.
COMPANIONS_BEHIND_MAX = 1


def saved_values(node: WiredNode) -> Mapping[str, Any]:
    if node.type is not None:
        return {name: value for name, value in node.values.items() if value is not ABSENT}
    values = node.node.values
    linked = {slot.name for slot in node.inputs if slot.link is not None}
    if isinstance(values, dict):
        named = values
    else:
        names = [slot.widget for slot in node.node.inputs if slot.widget]
        named = _named(names, values if isinstance(values, list) else [])
    return {name: value for name, value in named.items() if name not in linked}


def primitive_values(wired: WiredGraph, node: WiredNode) -> Iterator[tuple[str, Any]]:
    """Yields the values that primitives write to the inputs that they are linked to, by input
    name."""
    for slot in node.inputs:
        source = wired.nodes.get(slot.link.origin) if slot.link is not None else None
        saved = source.node.values if source and source.node.type == PRIMITIVE else None
        if isinstance(saved, list) and saved:
            yield slot.name, saved[0]


def nodes_of_group(instance: Node, group_nodes: Mapping[str, Any]) -> Iterator[Node]:
    """Yields the nodes inside a group node, the predecessor of a subgraph.

    The node ids have the same form as in older editors.
    """
    group = group_nodes.get(_GROUP_PREFIX.sub("", instance.type))
    nodes = group.get("nodes") if isinstance(group, dict) else None
    for index, saved in enumerate(nodes if isinstance(nodes, list) else ()):
        if isinstance(saved, dict) and isinstance(saved.get("type"), str):
            node = parse_node({**saved, "id": f"{instance.id}:{index}"}, "group node")
            if not is_virtual(node.type):
                yield node


def is_control(value: Any) -> bool:
    return isinstance(value, str) and value in CONTROL_VALUES


def _named(names: list[str], values: list[Any]) -> dict[str, Any]:
    """Returns values by name, or an empty dict if the counts differ, because old files only name
    inputs that were converted to sockets."""
    plain = [
        value
        for index, value in enumerate(values)
        if not (is_control(value) and index > 0 and _is_whole(values[index - 1]))
    ]
    if not 0 <= len(plain) - len(names) <= COMPANIONS_BEHIND_MAX:
        return {}
    return dict(zip(names, plain, strict=False))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Exposed(NamedTuple):
    """An inner node's input as its subgraph exposes it, and its value on the instance."""

    name: str
    value: Any


class NodeView(NamedTuple):
    """A node that is executed, or would be executed if it weren't switched off."""

    ref: NodeRef
    values: Mapping[str, Any]  # values of unlinked inputs
    linked: tuple[str, ...]  # names of the linked inputs
    feeds: bool  # other nodes use its outputs
    type: NodeType | None = None
    mode: int = Mode.ALWAYS
    properties: Mapping[str, Any] = {}
    exposed: Mapping[str, Exposed] = {}
    saved_widgets: tuple[str, ...] = ()  # names of the widgets in the file
    unnamed_values: tuple[Any, ...] = ()  # values that the file doesn't name

    @property
    def is_active(self) -> bool:
        return self.mode not in (Mode.MUTED, Mode.BYPASSED)


def is_link(value: Any) -> bool:
    """Checks whether ComfyUI treats a value as a link, which it does for any list of two."""
    return isinstance(value, list) and len(value) == 2


def is_node(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("class_type"), str)
        and isinstance(entry.get("inputs", {}), dict)
    )


def nodes_in_prompt(prompt: Mapping[str, Any], types: NodeTypes) -> list[NodeView]:
    """Returns the nodes of a prompt. Other entries are skipped, because some tools store notes
    there."""
    entries = {key: entry for key, entry in prompt.items() if is_node(entry)}
    origins = _origins(entries)
    return [_from_entry(key, entry, types, feeds=key in origins) for key, entry in entries.items()]


def nodes_in_scopes(
    scopes: list[GraphScope], prompt: Prompt | None, group_nodes: Mapping[str, Any]
) -> Iterator[NodeView]:
    """Yields the nodes of all scopes. `prompt` is the result of their conversion, or None if it
    failed."""
    shown_outside = _ExposedInputs()
    for scope in scopes:
        feeding = {link.origin for link in scope.wired.graph.links.values()}
        for node in scope.wired.nodes.values():
            inner = list(nodes_of_group(node.node, group_nodes)) if node.type is None else []
            yield from (_from_group(node.node, inner_node) for inner_node in inner)
            if not inner and node.definition is None and not _is_only_drawn(node):
                exposed = dict(shown_outside.of(scope, node))
                yield _from_scope(scope, node, exposed, prompt, feeds=node.node.id in feeding)


def _is_only_drawn(node: WiredNode) -> bool:
    return node.type is None and is_virtual(node.node.type)


def _inputs(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return entry.get("inputs") or {}


def _origins(entries: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {
        str(value[0])
        for entry in entries.values()
        for value in _inputs(entry).values()
        if is_link(value)
    }


def _from_entry(key: str, entry: Mapping[str, Any], types: NodeTypes, *, feeds: bool) -> NodeView:
    values, linked = _split(_inputs(entry))
    meta = entry.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    node_type = types.get(entry["class_type"])
    title = meta.get("title")
    if not isinstance(title, str):
        title = node_type.display_name if node_type else entry["class_type"]
    ref = NodeRef(key, entry["class_type"], title)
    return NodeView(ref, values, linked, feeds, node_type, properties=meta)


def _from_scope(
    scope: GraphScope,
    node: WiredNode,
    exposed: Mapping[str, Exposed],
    prompt: Prompt | None,
    *,
    feeds: bool,
) -> NodeView:
    key = f"{scope.prefix}{node.node.id}"
    values, linked = _inputs_of(scope, node, exposed, (prompt or {}).get(key))
    saved = node.node.values if isinstance(node.node.values, list) else []
    return NodeView(
        NodeRef(key, node.node.type, title_of(node), _path_of(scope)),
        values,
        linked,
        feeds,
        node.type,
        node.node.mode,
        node.node.properties,
        exposed,
        saved_widgets=tuple(slot.widget for slot in node.node.inputs if slot.widget),
        unnamed_values=tuple(saved) if node.type is None and not values else (),
    )


def _inputs_of(
    scope: GraphScope, node: WiredNode, exposed: Mapping[str, Exposed], entry: Any
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Returns the values and the names of linked inputs. They come from the prompt if it contains
    the same node: an older prompt may have a different node under this id."""
    if is_node(entry) and entry["class_type"] == node.node.type:
        return _split(_inputs(entry))
    outside = {name: shown.value for name, shown in exposed.items() if shown.value is not ABSENT}
    outside.update(primitive_values(scope.wired, node))
    values = {**saved_values(node), **outside}
    return values, tuple(
        slot.name for slot in node.inputs if slot.link is not None and slot.name not in outside
    )


def _from_group(instance: Node, node: Node) -> NodeView:
    """Returns a node inside a group node that was not expanded, because expansion needs a server's
    node types."""
    return NodeView(
        NodeRef(node.id, node.type, node.title or node.type, (instance.title or instance.type,)),
        values={},
        linked=(),
        feeds=True,
        mode=instance.mode,
        properties=node.properties,
        unnamed_values=tuple(node.values) if isinstance(node.values, list) else (),
    )


def _split(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    values = {name: value for name, value in inputs.items() if not is_link(value)}
    return values, tuple(name for name in inputs if name not in values)


def _path_of(scope: GraphScope) -> tuple[str, ...]:
    names: list[str] = []
    while scope.instance is not None and scope.parent is not None:
        names.append(scope.instance.node.title or scope.wired.graph.name)
        scope = scope.parent
    return tuple(reversed(names))


class _ExposedInputs:
    """Finds the inputs of inner nodes that their subgraphs expose."""

    def __init__(self) -> None:
        self._values: dict[str, Mapping[str, Any]] = {}  # saved values by instance id

    def of(self, scope: GraphScope, node: WiredNode) -> Iterator[tuple[str, Exposed]]:
        for slot in node.inputs:
            exposed = self._exposed(scope, slot)
            if exposed is not None:
                yield slot.name, exposed

    def _exposed(self, scope: GraphScope, slot: Input) -> Exposed | None:
        """Returns the input as the outermost instance exposes it, or None if it isn't exposed or is
        eventually fed by a link."""
        shown = instances_showing(scope, slot)
        if not shown:
            return None
        outermost = shown[-1]
        value = self._values_of(outermost).get(outermost.slot.name, ABSENT)
        return Exposed(f"{outermost.title}.{outermost.label}", value)

    def _values_of(self, shown: ShownAt) -> Mapping[str, Any]:
        if shown.instance_id not in self._values:
            self._values[shown.instance_id] = saved_values(shown.instance)
        return self._values[shown.instance_id]
