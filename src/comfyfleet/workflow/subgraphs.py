"""Expands subgraphs. Makes node ids unique, gives instances the widgets that their definition
promotes (or that the older `proxyWidgets` list), and builds the tree of graphs to execute."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.model import (
    ANY_TYPE,
    DEFAULT_LIMITS,
    SUBGRAPH_INPUT_ID,
    UNASSIGNED,
    CharacterBudget,
    Limits,
    Link,
    Node,
    Port,
    Workflow,
    WorkflowGraph,
    graph_place,
    join_places,
    node_place,
)
from comfyfleet.workflow.node_behaviours import PRIMITIVE
from comfyfleet.workflow.node_inputs import ABSENT, Input, Widget
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.wire import WiredGraph, WiredNode, wire


class GraphDraft:
    """A graph under construction."""

    def __init__(
        self, graph: WorkflowGraph, nodes: dict[str, WiredNode], ports: list[Port]
    ) -> None:
        self.graph = graph
        self.nodes = nodes
        self.ports = ports
        self.links = dict(graph.links)
        # for each replaced primitive, the name of the port that replaced it
        self.replaced: dict[str, str] = {}

    def frozen(self) -> WiredGraph:
        graph = self.graph._replace(inputs=tuple(self.ports), links=self.links)
        return WiredGraph(graph, self.nodes)

    def ends_of(self, port: Port) -> Iterator[tuple[WiredNode, Input]]:
        """Yields the inner inputs that a port feeds, in saved order."""
        for link_id in port.links:
            link = self.links.get(link_id)
            node = self.nodes.get(link.target) if link else None
            if link is None or node is None:
                continue
            for slot in node.inputs:
                if slot.link is not None and slot.link.id == link_id:
                    yield node, slot

    def promoted_widget(self, port: Port) -> tuple[Widget, Any] | None:
        """Returns the inner widget that a port feeds, and its value."""
        for node, slot in self.ends_of(port):
            if slot.widget is not None and slot.widget in node.values:
                widget = next(widget for widget in node.widgets if widget.name == slot.widget)
                return widget, node.values[slot.widget]
        return None

    def source_of(self, port: Port) -> tuple[str, str] | None:
        """Returns the inner node id and the widget name that a port feeds. For a nested instance,
        the name is that of its input."""
        for node, slot in self.ends_of(port):
            if node.definition is not None:
                return node.node.id, slot.name
            if slot.widget is not None and slot.widget in node.values:
                return node.node.id, slot.widget
        return None

    def connect_port(self, name: str, slot_type: str, ends: Iterable[tuple[str, int]]) -> Port:
        """Adds a port and links it to inner inputs, given as (node id, slot). Existing links of
        these inputs are replaced."""
        links = []
        for node_id, slot in ends:
            link = Link(
                min(self.links, default=0) - 1, SUBGRAPH_INPUT_ID, len(self.ports), node_id, slot
            )
            self.links[link.id] = link
            links.append(link.id)
            self._set_link(node_id, slot, link)
        port = Port(name, slot_type, tuple(links))
        self.ports.append(port)
        return port

    def unlink(self, node_id: str, slot: int) -> None:
        self._set_link(node_id, slot, None)

    def _set_link(self, node_id: str, slot: int, link: Link | None) -> None:
        node = self.nodes[node_id]
        inputs = list(node.inputs)
        inputs[slot] = inputs[slot]._replace(link=link)
        self.nodes[node_id] = node._replace(inputs=tuple(inputs))


class GraphDrafts:
    """The graphs that were created so far, innermost first."""

    def __init__(self) -> None:
        self._drafts: dict[str, GraphDraft] = {}

    def add(self, draft: GraphDraft) -> None:
        self._drafts[draft.graph.id] = draft

    def get(self, graph_id: str | None) -> GraphDraft | None:
        return None if graph_id is None else self._drafts.get(graph_id)

    def all(self) -> Iterable[GraphDraft]:
        return self._drafts.values()

    def add_input_to_instances(self, definition: GraphDraft, port: Port) -> None:
        """Adds a definition's new port, with its inner value, to every instance wired so far."""
        source = definition.promoted_widget(port)
        for draft in self._drafts.values():
            for node_id, node in draft.nodes.items():
                if node.definition == definition.graph.id:
                    draft.nodes[node_id] = _with_input(node, port, source)


