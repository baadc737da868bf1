"""How segments flow into each other and into the rest of a graph. Sets of segments are bit masks."""

from collections.abc import Collection, Mapping, Sequence

from comfyfleet.workflow.switching.levels import Level

Owners = Mapping[str, int]  # the segment that a node belongs to; the rest of the graph has none


def owners_of(level: Level, segments: Sequence[Collection[str]]) -> dict[str, int]:
    """A node that feeds an earlier segment, too, is not part of its own: a loader, say, that only
    happens to stand there. It belongs to the rest."""
    owners = {
        node: index
        for index, nodes in reversed(list(enumerate(segments)))
        for node in nodes
        if node in level.nodes
    }
    earliest: dict[str, int] = {}
    for node in reversed(level.order):
        fed = [earliest[end.node] for end in level.consumers.get(node, ()) if end.node in earliest]
        earliest[node] = min([owners.get(node, len(segments)), *fed])
    return {node: index for node, index in owners.items() if earliest[node] == index}


def gathered(level: Level, owners: Owners) -> dict[str, int]:
    """For each node the segments whose output reaches it through nodes of the rest only."""
    masks: dict[str, int] = {}
    for node in level.order:
        mask = 0
        for _, source in level.inputs_of(node):
            mask |= mask_of(source.node_id, owners, masks)
        masks[node] = mask
    return masks


def needed_by(level: Level, owners: Owners) -> dict[str, int]:
    """For each node the segments that it reaches through nodes of the rest only."""
    masks: dict[str, int] = {}
    for node in reversed(level.order):
        mask = 0
        for end in level.consumers.get(node, ()):
            mask |= mask_of(end.node, owners, masks)
        masks[node] = mask
    return masks


def mask_of(node: str, owners: Owners, masks: Mapping[str, int]) -> int:
    """The segment of a node, or for one of the rest those that are behind it."""
    owner = owners.get(node)
    return masks.get(node, 0) if owner is None else 1 << owner


def behind(level: Level, owners: Owners) -> dict[str, int]:
    """For each node all segments that it depends on in any way, without its own."""
    masks: dict[str, int] = {}
    for node in level.order:
        mask = 0
        for _, source in level.inputs_of(node):
            mask |= masks.get(source.node_id, 0) | mask_of(source.node_id, owners, {})
        masks[node] = mask
    return {
        node: mask & ~(1 << owners[node]) if node in owners else mask
        for node, mask in masks.items()
    }


def leading_out(level: Level, owners: Owners) -> set[str]:
    """Nodes of the rest that lead to something other than segments: a saver, or a node that
    gathers. The others only hand over from one segment to the next."""
    found: set[str] = set()
    for node in reversed(level.order):
        ends = level.consumers.get(node, ())
        if node not in owners and (not ends or any(end.node in found for end in ends)):
            found.add(node)
    return found
