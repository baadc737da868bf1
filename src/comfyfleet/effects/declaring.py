"""Whether properties fit the document that they are declared for. Pure."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comfyfleet.effects.model import PROPERTY_TYPES, SEED_MAX, Property
from comfyfleet.effects.placeholders import places_of
from comfyfleet.effects.prompting import Place, place_of
from comfyfleet.effects.values import checked, shown
from comfyfleet.kernel.errors import InvalidInput, InvalidValue
from comfyfleet.kernel.texts import is_storable, problem_with_text
from comfyfleet.workflow.setting.changing import declared_at
from comfyfleet.workflow.setting.entries import Entry, as_link, read_entry
from comfyfleet.workflow.setting.problems import choices_of
from comfyfleet.workflow.setting.wording import closest
from comfyfleet.workflow.setting.wording import hint as hint_of
from comfyfleet.workflow.specs import input_spec
from comfyfleet.workflow.widgettypes import WIDGET_TYPES

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
PROPERTIES_MAX = 500
CHOICES_MAX = 10_000
DESCRIPTION_CHARACTERS_MAX = 10_000
PLACEHOLDER_CHARACTERS_MAX = 1_000


def check_properties(
    properties: Sequence[Property],
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
    hidden: Collection[int] = (),
) -> tuple[Property, ...]:
    """With choices and ranges filled in as the node declares them; `prompt` has marks.

    `hidden` marks stand in nodes of types that nobody knows, so it can't be said where.
    """
    if len(properties) > PROPERTIES_MAX:
        raise InvalidInput(f"at most {PROPERTIES_MAX} properties", field="properties")
    _refuse_twice(properties)
    numbers = {
        each.name: number
        for number, each in enumerate(each for each in properties if each.placeholder)
    }
    checked = []
    for each in properties:
        _check_shape(each)
        if each.binding is not None:
            place: Place | None = _bound_place(each, prompt, object_info)
        else:
            number = numbers[each.name]
            place = _placeholder_place(each, number, prompt, is_hidden=number in hidden)
        checked.append(_completed_at(each, place, prompt, object_info))
    return tuple(checked)


def refused(each: Property, problem: str, *, node: str | None = None) -> InvalidInput:
    details = {"field": "properties", "property": each.name, "node": node}
    return InvalidInput(f"the property {each.name}: {problem}", **details)


def _refuse_twice(properties: Sequence[Property]) -> None:
    seen: set[tuple[str, str | None]] = set()
    for each in properties:
        for what, value in (
            ("name", each.name),
            ("binding", each.binding),
            ("placeholder", each.placeholder),
        ):
            if value is not None and (what, value) in seen:
                raise refused(each, f"another property has the same {what} {shown(value)}")
            seen.add((what, value))


def _completed_at(
    each: Property,
    place: Place | None,
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
) -> Property:
    declared, node_id = None, None
    if place is not None:
        node_id = place.node_id
        declared = declared_at(read_entry(node_id, prompt[node_id], object_info), place.input)
    _refuse_file_name(each, declared, node_id)
    each = _completed(each, declared, is_bound=each.binding is not None)
    _check_choices(each, node_id)
    _check_default(each, node_id)
    return each


def _refuse_file_name(each: Property, declared: Any, node_id: str | None) -> None:
    """What is typed there would name any file of the backend, other customers' among them."""
    if each.is_media or declared is None:
        return
    options = input_spec("", declared).options
    if any(name.endswith("_upload") and options[name] for name in options):
        raise refused(
            each,
            f"{each.place} names a file, so its type is image, video or audio, not {each.type}",
            node=node_id,
        )


def _check_shape(each: Property) -> None:
    if not NAME.fullmatch(each.name):
        raise refused(each, "a name begins with a letter, then letters, digits, _, . and -")
    if each.type not in PROPERTY_TYPES:
        near = closest(each.type, PROPERTY_TYPES)
        meant = f", did you mean {near[0]}?" if near else "."
        listed = ", ".join(PROPERTY_TYPES)
        raise refused(each, f"{shown(each.type)} is no type{meant} There are: {listed}")
    if (each.binding is None) == (each.placeholder is None):
        raise refused(each, 'it needs either a binding "node.input" or a placeholder')
    if each.placeholder is not None and not 0 < len(each.placeholder) <= PLACEHOLDER_CHARACTERS_MAX:
        raise refused(each, f"a placeholder has 1 to {PLACEHOLDER_CHARACTERS_MAX} characters")
    if len(each.description) > DESCRIPTION_CHARACTERS_MAX:
        raise refused(each, f"at most {DESCRIPTION_CHARACTERS_MAX:,} characters of description")
    for text in (each.description, each.placeholder or "", each.binding or ""):
        problem = problem_with_text(text)
        if problem:
            raise refused(each, problem)
    _check_bounds(each)


