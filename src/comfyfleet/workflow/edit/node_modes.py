"""Bypasses, mutes and enables nodes by id, title or group, and finds instances whose nodes are all
switched off.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.edit.documents import (
    JsonObject,
    count_instances,
    graph_at,
    graph_paths,
    nodes_of,
    with_all_inside,
    with_graph,
    with_nodes,
    with_own_definition,
)
from comfyfleet.workflow.edit.selectors import (
    NodeLocation,
    Selection,
    SelectorIndex,
    SelectorKind,
    name_of,
    place_of,
)
from comfyfleet.workflow.model import DEFAULT_LIMITS, Limits, Mode, Node, Workflow, WorkflowGraph
from comfyfleet.workflow.node_behaviours import is_virtual
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.subgraphs import innermost_first


class Switched(NamedTuple):
    """A new document, the changes, and warnings for the user."""

    document: dict[str, Any]
    done: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class DeadShell(NamedTuple):
    """An instance that has no effect, because all nodes in its definition are switched off."""

    id: str  # the id in a prompt: `57`, or `57:3` for an instance inside instance 57
    title: str
    definition: str


class Segment(NamedTuple):
    """A numbered part of a chain. `nodes` are saved ids in the order of the file."""

    number: int
    title: str
    nodes: tuple[str, ...]


Kind = Literal["group", "instance", "title"]


class Chain(NamedTuple):
    """Numbered segments. Each one is fed by the previous one, or merged with it.

    `segments` are the segments that have an effect, ordered by number. `off` are the segments that
    don't count, because they are switched off or consist of dead shells. `graph` is the id of the
    definition that contains the chain, or empty for the root graph.
    """

    kind: Kind
    name: str
    segments: tuple[Segment, ...]
    off: tuple[Segment, ...] = ()
    graph: str = ""


def dead_shells(
    document: dict[str, Any], *, limits: Limits = DEFAULT_LIMITS
) -> tuple[DeadShell, ...]:
    """Returns the instances of dead definitions, whether or not the instance itself is on."""
    workflow = parse(document, limits=limits)
    dead = dead_definitions(workflow)
    worth_entering = _leading_to(dead, workflow)
    shells: list[DeadShell] = []
    pending: list[tuple[WorkflowGraph, str, int]] = [(workflow.root, "", 0)]
    budget = limits.nodes_max
    while pending:
        graph, prefix, depth = pending.pop()
        budget -= len(graph.nodes)
        if budget < 0 or depth > limits.subgraph_depth_max:
            raise LimitExceeded(
                f"the workflow has more than {limits.nodes_max} nodes or "
                f"{limits.subgraph_depth_max} levels of subgraphs when expanded"
            )
        inner = []
        for node in graph.nodes:
            if node.type in dead:
                definition = workflow.definitions[node.type].name
                shells.append(DeadShell(prefix + node.id, name_of(node, workflow), definition))
            elif node.type in worth_entering:
                inner.append((workflow.definitions[node.type], f"{prefix}{node.id}:", depth + 1))
        pending.extend(reversed(inner))
    return tuple(shells)


def dead_definitions(workflow: Workflow) -> frozenset[str]:
    """Returns the ids of definitions whose executable nodes are all muted or bypassed.

    A nested instance is dead if its definition is.
    """
    dead: set[str] = set()
    for graph in innermost_first(workflow):
        nodes = [node for node in graph.nodes if not is_virtual(node.type)]
        if nodes and all(node.is_inactive or node.type in dead for node in nodes):
            dead.add(graph.id)
    return frozenset(dead)


def _leading_to(dead: frozenset[str], workflow: Workflow) -> frozenset[str]:
    """Returns the definitions that aren't dead, but have a dead instance at some level."""
    leading: set[str] = set()
    for graph in innermost_first(workflow):
        if graph.id not in dead and any(_is_in(node, dead, leading) for node in graph.nodes):
            leading.add(graph.id)
    return frozenset(leading)


def _is_in(node: Node, *ids: frozenset[str] | set[str]) -> bool:
    return any(node.type in some for some in ids)


NODES_LISTED_MAX = 12  # maximum number of nodes in a message
MODE_TEXTS = {Mode.ALWAYS: "enabled", Mode.MUTED: "muted", Mode.BYPASSED: "bypassed"}


class _ModeChange(NamedTuple):
    selector: str
    selection: Selection
    mode: Mode


