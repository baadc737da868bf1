"""What a group node shows to the outside: which inner inputs, widgets and outputs, in which order."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.workflow.behaviours import PRIMITIVE
from comfyfleet.workflow.nodetypes import NodeTypes, is_widget
from comfyfleet.workflow.parse import slot_type
from comfyfleet.workflow.specs import InputSpec

REROUTE = "Reroute"
SEED_NAMES = ("seed", "noise_seed")


class GroupInterface(NamedTuple):
    definition: dict[str, Any]  # as an entry of object_info
    widgets: list[dict[str, str]]  # per inner node: its widget → the group's
    inputs: list[dict[str, int]]  # per inner node: its input → the group's slot
    outputs: dict[int, tuple[int, int]]  # the group's output → inner node and slot


class _Declared(NamedTuple):
    """What an inner node offers: from its class, or made up for the editor's own nodes."""

    inputs: dict[str, Any]
    widgets: set[str]
    outputs: list[Any]


def describe_group(group: Mapping[str, Any], types: NodeTypes) -> GroupInterface:
    return _Builder(group, types).build()


class _Builder:
    def __init__(self, group: Mapping[str, Any], types: NodeTypes) -> None:
        self._group = group
        self._types = types
        self._nodes: list[dict[str, Any]] = group["nodes"]
        self._required: dict[str, Any] = {}
        self._seen: dict[str, int] = {}
        self._slots = 0
        self._linked_from: dict[int, dict[int, list[list[Any]]]] = {}
        self._linked_to: dict[int, dict[int, list[Any]]] = {}
        for link in group["links"]:
            if isinstance(link, list) and len(link) > 3 and link[0] is not None:
                self._linked_from.setdefault(link[0], {}).setdefault(link[1], []).append(link)
                self._linked_to.setdefault(link[2], {})[link[3]] = link
        self._external = {
            (entry[0], entry[1])
            for entry in group.get("external") or ()
            if isinstance(entry, list)
            and len(entry) > 2
            and isinstance(entry[0], int)
            and isinstance(entry[1], int)
            and entry[2] is not None
        }

    def build(self) -> GroupInterface:
        count = len(self._nodes)
        widgets: list[dict[str, str]] = [{} for _ in range(count)]
        inputs: list[dict[str, int]] = [{} for _ in range(count)]
        outputs: dict[int, tuple[int, int]] = {}
        types: list[Any] = []
        converted: list[tuple[int, int, str, Any]] = []
        for index, node in enumerate(self._nodes):
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
                shown = self._add(index, self._nodes[index], name, spec)
                widgets[index][name] = shown
                inputs[index][name] = self._take_slot()
        definition = {
            "input": {"required": self._required},
            "input_order": {"required": list(self._required)},
            "output": types,
            "name": "group node",
        }
        return GroupInterface(definition, widgets, inputs, outputs)

    def _declared(self, index: int, node: Mapping[str, Any]) -> _Declared | None:
        known = self._types.get(node["type"])
        if known is not None:
            return _Declared(
                {spec.name: _spec_entry(spec) for spec in known.specs},
                {spec.name for spec in known.specs if is_widget(spec)},
                list(known.outputs),
            )
        if node["type"] == PRIMITIVE:
            return self._declared_primitive(index)
        return self._declared_reroute(index, node) if node["type"] == REROUTE else None

    def _declared_primitive(self, index: int) -> _Declared | None:
        links = self._linked_from.get(index, {}).get(0)
        if not links:
            return None
        target, slot = links[0][2], links[0][3]
        name = self._input_name(target, slot)
        known = self._types.get(self._nodes[target]["type"])
        spec = next((spec for spec in known.specs if spec.name == name), None) if known else None
        if spec is None:
            return None
        return _Declared({"value": _spec_entry(spec)}, {"value"}, [spec.type])

    def _declared_reroute(self, index: int, node: Mapping[str, Any]) -> _Declared | None:
        used_inside = self._linked_to.get(index) and self._linked_from.get(index)
        if used_inside and (index, 0) not in self._external:
            return None
        outputs = node.get("outputs") or [{}]
        kind = slot_type(outputs[0].get("type"))
        return _Declared({kind: [kind, {"forceInput": True}]}, set(), [kind])

    def _input_name(self, index: int, slot: int) -> str:
        saved = self._nodes[index].get("inputs") or []
        return str(saved[slot].get("name")) if slot < len(saved) else ""

    def _add_widgets(
        self, index: int, node: Mapping[str, Any], declared: _Declared, shown: dict[str, str]
    ) -> Iterator[tuple[int, int, str, Any]]:
        """Ordinary widgets are shown; those that were turned into inputs come after all nodes."""
        saved = node.get("inputs") or []
        for name, spec in declared.inputs.items():
            if name not in declared.widgets:
                continue
            slot = next((i for i, entry in enumerate(saved) if _is_converted(entry, name)), None)
            if slot is not None:
                yield index, slot, name, spec
            else:
                shown[name] = self._add(index, node, name, spec)

    def _add_sockets(
        self, index: int, node: Mapping[str, Any], declared: _Declared, shown: dict[str, int]
    ) -> None:
        names = [name for name in declared.inputs if name not in declared.widgets]
        saved = [entry.get("name") for entry in node.get("inputs") or []]
        for position, name in enumerate(names):
            slot = saved.index(name) if name in saved else position
            if slot in self._linked_to.get(index, {}):
                continue
            config = (self._config(index).get("input") or {}).get(name) or {}
            outer = self._name_for(index, node, name)
            if config.get("visible") is False:
                continue
            self._required[outer] = declared.inputs[name]
            shown[name] = self._take_slot()

    def _shown_outputs(self, index: int, declared: _Declared) -> Iterator[tuple[int, Any]]:
        for slot, output in enumerate(declared.outputs):
            linked = (
                slot in self._linked_from.get(index, {}) and (index, slot) not in self._external
            )
            config = (self._config(index).get("output") or {}).get(str(slot)) or {}
            if config.get("visible", not linked):
                yield slot, output

    def _add(self, index: int, node: Mapping[str, Any], name: str, spec: Any) -> str:
        outer = self._name_for(index, node, name)
        kind, options = spec[0], dict(spec[1])
        if name in SEED_NAMES or (node["type"] == PRIMITIVE and kind in ("INT", "FLOAT", "COMBO")):
            options["control_after_generate"] = True
        self._required[outer] = [kind, options]
        return outer

    def _name_for(self, index: int, node: Mapping[str, Any], name: str) -> str:
        """The inner name, with the node's title before it where that is taken."""
        config = (self._config(index).get("input") or {}).get(name) or {}
        label = next(
            (e.get("label") for e in node.get("inputs") or [] if e.get("name") == name), None
        )
        key = outer = config.get("name") or label or name
        if (node["type"] == PRIMITIVE and node.get("title")) or outer in self._seen:
            prefix = node.get("title") or node["type"]
            key = outer = f"{prefix} {name}"
            if outer in self._seen:
                outer = f"{prefix} {self._seen[outer]} {name}"
        self._seen[key] = self._seen.get(key, 1) + 1
        return str(outer)

    def _config(self, index: int) -> Mapping[str, Any]:
        config = self._group.get("config")
        entry = config.get(str(index)) if isinstance(config, dict) else None
        return entry if isinstance(entry, dict) else {}

    def _take_slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def _spec_entry(spec: InputSpec) -> list[Any]:
    options = {**spec.options, "forceInput": True} if spec.forced else dict(spec.options)
    return [spec.choices if spec.choices is not None else spec.type, options]


def _is_converted(saved: Any, name: str) -> bool:
    widget = saved.get("widget") if isinstance(saved, dict) else None
    return isinstance(widget, dict) and saved.get("name") == name and widget.get("name") == name