def _with_input(node: WiredNode, port: Port, source: tuple[Widget, Any] | None) -> WiredNode:
    slot = Input(port.name, port.type, port.name if source else None)
    node = node._replace(inputs=(*node.inputs, slot))
    if source is None:
        return node
    widget, value = source
    widgets = (*node.widgets, widget._replace(name=port.name))
    return node._replace(widgets=widgets, values={**node.values, port.name: value})


def unique_ids(workflow: Workflow) -> Workflow:
    if not workflow.definitions and not workflow.group_nodes and _all_unique(workflow.root):
        return workflow
    id_allocator = _IdAllocator(workflow)
    renamed: dict[str, dict[str, str]] = {}
    definitions = {}
    for key, graph in workflow.definitions.items():
        definitions[key], names = _rename_inner(graph, id_allocator)
        if names:
            renamed[key] = names
    root = _rename_repeated(workflow.root, id_allocator)
    if renamed:
        root = _follow_renamed(root, renamed)
        definitions = {key: _follow_renamed(graph, renamed) for key, graph in definitions.items()}
    return workflow._replace(root=root, definitions=definitions, last_node_id=id_allocator.last)


class _IdAllocator:
    def __init__(self, workflow: Workflow) -> None:
        self.last = workflow.last_node_id
        self.used = {node.id for node in workflow.root.nodes}

    def take(self, node_id: str) -> None:
        self.used.add(node_id)
        number = _number(node_id)
        if number is not None:
            self.last = max(self.last, number)

    def allocate(self) -> str:
        self.last += 1
        while str(self.last) in self.used:
            self.last += 1
        self.used.add(str(self.last))
        return str(self.last)


def _all_unique(graph: WorkflowGraph) -> bool:
    ids = {node.id for node in graph.nodes}
    return len(ids) == len(graph.nodes) and UNASSIGNED not in ids


def _rename_inner(
    graph: WorkflowGraph, id_allocator: _IdAllocator
) -> tuple[WorkflowGraph, dict[str, str]]:
    names: dict[str, str] = {}
    nodes: dict[str, Node] = {}
    for node in graph.nodes:
        if node.id in nodes:
            continue  # if two nodes of a definition have the same id, the editor uses the first one
        nodes[node.id] = node
        if node.id in id_allocator.used:
            names[node.id] = id_allocator.allocate()
            nodes[node.id] = node._replace(id=names[node.id])
        else:
            id_allocator.take(node.id)
    links = graph.links
    if names:
        links = {key: _renamed_link(link, names) for key, link in links.items()}
    return graph._replace(nodes=tuple(nodes.values()), links=links), names


def _renamed_link(link: Link, names: Mapping[str, str]) -> Link:
    return link._replace(
        origin=names.get(link.origin, link.origin), target=names.get(link.target, link.target)
    )


def _rename_repeated(root: WorkflowGraph, id_allocator: _IdAllocator) -> WorkflowGraph:
    """Gives a new id to nodes without an id and to nodes whose id is already used. Links stay with
    the first node."""
    for node in root.nodes:
        id_allocator.take(node.id)
    if _all_unique(root):
        return root
    seen = {UNASSIGNED}
    nodes = []
    for node in root.nodes:
        nodes.append(node._replace(id=id_allocator.allocate()) if node.id in seen else node)
        seen.add(node.id)
    return root._replace(nodes=tuple(nodes))


