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
End = tuple[str, int]  # node id and input slot


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
    matching = [node for node in wired.nodes.values() if node.type and node.type.match]
    rerouting = any(node.node.type == REROUTE for node in wired.nodes.values())
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
    if slot >= len(node.outputs):
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
        return ports[slot.link.origin_slot].type if slot.link.origin_slot < len(ports) else ANY_TYPE
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
            if place < len(outputs) and not are_compatible(outputs[place], slot.type):
                yield node.node.id, index


def _misfits_behind_reroutes(nodes: Mapping[str, WiredNode]) -> Iterator[End]:
    fed: dict[str, list[End]] = {}
    for node in nodes.values():
        for index, slot in enumerate(node.inputs):
            if slot.link is not None and _is_reroute(nodes, slot.link.origin):
                fed.setdefault(slot.link.origin, []).append((node.node.id, index))
    for node_id in [key for key in nodes if _is_reroute(nodes, key)]:
        above = _first_above(nodes, node_id)
        if above is None:
            continue
        if above == (node_id, -1):
            yield node_id, 0  # reroutes in a circle are cut open
            continue
        outputs = nodes[above[0]].outputs
        root_type = outputs[above[1]] if above[1] < len(outputs) else ""
        for target_id, index in fed.get(node_id, ()):
            wanted = "" if _is_reroute(nodes, target_id) else nodes[target_id].inputs[index].type
            if not are_compatible(root_type, wanted):
                yield target_id, index


def _first_above(nodes: Mapping[str, WiredNode], start: str) -> tuple[str, int] | None:
    """The output that feeds a chain of reroutes; the start itself, with -1, if it is a circle."""
    current, seen = start, {start}
    while True:
        link = nodes[current].inputs[0].link if nodes[current].inputs else None
        if link is None or link.origin not in nodes:
            return None
        if not _is_reroute(nodes, link.origin):
            return link.origin, link.origin_slot
        if link.origin in seen:
            return start, -1
        current = link.origin
        seen.add(current)


def _is_reroute(nodes: Mapping[str, WiredNode], node_id: str) -> bool:
    node = nodes.get(node_id)
    return node is not None and node.node.type == REROUTE


def _unlink(nodes: dict[str, WiredNode], ends: Iterator[End]) -> None:
    for node_id, index in list(ends):
        inputs = list(nodes[node_id].inputs)
        inputs[index] = inputs[index]._replace(link=None)
        nodes[node_id] = nodes[node_id]._replace(inputs=tuple(inputs))
