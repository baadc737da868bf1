"""Part of pass 4: slots settle on their types, and links that don't fit any more come off.

After a file is opened the editor lets two kinds of nodes look at what they are connected to: inputs
declared to match each other (`COMFY_MATCHTYPE_V3`) and reroutes. Both disconnect what doesn't fit.
"""

from collections.abc import Iterator, Mapping, Sequence

from comfyfleet.workflow.model import ANY_TYPE, SUBGRAPH_INPUT_ID
from comfyfleet.workflow.nodetypes import MatchGroups
from comfyfleet.workflow.slots import Input
from comfyfleet.workflow.wiring import WiredGraph, WiredNode

MATCH_CHAIN_MAX = 50
REROUTE = "Reroute"
End = tuple[str, int]  # node id and slot
CIRCLE: End = ("", -1)


def are_compatible(one: str, other: str) -> bool:
    """Any type goes with everything; else equal but for case, or one of a list of types is."""
    if one in (ANY_TYPE, "") or other in (ANY_TYPE, "") or one == other:
        return True
    ones, others = set(one.lower().split(",")), set(other.lower().split(","))
    return not ones.isdisjoint(others) or not {ANY_TYPE, ""}.isdisjoint(ones | others)


def common_type(types: Sequence[str]) -> str | None:
    """The types that all of them admit, or None if there are none."""
    lists = [one.split(",") for one in types if one != ANY_TYPE]
    if not lists:
        return ANY_TYPE
    common = [part for part in lists[0] if all(part in other for other in lists[1:])]
    return ",".join(common) or None


def settle_types(wired: WiredGraph) -> WiredGraph:
    matching = []
    rerouting = False
    for node in wired.nodes.values():
        if node.type is None:
            rerouting = rerouting or node.node.type == REROUTE
        elif node.type.match is not None:
            matching.append(node)
    if not matching and not rerouting:
        return wired
    nodes = dict(wired.nodes)
    if rerouting:
        _unlink(nodes, _misfits_behind_reroutes(nodes))
    if matching:
        graph = WiredGraph(wired.graph, dict(nodes))
        for node in matching:
            nodes[node.node.id] = _matched(nodes[node.node.id], graph)
        _unlink(nodes, _misfits_behind(matching, nodes))
    return WiredGraph(wired.graph, nodes)


def _matched(node: WiredNode, graph: WiredGraph) -> WiredNode:
    match = node.type.match if node.type else None
    if match is None:
        return node
    connected = {
        slot.name: _origin_type(graph, slot, MATCH_CHAIN_MAX)
        for slot in node.inputs
        if slot.name in match.inputs
    }
    inputs = tuple(
        slot._replace(type=_narrowed(slot, match, connected)) if slot.name in connected else slot
        for slot in node.inputs
    )
    outputs = tuple(
        _output_type(graph, node, slot, MATCH_CHAIN_MAX) for slot in range(len(node.outputs))
    )
    return node._replace(inputs=inputs, outputs=outputs)


def _output_type(graph: WiredGraph, node: WiredNode, slot: int, chain_left: int) -> str:
    if not 0 <= slot < len(node.outputs):
        return ANY_TYPE
    match = node.type.match if node.type else None
    group = match.outputs.get(slot) if match else None
    if match is None or group is None or chain_left == 0:
        return node.outputs[slot]
    connected = [
        _origin_type(graph, candidate, chain_left - 1)
        for candidate in node.inputs
        if match.inputs.get(candidate.name, ("", ""))[0] == group
    ]
    return common_type(connected) or ANY_TYPE


def _narrowed(slot: Input, match: MatchGroups, connected: Mapping[str, str]) -> str:
    """What still fits: the allowed types, and those of the other connected inputs of the group."""
    group, allowed = match.inputs[slot.name]
    others = [
        other_type
        for name, other_type in connected.items()
        if name != slot.name and match.inputs[name][0] == group
    ]
    return common_type([*others, allowed]) or slot.type


def _origin_type(graph: WiredGraph, slot: Input, chain_left: int) -> str:
    if slot.link is None:
        return ANY_TYPE
    if slot.link.origin == SUBGRAPH_INPUT_ID:
        ports = graph.graph.inputs
        place = slot.link.origin_slot
        return ports[place].type if 0 <= place < len(ports) else ANY_TYPE
    origin = graph.nodes.get(slot.link.origin)
    if origin is None:
        return ANY_TYPE
    return _output_type(graph, origin, slot.link.origin_slot, chain_left)


def _misfits_behind(matching: Sequence[WiredNode], nodes: Mapping[str, WiredNode]) -> Iterator[End]:
    ids = {node.node.id for node in matching}
    for node in nodes.values():
        for index, slot in enumerate(node.inputs):
            if slot.link is None or slot.link.origin not in ids:
                continue
            outputs = nodes[slot.link.origin].outputs
            place = slot.link.origin_slot
            if 0 <= place < len(outputs) and not are_compatible(outputs[place], slot.type):
                yield node.node.id, index


def _misfits_behind_reroutes(nodes: Mapping[str, WiredNode]) -> Iterator[End]:
    roots = _roots_of_reroutes(nodes)
    for node_id, root in roots.items():
        if root == CIRCLE:
            yield node_id, 0  # reroutes in a circle are cut open
    for node in nodes.values():
        for index, slot in enumerate(node.inputs):
            root = roots.get(slot.link.origin) if slot.link is not None else None
            if root is None or root == CIRCLE or node.node.type == REROUTE:
                continue
            outputs = nodes[root[0]].outputs
            root_type = outputs[root[1]] if 0 <= root[1] < len(outputs) else ""
            if not are_compatible(root_type, slot.type):
                yield node.node.id, index


def _roots_of_reroutes(nodes: Mapping[str, WiredNode]) -> dict[str, End | None]:
    """For each reroute the output that feeds its chain, if any. Each is looked at once."""
    roots: dict[str, End | None] = {}
    for start in [key for key in nodes if _is_reroute(nodes, key)]:
        path: dict[str, None] = {}
        current = start
        while current not in roots:
            path[current] = None
            link = nodes[current].inputs[0].link if nodes[current].inputs else None
            if link is None or link.origin not in nodes:
                roots[current] = None
            elif not _is_reroute(nodes, link.origin):
                roots[current] = (link.origin, link.origin_slot)
            elif link.origin in path:
                roots[current] = CIRCLE
            else:
                current = link.origin
        roots.update(dict.fromkeys(path, roots[current]))
    return roots


def _is_reroute(nodes: Mapping[str, WiredNode], node_id: str) -> bool:
    node = nodes.get(node_id)
    return node is not None and node.node.type == REROUTE


def _unlink(nodes: dict[str, WiredNode], ends: Iterator[End]) -> None:
    for node_id, index in list(ends):
        inputs = list(nodes[node_id].inputs)
        inputs[index] = inputs[index]._replace(link=None)
        nodes[node_id] = nodes[node_id]._replace(inputs=tuple(inputs))