def _follow_renamed(
    graph: WorkflowGraph, renamed: Mapping[str, Mapping[str, str]]
) -> WorkflowGraph:
    """Updates node ids in the `proxyWidgets` of instances."""
    nodes = []
    for node in graph.nodes:
        names = renamed.get(node.type)
        proxies = node.properties.get("proxyWidgets")
        if names and isinstance(proxies, list):
            properties = {**node.properties, "proxyWidgets": _renamed_proxies(proxies, names)}
            node = node._replace(properties=properties)
        nodes.append(node)
    return graph._replace(nodes=tuple(nodes))


def _renamed_proxies(proxies: list[Any], names: Mapping[str, str]) -> list[Any]:
    return [
        [names.get(str(entry[0]), entry[0]), *entry[1:]]
        if isinstance(entry, list) and entry
        else entry
        for entry in proxies
    ]


def _number(node_id: str) -> int | None:
    return int(node_id) if node_id.isdecimal() and str(int(node_id)) == node_id else None


class GraphScope:
    """A graph and its location in the tree. `prefix` is the prefix of its nodes' ids, such as `57:`
    for instance 57."""

    __slots__ = ("children", "instance", "parent", "prefix", "wired")

    def __init__(
        self,
        wired: WiredGraph,
        parent: "GraphScope | None" = None,
        instance: WiredNode | None = None,
    ) -> None:
        self.wired = wired
        self.parent = parent
        self.instance = instance
        self.prefix: str = f"{parent.prefix}{instance.node.id}:" if parent and instance else ""
        self.children: dict[str, GraphScope] = {}

    def place_of(self, node: WiredNode) -> str:
        return join_places(graph_place(self.wired.graph), node_place(node.node))


def expand(graphs: Mapping[str, WiredGraph], limits: Limits) -> list[GraphScope]:
    """Returns all scopes. The root comes first, and the instances of each graph are in the order of
    the file.

    The contents of a muted or bypassed instance in the root graph are left out. At deeper levels,
    such an instance only stops feeding other nodes: its inner nodes are still sent, as in the
    editor.
    """
    scopes = [GraphScope(graphs[""])]
    budget = limits.nodes_max
    prefixes = CharacterBudget(limits.text_characters_max, "ids of instances")
    pending = [(scopes[0], 0)]
    while pending:
        scope, depth = pending.pop()
        budget -= len(scope.wired.nodes)
        if depth > limits.subgraph_depth_max or budget < 0:
            _refuse(scope, limits)
        inner = []
        for node in scope.wired.nodes.values():
            if node.definition is None or (depth == 0 and node.node.is_inactive):
                continue
            child = GraphScope(graphs[node.definition], scope, node)
            prefixes.take(len(child.prefix))
            scope.children[node.node.id] = child
            scopes.append(child)
            inner.append((child, depth + 1))
        pending.extend(reversed(inner))
    return scopes


def _refuse(scope: GraphScope, limits: Limits) -> None:
    raise LimitExceeded(
        f"{graph_place(scope.wired.graph) or 'the workflow'} has more than {limits.nodes_max} nodes "
        f"or {limits.subgraph_depth_max} levels of subgraphs when expanded"
    )


PROMOTION_DEPTH_MAX = 100
PREVIEW_PREFIX = "$$"
HOST_ITSELF = "-1"
_NUMBERED = re.compile(r"^\s*(\d+)\s*:\s*(.+)$")


class ProxyEntry(NamedTuple):
    source: str
    widget: str
    within: str | None  # id of the node inside the source, if the name alone is ambiguous
    value: Any  # ABSENT if the instance has no value


