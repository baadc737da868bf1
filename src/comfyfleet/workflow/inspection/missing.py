"""What a server lacks of what a workflow needs."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from comfyfleet.workflow.behaviours import CUSTOM_COMBO
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
from comfyfleet.workflow.setting.problems import choices_of, problem_with, takes_several
from comfyfleet.workflow.setting.wording import closest, shown
from comfyfleet.workflow.specs import input_spec

# Looking for the closest of thousands of choices takes a twentieth of a second.
COMPARED_VALUES_MAX = 50


def missing_on_server(
    nodes: Iterable[SeenNode], files: Iterable[NamedFile], object_info: ObjectInfo
) -> Missing:
    active = [node for node in nodes if node.is_active]
    return Missing(
        tuple(_missing_types(active)),
        tuple(_refused_values(active, object_info)),
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


def _refused_values(nodes: Iterable[SeenNode], object_info: ObjectInfo) -> Iterator[RefusedValue]:
    compared = 0
    for node in nodes:
        declared = _declared(node, object_info)
        for name, value in node.values.items():
            problem = _problem(declared.get(name), value)
            if problem is None:
                continue
            compared += 1
            choices = _choices(declared[name]) if compared <= COMPARED_VALUES_MAX else ()
            yield RefusedValue(
                f"{node.ref.id}.{name}", node.ref, value, problem, _closest(value, choices)
            )


def _declared(node: SeenNode, object_info: ObjectInfo) -> dict[str, Any]:
    """All inputs at once: those of a group that grows are found by going through all values."""
    raw = {"class_type": node.ref.class_type, "inputs": node.values}
    entry = read_entry(node.ref.id, raw, object_info)
    declared = entry.declared()
    if node.ref.class_type == CUSTOM_COMBO:
        declared["choice"] = declared_at(entry, "choice")
    return declared


def _problem(declared: Any, value: Any) -> str | None:
    """Choices are looked at here, as the closest ones are told beside the problem."""
    if declared is None:
        return None
    choices = _choices(declared)
    if not choices or takes_several(input_spec("", declared)):
        return problem_with(declared, value)
    return None if value in choices else f"{shown(value)} is not among the choices"


def _choices(declared: Any) -> Sequence[Any]:
    return choices_of(input_spec("", declared)) or ()


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
