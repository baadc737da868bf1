"""Pass 2: instances of subgraphs get the widgets that their definition promotes, and host values.

An input of a definition that leads to an inner widget makes a widget on every instance. Its value
is the instance's own (positional over such inputs), else that of the inner widget. Definitions are
worked off from the innermost outwards, the root graph last.
"""

from collections.abc import Iterator
from typing import Any

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.drafts import Draft, Drafts
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import Graph, Node, Workflow
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.places import graph_place, node_place
from comfyfleet.workflow.proxies import HOST_ITSELF, migrate_proxies
from comfyfleet.workflow.wiring import WiredGraph, WiredNode, wire


def wire_all(
    workflow: Workflow, types: NodeTypes, *, limits: Limits = DEFAULT_LIMITS
) -> dict[str, WiredGraph]:
    """All graphs by id; the root graph's id is the empty text."""
    definitions = workflow.definitions
    if not definitions:
        return {"": wire(workflow.root, types, definitions, limits=limits)}
    drafts = Drafts()
    for graph in (*innermost_first(workflow), workflow.root):
        wired = wire(graph, types, definitions, limits=limits)
        draft = Draft(graph, dict(wired.nodes), list(graph.inputs))
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
    """As on any node, a choice that is null becomes the first one."""
    first = {
        widget.name: widget.choices[0]
        for widget in instance.widgets
        if widget.choices and instance.values[widget.name] is None
    }
    return instance._replace(values={**instance.values, **first}) if first else instance


def innermost_first(workflow: Workflow) -> list[Graph]:
    """Definitions that use others come after those; the file's order decides otherwise."""
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
    """Definitions that contain themselves matter only if something instantiates one of them."""
    reached: list[tuple[Graph, tuple[str, ...]]] = [(workflow.root, ())]
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


def _with_host_values(instance: WiredNode, drafts: Drafts) -> WiredNode:
    definition = drafts.get(instance.definition)
    if definition is None:
        return instance
    saved = instance.node.values if isinstance(instance.node.values, list) else []
    kept_aside = dict(_quarantined(instance.node))
    inputs, widgets, values = [], [], {}
    position = 0
    for slot, port in zip(instance.inputs, definition.ports, strict=False):
        source = definition.promoted_widget(port)
        if source is None:
            inputs.append(slot)
            continue
        widget, value = source
        if slot.name in kept_aside:
            value = kept_aside[slot.name]
        elif position < len(saved):
            value = saved[position]
        position += 1
        inputs.append(slot._replace(widget=slot.name))
        widgets.append(widget._replace(name=slot.name))
        values[slot.name] = value
    return instance._replace(
        inputs=tuple(inputs), widgets=tuple(widgets), values=values, value_slots=position
    )


def _quarantined(node: Node) -> Iterator[tuple[str, Any]]:
    """Values that an earlier migration could not place and kept by the name of the input."""
    entries = node.properties.get("proxyWidgetErrorQuarantine")
    for entry in reversed(entries if isinstance(entries, list) else []):
        original = entry.get("originalEntry") if isinstance(entry, dict) else None
        if not isinstance(original, list) or len(original) < 2 or "hostValue" not in entry:
            continue
        if original[0] == HOST_ITSELF:
            yield str(original[1]), entry["hostValue"]