def migrate_proxies(host: Node, draft: GraphDraft, drafts: GraphDrafts) -> None:
    definition = drafts.get(draft.nodes[host.id].definition)
    if definition is None:
        return
    entries = _entries(host, definition, drafts)
    linked = _linked_sources(draft.nodes[host.id], definition)
    plans = [_plan(entry, linked, definition, drafts) for entry in entries]
    for entry, plan in zip(entries, plans, strict=True):
        if plan == "create":
            _create_input(host, entry, draft, definition, drafts)
        elif plan.startswith("linked:"):
            _set_host_value(host, plan.removeprefix("linked:"), entry.value, draft)
    _replace_primitives(host, entries, plans, draft, definition, drafts)
    for entry, plan in zip(entries, plans, strict=True):
        if plan == "none" and entry.source == HOST_ITSELF:
            _set_host_value(host, entry.widget, entry.value, draft)


def _entries(host: Node, definition: GraphDraft, drafts: GraphDrafts) -> list[ProxyEntry]:
    values = host.values if isinstance(host.values, list) else []
    entries = []
    for index, proxy in enumerate(_tuples(host.properties.get("proxyWidgets"))):
        source, name, *rest = proxy
        within = rest[0] if rest else None
        if not _resolves(definition, source, name, drafts):
            name, prefix = _without_prefixes(name)
            within = prefix or within
        entries.append(
            ProxyEntry(source, name, within, values[index] if index < len(values) else ABSENT)
        )
    return entries


def _tuples(saved: Any) -> Sequence[list[str]]:
    """Returns all entries. Like the editor, returns none of them if one is malformed."""
    if isinstance(saved, str):
        try:
            saved = json.loads(saved)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(saved, list):
        return ()
    well_formed = all(
        isinstance(entry, list)
        and len(entry) in (2, 3)
        and all(isinstance(part, str) for part in entry)
        for entry in saved
    )
    return saved if well_formed else ()


def _without_prefixes(name: str) -> tuple[str, str | None]:
    """Splits a name with prefixes: `12: 7: steps` is the widget `steps` of node 7."""
    deepest = None
    while match := _NUMBERED.match(name):
        deepest, name = match.groups()
    return name, deepest


def _resolves(definition: GraphDraft, source: str, name: str, drafts: GraphDrafts) -> bool:
    current: GraphDraft | None = definition
    for _ in range(PROMOTION_DEPTH_MAX):
        node = current.nodes.get(source) if current else None
        if node is None:
            return False
        if node.definition is None:
            return name in node.values
        current = drafts.get(node.definition)
        port = (
            next((port for port in current.ports if port.name == name), None) if current else None
        )
        target = current.source_of(port) if current and port else None
        if target is None:
            return False
        source, name = target
    return False


def _linked_sources(host: WiredNode, definition: GraphDraft) -> dict[tuple[str, str], str]:
    """Maps inner nodes and widgets to the instance's input that exposes them. If there are several,
    the first one counts."""
    input_names: dict[tuple[str, str], str] = {}
    for slot, port in zip(host.inputs, definition.ports, strict=False):
        source = definition.source_of(port)
        if source is not None:
            input_names.setdefault(source, slot.name)
    return input_names


def _plan(
    entry: ProxyEntry,
    linked: Mapping[tuple[str, str], str],
    definition: GraphDraft,
    drafts: GraphDrafts,
) -> str:
    if (entry.source, entry.widget) in linked:
        return f"linked:{linked[entry.source, entry.widget]}"
    source = definition.nodes.get(entry.source)
    if source is None:
        return "none"
    if source.node.type == PRIMITIVE:
        if entry.source in definition.replaced:
            return f"linked:{definition.replaced[entry.source]}"
        return "primitive" if _targets(definition, source.node) else "none"
    if entry.widget.startswith(PREVIEW_PREFIX) or _widget_slot(source, entry, drafts) is None:
        return "none"
    return "create"


