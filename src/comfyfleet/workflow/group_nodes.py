"""Converts group nodes, the predecessors of subgraphs, to subgraphs in the same way as the
editor."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.model import (
    ANY_TYPE,
    DEFAULT_LIMITS,
    SUBGRAPH_INPUT_ID,
    SUBGRAPH_OUTPUT_ID,
    Limits,
    Link,
    Node,
    NodeSlot,
    Port,
    Workflow,
    WorkflowGraph,
)
from comfyfleet.workflow.node_behaviours import PRIMITIVE, is_virtual
from comfyfleet.workflow.node_inputs import InputSpec
from comfyfleet.workflow.object_info import NodeTypes, is_widget, read_node_type
from comfyfleet.workflow.parse import parse_node
from comfyfleet.workflow.wire import WiredNode, are_compatible, wire_node

REROUTE = "Reroute"
SEED_NAMES = ("seed", "noise_seed")


class InnerLink(NamedTuple):
    """A link between inner nodes, which are identified by their index in the group."""

    source: int
    source_slot: int
    target: int
    target_slot: int


class GroupDefinition(NamedTuple):
    nodes: tuple[Node, ...]
    links: tuple[InnerLink, ...]
    # Outputs (node, slot) that are exposed although they are linked inside the group.
    shown: frozenset[tuple[int, int]]
    # for each node: the labels that the user gave to its inputs
    labels: tuple[Mapping[str, str], ...]
    config: Mapping[str, Any]


class GroupInterface(NamedTuple):
    definition: dict[str, Any]  # in the format of object_info
    widgets: list[dict[str, str]]  # for each inner node: the group's widget for each of its widgets
    inputs: list[dict[str, int]]  # for each inner node: the group's slot for each of its inputs
    outputs: dict[int, tuple[int, int]]  # the inner node and slot for each output of the group


def read_group(saved: Any) -> GroupDefinition | None:
    """Parses a group definition. Returns None if it is malformed. Its instances are then nodes of
    an unknown type.
    """
    if not isinstance(saved, dict):
        return None
    nodes, links = saved.get("nodes"), saved.get("links")
    if not isinstance(nodes, list) or not isinstance(links, list):
        return None
    try:
        inner = tuple(
            [parse_node({**node, "id": index}, "group node") for index, node in enumerate(nodes)]
        )
    except (InvalidWorkflow, TypeError):
        return None
    config = saved.get("config")
    return GroupDefinition(
        inner,
        tuple(_inner_links(links, len(inner))),
        frozenset(_shown_outputs(saved.get("external"))),
        tuple([dict(_labels(node.get("inputs"))) for node in nodes]),
        config if isinstance(config, dict) else {},
    )


def _inner_links(saved: list[Any], count: int) -> Iterator[InnerLink]:
    """Yields the links inside the group. Links from outside have no source in the group and are
    skipped."""
    for entry in saved:
        numbers = entry[:4] if isinstance(entry, list) else []
        if len(numbers) == 4 and all(type(number) is int and number >= 0 for number in numbers):
            link = InnerLink(*numbers)
            if link.source < count and link.target < count:
                yield link


def _shown_outputs(saved: Any) -> Iterator[tuple[int, int]]:
    for entry in saved if isinstance(saved, list) else ():
        node, slot, kind = entry[:3] if isinstance(entry, list) and len(entry) > 2 else (None,) * 3
        if isinstance(node, int) and isinstance(slot, int) and kind is not None:
            yield node, slot


def _labels(saved: Any) -> Iterator[tuple[str, str]]:
    for entry in saved if isinstance(saved, list) else ():
        name, label = entry.get("name"), entry.get("label")
        if isinstance(name, str) and isinstance(label, str) and label:
            yield name, label


class _Declared(NamedTuple):
    """The inputs and outputs of an inner node: from its class, or derived for the editor's own
    nodes."""

    inputs: dict[str, Any]
    widgets: set[str]
    outputs: list[Any]


def describe_group(group: GroupDefinition, types: NodeTypes) -> GroupInterface:
    return _Builder(group, types).build()


class _Builder:
    def __init__(self, group: GroupDefinition, types: NodeTypes) -> None:
        self._group = group
        self._types = types
        self._required: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._slots = 0
        self._linked_from: dict[int, dict[int, list[InnerLink]]] = {}
        self._linked_to: dict[int, dict[int, InnerLink]] = {}
        for link in group.links:
            sources = self._linked_from.setdefault(link.source, {})
            sources.setdefault(link.source_slot, []).append(link)
            self._linked_to.setdefault(link.target, {})[link.target_slot] = link

    def build(self) -> GroupInterface:
        count = len(self._group.nodes)
        widgets: list[dict[str, str]] = [{} for _ in range(count)]
        inputs: list[dict[str, int]] = [{} for _ in range(count)]
        outputs: dict[int, tuple[int, int]] = {}
        types: list[Any] = []
        converted: list[tuple[int, int, str, Any]] = []
        for index, node in enumerate(self._group.nodes):
            declared = self._declared(index, node)
            if declared is None:
                continue
            converted.extend(self._add_widgets(index, node, declared, widgets[index]))
            self._add_sockets(index, node, declared, inputs[index])
            for slot, output in self._shown_outputs(index, declared):
                outputs[len(types)] = (index, slot)
                types.append(output)
        for index, slot, name, spec in converted:
            if slot not in self._linked_to.get(index, {}):
                widgets[index][name] = self._add(index, name, spec)
                inputs[index][name] = self._take_slot()
        definition = {
            "input": {"required": self._required},
            "input_order": {"required": list(self._required)},
            "output": types,
        }
        return GroupInterface(definition, widgets, inputs, outputs)

    def _declared(self, index: int, node: Node) -> _Declared | None:
        node_type = self._types.get(node.type)
        if node_type is not None:
            return _Declared(
                {spec.name: _spec_entry(spec) for spec in node_type.specs},
                {spec.name for spec in node_type.specs if is_widget(spec)},
                list(node_type.outputs),
            )
        if node.type == PRIMITIVE:
            return self._declared_primitive(index)
        return self._declared_reroute(index, node) if node.type == REROUTE else None

    def _declared_primitive(self, index: int) -> _Declared | None:
        links = self._linked_from.get(index, {}).get(0)
        if not links:
            return None
        target = self._group.nodes[links[0].target]
        slot = links[0].target_slot
        name = target.inputs[slot].name if slot < len(target.inputs) else ""
        node_type = self._types.get(target.type)
        spec = (
            next((spec for spec in node_type.specs if spec.name == name), None)
            if node_type
            else None
        )
        if spec is None:
            return None
        return _Declared({"value": _spec_entry(spec)}, {"value"}, [spec.type])

    def _declared_reroute(self, index: int, node: Node) -> _Declared | None:
        used_inside = self._linked_to.get(index) and self._linked_from.get(index)
        if used_inside and (index, 0) not in self._group.shown:
            return None
        kind = node.outputs[0] if node.outputs else ANY_TYPE
        return _Declared({kind: [kind, {"forceInput": True}]}, set(), [kind])

    def _add_widgets(
        self, index: int, node: Node, declared: _Declared, shown: dict[str, str]
    ) -> Iterator[tuple[int, int, str, Any]]:
        """Adds the ordinary widgets. Yields the widgets that were converted to inputs, which come
        after all nodes."""
        converted = {
            slot.name: place for place, slot in enumerate(node.inputs) if slot.widget == slot.name
        }
        for name, spec in declared.inputs.items():
            if name not in declared.widgets:
                continue
            if name in converted:
                yield index, converted[name], name, spec
            else:
                shown[name] = self._add(index, name, spec)

    def _add_sockets(
        self, index: int, node: Node, declared: _Declared, shown: dict[str, int]
    ) -> None:
        names = [name for name in declared.inputs if name not in declared.widgets]
        saved = [slot.name for slot in node.inputs]
        for position, name in enumerate(names):
            slot = saved.index(name) if name in saved else position
            if slot in self._linked_to.get(index, {}):
                continue
            outer = self._name_for(index, name)
            if self._config(index, "input", name).get("visible") is False:
                continue
            self._required[outer] = declared.inputs[name]
            shown[name] = self._take_slot()

    def _shown_outputs(self, index: int, declared: _Declared) -> Iterator[tuple[int, Any]]:
        for slot, output in enumerate(declared.outputs):
            linked = slot in self._linked_from.get(index, {})
            hidden = linked and (index, slot) not in self._group.shown
            if self._config(index, "output", str(slot)).get("visible", not hidden):
                yield slot, output

    def _add(self, index: int, name: str, spec: Any) -> str:
        outer = self._name_for(index, name)
        kind, options = spec[0], dict(spec[1])
        is_primitive = self._group.nodes[index].type == PRIMITIVE
        if name in SEED_NAMES or (is_primitive and kind in ("INT", "FLOAT", "COMBO")):
            options["control_after_generate"] = True
        self._required[outer] = [kind, options]
        return outer

    def _name_for(self, index: int, name: str) -> str:
        """Returns the outer name of an input: its configured name, label or inner name. The node's
        title is added if that name is already used, or if the node is a primitive with a title."""
        node = self._group.nodes[index]
        configured = self._config(index, "input", name).get("name")
        key = outer = str(configured or self._group.labels[index].get(name) or name)
        if (node.type == PRIMITIVE and node.title) or outer in self._seen:
            prefix = node.title or node.type
            key = outer = f"{prefix} {name}"
            if outer in self._seen:
                outer = f"{prefix} {self._seen[outer]} {name}"
        self._seen[key] = self._seen.get(key, 1) + 1
        return outer

    def _config(self, index: int, part: str, name: str) -> Mapping[str, Any]:
        """Returns the user's settings for one input or output."""
        settings: Any = self._group.config
        for key in (str(index), part, name):
            settings = settings.get(key) if isinstance(settings, dict) else None
        return settings if isinstance(settings, dict) else {}

    def _take_slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def _spec_entry(spec: InputSpec) -> list[Any]:
    options = {**spec.options, "forceInput": True} if spec.forced else dict(spec.options)
    return [spec.choices if spec.choices is not None else spec.type, options]


