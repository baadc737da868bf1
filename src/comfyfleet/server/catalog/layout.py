"""Draws workflows and prompts, suggests properties for their inputs, and compares versions.
Pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

from comfyfleet.api.admin import PropertyType
from comfyfleet.api.console import (
    ChangedValue,
    Drawing,
    DrawnGroup,
    DrawnLink,
    DrawnNode,
    DrawnSlot,
    NamedNode,
    SuggestedProperty,
    WorkflowDiff,
)
from comfyfleet.server.catalog.model import Property
from comfyfleet.workflow.edit.input_lookup import as_link
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import Inspection
from comfyfleet.workflow.inspect.results import InspectedInput

NODES_MAX, LINKS_MAX, GROUPS_MAX = 5_000, 20_000, 500
PROPERTIES_MAX, CHOICES_MAX, CHANGES_MAX = 1_000, 500, 500
MODES: Mapping[int, Literal["muted", "bypassed"]] = {2: "muted", 4: "bypassed"}
# The grid on which prompts are drawn, because prompts contain no positions.
COLUMN_WIDTH, ROW_HEIGHT, NODE_WIDTH, NODE_HEIGHT = 340.0, 180.0, 260.0, 120.0
NAME_CHARACTERS_MAX = 60
COLUMNS_MAX = 200
TYPES: Mapping[str, PropertyType] = {
    "INT": "integer",
    "FLOAT": "number",
    "STRING": "text",
    "BOOLEAN": "boolean",
    "COMBO": "choice",
}


def draw(opened: Opened) -> Drawing:
    """Draws the top level of a workflow with its saved layout. Draws a prompt in columns, in the
    order of its links."""
    if opened.workflow is not None:
        return _draw_workflow(opened.workflow)
    return _draw_prompt(opened.prompt or {})


def _draw_workflow(workflow: Mapping[str, Any]) -> Drawing:
    names = {
        str(subgraph.get("id")): str(subgraph.get("name"))
        for subgraph in _maps(_map(workflow.get("definitions")).get("subgraphs"))
    }
    nodes = [_node(node, names) for node in _maps(workflow.get("nodes"))[:NODES_MAX]]
    links = [link for row in _list(workflow.get("links"))[:LINKS_MAX] for link in _link(row)]
    groups = [_group(group) for group in _maps(workflow.get("groups"))[:GROUPS_MAX]]
    return Drawing(nodes=nodes, links=links, groups=groups)


def _node(node: Mapping[str, Any], names: Mapping[str, str]) -> DrawnNode:
    kind = str(node.get("type", ""))
    x, y = _pair(node.get("pos"), 0.0, 0.0)
    width, height = _pair(node.get("size"), NODE_WIDTH, NODE_HEIGHT)
    mode = node.get("mode")
    return DrawnNode(
        id=str(node.get("id")),
        type=kind,
        title=str(node.get("title") or names.get(kind) or kind),
        is_subgraph=kind in names,
        x=x,
        y=y,
        width=width,
        height=height,
        mode=MODES.get(mode, "always") if isinstance(mode, int) else "always",
        inputs=[_slot(slot) for slot in _maps(node.get("inputs"))],
        outputs=[_slot(slot) for slot in _maps(node.get("outputs"))],
    )


def _slot(slot: Mapping[str, Any]) -> DrawnSlot:
    return DrawnSlot(name=str(slot.get("name", "")), type=str(slot.get("type", "")))


def _link(link: Any) -> Iterator[DrawnLink]:
    """Yields a link, which is stored as a list or as an object, depending on the format version."""
    if isinstance(link, Mapping):
        names = ("origin_id", "origin_slot", "target_id", "target_slot", "type")
        values = [link.get(name) for name in names]
    elif isinstance(link, list) and len(link) >= 6:
        values = link[1:6]
    else:
        return
    origin, out, target, into, kind = values
    if isinstance(out, int) and isinstance(into, int):
        yield DrawnLink(
            from_node=str(origin), from_slot=out, to_node=str(target), to_slot=into, type=str(kind)
        )


def _group(group: Mapping[str, Any]) -> DrawnGroup:
    box = _list(group.get("bounding"))
    x, y, width, height = (_number(value) for value in (*box[:4], *[0.0] * (4 - len(box[:4]))))
    return DrawnGroup(title=str(group.get("title", "")), x=x, y=y, width=width, height=height)


def _draw_prompt(prompt: Mapping[str, Any]) -> Drawing:
    entries = {name: _map(entry) for name, entry in list(prompt.items())[:NODES_MAX]}
    feeds: dict[str, list[tuple[int, str, int]]] = {name: [] for name in entries}
    for name, link in islice(_prompt_links(entries), LINKS_MAX):
        feeds[name].append(link)
    rows: dict[int, int] = {}
    nodes = []
    for name, column in _columns(feeds).items():
        row = rows[column] = rows.get(column, -1) + 1
        nodes.append(_prompt_node(name, entries[name], column, row))
    links = [
        DrawnLink(from_node=origin, from_slot=out, to_node=name, to_slot=into, type="")
        for name, those in feeds.items()
        for into, origin, out in those
    ]
    return Drawing(nodes=nodes, links=links, groups=[])


def _prompt_links(
    entries: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, tuple[int, str, int]]]:
    """Yields each link of a prompt: the target node, the position of its input, and the source node
    and output."""
    for name, entry in entries.items():
        for into, value in enumerate(_map(entry.get("inputs")).values()):
            if (link := as_link(value)) is not None and link[0] in entries:
                yield name, (into, *link)


def _columns(feeds: Mapping[str, Sequence[tuple[int, str, int]]]) -> dict[str, int]:
    """Returns the column of each node: one more than the highest column among the nodes that feed
    it. Nodes in a cycle remain on the left."""
    columns = dict.fromkeys(feeds, 0)
    waits_for = {name: len(those) for name, those in feeds.items()}
    fed_by: dict[str, list[str]] = {name: [] for name in feeds}
    for name, those in feeds.items():
        for _, origin, _ in those:
            fed_by[origin].append(name)
    ready = [name for name, count in waits_for.items() if not count]
    while ready:
        done = ready.pop()
        for name in fed_by[done]:
            columns[name] = min(max(columns[name], columns[done] + 1), COLUMNS_MAX - 1)
            waits_for[name] -= 1
            if not waits_for[name]:
                ready.append(name)
    return columns


def _prompt_node(name: str, entry: Mapping[str, Any], column: int, row: int) -> DrawnNode:
    kind = str(entry.get("class_type", ""))
    return DrawnNode(
        id=name,
        type=kind,
        title=str(_map(entry.get("_meta")).get("title") or kind),
        is_subgraph=False,
        x=column * COLUMN_WIDTH,
        y=row * ROW_HEIGHT,
        width=NODE_WIDTH,
        height=NODE_HEIGHT,
        mode="always",
        inputs=[DrawnSlot(name=input_name, type="") for input_name in _map(entry.get("inputs"))],
        outputs=[],
    )


def _maps(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, Mapping)]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pair(value: Any, first: float, second: float) -> tuple[float, float]:
    """Reads a pair of numbers. Editors save pairs as lists, or as objects with the keys 0 and 1."""
    if isinstance(value, Mapping):
        value = [value.get("0"), value.get("1")]
    pair = _list(value)[:2]
    if len(pair) < 2:
        return first, second
    return _number(pair[0]), _number(pair[1])


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e9 else 0.0


def suggest_properties(seen: Inspection) -> list[SuggestedProperty]:
    """Suggests a property for each settable input, most important first."""
    suggestions: list[SuggestedProperty] = []
    names: set[str] = set()
    for item in seen.takes[:PROPERTIES_MAX]:
        if item.address is None or item.input is None:
            continue
        kind = property_type(item)
        name = _free_name(_wanted_name(item, kind, names), names)
        names.add(name)
        suggestions.append(_suggestion(item, name, kind))
    return suggestions


def property_type(item: InspectedInput) -> PropertyType:
    if item.role == "seed":
        return "seed"
    if item.role == "file":
        kind = item.node.class_type.lower()
        return "audio" if "audio" in kind else "video" if "video" in kind else "image"
    return TYPES.get(item.type, "choice" if item.choices else "text")


def _wanted_name(item: InspectedInput, kind: PropertyType, names: set[str]) -> str:
    """Returns a name for an input. The first image or video is the user's media, which has a fixed
    name."""
    if kind in ("image", "video") and "input" not in names:
        return "input"
    shown = item.exposed_as.rpartition(".")[2] if item.exposed_as else item.input or ""
    return re.sub(r"[^A-Za-z0-9_]+", "_", shown).strip("_")[:NAME_CHARACTERS_MAX] or "value"


def _free_name(base: str, names: set[str]) -> str:
    base = f"_{base}" if base[0].isdigit() else base
    name, number = base, 1
    while name in names:
        number += 1
        name = f"{base}_{number}"
    return name


def _suggestion(item: InspectedInput, name: str, kind: PropertyType) -> SuggestedProperty:
    is_media = kind in ("image", "video", "audio")
    return SuggestedProperty(
        name=name,
        type=kind,
        binding=item.address or "",
        node_id=item.node.id,
        node_title=item.node.title,
        path=list(item.node.path),
        input=item.input or "",
        value=item.value,
        default=None if is_media or kind == "seed" else item.value,
        minimum=item.min,
        maximum=item.max,
        step=item.step,
        choices=None if is_media or item.choices is None else list(item.choices)[:CHOICES_MAX],
        is_multiline=item.multiline,
        role=item.role,
    )


class DrawnVersion:
    """A version of a workflow, prepared for a comparison."""

    def __init__(self, opened: Opened, seen: Inspection, properties: Iterable[Property]) -> None:
        self.nodes = {node.id: node for node in draw(opened).nodes}
        self.links = {
            (link.from_node, link.from_slot, link.to_node, link.to_slot)
            for link in draw(opened).links
        }
        self.values = {item.address: item for item in seen.takes if item.address is not None}
        self.files = {file.name for file in seen.files}
        self.properties = {prop.name: prop for prop in properties}


def diff_versions(before: DrawnVersion, after: DrawnVersion) -> WorkflowDiff:
    kinds = {name: node.type for name, node in before.nodes.items()}
    same = {name for name, node in after.nodes.items() if kinds.get(name) == node.type}
    changed = [
        ChangedValue(
            address=name,
            title=item.node.title,
            before=before.values[name].value,
            after=item.value,
        )
        for name, item in after.values.items()
        if name in before.values and before.values[name].value != item.value
    ]
    shared = before.properties.keys() & after.properties.keys()
    return WorkflowDiff(
        nodes_added=[_named(node) for name, node in after.nodes.items() if name not in same],
        nodes_removed=[_named(node) for name, node in before.nodes.items() if name not in same],
        links_added=len(after.links - before.links),
        links_removed=len(before.links - after.links),
        values_changed=changed[:CHANGES_MAX],
        files_added=sorted(after.files - before.files),
        files_removed=sorted(before.files - after.files),
        properties_added=sorted(after.properties.keys() - shared),
        properties_removed=sorted(before.properties.keys() - shared),
        properties_changed=sorted(
            name for name in shared if before.properties[name] != after.properties[name]
        ),
    )


def _named(node: DrawnNode) -> NamedNode:
    return NamedNode(id=node.id, type=node.type, title=node.title)
