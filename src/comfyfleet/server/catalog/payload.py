"""Builds the payload of a job: the converted prompt with its placeholders and properties filled in,
and the required files. Pure."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from comfyfleet.api.values import is_plain_line
from comfyfleet.errors import InvalidInput, InvalidWorkflow, LimitExceeded
from comfyfleet.server.catalog import model
from comfyfleet.server.catalog.model import (
    AssetRef,
    JobPayload,
    Kind,
    Property,
    WorkflowVersion,
    resolve_values,
    value_error,
)
from comfyfleet.workflow import convert
from comfyfleet.workflow.edit.input_lookup import as_link, read_entry
from comfyfleet.workflow.edit.values import declared_at, has_branches, rebranched_inputs
from comfyfleet.workflow.embedded.document import find_documents
from comfyfleet.workflow.embedded.reader import DEFAULT_LIMITS
from comfyfleet.workflow.text_patterns import Random

VALUE_DEPTH_MAX = 100
FILE_PREFIX = "filename_prefix"
_MARK = re.compile("\ue000comfyfleet-([0-9]+)\ue001")
Prompt = Mapping[str, Mapping[str, Any]]


def mark_text(number: int) -> str:
    """Returns the mark that stands for a placeholder. It contains private-use characters, which
    don't occur in user text."""
    return f"\ue000comfyfleet-{number}\ue001"


def marked_prompt(prompt: Prompt, placeholders: Sequence[str]) -> dict[str, Any]:
    """Replaces placeholders in input values with marks. Class names and ids don't change."""
    return {
        node_id: {**node, "inputs": _map_input_texts(node, _marker(placeholders))}
        for node_id, node in prompt.items()
    }


def marked_workflow(workflow: Mapping[str, Any], placeholders: Sequence[str]) -> dict[str, Any]:
    """Replaces placeholders in saved widget values with marks, including the values in
    subgraphs."""
    marked = _map_saved_values(workflow, _marker(placeholders), VALUE_DEPTH_MAX)
    return dict(marked)


def places_of(prompt: Prompt, number: int) -> list[tuple[str, str, bool]]:
    """Returns the places of a mark, in the order of the prompt: the node id, the input, and whether
    the mark is the whole input."""
    mark = mark_text(number)
    places = []
    for node_id, node in prompt.items():
        for name, value in node.get("inputs", {}).items():
            if value == mark:
                places.append((node_id, name, True))
            elif number in marks_in(value):
                places.append((node_id, name, False))
    return places


def marks_in(value: Any) -> set[int]:
    numbers: set[int] = set()

    def look(text: str) -> Any:
        numbers.update(int(match[1]) for match in _MARK.finditer(text))
        return text

    _map_texts(value, look)
    return numbers


def fill_marks(prompt: Prompt, values: Mapping[int, Any]) -> dict[str, Any]:
    """Replaces marks with values. A value keeps its type if the mark is the whole input. Otherwise,
    it is inserted as text."""

    def fill(text: str) -> Any:
        whole = _MARK.fullmatch(text)
        if whole:
            return as_input(values[int(whole[1])])
        return _MARK.sub(lambda match: as_text(values[int(match[1])]), text)

    return {
        node_id: {**node, "inputs": _map_input_texts(node, fill)}
        for node_id, node in prompt.items()
    }


def as_input(value: Any) -> Any:
    """Wraps a list in an object that ComfyUI unwraps. ComfyUI would interpret a plain list as a
    link."""
    return {"__value__": value} if isinstance(value, list) else value


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _marker(placeholders: Sequence[str]) -> Callable[[str], str]:
    if not placeholders:
        return lambda text: text
    numbers = {text: number for number, text in enumerate(placeholders)}
    # The longest placeholders come first, because one placeholder may be the start of another.
    ordered = sorted(placeholders, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)))
    return lambda text: pattern.sub(lambda match: mark_text(numbers[match[0]]), text)


