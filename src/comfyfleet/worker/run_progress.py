"""Computes a run's progress from its events."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from comfyfleet.api import worker as wire
from comfyfleet.comfy.events import Cached, Event, NodeDone, NodeStarted, Preview, Progress

# Maximum size of a preview in bytes. Base64 makes it a third longer, and the API accepts 700,000
# characters.
PREVIEW_BYTES_MAX = 500_000
METADATA_MAX, NODE_CHARACTERS_MAX = 8, 200


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """Counts the finished nodes of a run. All nodes have the same weight, and the current node
    counts in proportion to its finished steps."""

    nodes: frozenset[str]
    done: frozenset[str] = frozenset()
    node: str | None = None
    step: float = 0
    steps: float = 0

    def report(self) -> wire.Progress:
        return wire.Progress(
            percent=self._percent(),
            node=self.node,
            step=int(self.step) if self.steps else None,
            steps=int(self.steps) if self.steps else None,
        )

    def _percent(self) -> float | None:
        if not self.nodes:
            return None
        current = self.node in self.nodes and self.node not in self.done and self.steps > 0
        part = min(1.0, self.step / self.steps) if current else 0.0
        return round(min(100.0, 100 * (len(self.done) + part) / len(self.nodes)), 1)


def reported_preview(preview: Preview | None) -> wire.RunPreview | None:
    """Converts a preview for a report. Returns None without a preview, and for one that is too
    large or has an unsupported type."""
    if preview is None or preview.content_type not in wire.PREVIEW_TYPES:
        return None
    if len(preview.data) > PREVIEW_BYTES_MAX:
        return None
    return wire.RunPreview(
        node_id=None if preview.node_id is None else preview.node_id[:NODE_CHARACTERS_MAX],
        content_type=preview.content_type,  # type: ignore[arg-type]
        base64=base64.b64encode(preview.data).decode(),
        metadata=dict([*node_ids(preview).items()][:METADATA_MAX]),
    )


def node_ids(preview: Preview) -> dict[str, str | None]:
    """Returns the node ids from a preview's metadata. The rest of the metadata isn't reported,
    because it is private to the backend."""
    return {
        name: value if value is None else value[:NODE_CHARACTERS_MAX]
        for name, value in preview.metadata.items()
        if name.endswith("node_id") and (value is None or isinstance(value, str))
    }


def begin_progress(prompt: Mapping[str, Any]) -> NodeCounts:
    return NodeCounts(frozenset(prompt))


def advance_progress(counts: NodeCounts, event: Event) -> NodeCounts:
    """Returns the counts after an event, or the same object if the event doesn't affect them."""
    match event:
        case Cached(nodes=nodes):
            return replace(counts, done=counts.done | (counts.nodes & set(nodes)))
        case NodeStarted(display_id=node_id):
            return _at(counts, node_id)
        case NodeDone(node_id=node_id):
            return replace(counts, done=counts.done | (counts.nodes & {node_id}))
        case Progress(node_id=node_id, done=done, total=total):
            return replace(_at(counts, node_id), step=done, steps=total)
    return counts


def _at(counts: NodeCounts, node_id: str) -> NodeCounts:
    """Returns the counts after the run has moved on to a node.

    Nodes run one after another, so the previous node has finished even if no message reported it.
    """
    if node_id == counts.node:
        return counts
    before = counts.nodes & {counts.node or ""}
    return replace(counts, done=counts.done | before, node=node_id, step=0, steps=0)
