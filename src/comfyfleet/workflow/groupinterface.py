"""What a group node shows to the outside: which inner inputs, widgets and outputs, in which order."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.behaviours import PRIMITIVE
from comfyfleet.workflow.model import ANY_TYPE, Node
from comfyfleet.workflow.nodetypes import NodeTypes, is_widget
from comfyfleet.workflow.parse import parse_node
from comfyfleet.workflow.specs import InputSpec

REROUTE = "Reroute"
SEED_NAMES = ("seed", "noise_seed")


class InnerLink(NamedTuple):
    """Between inner nodes, by their index in the group."""

    source: int
    source_slot: int
    target: int
    target_slot: int


class GroupDefinition(NamedTuple):
    nodes: tuple[Node, ...]
    links: tuple[InnerLink, ...]
    # Outputs (node, slot) that are shown although they are linked inside.
    shown: frozenset[tuple[int, int]]
    labels: tuple[Mapping[str, str], ...]  # per node: names that a person gave to its inputs
    config: Mapping[str, Any]


class GroupInterface(NamedTuple):
    definition: dict[str, Any]  # as an entry of object_info
    widgets: list[dict[str, str]]  # per inner node: its widget → the group's
    inputs: list[dict[str, int]]  # per inner node: its input → the group's slot
    outputs: dict[int, tuple[int, int]]  # the group's output → inner node and slot


def read_group(saved: Any) -> GroupDefinition | None:
    """None where it is not well-formed: an instance then is a node of an unknown type."""
    if not isinstance(saved, dict):
        return None
    nodes, links = saved.get("nodes"), saved.get("links")
    if not isinstance(nodes, list) or not isinstance(links, list):
        return None
    try:
        inner = tuple(
            [parse_node({**node, "id": index}, "group node") for index, node in enumerate(nodes)]
        )
    except (InvalidWorkflow, TypeError):
        return None
    config = saved.get("config")
    return GroupDefinition(
        inner,
        tuple(_inner_links(links, len(inner))),
        frozenset(_shown_outputs(saved.get("external"))),
        tuple([dict(_labels(node.get("inputs"))) for node in nodes]),
        config if isinstance(config, dict) else {},
    )


def _inner_links(saved: list[Any], count: int) -> Iterator[InnerLink]:
    """A link from outside of the group has no source here."""
    for entry in saved:
        numbers = entry[:4] if isinstance(entry, list) else []
        if len(numbers) == 4 and all(type(number) is int and number >= 0 for number in numbers):
            link = InnerLink(*numbers)
            if link.source < count and link.target < count:
                yield link


def _shown_outputs(saved: Any) -> Iterator[tuple[int, int]]:
    for entry in saved if isinstance(saved, list) else ():
        node, slot, kind = entry[:3] if isinstance(entry, list) and len(entry) > 2 else (None,) * 3
        if isinstance(node, int) and isinstance(slot, int) and kind is not None:
            yield node, slot


def _labels(saved: Any) -> Iterator[tuple[str, str]]:
    for entry in saved if isinstance(saved, list) else ():
        name, label = entry.get("name"), entry.get("label")
        if isinstance(name, str) and isinstance(label, str) and label:
            yield name, label


class _Declared(NamedTuple):
    """What an inner node offers: from its class, or made up for the editor's own nodes."""

    inputs: dict[str, Any]
    widgets: set[str]
    outputs: list[Any]


def describe_group(group: GroupDefinition, types: NodeTypes) -> GroupInterface:
    return _Builder(group, types).build()