def _widget_slot(source: WiredNode, entry: ProxyEntry, drafts: GraphDrafts) -> int | None:
    """Returns the index of the source's input that represents the widget, or None."""
    if source.definition is not None:
        inner = drafts.get(source.definition)
        for index, slot in enumerate(source.inputs):
            port = inner.ports[index] if inner and index < len(inner.ports) else None
            target = inner.source_of(port) if inner and port else None
            if entry.within is not None:
                matches = target == (entry.within, entry.widget)
            else:
                matches = slot.name == entry.widget or bool(target and target[1] == entry.widget)
            if matches:
                return index if slot.widget is not None else None
    for index, slot in enumerate(source.inputs):
        if slot.widget == entry.widget:
            return index
    return None


def _create_input(
    host: Node, entry: ProxyEntry, draft: GraphDraft, definition: GraphDraft, drafts: GraphDrafts
) -> None:
    source = definition.nodes[entry.source]
    slot = _widget_slot(source, entry, drafts)
    if slot is None:
        return
    name = _unique_name(entry.widget, definition)
    port = definition.connect_port(name, source.inputs[slot].type, [(entry.source, slot)])
    drafts.add_input_to_instances(definition, port)
    _set_host_value(host, name, entry.value, draft)


def _replace_primitives(
    host: Node,
    entries: Sequence[ProxyEntry],
    plans: Sequence[str],
    draft: GraphDraft,
    definition: GraphDraft,
    drafts: GraphDrafts,
) -> None:
    by_primitive: dict[str, list[ProxyEntry]] = {}
    for entry, plan in zip(entries, plans, strict=True):
        if plan == "primitive":
            by_primitive.setdefault(entry.source, []).append(entry)
    for primitive_id, cohort in by_primitive.items():
        primitive = definition.nodes[primitive_id].node
        targets = _targets(definition, primitive)
        if len({entry.widget for entry in cohort}) > 1 or not targets:
            continue
        slot_type = primitive.outputs[0] if primitive.outputs else ANY_TYPE
        if not all(_fits(definition, link, slot_type) for link in targets):
            continue
        name = _unique_name(primitive.title or cohort[0].widget, definition)
        ends = [(link.target, link.target_slot) for link in targets]
        port = definition.connect_port(name, slot_type, ends)
        definition.replaced[primitive_id] = name
        drafts.add_input_to_instances(definition, port)
        values = [entry.value for entry in cohort if entry.value is not ABSENT]
        _set_host_value(host, name, values[0] if values else ABSENT, draft)


def _targets(definition: GraphDraft, primitive: Node) -> list[Link]:
    """Returns the links from the primitive's output, with their current target slots."""
    return [
        slot.link._replace(target_slot=index)
        for node in definition.nodes.values()
        for index, slot in enumerate(node.inputs)
        if slot.link is not None and slot.link.origin == primitive.id and slot.link.origin_slot == 0
    ]


def _fits(definition: GraphDraft, link: Link, slot_type: str) -> bool:
    target_type = definition.nodes[link.target].inputs[link.target_slot].type
    return target_type == slot_type or ANY_TYPE in (target_type, slot_type)


def _unique_name(base: str, definition: GraphDraft) -> str:
    names = {port.name for port in definition.ports}
    name, number = base, 1
    while name in names:
        name, number = f"{base}_{number}", number + 1
    return name


def _set_host_value(host: Node, name: str, value: Any, draft: GraphDraft) -> None:
    node = draft.nodes[host.id]
    if value is not ABSENT and name in node.values:
        draft.nodes[host.id] = node._replace(values={**node.values, name: value})


def wire_all(
    workflow: Workflow, types: NodeTypes, *, limits: Limits = DEFAULT_LIMITS
) -> dict[str, WiredGraph]:
    """Wires all graphs. Returns them by id. The root graph's id is the empty string."""
    definitions = workflow.definitions
    if not definitions:
        return {"": wire(workflow.root, types, definitions, limits=limits)}
    drafts = GraphDrafts()
    for graph in (*innermost_first(workflow), workflow.root):
        wired = wire(graph, types, definitions, limits=limits)
        draft = GraphDraft(graph, dict(wired.nodes), list(graph.inputs))
        drafts.add(draft)
        instances = [node for node in wired.nodes.values() if node.definition is not None]
        for instance in instances:
            draft.nodes[instance.node.id] = _with_host_values(instance, drafts)
        for instance in instances:
            if "proxyWidgets" in instance.node.properties:
                migrate_proxies(instance.node, draft, drafts)
    for draft in drafts.all():
        for key, node in draft.nodes.items():
            if node.definition is not None:
                draft.nodes[key] = _without_empty_choices(node)
    return {draft.graph.id: draft.frozen() for draft in drafts.all()}