def _check_bounds(each: Property) -> None:
    least, most = each.minimum, each.maximum
    if (least is not None or most is not None) and each.type not in ("number", "integer", "seed"):
        raise refused(each, f"a property of type {each.type} has no range")
    if least is not None and most is not None and least > most:
        raise refused(each, f"the minimum {shown(least)} is above the maximum {shown(most)}")
    if each.type == "seed" and not ((least or 0) >= 0 and (most or 0) <= SEED_MAX):
        raise refused(each, f"seeds are 0 to {SEED_MAX}")
    if each.step is not None and not each.step > 0:
        raise refused(each, f"the step must be above zero, not {shown(each.step)}")


def _bound_place(
    each: Property, prompt: Mapping[str, Any], object_info: Mapping[str, Any]
) -> Place:
    binding = each.binding or ""
    place = place_of(binding, prompt)
    if place is None:
        node = binding.partition(".")[0]
        if "." not in binding or not node:
            raise refused(each, f"the binding {shown(binding)} is not <node id>.<input>")
        raise refused(
            each, f"there is no node {shown(node)} in the prompt (binding {binding})", node=node
        )
    entry = read_entry(place.node_id, prompt[place.node_id], object_info)
    # What a node of an unknown type takes is not known either.
    if entry.info and place.input not in entry.inputs and declared_at(entry, place.input) is None:
        known = dict.fromkeys([*entry.declared(), *entry.inputs])
        bindable = [name for name in known if _socket_at(entry, name) is None]
        hint = hint_of(place.input, bindable, "it has")
        raise refused(
            each, f"node {entry.name} has no input {shown(place.input)}{hint}", node=entry.id
        )
    _refuse_socket(each, entry, place)
    return place


def _refuse_socket(each: Property, entry: Entry, place: Place) -> None:
    kind = _socket_at(entry, place.input)
    if kind is not None:
        raise refused(
            each,
            f"{place.input} of node {entry.name} takes {kind} from another node, and no value",
            node=entry.id,
        )


def _socket_at(entry: Entry, name: str) -> str | None:
    """What an input takes from another node, if it takes no value."""
    declared = declared_at(entry, name)
    current = entry.inputs.get(name)
    if declared is None or (name in entry.inputs and as_link(current) is None):
        return None
    spec = input_spec(name, declared)
    takes_value = not {spec.widget_type, *spec.type.split(",")}.isdisjoint({*WIDGET_TYPES, "*"})
    return None if takes_value else spec.type


def _placeholder_place(
    each: Property, number: int, prompt: Mapping[str, Any], *, is_hidden: bool
) -> Place | None:
    places = places_of(prompt, number)
    if not places:
        if is_hidden:
            return None
        raise refused(each, f"the placeholder {shown(each.placeholder)} is nowhere in the document")
    node_id, name, _ = places[0]
    return Place(node_id, name)


def _completed(each: Property, declared: Any, *, is_bound: bool) -> Property:
    """Choices and ranges as the node has them, where the property says nothing; and who must be given."""
    spec = input_spec("", declared) if declared is not None else None
    if each.type == "choice" and each.choices is None and spec is not None:
        each = replace(each, choices=tuple(choices_of(spec) or ()) or None)
    if each.type in ("number", "integer") and spec is not None:
        each = replace(
            each,
            minimum=_bound(spec.options.get("min")) if each.minimum is None else each.minimum,
            maximum=_bound(spec.options.get("max")) if each.maximum is None else each.maximum,
        )
    if each.default is not None or each.type == "seed":
        return replace(each, required=bool(each.required))
    # Without a value a bound input keeps what the document has; a placeholder would stay in the text.
    if not is_bound and each.required is False:
        raise refused(each, "with a placeholder it is required, or needs a default")
    usual = each.is_media or not is_bound
    return replace(each, required=usual if each.required is None else each.required)


def _bound(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _check_choices(each: Property, node_id: str | None) -> None:
    if each.type != "choice":
        if each.choices is not None:
            raise refused(each, f"a property of type {each.type} has no choices")
        return
    if not each.choices:
        raise refused(each, "a choice needs choices", node=node_id)
    if len(each.choices) > CHOICES_MAX:
        raise refused(each, f"at most {CHOICES_MAX:,} choices")
    if not all(map(_can_be_chosen, each.choices)):
        raise refused(each, "choices are texts, numbers, true and false")


def _can_be_chosen(choice: Any) -> bool:
    if isinstance(choice, str):
        return is_storable(choice)
    return isinstance(choice, int) or (isinstance(choice, float) and math.isfinite(choice))


def _check_default(each: Property, node_id: str | None) -> None:
    if each.default is None:
        return
    try:
        checked(each, each.default, is_ours=True)
    except InvalidValue as error:
        at = f" ({each.place})"
        raise refused(each, f"its default: {error.message}{at}", node=node_id) from None
