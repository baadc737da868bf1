"""Part of pass 2: `proxyWidgets`, the way in which instances used to show inner widgets.

Entry i names an inner node and widget and goes with value i of the instance. An entry whose widget
is promoted already sets the host value; another inner widget becomes a new input of the definition;
a primitive is replaced by a new input that feeds all its targets. What can't be resolved is passed
over, but a value for `["-1", name]` goes to the instance's own input of that name.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import PRIMITIVE
from comfyfleet.workflow.drafts import Draft, Drafts
from comfyfleet.workflow.model import ANY_TYPE, Link, Node
from comfyfleet.workflow.widgettypes import ABSENT
from comfyfleet.workflow.wiring import WiredNode

PROMOTION_DEPTH_MAX = 100
PREVIEW_PREFIX = "$$"
HOST_ITSELF = "-1"
_NUMBERED = re.compile(r"^\s*(\d+)\s*:\s*(.+)$")


class Entry(NamedTuple):
    source: str
    widget: str
    within: str | None  # id of the node inside the source, where its name alone is ambiguous
    value: Any  # ABSENT where the instance holds none


def migrate_proxies(host: Node, draft: Draft, drafts: Drafts) -> None:
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


def _entries(host: Node, definition: Draft, drafts: Drafts) -> list[Entry]:
    values = host.values if isinstance(host.values, list) else []
    entries = []
    for index, proxy in enumerate(_tuples(host.properties.get("proxyWidgets"))):
        source, name, *rest = proxy
        within = rest[0] if rest else None
        if not _resolves(definition, source, name, drafts):
            name, prefix = _without_prefixes(name)
            within = prefix or within
        entries.append(
            Entry(source, name, within, values[index] if index < len(values) else ABSENT)
        )
    return entries


def _tuples(saved: Any) -> Sequence[list[str]]:
    """All of them, or none if one is ill-formed, as the editor has it."""
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
    """`12: 7: steps` is `steps` of node 7."""
    deepest = None
    while match := _NUMBERED.match(name):
        deepest, name = match.groups()
    return name, deepest


def _resolves(definition: Draft, source: str, name: str, drafts: Drafts) -> bool:
    current: Draft | None = definition
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


def _linked_sources(host: WiredNode, definition: Draft) -> dict[tuple[str, str], str]:
    """Inner node and widget → the instance's input that shows it; the first of several counts."""
    found: dict[tuple[str, str], str] = {}
    for slot, port in zip(host.inputs, definition.ports, strict=False):
        source = definition.source_of(port)
        if source is not None:
            found.setdefault(source, slot.name)
    return found


def _plan(
    entry: Entry, linked: Mapping[tuple[str, str], str], definition: Draft, drafts: Drafts
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


def _widget_slot(source: WiredNode, entry: Entry, drafts: Drafts) -> int | None:
    """Which input slot of the source stands for the widget."""
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
    host: Node, entry: Entry, draft: Draft, definition: Draft, drafts: Drafts
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
    entries: Sequence[Entry],
    plans: Sequence[str],
    draft: Draft,
    definition: Draft,
    drafts: Drafts,
) -> None:
    by_primitive: dict[str, list[Entry]] = {}
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


def _targets(definition: Draft, primitive: Node) -> list[Link]:
    """Links from the primitive's output, at the slots where they have ended up."""
    return [
        slot.link._replace(target_slot=index)
        for node in definition.nodes.values()
        for index, slot in enumerate(node.inputs)
        if slot.link is not None and slot.link.origin == primitive.id and slot.link.origin_slot == 0
    ]


def _fits(definition: Draft, link: Link, slot_type: str) -> bool:
    target_type = definition.nodes[link.target].inputs[link.target_slot].type
    return target_type == slot_type or ANY_TYPE in (target_type, slot_type)


def _unique_name(wanted: str, definition: Draft) -> str:
    names = {port.name for port in definition.ports}
    name, number = wanted, 1
    while name in names:
        name, number = f"{wanted}_{number}", number + 1
    return name


def _set_host_value(host: Node, name: str, value: Any, draft: Draft) -> None:
    node = draft.nodes[host.id]
    if value is not ABSENT and name in node.values:
        draft.nodes[host.id] = node._replace(values={**node.values, name: value})
