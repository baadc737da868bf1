"""One input of one node gets another value, and a sentence says so."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidInput, InvalidValue
from comfyfleet.workflow.behaviours import CUSTOM_COMBO
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.branches import has_branches, rebranched_inputs
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.problems import problem_with
from comfyfleet.workflow.setting.reading import read_value, wrapped
from comfyfleet.workflow.setting.wording import shown
from comfyfleet.workflow.specs import input_spec
from comfyfleet.workflow.values import option_index
from comfyfleet.workflow.widgettypes import WIDGET_TYPES, drawn_type


class Change(NamedTuple):
    entry: Entry
    done: str
    warning: str = ""


def change_input(
    entries: Mapping[str, Entry], place: Place, value: Any, *, check: bool = True
) -> Change:
    """Raises InvalidValue if the value doesn't fit, InvalidInput if the input takes no values."""
    entry = entries[place.node_id]
    declared = declared_at(entry, place.input)
    value = _fitting(entry, place.input, declared, value, check=check)
    inputs = _inputs_with(entry, place.input, declared, value)
    return Change(
        entry._replace(inputs=inputs),
        f"{entry.name}: {_set_in_words(entries, entry, place.input, value)}"
        + _branch_in_words(entry.inputs, inputs, place.input),
        "" if declared is not None else _unchecked(entry, place.input),
    )


def declared_at(entry: Entry, name: str) -> Any:
    """As the server declares the input; None if it doesn't."""
    if entry.class_name == CUSTOM_COMBO and name == "choice":
        # Its choices are inputs that stand beside it.
        return [[value for key, value in entry.inputs.items() if key.startswith("option")]]
    return entry.declared().get(name)


def with_entries(
    prompt: Mapping[str, Any], entries: Mapping[str, Entry], changed: Collection[str]
) -> Prompt:
    """A new prompt; what was not changed is shared with the old one."""
    return {
        key: {**raw, "inputs": dict(entries[key].inputs)} if key in changed else raw
        for key, raw in prompt.items()
    }


def _fitting(entry: Entry, name: str, declared: Any, value: Any, *, check: bool) -> Any:
    """The value as it may stand in the prompt."""
    where = f"{entry.name}: {name}"
    if check and _is_socket(entry, name, declared):
        kind = input_spec(name, declared).type
        raise InvalidInput(f"{where}: it takes {kind} from another node, and no value")
    try:
        fitting = _read(declared, value, entry.inputs.get(name), check=check)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error.message}") from None
    problem = problem_with(declared, fitting) if check else None
    if problem:
        raise InvalidValue(f"{where}: {problem}")
    return wrapped(fitting)


def _read(declared: Any, value: Any, current: Any, *, check: bool) -> Any:
    try:
        return read_value(declared, value, current)
    except InvalidValue:
        if check or not isinstance(value, str):
            raise
        return read_value(["STRING"], value)  # unchecked: a text that fits nothing stays a text


def _is_socket(entry: Entry, name: str, declared: Any) -> bool:
    """Neither drawn as a widget in the editor nor given a value so far."""
    if declared is None or (name in entry.inputs and entry.link(name) is None):
        return False
    spec = input_spec(name, declared)
    return {drawn_type(spec), *spec.type.split(",")}.isdisjoint({*WIDGET_TYPES, "*"})


def _inputs_with(entry: Entry, name: str, declared: Any, value: Any) -> dict[str, Any]:
    if declared is not None and has_branches(declared):
        return rebranched_inputs(entry, name, value)
    inputs = {**entry.inputs, name: value}
    if entry.class_name == CUSTOM_COMBO and name == "choice":
        inputs["index"] = option_index(entry.inputs, value)
    return inputs


def _set_in_words(entries: Mapping[str, Entry], entry: Entry, name: str, value: Any) -> str:
    link = entry.link(name)
    if link is not None:
        origin = entries[link[0]].name if link[0] in entries else link[0]
        return f"{name} {shown(value)}, instead of the link from {origin}"
    if name not in entry.inputs:
        return f"{name} {shown(value)}"
    before = shown(entry.inputs[name])
    if entry.inputs[name] == value:
        return f"{name} {before}, as before"
    return f"{name} {before} → {shown(value)}"


def _branch_in_words(before: Mapping[str, Any], after: Mapping[str, Any], choice: str) -> str:
    return "".join(
        f"; {what}: {', '.join(names)}"
        for what, names in (
            ("new", [f"{name} {shown(after[name])}" for name in _only_in(after, before, choice)]),
            ("gone", list(_only_in(before, after, choice))),
        )
        if names
    )


def _only_in(one: Mapping[str, Any], other: Mapping[str, Any], choice: str) -> Iterator[str]:
    return (name for name in one if name.startswith(f"{choice}.") and name not in other)


def _unchecked(entry: Entry, name: str) -> str:
    if not entry.info:
        return f"{entry.name}: {name} is not checked, the server doesn't have this class"
    return f"{entry.name}: {name} is not checked, the server doesn't declare it"