def _map_input_texts(node: Mapping[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """Applies `change` to the strings in a node's inputs. Links don't change, because a node id may
    look like a placeholder."""
    return {
        name: value if as_link(value) else _map_texts(value, change)
        for name, value in node.get("inputs", {}).items()
    }


def _map_texts(value: Any, change: Callable[[str], Any], depth: int = VALUE_DEPTH_MAX) -> Any:
    """Returns the value with every string in it changed, except keys."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise LimitExceeded(
            f"a value is nested more than {VALUE_DEPTH_MAX} levels deep", limit=VALUE_DEPTH_MAX
        )
    if isinstance(value, dict):
        return {key: _map_texts(inner, change, depth - 1) for key, inner in value.items()}
    return [_map_texts(inner, change, depth - 1) for inner in value]


def _map_saved_values(value: Any, change: Callable[[str], Any], depth: int) -> Any:
    if depth == 0 or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [_map_saved_values(inner, change, depth - 1) for inner in value]
    return {
        key: _map_texts(inner, change)
        if key == "widgets_values"
        else _map_saved_values(inner, change, depth - 1)
        for key, inner in value.items()
    }


BINDING_DOTS_MAX = 50


class RandomSource(NamedTuple):
    """The time and the random generator that the conversion uses for dates and wildcards in
    text."""

    now: datetime | None = None
    rng: Random | None = None


class InputPlace(NamedTuple):
    node_id: str
    input: str


def find_document(value: Any) -> tuple[Kind, dict[str, Any]]:
    """Finds the workflow or the prompt in a document. A workflow is preferred, because it can be
    converted for any fleet."""
    pieces = find_documents(value, DEFAULT_LIMITS)
    if pieces.workflow is not None:
        return "workflow", pieces.workflow
    if pieces.prompt is None:
        raise InvalidInput("the document is neither a workflow nor a prompt", field="document")
    return "prompt", pieces.prompt


def placeholders_of(properties: Iterable[Property]) -> list[str]:
    """Returns the placeholders in the order of their mark numbers."""
    return [prop.placeholder for prop in properties if prop.placeholder]


def marked_prompt_of(
    kind: Kind,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    placeholders: list[str],
    *,
    keep_unknown: bool = False,
    chance: RandomSource = RandomSource(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Converts a document to a marked prompt. Refuses nodes of unknown types, unless `keep_unknown`
    is set."""
    if kind == "prompt":
        return marked_prompt(_check_prompt(document), placeholders)
    return dict(
        convert(
            marked_workflow(document, placeholders),
            object_info,
            unknown="keep",
            strict=not keep_unknown,
            now=chance.now,
            rng=chance.rng,
        )
    )


def place_of(binding: str, prompt: Mapping[str, Any]) -> InputPlace | None:
    """Splits a binding into node and input. Both may contain dots, so the prompt determines where
    the node id ends."""
    end = -1
    for _ in range(BINDING_DOTS_MAX):
        end = binding.find(".", end + 1)
        if end < 0:
            return None
        if binding[:end] in prompt and binding[end + 1 :]:
            return InputPlace(binding[:end], binding[end + 1 :])
    return None


def with_value(
    prompt: Mapping[str, Any], place: InputPlace, value: Any, object_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the prompt with a value set. If the value is a choice that has inputs of its own,
    adds these inputs."""
    node = prompt[place.node_id]
    entry = read_entry(place.node_id, node, object_info)
    declared = declared_at(entry, place.input)
    if declared is not None and has_branches(declared):
        inputs = rebranched_inputs(entry, place.input, value)
    else:
        inputs = {**entry.inputs, place.input: as_input(value)}
    return {**prompt, place.node_id: {**node, "inputs": inputs}}


def _check_prompt(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    for node_id, node in prompt.items():
        if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
            raise InvalidWorkflow(f"node {node_id!r} of the prompt has no class_type")
        if not isinstance(node.get("inputs", {}), dict):
            raise InvalidWorkflow(f"the inputs of node {node_id!r} must be an object")
    return prompt


def build_payload(
    version: WorkflowVersion,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    files: Mapping[str, UUID] | None = None,
    seed: int,
    chance: RandomSource = RandomSource(),  # noqa: B008 - frozen
) -> JobPayload:
    """Builds a payload from the user's `values`, the effect's `overrides`, and `files` by property.

    `seed` is used for seed properties without a value, so callers must choose a new one for each
    job."""
    resolved = resolved_for(version, values, overrides, files=files, seed=seed)
    return fill_payload(
        version, build_marked_prompt(version, document, object_info, chance), object_info, resolved
    )


def resolved_for(
    version: WorkflowVersion,
    values: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    files: Mapping[str, UUID] | None,
    seed: int,
) -> dict[str, Any]:
    return resolve_values(version.properties, {**values, **(files or {})}, overrides, seed=seed)


def build_marked_prompt(
    version: WorkflowVersion,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    chance: RandomSource,
) -> dict[str, Any]:
    """Returns the prompt without values. It is the same for all jobs with the same random
    source."""
    placeholders = placeholders_of(version.properties)
    return marked_prompt_of(version.kind, document, object_info, placeholders, chance=chance)


def fill_payload(
    version: WorkflowVersion,
    prompt: Mapping[str, Any],
    object_info: Mapping[str, Any],
    resolved: Mapping[str, Any],
) -> JobPayload:
    """Fills values into a marked prompt."""
    properties = version.properties
    placeholders = placeholders_of(properties)
    assets = tuple(
        asset for prop in properties for asset in _assets(prop, resolved, prompt, placeholders)
    )
    _refuse_overlap(properties, resolved, assets)
    whole = _fill_values(prompt, properties, resolved, object_info)
    _require_plain_prefixes(whole)
    uses = model.models_of(whole)
    return JobPayload(
        prompt=whole,
        assets=assets,
        properties={name: _plain(value) for name, value in resolved.items()},
        model_key=model.model_key(uses),
        model_set=model.model_set(uses),
    )


def _require_plain_prefixes(prompt: Mapping[str, Any]) -> None:
    """Rejects file name prefixes with control characters. No file can have such a name, so every
    attempt to run the job would fail."""
    for node in prompt.values():
        prefix = node.get("inputs", {}).get(FILE_PREFIX)
        if isinstance(prefix, str) and not is_plain_line(prefix):
            raise InvalidInput(
                f"{FILE_PREFIX} must not contain control characters, such as line breaks",
                field="properties",
            )


def with_defaults(
    prompt: Mapping[str, Any], properties: Sequence[Property], object_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Fills only default values into a marked prompt. Other inputs keep the document's values."""
    defaults = {prop.name: prop.default for prop in properties if prop.default is not None}
    return _fill_values(prompt, properties, defaults, object_info)


def _fill_values(
    prompt: Mapping[str, Any],
    properties: Sequence[Property],
    resolved: Mapping[str, Any],
    object_info: Mapping[str, Any],
) -> dict[str, Any]:
    """Fills in all values except files. The worker sets the names of files later."""
    texts = [prop for prop in properties if prop.placeholder]
    marks = {
        number: prop.placeholder if _is_unfilled(prop, resolved) else resolved[prop.name]
        for number, prop in enumerate(texts)
    }
    result = fill_marks(prompt, marks) if marks else dict(prompt)
    for prop in properties:
        if prop.binding is None or _is_unfilled(prop, resolved):
            continue
        place = place_of(prop.binding, result)
        if place is None:
            raise InvalidInput(
                f"the property {prop.name}: the node of its binding {prop.binding} is missing from "
                "the prompt for this fleet's backends",
                property=prop.name,
            )
        result = with_value(result, place, resolved[prop.name], object_info)
    return result


def _is_unfilled(prop: Property, resolved: Mapping[str, Any]) -> bool:
    return prop.name not in resolved or isinstance(resolved[prop.name], UUID)


def _assets(
    prop: Property,
    resolved: Mapping[str, Any],
    prompt: Mapping[str, Any],
    placeholders: Sequence[str],
) -> list[AssetRef]:
    file_id = resolved.get(prop.name)
    if not isinstance(file_id, UUID):
        return []
    if prop.placeholder is None:
        return [AssetRef(prop.name, file_id, prop.type, prop.binding, None, prop.is_primary_input)]
    places = places_of(prompt, placeholders.index(prop.placeholder))
    # Bind the file to its places in the document, because a user's text may contain the same
    # characters.
    bindings = [f"{node_id}.{name}" for node_id, name, is_whole in places if is_whole]
    is_inside_text = len(bindings) < len(places)
    targets: list[tuple[str | None, str | None]] = [(binding, None) for binding in bindings]
    if is_inside_text:
        targets.append((None, prop.placeholder))
    return [
        AssetRef(
            prop.name if number == 1 else f"{prop.name}#{number}",
            file_id,
            prop.type,
            binding,
            placeholder,
            prop.is_primary_input and number == 1,
        )
        for number, (binding, placeholder) in enumerate(targets, start=1)
    ]


def _refuse_overlap(
    properties: Sequence[Property], resolved: Mapping[str, Any], assets: Sequence[AssetRef]
) -> None:
    """Rejects text that contains a file's placeholder, because the worker would replace it there as
    well."""
    waiting = [asset.placeholder for asset in assets if asset.placeholder]
    for prop in properties:
        value = resolved.get(prop.name)
        if isinstance(value, str) and any(text in value for text in waiting):
            raise value_error(prop, "the text contains the placeholder of a file")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, UUID) else value
