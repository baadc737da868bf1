"""Converts a workflow to a prompt, pass by pass, and lists the inputs that subgraphs expose on
their instances, with the names that the author sees."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from comfyfleet.workflow.edit import ExposedInput, Place
from comfyfleet.workflow.emit import Budgets, Emission, Patterns, emit, only_reachable
from comfyfleet.workflow.group_nodes import expand_group_nodes
from comfyfleet.workflow.model import DEFAULT_LIMITS, SUBGRAPH_INPUT_ID, Limits, Prompt
from comfyfleet.workflow.node_inputs import Input
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.report import (
    Warning,
    refuse_missing_inputs,
    refuse_unknown_types,
    warnings_of,
)
from comfyfleet.workflow.resolve import Resolver, apply_primitives
from comfyfleet.workflow.subgraphs import GraphScope, expand, unique_ids, wire_all
from comfyfleet.workflow.text_patterns import Random
from comfyfleet.workflow.wire import WiredNode, settle_types


class ShownAt(NamedTuple):
    """An instance that exposes an input of an inner node. `around` is the graph that contains the
    instance."""

    around: GraphScope
    instance: WiredNode
    title: str
    slot: Input
    label: str

    @property
    def instance_id(self) -> str:
        return f"{self.around.prefix}{self.instance.node.id}"


def exposed_inputs(scopes: list[GraphScope], prompt: Prompt) -> Iterator[ExposedInput]:
    """Yields an entry for each exposed input of the prompt and each level where an instance exposes
    it.
    """
    for scope in scopes:
        if scope.instance is None:
            continue
        for node in scope.wired.nodes.values():
            key = scope.prefix + node.node.id
            inputs = prompt[key]["inputs"] if key in prompt else {}
            for slot in node.inputs:
                if slot.name not in inputs or isinstance(inputs[slot.name], list):
                    continue
                for shown in instances_showing(scope, slot):
                    yield ExposedInput(
                        shown.instance_id,
                        shown.title,
                        shown.slot.name,
                        shown.label,
                        Place(key, slot.name),
                    )


def instances_showing(scope: GraphScope, slot: Input) -> list[ShownAt]:
    """Returns the instances that expose an input, innermost first. Returns an empty list if the
    input is eventually fed by a link."""
    instances: list[ShownAt] = []
    while slot.link is not None and slot.link.origin == SUBGRAPH_INPUT_ID:
        instance, place = scope.instance, slot.link.origin_slot
        if instance is None or scope.parent is None or place >= len(instance.inputs):
            return []
        ports, slot = scope.wired.graph.inputs, instance.inputs[place]
        label = ports[place].label if place < len(ports) else ""
        title = instance.node.title or scope.wired.graph.name
        instances.append(ShownAt(scope.parent, instance, title, slot, label or slot.name))
        scope = scope.parent
    return [] if slot.link is not None else instances


class Options(TypedDict, total=False):
    """Options of a conversion. The defaults match the editor exactly.

    Time and randomness are arguments: without `now`, date patterns are not filled in, and without
    `rng`, the first option of {a|b} is used.
    """

    now: datetime | None
    rng: Random | None
    # How to handle nodes of a type that the server lacks: drop them, or emit them like the editor.
    unknown: Literal["drop", "keep"]
    # Raise an error that lists all unknown node types, or all required links that are missing.
    strict: bool
    # Drop nodes that no output node needs.
    reachable_only: bool
    # Choices that a server provides outside of object_info, by route.
    remote_choices: Mapping[str, list[Any]] | None
    limits: Limits


class Conversion(NamedTuple):
    """The result of a conversion: the prompt, warnings, and the inputs that subgraphs expose."""

    prompt: Prompt
    warnings: tuple[Warning, ...] = ()
    exposed: tuple[ExposedInput, ...] = ()


def convert(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], **options: Unpack[Options]
) -> Prompt:
    """Returns the prompt as a new dict. The workflow is never modified."""
    prompt, _, _ = _convert(workflow, object_info, options)
    return prompt


def convert_with_report(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], **options: Unpack[Options]
) -> Conversion:
    """Converts a workflow, and reports which parts were left out and why, and which values the
    server is likely to refuse."""
    prompt, scopes, types = _convert(workflow, object_info, options)
    warnings = tuple(warnings_of(prompt, scopes, types))
    return Conversion(prompt, warnings, tuple(exposed_inputs(scopes, prompt)))


def _convert(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], options: Options
) -> tuple[Prompt, list[GraphScope], NodeTypes]:
    limits, now = options.get("limits", DEFAULT_LIMITS), options.get("now")
    types = NodeTypes(object_info, options.get("remote_choices"))
    parsed = unique_ids(parse(workflow, limits=limits))
    parsed = expand_group_nodes(parsed, types, limits=limits)
    graphs = {
        key: settle_types(wired) for key, wired in wire_all(parsed, types, limits=limits).items()
    }
    budgets = Budgets(limits)
    fill = Patterns(graphs, now, budgets).fill
    graphs = {
        key: apply_primitives(wired, partial(fill, graph_id=key)) for key, wired in graphs.items()
    }
    scopes = expand(graphs, limits)
    if options.get("strict"):
        refuse_unknown_types(scopes)
    keep_unknown = options.get("unknown") == "keep"
    patterns = Patterns(graphs, now, budgets)
    resolver = Resolver(scopes, inline_values=not keep_unknown)
    emission = Emission(resolver, patterns, limits, budgets, options.get("rng"), keep_unknown)
    prompt = emit(scopes, emission)
    if options.get("strict"):
        refuse_missing_inputs(prompt, scopes, types)
    if options.get("reachable_only"):
        prompt = only_reachable(prompt, types)
    return prompt, scopes, types
