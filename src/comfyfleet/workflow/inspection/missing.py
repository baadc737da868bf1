"""What a server lacks of what a workflow needs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from comfyfleet.workflow.inspection.model import (
    LostInput,
    Missing,
    MissingType,
    NamedFile,
    NodeRef,
    RefusedValue,
)
from comfyfleet.workflow.inspection.requirements import pack_of
from comfyfleet.workflow.inspection.takes import widgets_of_values
from comfyfleet.workflow.inspection.view import SeenNode
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.setting.changing import declared_at
from comfyfleet.workflow.setting.entries import read_entry
from comfyfleet.workflow.setting.problems import choices_of, problem_with
from comfyfleet.workflow.setting.wording import closest
from comfyfleet.workflow.specs import input_spec


def missing_on_server(
    nodes: Iterable[SeenNode], files: Iterable[NamedFile], object_info: ObjectInfo
) -> Missing:
    active = [node for node in nodes if node.is_active]
    return Missing(
        tuple(_missing_types(active)),
        tuple(refused for node in active for refused in _refused_values(node, object_info)),
        tuple(lost for node in active for lost in _lost_inputs(node)),
        tuple(_missing_files(files)),
    )


def _missing_types(nodes: Iterable[SeenNode]) -> Iterator[MissingType]:
    refs: dict[str, list[NodeRef]] = {}
    packs: dict[str, str | None] = {}
    for node in nodes:
        if node.type is None:
            name = node.ref.class_type
            refs.setdefault(name, []).append(node.ref)
            packs[name] = packs.get(name) or pack_of(node)
    for name, found in refs.items():
        yield MissingType(name, tuple(found), packs[name])


def _refused_values(node: SeenNode, object_info: ObjectInfo) -> Iterator[RefusedValue]:
    raw = {"class_type": node.ref.class_type, "inputs": node.values}
    entry = read_entry(node.ref.id, raw, object_info)
    for name, value in node.values.items():
        declared = declared_at(entry, name)
        problem = None if declared is None else problem_with(declared, value)
        if problem is not None:
            choices = choices_of(input_spec(name, declared)) or ()
            yield RefusedValue(
                f"{node.ref.id}.{name}", node.ref, value, problem, _closest(value, choices)
            )


def _closest(value: Any, choices: Sequence[Any]) -> tuple[str, ...]:
    return tuple(closest(str(value), [str(choice) for choice in choices]))


def _lost_inputs(node: SeenNode) -> Iterator[LostInput]:
    if node.type is None:
        return
    known = widgets_of_values(node.type, node.values)
    declared = {spec.name for spec in node.type.specs}
    for name in node.saved_widgets:
        if name not in known and name not in declared:
            yield LostInput(node.ref, name)


def _missing_files(files: Iterable[NamedFile]) -> Iterator[str]:
    for file in files:
        if file.kind == "input" and file.active and file.present is False:
            yield file.name
