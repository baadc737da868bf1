"""Which nodes a group holds: those whose centre lies in its rectangle, as the editor computes it."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.model import Group

# The title is drawn above a node's position, and counts for its centre.
TITLE_HEIGHT = 30.0
# The editor draws these without a title.
UNTITLED_TYPES = ("Reroute",)
# A collapsed node is as wide as its title, which the editor measures in its own font. This is the
# mean width of a character there; a centre is off by a few pixels at most.
CHARACTER_WIDTH = 7.0
# Real workflows stay a thousand times below this, even with many groups over many nodes.
NODES_COMPARED_MAX = 20_000_000


class Canvas:
    """The nodes of one graph by where they are."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]]) -> None:
        """`nodes` are as saved."""
        centres = ((centre(node), index) for index, node in enumerate(nodes))
        self._by_x = sorted((*middle, index) for middle, index in centres if middle is not None)
        self._budget = NODES_COMPARED_MAX

    def inside(self, group: Group) -> list[int]:
        """Indices of nodes. The left and top edges belong to the rectangle, the others don't."""
        left, top, width, height = group.bounding
        first, end = (bisect_left(self._by_x, (x,)) for x in (left, left + width))
        self._budget -= max(0, end - first)
        if self._budget < 0:
            raise LimitExceeded("too many groups over too many nodes")
        within = self._by_x[first:end]
        return sorted(index for _, y, index in within if top <= y < top + height)


def centre(node: Mapping[str, Any]) -> tuple[float, float] | None:
    """None for a node without a position."""
    position, size = _pair(node.get("pos")), _pair(node.get("size")) or (0.0, 0.0)
    if position is None:
        return None
    title_height = 0.0 if node.get("type") in UNTITLED_TYPES else TITLE_HEIGHT
    width, height = size[0], size[1] + title_height
    flags = node.get("flags")
    if isinstance(flags, dict) and flags.get("collapsed"):
        width, height = _collapsed_width(node, size[0]), TITLE_HEIGHT
    return position[0] + width / 2, position[1] - title_height + height / 2


def _collapsed_width(node: Mapping[str, Any], width: float) -> float:
    title = str(node.get("title") or node.get("type") or "")
    return min(width, 2 * TITLE_HEIGHT + CHARACTER_WIDTH * len(title))


def _pair(value: Any) -> tuple[float, float] | None:
    """Positions and sizes are saved as a list, by older editors as an object with keys 0 and 1."""
    if isinstance(value, dict):
        value = [value.get("0"), value.get("1")]
    if not isinstance(value, list) or len(value) < 2:
        return None
    first, second = value[0], value[1]
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return None
    # A whole number in JSON may be longer than a float can hold.
    return (float(first), float(second)) if max(abs(first), abs(second)) < 2**53 else None