def _without_empty_choices(instance: WiredNode) -> WiredNode:
    """Replaces null choices by the first choice, as on any node."""
    first = {
        widget.name: widget.choices[0]
        for widget in instance.widgets
        if widget.choices and instance.values[widget.name] is None
    }
    return instance._replace(values={**instance.values, **first}) if first else instance


def innermost_first(workflow: Workflow) -> list[WorkflowGraph]:
    """Returns the definitions ordered so that each one comes after the definitions that it uses.
    Otherwise, the order of the file is preserved."""
    used_by: dict[str, list[str]] = {key: [] for key in workflow.definitions}
    waiting: dict[str, int] = dict.fromkeys(workflow.definitions, 0)
    for key, graph in workflow.definitions.items():
        for node in graph.nodes:
            if node.type in used_by:
                used_by[node.type].append(key)
                waiting[key] += 1
    ready = [key for key, count in waiting.items() if count == 0]
    for key in ready:
        for user in used_by[key]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    if len(ready) != len(workflow.definitions):
        _refuse_endless(workflow)
        ready = list(workflow.definitions)
    return [workflow.definitions[key] for key in ready]


def _refuse_endless(workflow: Workflow) -> None:
    """Refuses definitions that contain themselves, if the root graph uses one of them directly or
    indirectly."""
    reached: list[tuple[WorkflowGraph, tuple[str, ...]]] = [(workflow.root, ())]
    seen = set()
    while reached:
        graph, path = reached.pop()
        for node in graph.nodes:
            definition = workflow.definitions.get(node.type)
            if definition is None:
                continue
            if node.type in path:
                where = node_place(node, graph)
                raise InvalidWorkflow(f"{where}: {graph_place(definition)} contains itself")
            if (node.type, path) not in seen:
                seen.add((node.type, path))
                reached.append((definition, (*path, node.type)))


def _with_host_values(instance: WiredNode, drafts: GraphDrafts) -> WiredNode:
    definition = drafts.get(instance.definition)
    if definition is None:
        return instance
    saved = instance.node.values if isinstance(instance.node.values, list) else []
    quarantined = dict(_unplaced_values(instance.node))
    inputs, widgets, values = [], [], {}
    position = 0
    for slot, port in zip(instance.inputs, definition.ports, strict=False):
        source = definition.promoted_widget(port)
        if source is None:
            inputs.append(slot)
            continue
        widget, value = source
        if slot.name in quarantined:
            value = quarantined[slot.name]
        elif position < len(saved):
            value = saved[position]
        position += 1
        inputs.append(slot._replace(widget=slot.name))
        widgets.append(widget._replace(name=slot.name))
        values[slot.name] = value
    return instance._replace(
        inputs=tuple(inputs), widgets=tuple(widgets), values=values, value_slots=position
    )


def _unplaced_values(node: Node) -> Iterator[tuple[str, Any]]:
    """Yields values that an earlier migration could not assign and stored under the input's name
    instead.
    """
    entries = node.properties.get("proxyWidgetErrorQuarantine")
    for entry in reversed(entries if isinstance(entries, list) else []):
        original = entry.get("originalEntry") if isinstance(entry, dict) else None
        if not isinstance(original, list) or len(original) < 2 or "hostValue" not in entry:
            continue
        if original[0] == HOST_ITSELF:
            yield str(original[1]), entry["hostValue"]
