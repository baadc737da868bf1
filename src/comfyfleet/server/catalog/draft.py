"""Checks a new workflow version and its properties as a whole, before anything is written. Pure."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comfyfleet.api.admin import PROPERTY_TYPES
from comfyfleet.api.values import is_storable, problem_with_text
from comfyfleet.errors import InvalidInput, InvalidValue, LimitExceeded
from comfyfleet.server.catalog.model import (
    SEED_MAX,
    Kind,
    Property,
    WorkflowDraft,
    check_slug,
    check_value,
    models_of,
    shown,
)
from comfyfleet.server.catalog.payload import (
    FILE_PREFIX,
    InputPlace,
    find_document,
    marked_prompt_of,
    marked_workflow,
    marks_in,
    place_of,
    placeholders_of,
    places_of,
    with_defaults,
)
from comfyfleet.server.fleets.model import ModelUse
from comfyfleet.workflow.edit import find_input
from comfyfleet.workflow.edit.input_lookup import (
    PromptEntry,
    as_link,
    closest,
    missing_required,
    read_entry,
)
from comfyfleet.workflow.edit.input_lookup import hint as hint_of
from comfyfleet.workflow.edit.values import choices_of, declared_at
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import inspect
from comfyfleet.workflow.node_inputs import WIDGET_TYPES, input_spec

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
PROPERTIES_MAX = 500
CHOICES_MAX = 10_000
DESCRIPTION_CHARACTERS_MAX = 10_000
PLACEHOLDER_CHARACTERS_MAX = 1_000
LABEL_CHARACTERS_MAX = 200
# The property types that can have each format.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "multiline": ("text",),
    "colour": ("text", "integer"),
    "mask": ("image",),
}


def check_properties(
    properties: Sequence[Property],
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
    hidden: Collection[int] = (),
) -> tuple[Property, ...]:
    """Checks properties against the marked prompt. Returns them with missing choices and ranges
    filled in from the node's declaration.

    `hidden` are marks inside nodes of unknown types, whose place in the prompt can't be
    determined."""
    if len(properties) > PROPERTIES_MAX:
        raise InvalidInput(
            f"a workflow can have at most {PROPERTIES_MAX} properties", field="properties"
        )
    properties = [_by_node_id(prop, prompt, object_info) for prop in properties]
    _refuse_duplicates(properties)
    numbers = {
        prop.name: number
        for number, prop in enumerate(prop for prop in properties if prop.placeholder)
    }
    checked = []
    for prop in properties:
        _check_shape(prop)
        if prop.binding is not None:
            place: InputPlace | None = _bound_place(prop, prompt, object_info)
        else:
            number = numbers[prop.name]
            place = _placeholder_place(prop, number, prompt, is_hidden=number in hidden)
        checked.append(_complete_at_input(prop, place, prompt, object_info))
    return tuple(checked)


def property_error(prop: Property, problem: str, *, node: str | None = None) -> InvalidInput:
    details = {"field": "properties", "property": prop.name, "node": node}
    return InvalidInput(f"the property {prop.name}: {problem}", **details)


def _refuse_duplicates(properties: Sequence[Property]) -> None:
    seen: set[tuple[str, str | None]] = set()
    for prop in properties:
        for what, value in (
            ("name", prop.name),
            ("binding", prop.binding),
            ("placeholder", prop.placeholder),
        ):
            if value is not None and (what, value) in seen:
                raise property_error(prop, f"another property has the same {what} {shown(value)}")
            seen.add((what, value))


def _complete_at_input(
    prop: Property,
    place: InputPlace | None,
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
) -> Property:
    declared, node_id = None, None
    if place is not None:
        node_id = place.node_id
        declared = declared_at(read_entry(node_id, prompt[node_id], object_info), place.input)
    _refuse_file_name(prop, declared, node_id)
    prop = _complete(prop, declared, is_bound=prop.binding is not None)
    _check_choices(prop, node_id)
    _check_default(prop, node_id)
    return prop


def _refuse_file_name(prop: Property, declared: Any, node_id: str | None) -> None:
    """Rejects a text property for an input that names a file. Through such a property, customers
    could use any file on the backend, including files of other customers."""
    if prop.is_media or declared is None:
        return
    options = input_spec("", declared).options
    if any(name.endswith("_upload") and options[name] for name in options):
        raise property_error(
            prop,
            f"{prop.place} names a file, so the type must be image, video or audio, not {prop.type}",
            node=node_id,
        )


def _check_shape(prop: Property) -> None:
    if not NAME.fullmatch(prop.name):
        raise property_error(
            prop, "the name must begin with a letter or _, followed by letters, digits, _, . or -"
        )
    if prop.type not in PROPERTY_TYPES:
        near = closest(prop.type, PROPERTY_TYPES)
        suggestion = f" (did you mean {near[0]}?);" if near else ";"
        listed = ", ".join(PROPERTY_TYPES)
        raise property_error(
            prop, f"unknown type {shown(prop.type)}{suggestion} use one of {listed}"
        )
    if (prop.binding is None) == (prop.placeholder is None):
        raise property_error(prop, 'either a binding "node.input" or a placeholder is required')
    if prop.placeholder is not None and not 0 < len(prop.placeholder) <= PLACEHOLDER_CHARACTERS_MAX:
        raise property_error(
            prop, f"a placeholder must have 1 to {PLACEHOLDER_CHARACTERS_MAX} characters"
        )
    if len(prop.description) > DESCRIPTION_CHARACTERS_MAX:
        raise property_error(
            prop, f"the description can have at most {DESCRIPTION_CHARACTERS_MAX:,} characters"
        )
    if len(prop.label or "") > LABEL_CHARACTERS_MAX:
        raise property_error(prop, f"the label can have at most {LABEL_CHARACTERS_MAX} characters")
    _check_format(prop)
    for text in (prop.description, prop.label or "", prop.placeholder or "", prop.binding or ""):
        problem = problem_with_text(text)
        if problem:
            raise property_error(prop, problem)
    _check_bounds(prop)


def _check_format(prop: Property) -> None:
    if prop.format is None:
        return
    if prop.format not in FORMATS:
        listed = ", ".join(FORMATS)
        raise property_error(prop, f"unknown format {shown(prop.format)}; use one of {listed}")
    if prop.type not in FORMATS[prop.format]:
        types = " or ".join(FORMATS[prop.format])
        raise property_error(
            prop, f"the format {prop.format} requires the type {types}, not {prop.type}"
        )


def _check_bounds(prop: Property) -> None:
    least, most = prop.minimum, prop.maximum
    if (least is not None or most is not None) and prop.type not in ("number", "integer", "seed"):
        raise property_error(prop, f"a property of type {prop.type} has no range")
    if least is not None and most is not None and least > most:
        raise property_error(prop, f"the minimum {shown(least)} is above the maximum {shown(most)}")
    if prop.type == "seed" and not ((least or 0) >= 0 and (most or 0) <= SEED_MAX):
        raise property_error(prop, f"seeds must be between 0 and {SEED_MAX}")
    if prop.step is not None and not prop.step > 0:
        raise property_error(prop, f"the step must be above zero, not {shown(prop.step)}")


def _by_node_id(
    prop: Property, prompt: Mapping[str, Any], object_info: Mapping[str, Any]
) -> Property:
    """Replaces a node's title or class in a binding with the node's id, as `--set` does."""
    binding = prop.binding or ""
    node, dot, name = binding.rpartition(".")
    if not (node and dot and name) or place_of(binding, prompt):
        return prop
    try:
        places = find_input(prompt, object_info, binding)
    except InvalidInput as error:
        raise property_error(prop, f"{error.message} (binding {binding})", node=node) from error
    if len(places) != 1:
        raise property_error(prop, f"the binding {binding} matches several inputs", node=node)
    return replace(prop, binding=f"{places[0].node_id}.{places[0].input}")


def _bound_place(
    prop: Property, prompt: Mapping[str, Any], object_info: Mapping[str, Any]
) -> InputPlace:
    binding = prop.binding or ""
    place = place_of(binding, prompt)
    if place is None:
        node = binding.partition(".")[0]
        if "." not in binding or not node:
            raise property_error(
                prop, f"the binding {shown(binding)} must have the form <node id>.<input>"
            )
        raise property_error(
            prop, f"the prompt has no node {shown(node)} (binding {binding})", node=node
        )
    entry = read_entry(place.node_id, prompt[place.node_id], object_info)
    # The inputs of an unknown node type aren't known either, so they can't be checked.
    if entry.info and place.input not in entry.inputs and declared_at(entry, place.input) is None:
        known = dict.fromkeys([*entry.declared(), *entry.inputs])
        bindable = [name for name in known if _socket_at(entry, name) is None]
        hint = hint_of(place.input, bindable, "it has")
        raise property_error(
            prop, f"node {entry.name} has no input {shown(place.input)}{hint}", node=entry.id
        )
    _refuse_socket(prop, entry, place)
    return place


def _refuse_socket(prop: Property, entry: PromptEntry, place: InputPlace) -> None:
    kind = _socket_at(entry, place.input)
    if kind is not None:
        raise property_error(
            prop,
            f"{place.input} of node {entry.name} accepts {kind} from another node, but no value",
            node=entry.id,
        )


def _socket_at(entry: PromptEntry, name: str) -> str | None:
    """Returns the type of link that an input requires. Returns None if the input accepts a
    value."""
    declared = declared_at(entry, name)
    current = entry.inputs.get(name)
    if declared is None or (name in entry.inputs and as_link(current) is None):
        return None
    spec = input_spec(name, declared)
    takes_value = not {spec.widget_type, *spec.type.split(",")}.isdisjoint({*WIDGET_TYPES, "*"})
    return None if takes_value else spec.type


def _placeholder_place(
    prop: Property, number: int, prompt: Mapping[str, Any], *, is_hidden: bool
) -> InputPlace | None:
    places = places_of(prompt, number)
    if not places:
        if is_hidden:
            return None
        raise property_error(
            prop, f"the document doesn't contain the placeholder {shown(prop.placeholder)}"
        )
    node_id, name, _ = places[0]
    return InputPlace(node_id, name)


def _complete(prop: Property, declared: Any, *, is_bound: bool) -> Property:
    """Fills in the choices, the range and `required` from the node's declaration if the property
    doesn't set them."""
    spec = input_spec("", declared) if declared is not None else None
    if prop.type == "choice" and prop.choices is None and spec is not None:
        prop = replace(prop, choices=tuple(choices_of(spec) or ()) or None)
    if prop.type in ("number", "integer") and spec is not None:
        prop = replace(
            prop,
            minimum=_bound(spec.options.get("min")) if prop.minimum is None else prop.minimum,
            maximum=_bound(spec.options.get("max")) if prop.maximum is None else prop.maximum,
        )
    if prop.default is not None or prop.type == "seed":
        return replace(prop, required=bool(prop.required))
    # A bound input without a value keeps the document's value, but a placeholder would remain in
    # the text.
    if not is_bound and prop.required is False:
        raise property_error(
            prop, "a property with a placeholder must be required or have a default"
        )
    usual = prop.is_media or not is_bound
    return replace(prop, required=usual if prop.required is None else prop.required)


