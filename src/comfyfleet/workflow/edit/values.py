"""Sets values by the names of their node and input, and checks them as ComfyUI's server would."""

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import FleetError, InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.workflow.edit.input_lookup import (
    BRANCH_DEPTH_MAX,
    LISTED_MAX,
    ExposedInput,
    NodeIndex,
    Place,
    PromptEntry,
    as_link,
    find_places,
    hint,
    listed,
    quoted,
    read_entries,
    shown_value,
)
from comfyfleet.workflow.embedded.reader import parse_json
from comfyfleet.workflow.model import ANY_TYPE, ObjectInfo, Prompt
from comfyfleet.workflow.node_behaviours import CUSTOM_COMBO
from comfyfleet.workflow.node_inputs import ABSENT, WIDGET_TYPES, InputSpec, drawn_type, input_spec
from comfyfleet.workflow.object_info import DYNAMIC_COMBO, MATCH_TYPE, is_widget, widgets_of_spec
from comfyfleet.workflow.widget_values import option_index

# Options of inputs whose declared list of choices may be incomplete: a file may have been added
# since, or be in another folder.
_OPEN_CHOICES = (
    "image_upload", "animated_image_upload", "video_upload", "audio_upload", "file_upload", "remote",
)  # fmt: skip


def problem_with(declared: Any, value: Any) -> str | None:
    """Describes the problem with a value, or returns None if the value is valid.

    `declared` is an entry of `input.required` or `input.optional`: `[type or choices, options]`.
    """
    spec = input_spec("", declared)
    value = unwrapped(value)
    coerce = _COERCIONS.get(spec.type)
    if coerce is not None:
        value, problem = _coerced(coerce, value, spec.type)
        if problem:
            return problem
    return _range_problem(spec.options, value) or _choice_problem(spec, value)


def unwrapped(value: Any) -> Any:
    """Unwraps a list. Prompts wrap lists, because a plain list could be mistaken for a link."""
    return value["__value__"] if isinstance(value, dict) and "__value__" in value else value


def choices_of(spec: InputSpec) -> list[Any] | None:
    """Returns the choices, or None if the input has none or accepts other values as well."""
    if spec.type == DYNAMIC_COMBO:
        options = spec.options.get("options")
        branches = options if isinstance(options, list) else []
        return [branch.get("key") for branch in branches if isinstance(branch, dict)]
    if spec.choices is None or any(spec.options.get(name) for name in _OPEN_CHOICES):
        return None
    return spec.choices


def takes_several(spec: InputSpec) -> bool:
    return bool(spec.options.get("multiselect") or spec.options.get("multi_select"))


_COERCIONS: Mapping[str, Callable[[Any], Any]] = {"INT": int, "FLOAT": float}
_NUMBER_NAMES = {"INT": "a whole number", "FLOAT": "a number"}


def _coerced(coerce: Callable[[Any], Any], value: Any, name: str) -> tuple[Any, str | None]:
    try:
        return coerce(value), None
    except (TypeError, ValueError, OverflowError):
        return value, f"{shown_value(value)} is not {_NUMBER_NAMES[name]}"


def _range_problem(options: Mapping[str, Any], value: Any) -> str | None:
    least, most = _bound(options, "min"), _bound(options, "max")
    if least is None and most is None:
        return None
    if not isinstance(value, int | float):
        return f"{shown_value(value)} is not a number"
    if least is not None and value < least:
        return f"{shown_value(value)} is below the minimum of {shown_value(least)}"
    if most is not None and value > most:
        return f"{shown_value(value)} is above the maximum of {shown_value(most)}"
    return None


def _bound(options: Mapping[str, Any], name: str) -> float | None:
    bound = options.get(name)
    is_number = isinstance(bound, int | float) and not (
        isinstance(bound, float) and math.isnan(bound)
    )
    return bound if is_number else None


def _choice_problem(spec: InputSpec, value: Any) -> str | None:
    choices = choices_of(spec)
    if choices is None:
        return None
    several = takes_several(spec) and isinstance(value, list)
    invalid = [one for one in (value if several else [value]) if one not in choices]
    if not invalid:
        return None
    if not choices:
        return f"{shown_value(invalid[0])} can't be chosen, because the server offers no choices"
    return f"{shown_value(invalid[0])} is not {_choices_text(invalid[0], choices)}"


