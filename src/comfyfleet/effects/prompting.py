"""A document becomes a prompt, with marks where its placeholders stood. Pure."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from comfyfleet.effects.model import Kind, Property
from comfyfleet.effects.placeholders import as_input, marked_prompt, marked_workflow
from comfyfleet.kernel.errors import InvalidInput, InvalidWorkflow
from comfyfleet.workflow import convert
from comfyfleet.workflow.media.limits import DEFAULT_LIMITS
from comfyfleet.workflow.media.shapes import find_pieces
from comfyfleet.workflow.setting.branches import has_branches, rebranched_inputs
from comfyfleet.workflow.setting.changing import declared_at
from comfyfleet.workflow.setting.entries import read_entry
from comfyfleet.workflow.texts import Random

BINDING_DOTS_MAX = 50


class Chance(NamedTuple):
    """What the editor takes from the world when it queues a workflow: the date and the dice."""

    now: datetime | None = None
    rng: Random | None = None


class Place(NamedTuple):
    node_id: str
    input: str


def find_document(value: Any) -> tuple[Kind, dict[str, Any]]:
    """The workflow in whatever was given, else the prompt; a workflow can be fitted to a fleet."""
    pieces = find_pieces(value, DEFAULT_LIMITS)
    if pieces.workflow is not None:
        return "workflow", pieces.workflow
    if pieces.prompt is None:
        raise InvalidInput("the document is neither a workflow nor a prompt", field="document")
    return "prompt", pieces.prompt


def placeholders_of(properties: Iterable[Property]) -> list[str]:
    """In the order of their numbers."""
    return [each.placeholder for each in properties if each.placeholder]


def marked_prompt_of(
    kind: Kind,
    document: Mapping[str, Any],
    object_info: Mapping[str, Any],
    placeholders: list[str],
    *,
    keep_unknown: bool = False,
    chance: Chance = Chance(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """`keep_unknown`: nodes of types that nobody knows yet stay; otherwise they are refused."""
    if kind == "prompt":
        return marked_prompt(_sound(document), placeholders)
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


def place_of(binding: str, prompt: Mapping[str, Any]) -> Place | None:
    """Both ids and names of inputs may hold dots: the prompt tells where the id ends."""
    end = -1
    for _ in range(BINDING_DOTS_MAX):
        end = binding.find(".", end + 1)
        if end < 0:
            return None
        if binding[:end] in prompt and binding[end + 1 :]:
            return Place(binding[:end], binding[end + 1 :])
    return None


def with_value(
    prompt: Mapping[str, Any], place: Place, value: Any, object_info: Mapping[str, Any]
) -> dict[str, Any]:
    """A new prompt. A choice that brings inputs of its own brings them here, too."""
    node = prompt[place.node_id]
    entry = read_entry(place.node_id, node, object_info)
    declared = declared_at(entry, place.input)
    if declared is not None and has_branches(declared):
        inputs = rebranched_inputs(entry, place.input, value)
    else:
        inputs = {**entry.inputs, place.input: as_input(value)}
    return {**prompt, place.node_id: {**node, "inputs": inputs}}


def _sound(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    for node_id, node in prompt.items():
        if not isinstance(node, dict) or not isinstance(node.get("class_type"), str):
            raise InvalidWorkflow(f"node {node_id!r} of the prompt has no class_type")
        if not isinstance(node.get("inputs", {}), dict):
            raise InvalidWorkflow(f"the inputs of node {node_id!r} are no object")
    return prompt