def _bound(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def _check_choices(prop: Property, node_id: str | None) -> None:
    if prop.type != "choice":
        if prop.choices is not None:
            raise property_error(prop, f"a property of type {prop.type} can't have choices")
        return
    if not prop.choices:
        raise property_error(prop, "a property of type choice must have choices", node=node_id)
    if len(prop.choices) > CHOICES_MAX:
        raise property_error(prop, f"a property can have at most {CHOICES_MAX:,} choices")
    if not all(map(_can_be_chosen, prop.choices)):
        raise property_error(prop, "choices must be strings, numbers or booleans")


def _can_be_chosen(choice: Any) -> bool:
    if isinstance(choice, str):
        return is_storable(choice)
    return isinstance(choice, int) or (isinstance(choice, float) and math.isfinite(choice))


def _check_default(prop: Property, node_id: str | None) -> None:
    if prop.default is None:
        return
    try:
        check_value(prop, prop.default, is_operator_value=True)
    except InvalidValue as error:
        at = f" ({prop.place})"
        raise property_error(prop, f"invalid default: {error.message}{at}", node=node_id) from None


DOCUMENT_BYTES_MAX = 64 * 1024**2
WARNED_TYPES_MAX = 20
WARNED_NODES_MAX = 20
# NUL as escaped in JSON. After another backslash, it is ordinary text.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def draft_workflow(
    *,
    slug: str,
    document: Any,
    properties: Sequence[Property],
    output_node_id: str | None,
    object_info: Mapping[str, Any],
    is_reported: bool = True,
) -> WorkflowDraft:
    """Checks a new version as a whole. `document` is a workflow, a prompt, or a file that contains
    either.

    Unknown node types are allowed, because a fleet that has them may be added later. They cause a
    warning if `object_info` was reported by a worker (`is_reported`)."""
    check_slug(slug)
    kind, content = find_document(document)
    data = _serialize(content)
    prompt = marked_prompt_of(
        kind, content, object_info, placeholders_of(properties), keep_unknown=True
    )
    if not prompt:
        raise InvalidInput("the document has no node that would be executed", field="document")
    prompt, unnamed, hidden = _with_unknown_types(prompt, content, properties, object_info)
    checked = check_properties(properties, prompt, object_info, hidden)
    _check_output(output_node_id, prompt, object_info)
    node_types = tuple(sorted({node["class_type"] for node in prompt.values()}))
    usual = with_defaults(prompt, checked, object_info)
    return WorkflowDraft(
        slug=slug,
        kind=kind,
        document=data,
        document_hash=hashlib.sha256(data).hexdigest(),
        properties=checked,
        output_node_id=output_node_id,
        node_types=node_types,
        models=(*models_of(usual), *unnamed),
        warnings=(
            *(_warnings(node_types, object_info) if is_reported else ()),
            *_missing_inputs(usual, object_info),
        ),
        notes=() if is_reported else tuple(_notes(node_types, object_info)),
        shows_text_only=_shows_text_only(usual, output_node_id, object_info),
    )