def switch(
    document: dict[str, Any],
    *,
    bypass: Iterable[str] = (),
    mute: Iterable[str] = (),
    enable: Iterable[str] = (),
) -> Switched:
    """Switches nodes. All selectors (see `selectors`) are resolved first: if one is invalid,
    nothing changes.

    If two selectors contradict each other, an id wins over a title, and a title over a group. So it
    is possible to switch all nodes of a group except one.

    A node that is selected through its instance (`57:3`) changes only in that instance, which gets
    its own copy of a shared definition. A title or a group in a definition applies to all
    instances. Enabling a dead shell also enables all nodes inside it, because otherwise it would
    still have no effect. This doesn't happen if nodes inside it are selected.
    """
    workflow = parse(document)
    catalogue = SelectorIndex(document, workflow)
    mode_changes = _mode_changes(
        catalogue, {Mode.BYPASSED: bypass, Mode.MUTED: mute, Mode.ALWAYS: enable}
    )
    result = _revived(document, mode_changes, workflow)
    for mode_change in sorted(mode_changes, key=lambda mode_change: mode_change.selection.meaning):
        result = _apply_change(result, mode_change, workflow)
    return result


def enable_nodes(
    document: dict[str, Any], graph: str, nodes: Collection[str], reason: str
) -> Switched:
    """Enables nodes of a graph by their saved ids. Dead shells are enabled with all their nodes."""
    workflow = parse(document)
    within = workflow.definitions[graph] if graph else workflow.root
    spots = [NodeLocation(graph, at) for at, node in enumerate(within.nodes) if node.id in nodes]
    mode_change = _ModeChange(reason, Selection(SelectorKind.ID, tuple(spots)), Mode.ALWAYS)
    return _apply_change(_revived(document, [mode_change], workflow), mode_change, workflow)


def _mode_changes(
    catalogue: SelectorIndex, selectors: Mapping[Mode, Iterable[str]]
) -> list[_ModeChange]:
    mode_changes, problems = [], []
    for mode, names in selectors.items():
        for name in names:
            try:
                mode_changes.append(_ModeChange(name, catalogue.select(name), mode))
            except InvalidInput as error:
                problems.append(error.message)
    problems.extend(_contradictions(mode_changes, catalogue.workflow))
    if problems:
        raise InvalidInput("\n".join(problems), problems=tuple(problems))
    return mode_changes


def _contradictions(mode_changes: list[_ModeChange], workflow: Workflow) -> list[str]:
    first: dict[tuple[int, tuple[int, ...], NodeLocation], _ModeChange] = {}
    contradictions = []
    for mode_change in mode_changes:
        for spot in mode_change.selection.spots:
            key = (mode_change.selection.meaning, mode_change.selection.through, spot)
            other = first.setdefault(key, mode_change)
            if other.mode != mode_change.mode:
                contradictions.append(
                    f"{_place(spot, workflow)} can't be both {MODE_TEXTS[other.mode]} "
                    f"({other.selector}) and {MODE_TEXTS[mode_change.mode]} ({mode_change.selector})"
                )
    return contradictions


def _revived(document: JsonObject, mode_changes: list[_ModeChange], workflow: Workflow) -> Switched:
    """Enables all nodes inside the dead shells that `mode_changes` would enable."""
    dead = dead_definitions(workflow)
    enabling = [
        mode_change.selection for mode_change in mode_changes if mode_change.mode == Mode.ALWAYS
    ]
    through_paths = {
        selection.through[:end]
        for selection in enabling
        for end in range(len(selection.through) + 1)
    }
    all_notes: list[str] = []
    for selection in enabling:
        for spot in selection.spots:
            if (
                _node(spot, workflow).type in dead
                and (*selection.through, spot.at) not in through_paths
            ):
                document, graph, notes = _entered(document, selection.through)
                graph = graph if selection.through else spot.graph
                document = with_all_inside(document, graph, spot.at, Mode.ALWAYS, dead)
                all_notes += [*notes, f"enabled all nodes in {_place(spot, workflow)}"]
    return Switched(document, tuple(all_notes))


def _apply_change(result: Switched, mode_change: _ModeChange, workflow: Workflow) -> Switched:
    document = result.document
    if mode_change.selection.through:
        edited, notes = _switch_inside(document, mode_change)
    else:
        edited, notes = _switch_all(document, mode_change), []
    cautions = list(_change_warnings(edited, mode_change, workflow))
    if edited is document:
        cautions.insert(0, f"{mode_change.selector}: already {MODE_TEXTS[mode_change.mode]}")
        return result._replace(warnings=_joined(result.warnings, cautions))
    return Switched(
        edited,
        (
            *result.done,
            *notes,
            f"{MODE_TEXTS[mode_change.mode]} {_listed(mode_change.selection, workflow)}",
        ),
        _joined(result.warnings, cautions),
    )