def _choices_text(value: Any, choices: Sequence[Any]) -> str:
    names = [choice if isinstance(choice, str) else shown_value(choice) for choice in choices]
    if len(names) <= LISTED_MAX:
        return f"among the choices: {listed(map(quoted, names), len(names))}"
    text = value if isinstance(value, str) else shown_value(value)
    return f"among the {len(names)} choices{hint(text, names)}"


_YES = ("true", "yes", "on", "1")
_NO = ("false", "no", "off", "0")
# Types whose values are strings, so that a color such as 000000 isn't read as a number.
_TEXT_TYPES = ("STRING", "MARKDOWN", "TEXTAREA", "COLOR")
# The type to assume for a value when the server's declaration leaves it open.
_TYPES_OF_VALUES: Mapping[type, str] = {bool: "BOOLEAN", int: "INT", float: "FLOAT", str: "STRING"}


def read_value(declared: Any, value: Any, current: Any = None) -> Any:
    """Converts a string to a value of the declared type. Any other value only has to be valid JSON.

    `current` is the present value. It determines the type if the declaration doesn't.
    """
    spec = input_spec("", declared if declared is not None else [ANY_TYPE])
    if spec.type in (ANY_TYPE, MATCH_TYPE):
        spec = input_spec("", [_type_of(current)])
    is_choice = spec.type in ("COMBO", DYNAMIC_COMBO)
    if not isinstance(value, str):
        return _listed(spec, _json_copy(value)) if is_choice else _json_copy(value)
    text = _encodable(value)
    return (
        _chosen(spec, text) if is_choice else _READERS.get(spec.widget_type, _read_json)(spec, text)
    )


def wrapped(value: Any) -> Any:
    """Wraps a list, which could be mistaken for a link. The server unwraps it."""
    return {"__value__": value} if isinstance(value, list) else value


def _type_of(value: Any) -> str:
    return _TYPES_OF_VALUES.get(type(unwrapped(value)), ANY_TYPE)


