"""The nodes of a prompt beside what the server declares of their classes."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.nodetypes import AUTOGROW, DYNAMIC_COMBO, DYNAMIC_GROUP
from comfyfleet.workflow.setting.wording import quoted, shown

BRANCH_DEPTH_MAX = 20
_NOTHING: Mapping[str, Any] = {}

Link = tuple[str, int]  # id of the node that gives, and which of its outputs


class Entry(NamedTuple):
    """A node of a prompt. `info` is what object_info says of its class, empty if nothing."""

    id: str
    class_name: str
    title: str
    inputs: Mapping[str, Any]
    info: Mapping[str, Any]

    @property
    def name(self) -> str:
        """`3 KSampler "Main sampler"`; a title that says nothing new is left out."""
        new = self.title not in ("", self.class_name, self.info.get("display_name"))
        return f"{self.id} {self.class_name}" + (f" {quoted(self.title)}" if new else "")

    @property
    def outputs(self) -> tuple[str, ...]:
        outputs = self.info.get("output")
        return tuple(map(_type_name, outputs)) if isinstance(outputs, list) else ()

    def declared(self) -> dict[str, Any]:
        """The inputs that the node has, given its values: `[type or choices, options]` by name."""
        return dict(_declared(_table(self.info, "input"), "", self.inputs, BRANCH_DEPTH_MAX))

    def link(self, name: str) -> Link | None:
        return as_link(self.inputs.get(name))


def as_link(value: Any) -> Link | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    origin, slot = value
    return (str(origin), slot) if isinstance(origin, str | int) and isinstance(slot, int) else None


def read_entries(prompt: Mapping[str, Any], object_info: ObjectInfo) -> dict[str, Entry]:
    return {key: read_entry(key, raw, object_info) for key, raw in prompt.items()}


def read_entry(key: str, raw: Any, object_info: ObjectInfo) -> Entry:
    inputs = raw.get("inputs", _NOTHING) if isinstance(raw, dict) else None
    if not isinstance(inputs, dict):
        raise InvalidWorkflow(f"node {shown(key)} of the prompt has no inputs: {shown(raw)}")
    class_name = raw.get("class_type")
    class_name = class_name if isinstance(class_name, str) else ""
    info = object_info.get(class_name)
    info = info if isinstance(info, dict) else _NOTHING
    return Entry(key, class_name, _title(raw, info), inputs, info)


def _title(raw: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """As the editor shows it: a node without a title of its own shows the name of its class."""
    title = _table(raw, "_meta").get("title")
    name = title if isinstance(title, str) and title else info.get("display_name")
    return name if isinstance(name, str) else ""


def _declared(
    sections: Mapping[str, Any], prefix: str, inputs: Mapping[str, Any], depth_left: int
) -> Iterator[tuple[str, Any]]:
    """A choice with branches has the inputs of the chosen branch behind it, named `<choice>.<input>`."""
    for section in ("required", "optional"):
        for own_name, declared in _table(sections, section).items():
            name = f"{prefix}{own_name}"
            kind, options = _kind_and_options(declared)
            if kind not in (AUTOGROW, DYNAMIC_GROUP):
                yield name, declared
            if depth_left == 0:
                continue
            if kind == DYNAMIC_COMBO:
                branch = _branch(options, inputs.get(name))
                yield from _declared(branch, f"{name}.", inputs, depth_left - 1)
            elif kind in (AUTOGROW, DYNAMIC_GROUP):
                yield from _grown(name, options, inputs)


def _branch(options: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    branches = options.get("options")
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, dict) and branch.get("key") == key:
            return _table(branch, "inputs")
    return _NOTHING


def _grown(
    group: str, options: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Inputs of a group that grows: those that the prompt has. A field is known by its name's beginning."""
    template = _table(options, "template")
    template = _table(template, "input") or template
    fields = {**_table(template, "required"), **_table(template, "optional")}
    for name in inputs:
        if not name.startswith(f"{group}."):
            continue
        own_name = name.rsplit(".", 1)[-1]
        matching = [field for field in fields if own_name.startswith(field)] or list(fields)[:1]
        if matching:
            yield name, fields[matching[0]]


def _kind_and_options(declared: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(declared, list | tuple) or not declared:
        return None, _NOTHING
    options = declared[1] if len(declared) > 1 and isinstance(declared[1], dict) else _NOTHING
    return declared[0] if isinstance(declared[0], str) else None, options


def _table(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = source.get(key)
    return value if isinstance(value, dict) else _NOTHING


def _type_name(output: Any) -> str:
    return output if isinstance(output, str) else "COMBO"