def _switch_all(document: JsonObject, mode_change: _ModeChange) -> JsonObject:
    """Switches nodes in all instances. Returns the same document if all nodes already have the
    mode."""
    by_graph: dict[str, list[int]] = {}
    for spot in mode_change.selection.spots:
        by_graph.setdefault(spot.graph, []).append(spot.at)
    for graph, indices in by_graph.items():
        path = graph_paths(document)[graph]
        nodes = nodes_of(graph_at(document, path))
        changes = {index: {"mode": int(mode_change.mode)} for index in indices}
        if any(nodes[index].get("mode", Mode.ALWAYS) != mode_change.mode for index in indices):
            document = with_graph(document, path, partial(with_nodes, changes=changes))
    return document


def _switch_inside(document: JsonObject, mode_change: _ModeChange) -> tuple[JsonObject, list[str]]:
    """Switches a node in one instance only. Also returns notes about the instances that got a copy
    of their definition."""
    graphs = _graphs_on_the_way(document, mode_change.selection.through)
    (spot,) = mode_change.selection.spots
    if _saved_node(document, graphs[-1], spot.at).get("mode", Mode.ALWAYS) == mode_change.mode:
        return document, []
    document, graph, notes = _entered(document, mode_change.selection.through)
    change = partial(with_nodes, changes={spot.at: {"mode": int(mode_change.mode)}})
    return with_graph(document, graph_paths(document)[graph], change), notes


def _entered(document: JsonObject, through: tuple[int, ...]) -> tuple[JsonObject, str, list[str]]:
    """Gives every instance on the path its own definition. Returns the document, the graph at the
    end of the path, and notes about the instances whose definition was copied."""
    notes, graph = [], ""
    for index in through:
        instance = _saved_node(document, graph, index)
        document, graph = with_own_definition(document, graph, index)
        if graph != instance["type"]:
            notes.append(
                f"gave instance {instance.get('id')} its own copy of its subgraph, "
                "so that no other instance changes"
            )
    return document, graph, notes


def _graphs_on_the_way(document: JsonObject, through: tuple[int, ...]) -> list[str]:
    """Returns the graphs on the path. They are read from the document, because a definition may
    have been copied before."""
    graphs = [""]
    for index in through:
        graphs.append(_saved_node(document, graphs[-1], index)["type"])
    return graphs


def _saved_node(document: JsonObject, graph: str, index: int) -> JsonObject:
    return nodes_of(graph_at(document, graph_paths(document)[graph]))[index]


def _change_warnings(
    document: JsonObject, mode_change: _ModeChange, workflow: Workflow
) -> Iterator[str]:
    selection = mode_change.selection
    if not selection.through:
        for graph in sorted({spot.graph for spot in selection.spots if spot.graph}):
            count = count_instances(document, graph, graph_paths(document))
            if count > 1:
                name = workflow.definitions[graph].name
                yield f'{mode_change.selector}: all {count} instances of subgraph "{name}" change'
    for spot in selection.spots:
        nested = spot.graph and _node(spot, workflow).type in workflow.definitions
        if nested and mode_change.mode != Mode.ALWAYS:
            yield (
                f"{_place(spot, workflow)} is an instance inside a subgraph, so its nodes are "
                "still sent, as in the editor; mute its nodes that create something"
            )
    if mode_change.mode == Mode.ALWAYS:
        graphs = _graphs_on_the_way(document, selection.through)
        for graph, index in zip(graphs, selection.through, strict=False):
            around = _saved_node(document, graph, index)
            if around.get("mode") in (Mode.MUTED, Mode.BYPASSED):
                where = f"the enclosing instance {around.get('id')}"
                yield f"{mode_change.selector}: enabled, but {where} is {MODE_TEXTS[Mode(around['mode'])]}"


def _listed(selection: Selection, workflow: Workflow) -> str:
    places = [_place(spot, workflow) for spot in selection.spots[:NODES_LISTED_MAX]]
    more = len(selection.spots) - NODES_LISTED_MAX
    return ", ".join(places) + (f" and {more} more" if more > 0 else "")


def _joined(warnings: tuple[str, ...], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*warnings, *more)))


def _node(spot: NodeLocation, workflow: Workflow) -> Node:
    graph = workflow.definitions[spot.graph] if spot.graph else workflow.root
    return graph.nodes[spot.at]


def _place(spot: NodeLocation, workflow: Workflow) -> str:
    return place_of(_node(spot, workflow), workflow, workflow.definitions.get(spot.graph))