def _json_copy(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise InvalidValue("the value can't be written as JSON") from None


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue("the text contains half a character (a lone surrogate)") from None
    return text


def _read_int(_: InputSpec, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = _number(text)
        if number is None or not number.is_integer():
            raise InvalidValue(f"{shown_value(text)} is not a whole number") from None
        return int(number)


def _read_float(_: InputSpec, text: str) -> float:
    number = _number(text)
    if number is None:
        raise InvalidValue(f"{shown_value(text)} is not a number")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _read_boolean(_: InputSpec, text: str) -> bool:
    word = text.strip().lower()
    if word not in _YES + _NO:
        raise InvalidValue(f"{shown_value(text)} is neither true nor false")
    return word in _YES


def _read_text(_: InputSpec, text: str) -> str:
    return text


def _read_json(spec: InputSpec, text: str) -> Any:
    try:
        return parse_json(text, what="the value")
    except FleetError:
        if {ANY_TYPE, "STRING"}.isdisjoint(spec.type.split(",")):
            raise InvalidValue(
                f"{shown_value(text)} is not JSON, which {spec.type} requires"
            ) from None
        return text


def _chosen(spec: InputSpec, text: str) -> Any:
    """Returns the choice with this text form, because choices can also be numbers."""
    if takes_several(spec) and text.lstrip().startswith("["):
        return _read_json(spec, text)
    choices = choices_of(spec) or ()
    if text in choices:
        return text
    return next((choice for choice in choices if shown_value(choice) == text), text)


def _listed(spec: InputSpec, value: Any) -> Any:
    """Returns the value in its listed form: the number 5 selects "5" if the choices are strings."""
    choices = choices_of(spec) or ()
    return shown_value(value) if value not in choices and shown_value(value) in choices else value


_READERS: Mapping[str, Callable[[InputSpec, str], Any]] = {
    "INT": _read_int,
    "FLOAT": _read_float,
    "BOOLEAN": _read_boolean,
    **dict.fromkeys(_TEXT_TYPES, _read_text),
}


def has_branches(declared: Any) -> bool:
    return input_spec("", declared).type == DYNAMIC_COMBO


def rebranched_inputs(entry: PromptEntry, choice: str, key: Any) -> dict[str, Any]:
    """Returns the inputs of a node after a different branch was chosen. Inputs that the new branch
    lacks are removed, and new ones get their defaults.

    Values that fit the new branch are preserved, so that a prompt text survives switching to
    another model of a service.
    """
    prefix = f"{choice}."
    inputs = {**entry.inputs, choice: key}
    for _ in range(BRANCH_DEPTH_MAX):  # a choice inside a branch can add another branch
        declared = entry._replace(inputs=inputs).declared()
        renewed = {
            name: value
            for name, value in inputs.items()
            if not name.startswith(prefix) or _fits(declared.get(name), value)
        }
        for name, spec in declared.items():
            if name.startswith(prefix) and name not in renewed:
                renewed.update(_default(name, spec))
        if renewed == inputs:
            break
        inputs = renewed
    return inputs


def _fits(declared: Any, value: Any) -> bool:
    if declared is None:
        return False
    return as_link(value) is not None or problem_with(declared, value) is None


def _default(name: str, declared: Any) -> dict[str, Any]:
    """Returns the default that the editor fills in, under the input's name. Returns an empty dict
    for a socket."""
    spec = input_spec(name, declared)
    if not is_widget(spec):
        return {}
    widget = next(iter(widgets_of_spec(spec)))
    value = widget.choices[0] if widget.default is None and widget.choices else widget.default
    return {name: wrapped(value)} if widget.sent and value is not ABSENT else {}


class ValueChange(NamedTuple):
    entry: PromptEntry
    done: str
    warning: str = ""


def change_input(
    entries: Mapping[str, PromptEntry], place: Place, value: Any, *, check: bool = True
) -> ValueChange:
    """Sets one input. Raises InvalidValue if the value doesn't fit, and InvalidInput if the input
    only accepts links."""
    entry = entries[place.node_id]
    declared = declared_at(entry, place.input)
    value = _fitting(entry, place.input, declared, value, check=check)
    inputs = _inputs_with(entry, place.input, declared, value)
    return ValueChange(
        entry._replace(inputs=inputs),
        f"{entry.name}: {_describe_change(entries, entry, place.input, value)}"
        + _describe_branch_change(entry.inputs, inputs, place.input),
        "" if declared is not None else _unchecked(entry, place.input),
    )


def declared_at(entry: PromptEntry, name: str) -> Any:
    """Returns the server's declaration of the input, or None if it isn't declared."""
    if entry.class_name == CUSTOM_COMBO and name == "choice":
        # Node CustomCombo: its choices are the values of its other inputs.
        return [[value for key, value in entry.inputs.items() if key.startswith("option")]]
    return entry.declared().get(name)


def with_entries(
    prompt: Mapping[str, Any], entries: Mapping[str, PromptEntry], changed: Collection[str]
) -> Prompt:
    """Returns a new prompt that shares unchanged nodes with the old one."""
    return {
        key: {**raw, "inputs": dict(entries[key].inputs)} if key in changed else raw
        for key, raw in prompt.items()
    }


def _fitting(entry: PromptEntry, name: str, declared: Any, value: Any, *, check: bool) -> Any:
    """Converts a value to the form that the prompt needs, and checks it."""
    where = f"{entry.name}: {name}"
    if check and _is_socket(entry, name, declared):
        kind = input_spec(name, declared).type
        raise InvalidInput(f"{where} can't have a value; it only accepts a link of type {kind}")
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
        return read_value(["STRING"], value)  # without checks, an invalid string is kept


def _is_socket(entry: PromptEntry, name: str, declared: Any) -> bool:
    """Checks whether an input accepts only links: the editor draws no widget for it, and it has no
    value."""
    if declared is None or (name in entry.inputs and entry.link(name) is None):
        return False
    spec = input_spec(name, declared)
    return {drawn_type(spec), *spec.type.split(",")}.isdisjoint({*WIDGET_TYPES, "*"})


def _inputs_with(entry: PromptEntry, name: str, declared: Any, value: Any) -> dict[str, Any]:
    if declared is not None and has_branches(declared):
        return rebranched_inputs(entry, name, value)
    inputs = {**entry.inputs, name: value}
    if entry.class_name == CUSTOM_COMBO and name == "choice":
        inputs["index"] = option_index(entry.inputs, value)
    return inputs


def _describe_change(
    entries: Mapping[str, PromptEntry], entry: PromptEntry, name: str, value: Any
) -> str:
    link = entry.link(name)
    if link is not None:
        origin = entries[link[0]].name if link[0] in entries else link[0]
        return f"{name} {shown_value(value)}, instead of the link from {origin}"
    if name not in entry.inputs:
        return f"{name} {shown_value(value)}"
    before = shown_value(entry.inputs[name])
    if entry.inputs[name] == value:
        return f"{name} {before}, as before"
    return f"{name} {before} → {shown_value(value)}"


def _describe_branch_change(
    before: Mapping[str, Any], after: Mapping[str, Any], choice: str
) -> str:
    return "".join(
        f"; {what}: {', '.join(names)}"
        for what, names in (
            (
                "new",
                [f"{name} {shown_value(after[name])}" for name in _only_in(after, before, choice)],
            ),
            ("gone", list(_only_in(before, after, choice))),
        )
        if names
    )


def _only_in(one: Mapping[str, Any], other: Mapping[str, Any], choice: str) -> Iterator[str]:
    return (name for name in one if name.startswith(f"{choice}.") and name not in other)


def _unchecked(entry: PromptEntry, name: str) -> str:
    if not entry.info:
        return f"{entry.name}: {name} is not checked, because the server lacks this class"
    return f"{entry.name}: {name} is not checked, because the server doesn't declare it"


ASSIGNMENTS_MAX = 10_000
PROBLEMS_MAX = 20  # limited because each problem searches all names for the closest ones
_EXAMPLE = "use node.input=value, such as 3.seed=7"


class Assignment(NamedTuple):
    """A value for the input `target`, written as `node.input`. A string value is parsed according
    to the declared type of the input."""

    target: str
    value: Any


class Edit(NamedTuple):
    """A prompt after values were set, and a description of the changes."""

    prompt: Prompt
    done: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    not_set: tuple[str, ...] = ()  # shorthands that match no input or several


def parse_assignment(text: str) -> Assignment:
    """Parses `node.input=value`. Everything after the first `=` is the value, so a title can't
    contain one."""
    target, equals, value = text.partition("=")
    if not equals:
        raise InvalidInput(f"{quoted(text)} has no value; {_EXAMPLE}")
    if "." not in target.strip(" ."):
        raise InvalidInput(f"{quoted(text)} doesn't name an input; {_EXAMPLE}")
    return Assignment(target.strip(), value)


def find_input(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    target: str,
    exposed: Sequence[ExposedInput] = (),
) -> tuple[Place, ...]:
    """Returns the inputs that `node.input` refers to. An exposed input of a subgraph may feed
    several."""
    entries = read_entries(prompt, object_info)
    return find_places(NodeIndex(entries, exposed), entries, target)


def set_values(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    assignments: Sequence[Assignment],
    *,
    check: bool = True,
    exposed: Sequence[ExposedInput] = (),
) -> Edit:
    """Sets all values or none. All errors are raised together.

    With `exposed`, inputs can also be named as subgraphs expose them.
    """
    if len(assignments) > ASSIGNMENTS_MAX:
        raise LimitExceeded(f"{len(assignments)} values to set; the limit is {ASSIGNMENTS_MAX}")
    entries = read_entries(prompt, object_info)
    directory = NodeIndex(entries, exposed)
    changes: list[ValueChange] = []
    errors: list[InvalidInput] = []
    for assignment in assignments:
        if len(errors) == PROBLEMS_MAX:
            break
        try:
            for place in find_places(directory, entries, assignment.target):
                change = change_input(entries, place, assignment.value, check=check)
                entries[place.node_id] = change.entry
                changes.append(change)
        except InvalidInput as error:
            errors.append(error)
    if errors:
        raise combine_errors(errors)
    return edit_of(with_entries(prompt, entries, {change.entry.id for change in changes}), changes)


def combine_errors(errors: Sequence[InvalidInput]) -> InvalidInput:
    problems = [error.message for error in errors]
    if len(problems) == PROBLEMS_MAX:
        problems.append("and perhaps more")
    only_values = all(isinstance(error, InvalidValue) for error in errors)
    kind = InvalidValue if only_values else InvalidInput
    return kind("\n".join(problems), problems=problems)


def edit_of(prompt: Prompt, changes: Sequence[ValueChange], warnings: Sequence[str] = ()) -> Edit:
    change_warnings = [change.warning for change in changes if change.warning]
    return Edit(prompt, tuple(change.done for change in changes), (*change_warnings, *warnings))