def best_object_info(
    document: Any, candidates: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Returns the object_info that contains the most node types of the document. The first one wins
    a tie."""
    kind, content = find_document(document)
    types = _types_named(kind, content)
    return max(candidates, key=lambda known: len(types & known.keys()), default=None)


def _types_named(kind: Kind, document: Mapping[str, Any]) -> set[str]:
    if kind == "prompt":
        return {node["class_type"] for node in document.values() if "class_type" in node}
    opened = Opened("json", dict(document), None)
    return {used.class_type for used in inspect(opened).node_types}


def _serialize(document: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the document isn't valid JSON: {error}", field="document") from None
    problem = problem_with_text(text) or (
        "it contains a NUL character" if _NUL.search(text) else None
    )
    if problem or "\ue000comfyfleet-" in text:
        raise InvalidInput(
            f"invalid document: {problem or 'it contains reserved characters'}", field="document"
        )
    data = text.encode()
    if len(data) > DOCUMENT_BYTES_MAX:
        raise LimitExceeded(
            f"the document has {len(data):,} bytes, more than {DOCUMENT_BYTES_MAX:,}",
            limit=DOCUMENT_BYTES_MAX,
        )
    return data


def _check_output(
    node_id: str | None, prompt: Mapping[str, Any], object_info: Mapping[str, Any]
) -> None:
    if node_id is None:
        return
    if node_id not in prompt:
        raise InvalidInput(
            f"the output node {shown(node_id)} is not in the prompt", field="output_node_id"
        )
    class_type = prompt[node_id]["class_type"]
    known = object_info.get(class_type)
    if isinstance(known, dict) and known.get("output_node") is False:
        raise InvalidInput(
            f"node {node_id} ({class_type}) isn't an output node, so it would never run",
            field="output_node_id",
        )


# Link types that carry no media.
TEXT_TYPES = frozenset({"STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "*", "COMFY_MATCHTYPE_V3"})


def _shows_text_only(
    prompt: Mapping[str, Any], output_node_id: str | None, object_info: Mapping[str, Any]
) -> bool:
    """Checks whether the output nodes accept no media and save no files, as far as their types are
    known."""
    nodes = prompt.items() if output_node_id is None else [(output_node_id, prompt[output_node_id])]
    outputs = [
        read_entry(node_id, node, object_info)
        for node_id, node in nodes
        if output_node_id is not None or _is_output_or_unknown(node, object_info)
    ]
    return bool(outputs) and all(map(_shows_text, outputs))


def _is_output_or_unknown(node: Mapping[str, Any], object_info: Mapping[str, Any]) -> bool:
    known = object_info.get(node["class_type"])
    return not isinstance(known, dict) or bool(known.get("output_node"))


def _shows_text(entry: PromptEntry) -> bool:
    if not entry.info or FILE_PREFIX in entry.inputs:
        return False
    linked = [name for name, value in entry.inputs.items() if as_link(value)]
    return all(_link_type(entry, name) in TEXT_TYPES for name in linked)


def _link_type(entry: PromptEntry, name: str) -> str:
    declared = declared_at(entry, name)
    return "" if declared is None else input_spec(name, declared).type


def _with_unknown_types(
    prompt: Mapping[str, Any],
    document: Mapping[str, Any],
    properties: Sequence[Property],
    object_info: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[ModelUse, ...], set[int]]:
    """Completes nodes of unknown types, because the conversion can't determine their types or the
    names of their values.

    Their types, model files and placeholders are taken from the workflow. Returns the prompt, the
    models, and the marks whose place is unknown."""
    if all("class_type" in node for node in prompt.values()):
        return dict(prompt), (), set()
    seen = inspect(Opened("json", dict(document), None), object_info)
    types = {
        node.id: node_type.class_type
        for node_type in (seen.missing.node_types if seen.missing else ())
        for node in node_type.nodes
    }
    typed = {
        node_id: node
        if "class_type" in node
        else {"class_type": types.get(node_id, ""), "inputs": _links(node)}
        for node_id, node in prompt.items()
    }
    named = {use.file for use in models_of(typed)}
    unnamed = (
        ModelUse("", file.name)
        for file in seen.files
        if file.kind == "model" and file.active and file.name not in named
    )
    hidden = marks_in(marked_workflow(document, placeholders_of(properties)))
    return typed, tuple(unnamed), hidden


def _links(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node["inputs"].items() if as_link(value)}


def _notes(node_types: Iterable[str], object_info: Mapping[str, Any]) -> Iterable[str]:
    if any(name not in object_info for name in node_types):
        yield (
            "No worker has reported its backend's node types yet. Whether this workflow can run is known "
            "as soon as a worker has joined."
        )


def _missing_inputs(prompt: Mapping[str, Any], object_info: Mapping[str, Any]) -> Iterable[str]:
    """Yields one warning that lists all missing required inputs, because ComfyUI would refuse the
    prompt."""
    incomplete = [
        f"node {entry.name} lacks {', '.join(names)}"
        for node_id, node in prompt.items()
        if (names := missing_required(entry := read_entry(node_id, node, object_info)))
    ]
    if incomplete:
        listed = "; ".join(incomplete[:WARNED_NODES_MAX])
        more = len(incomplete) - WARNED_NODES_MAX
        rest = f"; and {more} more nodes" if more > 0 else ""
        yield f"Required inputs are missing, and ComfyUI will refuse the prompt: {listed}{rest}."


def _warnings(node_types: Iterable[str], object_info: Mapping[str, Any]) -> Iterable[str]:
    unknown = [name for name in node_types if name not in object_info]
    if unknown:
        listed = ", ".join(unknown[:WARNED_TYPES_MAX])
        more = (
            f" and {len(unknown) - WARNED_TYPES_MAX} more"
            if len(unknown) > WARNED_TYPES_MAX
            else ""
        )
        yield f"No known backend has the node types {listed}{more}."