class _Builder:
    def __init__(self, group: GroupDefinition, types: NodeTypes) -> None:
        self._group = group
        self._types = types
        self._required: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._slots = 0
        self._linked_from: dict[int, dict[int, list[InnerLink]]] = {}
        self._linked_to: dict[int, dict[int, InnerLink]] = {}
        for link in group.links:
            sources = self._linked_from.setdefault(link.source, {})
            sources.setdefault(link.source_slot, []).append(link)
            self._linked_to.setdefault(link.target, {})[link.target_slot] = link

    def build(self) -> GroupInterface:
        count = len(self._group.nodes)
        widgets: list[dict[str, str]] = [{} for _ in range(count)]
        inputs: list[dict[str, int]] = [{} for _ in range(count)]
        outputs: dict[int, tuple[int, int]] = {}
        types: list[Any] = []
        converted: list[tuple[int, int, str, Any]] = []
        for index, node in enumerate(self._group.nodes):
            declared = self._declared(index, node)
            if declared is None:
                continue
            converted.extend(self._add_widgets(index, node, declared, widgets[index]))
            self._add_sockets(index, node, declared, inputs[index])
            for slot, output in self._shown_outputs(index, declared):
                outputs[len(types)] = (index, slot)
                types.append(output)
        for index, slot, name, spec in converted:
            if slot not in self._linked_to.get(index, {}):
                widgets[index][name] = self._add(index, name, spec)
                inputs[index][name] = self._take_slot()
        definition = {
            "input": {"required": self._required},
            "input_order": {"required": list(self._required)},
            "output": types,
        }
        return GroupInterface(definition, widgets, inputs, outputs)

    def _declared(self, index: int, node: Node) -> _Declared | None:
        known = self._types.get(node.type)
        if known is not None:
            return _Declared(
                {spec.name: _spec_entry(spec) for spec in known.specs},
                {spec.name for spec in known.specs if is_widget(spec)},
                list(known.outputs),
            )
        if node.type == PRIMITIVE:
            return self._declared_primitive(index)
        return self._declared_reroute(index, node) if node.type == REROUTE else None

    def _declared_primitive(self, index: int) -> _Declared | None:
        links = self._linked_from.get(index, {}).get(0)
        if not links:
            return None
        target = self._group.nodes[links[0].target]
        slot = links[0].target_slot
        name = target.inputs[slot].name if slot < len(target.inputs) else ""
        known = self._types.get(target.type)
        spec = next((spec for spec in known.specs if spec.name == name), None) if known else None
        if spec is None:
            return None
        return _Declared({"value": _spec_entry(spec)}, {"value"}, [spec.type])

    def _declared_reroute(self, index: int, node: Node) -> _Declared | None:
        used_inside = self._linked_to.get(index) and self._linked_from.get(index)
        if used_inside and (index, 0) not in self._group.shown:
            return None
        kind = node.outputs[0] if node.outputs else ANY_TYPE
        return _Declared({kind: [kind, {"forceInput": True}]}, set(), [kind])

    def _add_widgets(
        self, index: int, node: Node, declared: _Declared, shown: dict[str, str]
    ) -> Iterator[tuple[int, int, str, Any]]:
        """Ordinary widgets are shown; those that were turned into inputs come after all nodes."""
        converted = {
            slot.name: place for place, slot in enumerate(node.inputs) if slot.widget == slot.name
        }
        for name, spec in declared.inputs.items():
            if name not in declared.widgets:
                continue
            if name in converted:
                yield index, converted[name], name, spec
            else:
                shown[name] = self._add(index, name, spec)

    def _add_sockets(
        self, index: int, node: Node, declared: _Declared, shown: dict[str, int]
    ) -> None:
        names = [name for name in declared.inputs if name not in declared.widgets]
        saved = [slot.name for slot in node.inputs]
        for position, name in enumerate(names):
            slot = saved.index(name) if name in saved else position
            if slot in self._linked_to.get(index, {}):
                continue
            outer = self._name_for(index, name)
            if self._config(index, "input", name).get("visible") is False:
                continue
            self._required[outer] = declared.inputs[name]
            shown[name] = self._take_slot()

    def _shown_outputs(self, index: int, declared: _Declared) -> Iterator[tuple[int, Any]]:
        for slot, output in enumerate(declared.outputs):
            linked = slot in self._linked_from.get(index, {})
            hidden = linked and (index, slot) not in self._group.shown
            if self._config(index, "output", str(slot)).get("visible", not hidden):
                yield slot, output

    def _add(self, index: int, name: str, spec: Any) -> str:
        outer = self._name_for(index, name)
        kind, options = spec[0], dict(spec[1])
        is_primitive = self._group.nodes[index].type == PRIMITIVE
        if name in SEED_NAMES or (is_primitive and kind in ("INT", "FLOAT", "COMBO")):
            options["control_after_generate"] = True
        self._required[outer] = [kind, options]
        return outer

    def _name_for(self, index: int, name: str) -> str:
        """The inner name, with the node's title before it where that is taken."""
        node = self._group.nodes[index]
        given = self._config(index, "input", name).get("name")
        key = outer = str(given or self._group.labels[index].get(name) or name)
        if (node.type == PRIMITIVE and node.title) or outer in self._seen:
            prefix = node.title or node.type
            key = outer = f"{prefix} {name}"
            if outer in self._seen:
                outer = f"{prefix} {self._seen[outer]} {name}"
        self._seen[key] = self._seen.get(key, 1) + 1
        return outer

    def _config(self, index: int, part: str, name: str) -> Mapping[str, Any]:
        """What a person set for one input or output."""
        found: Any = self._group.config
        for key in (str(index), part, name):
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def _take_slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def _spec_entry(spec: InputSpec) -> list[Any]:
    options = {**spec.options, "forceInput": True} if spec.forced else dict(spec.options)
    return [spec.choices if spec.choices is not None else spec.type, options]
