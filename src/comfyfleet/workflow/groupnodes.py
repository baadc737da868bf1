"""Pass 2, before subgraphs: group nodes, their predecessors, become subgraphs as the editor makes them.

A file keeps the nodes of a group under `extra.groupNodes`; an instance is one node of type
`workflow>NAME` whose inputs, widgets and outputs are those of the inner nodes that are not linked
inside. The inner nodes get the next free ids and the new instance the one after them.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.behaviours import PRIMITIVE, is_virtual
from comfyfleet.workflow.groupinterface import (
    GroupDefinition,
    GroupInterface,
    InnerLink,
    describe_group,
    read_group,
)
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import (
    ANY_TYPE,
    SUBGRAPH_INPUT_ID,
    SUBGRAPH_OUTPUT_ID,
    Graph,
    Link,
    Node,
    Port,
    Slot,
    Workflow,
)
from comfyfleet.workflow.nodetypes import NodeTypes, read_node_type
from comfyfleet.workflow.slottypes import are_compatible
from comfyfleet.workflow.wiring import WiredNode, wire_node

PREFIX, OLD_PREFIX = "workflow>", "workflow/"
MINTED_LINKS = 1_000_000_000  # ids for links that we make, far from any in a file


def expand_group_nodes(
    workflow: Workflow, types: NodeTypes, *, limits: Limits = DEFAULT_LIMITS
) -> Workflow:
    if not workflow.group_nodes:
        return workflow
    groups = {name: read_group(saved) for name, saved in workflow.group_nodes.items()}
    instances = [node for node in workflow.root.nodes if groups.get(_group_name(node))]
    if len(instances) > limits.group_nodes_max:
        raise LimitExceeded(
            f"the workflow has {len(instances)} group nodes, at most {limits.group_nodes_max} are taken"
        )
    for node in instances:
        group = groups[_group_name(node)]
        if group is not None and _is_known(group, types):
            workflow = _expand(workflow, node, group, types)
    return workflow


def _group_name(node: Node) -> str:
    for prefix in (PREFIX, OLD_PREFIX):
        if node.type.startswith(prefix):
            return node.type.removeprefix(prefix)
    return ""


def _is_known(group: GroupDefinition, types: NodeTypes) -> bool:
    """A group with a node type that is not known stays an unknown node itself."""
    return all(types.get(node.type) is not None or is_virtual(node.type) for node in group.nodes)


class _Inner(NamedTuple):
    """The inner nodes of one instance, and how each is laid out."""

    nodes: tuple[Node, ...]
    laid_out: tuple[WiredNode, ...]
    links: tuple[Link, ...]


class _Outside:
    """The nodes around a group, for the types at the far ends of its links."""

    def __init__(self, root: Graph, types: NodeTypes) -> None:
        self.links = root.links
        self._nodes = {node.id: node for node in root.nodes}
        self._links_to: dict[str, dict[int, Link]] = {}
        self._types = types
        for link in root.links.values():
            self._links_to.setdefault(link.target, {})[link.id] = link

    def links_to(self, node_id: str) -> dict[int, Link]:
        return self._links_to.get(node_id, {})

    def origin_type(self, link: Link) -> str:
        node = self._laid_out(link.origin)
        outputs = node.outputs if node else ()
        return outputs[link.origin_slot] if 0 <= link.origin_slot < len(outputs) else ANY_TYPE

    def target_type(self, link: Link) -> str:
        node = self._laid_out(link.target)
        slots = [slot for slot in node.inputs if slot.link == link] if node else []
        return slots[0].type if slots else ANY_TYPE

    def _laid_out(self, node_id: str) -> WiredNode | None:
        node = self._nodes.get(node_id)
        return wire_node(node, self._types.get(node.type), self.links_to(node_id)) if node else None


def _expand(workflow: Workflow, node: Node, group: GroupDefinition, types: NodeTypes) -> Workflow:
    interface = describe_group(group, types)
    root = workflow.root
    outside = _Outside(root, types)
    group_type = read_node_type(node.type, interface.definition)
    instance = wire_node(node, group_type, outside.links_to(node.id))
    inner = _make_inner(group, interface, instance, workflow.last_node_id, types)
    last = workflow.last_node_id + len(inner.nodes) + 1
    definition_id = f"group node {last}"
    inputs, input_links, feeding = _input_ports(instance, interface, inner, outside)
    outputs, output_links, fed = _output_ports(node.id, str(last), interface, inner, outside)
    links = {link.id: link for link in (*inner.links, *input_links, *output_links)}
    definition = Graph(definition_id, _group_name(node), inner.nodes, links, inputs, outputs)
    replacement = Node(
        id=str(last),
        type=definition_id,
        title=node.title,
        inputs=tuple(
            Slot(port.name, port.type, link.id) for port, link in zip(inputs, feeding, strict=True)
        ),
    )
    kept = {
        key: link for key, link in root.links.items() if node.id not in (link.origin, link.target)
    }
    root_links = {
        **kept,
        **{link.id: link._replace(target=str(last)) for link in feeding},
        **{link.id: link for link in fed},
    }
    nodes = tuple(other for other in root.nodes if other.id != node.id)
    return workflow._replace(
        root=root._replace(nodes=(*nodes, replacement), links=root_links),
        definitions={**workflow.definitions, definition_id: definition},
        last_node_id=last,
    )


def _make_inner(
    group: GroupDefinition,
    interface: GroupInterface,
    instance: WiredNode,
    last_id: int,
    types: NodeTypes,
) -> _Inner:
    names = [widget.name for widget in instance.widgets if widget.is_widget]
    taken: set[int] = set()
    nodes = []
    for index, saved in enumerate(group.nodes):
        node = saved._replace(id=str(last_id + 1 + index))
        overrides = {}
        for inner_name, outer_name in interface.widgets[index].items():
            place = _next_place(names, outer_name, taken)
            if place is not None:
                taken.add(place)
                overrides[inner_name] = instance.values[names[place]]
        node = _with_values(node, overrides)
        nodes.append(node._replace(inputs=tuple(slot._replace(link=None) for slot in node.inputs)))
    laid_out = tuple(wire_node(node, types.get(node.type), {}) for node in nodes)
    return _Inner(tuple(nodes), laid_out, tuple(_inner_links(group.links, laid_out)))


def _next_place(names: Sequence[str], wanted: str | None, taken: set[int]) -> int | None:
    return next(
        (index for index, name in enumerate(names) if name == wanted and index not in taken), None
    )


def _with_values(node: Node, overrides: dict[str, Any]) -> Node:
    """A primitive loses its value on the way and takes that of the widget that it is linked to."""
    if node.type == PRIMITIVE:
        return node._replace(values=None)
    return node._replace(overrides=overrides)


def _inner_links(saved: Sequence[InnerLink], nodes: Sequence[WiredNode]) -> Iterator[Link]:
    """By slot number, where the types fit."""
    for number, (source, out_slot, target, in_slot) in enumerate(saved):
        link = _link(nodes[source], out_slot, nodes[target], in_slot, MINTED_LINKS + number)
        if link is not None:
            yield link


def _link(
    source: WiredNode, out_slot: int, target: WiredNode, in_slot: int, link_id: int
) -> Link | None:
    if in_slot >= len(target.inputs):
        return None
    out_type = source.outputs[out_slot] if out_slot < len(source.outputs) else ANY_TYPE
    if not are_compatible(out_type, target.inputs[in_slot].type):
        return None
    return Link(link_id, source.node.id, out_slot, target.node.id, in_slot, out_type)


def _input_ports(
    instance: WiredNode, interface: GroupInterface, inner: _Inner, outside: _Outside
) -> tuple[tuple[Port, ...], list[Link], list[Link]]:
    """One port for each output outside that feeds the group, however many inner inputs it feeds.
    The editor connects them anew, so a link between types that don't fit is lost."""
    ends: dict[tuple[str, int], list[tuple[WiredNode, int]]] = {}
    for index, slots in enumerate(interface.inputs):
        for name, place in slots.items():
            link = instance.inputs[place].link if place < len(instance.inputs) else None
            node = inner.laid_out[index]
            found = [i for i, slot in enumerate(node.inputs) if slot.name == name]
            if link is None or not found:
                continue
            if are_compatible(outside.origin_type(link), node.inputs[found[0]].type):
                ends.setdefault((link.origin, link.origin_slot), []).append((node, found[0]))
    ports: list[Port] = []
    links: list[Link] = []
    feeding: list[Link] = []
    for number, ((origin, slot), targets) in enumerate(ends.items()):
        ids = []
        for node, place in targets:
            link_id = MINTED_LINKS * 2 + len(links)
            links.append(Link(link_id, SUBGRAPH_INPUT_ID, number, node.node.id, place))
            ids.append(link_id)
        first = targets[0][0].inputs[targets[0][1]]
        ports.append(Port(f"{first.name} {number}", first.type, tuple(ids)))
        outer_id = max(outside.links, default=0) + 1 + number
        feeding.append(Link(outer_id, origin, slot, instance.node.id, number))
    return tuple(ports), links, feeding


def _output_ports(
    old_id: str, new_id: str, interface: GroupInterface, inner: _Inner, outside: _Outside
) -> tuple[tuple[Port, ...], list[Link], list[Link]]:
    ports: dict[tuple[int, int], int] = {}
    fed = []
    for link in outside.links.values():
        source = interface.outputs.get(link.origin_slot) if link.origin == old_id else None
        if source is None:
            continue
        if are_compatible(_output_type(inner, *source), outside.target_type(link)):
            place = ports.setdefault(source, len(ports))
            fed.append(link._replace(origin=new_id, origin_slot=place))
    links: list[Link] = []
    made: list[Port] = []
    for (index, slot), place in ports.items():
        node = inner.laid_out[index]
        link = Link(MINTED_LINKS * 4 + place, node.node.id, slot, SUBGRAPH_OUTPUT_ID, place)
        links.append(link)
        made.append(Port(f"output {place}", _output_type(inner, index, slot), (link.id,)))
    return tuple(made), links, fed


def _output_type(inner: _Inner, index: int, slot: int) -> str:
    outputs = inner.laid_out[index].outputs
    return outputs[slot] if slot < len(outputs) else ANY_TYPE