PREFIX, OLD_PREFIX = "workflow>", "workflow/"
MINTED_LINKS = 1_000_000_000  # base id of generated links, far above the ids in any file


def expand_group_nodes(
    workflow: Workflow, types: NodeTypes, *, limits: Limits = DEFAULT_LIMITS
) -> Workflow:
    if not workflow.group_nodes:
        return workflow
    groups = {name: read_group(saved) for name, saved in workflow.group_nodes.items()}
    instances = [node for node in workflow.root.nodes if groups.get(_group_name(node))]
    if len(instances) > limits.group_nodes_max:
        raise LimitExceeded(
            f"the workflow has {len(instances)} group nodes; the limit is {limits.group_nodes_max}"
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
    """Checks whether all nodes of a group have a known type. Otherwise, the group stays an unknown
    node itself."""
    return all(types.get(node.type) is not None or is_virtual(node.type) for node in group.nodes)


class _Inner(NamedTuple):
    """The inner nodes of an instance, and their layouts."""

    nodes: tuple[Node, ...]
    laid_out: tuple[WiredNode, ...]
    links: tuple[Link, ...]


class _Outside:
    """The nodes outside a group, to look up the types at the far ends of its links."""

    def __init__(self, root: WorkflowGraph, types: NodeTypes) -> None:
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
    definition = WorkflowGraph(
        definition_id, _group_name(node), inner.nodes, links, inputs, outputs
    )
    replacement = Node(
        id=str(last),
        type=definition_id,
        title=node.title,
        inputs=tuple(
            NodeSlot(port.name, port.type, link.id)
            for port, link in zip(inputs, feeding, strict=True)
        ),
    )
    remaining = {
        key: link for key, link in root.links.items() if node.id not in (link.origin, link.target)
    }
    root_links = {
        **remaining,
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
    used: set[int] = set()
    nodes = []
    for index, saved in enumerate(group.nodes):
        node = saved._replace(id=str(last_id + 1 + index))
        overrides = {}
        for inner_name, outer_name in interface.widgets[index].items():
            place = _next_place(names, outer_name, used)
            if place is not None:
                used.add(place)
                overrides[inner_name] = instance.values[names[place]]
        node = _with_values(node, overrides)
        nodes.append(node._replace(inputs=tuple(slot._replace(link=None) for slot in node.inputs)))
    laid_out = tuple(wire_node(node, types.get(node.type), {}) for node in nodes)
    return _Inner(tuple(nodes), laid_out, tuple(_links_between(group.links, laid_out)))


def _next_place(names: Sequence[str], outer_name: str | None, used: set[int]) -> int | None:
    return next(
        (index for index, name in enumerate(names) if name == outer_name and index not in used),
        None,
    )


def _with_values(node: Node, overrides: dict[str, Any]) -> Node:
    """Sets the values of an inner node. A primitive loses its own value and takes the value of the
    widget that it is linked to."""
    if node.type == PRIMITIVE:
        return node._replace(values=None)
    return node._replace(overrides=overrides)


def _links_between(saved: Sequence[InnerLink], nodes: Sequence[WiredNode]) -> Iterator[Link]:
    """Yields the links between inner nodes, by slot number. Links between incompatible types are
    skipped."""
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
    """Returns the input ports, their inner links, and the links that feed the ports.

    There is one port for each outer output that feeds the group, regardless of how many inner
    inputs it feeds. The editor recreates these links, so links between incompatible types are lost.
    """
    ends: dict[tuple[str, int], list[tuple[WiredNode, int]]] = {}
    for index, slots in enumerate(interface.inputs):
        for name, place in slots.items():
            link = instance.inputs[place].link if place < len(instance.inputs) else None
            node = inner.laid_out[index]
            slots_of_name = [i for i, slot in enumerate(node.inputs) if slot.name == name]
            if link is None or not slots_of_name:
                continue
            if are_compatible(outside.origin_type(link), node.inputs[slots_of_name[0]].type):
                ends.setdefault((link.origin, link.origin_slot), []).append(
                    (node, slots_of_name[0])
                )
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
    """Returns the output ports, their inner links, and the links that the ports feed."""
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
    result: list[Port] = []
    for (index, slot), place in ports.items():
        node = inner.laid_out[index]
        link = Link(MINTED_LINKS * 4 + place, node.node.id, slot, SUBGRAPH_OUTPUT_ID, place)
        links.append(link)
        result.append(Port(f"output {place}", _output_type(inner, index, slot), (link.id,)))
    return tuple(result), links, fed


def _output_type(inner: _Inner, index: int, slot: int) -> str:
    outputs = inner.laid_out[index].outputs
    return outputs[slot] if slot < len(outputs) else ANY_TYPE
