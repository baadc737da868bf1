"""A workflow becomes a prompt exactly as the editor's own `graphToPrompt()` would make it.

The steps are those of the editor when it opens a file and queues it: parse, make ids unique, turn
group nodes into subgraphs, wire every graph, let types settle, let primitives write their values,
expand subgraphs, resolve every link, emit.
"""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from comfyfleet.workflow.emit import Emission, emit
from comfyfleet.workflow.exposed import exposed_inputs
from comfyfleet.workflow.groupnodes import expand_group_nodes
from comfyfleet.workflow.ids import unique_ids
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.naming import Patterns
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.primitives import apply_primitives
from comfyfleet.workflow.reaching import only_reachable
from comfyfleet.workflow.report import (
    Warning,
    refuse_missing_inputs,
    refuse_unknown_types,
    warnings_of,
)
from comfyfleet.workflow.resolve import Resolver
from comfyfleet.workflow.scopes import Scope, expand
from comfyfleet.workflow.setting import ExposedInput
from comfyfleet.workflow.slottypes import settle_types
from comfyfleet.workflow.subgraphs import wire_all
from comfyfleet.workflow.texts import Random


class Options(TypedDict, total=False):
    """All beside the exact default. Time and chance come in from outside: without `now` date
    patterns stay as they are, without `rng` the first of {a|b} is taken."""

    now: datetime | None
    rng: Random | None
    # Nodes of a type that the server lacks: left out, or emitted as the editor does.
    unknown: Literal["drop", "keep"]
    # … or refused, all of them at once.
    strict: bool
    # Drop what no output node needs.
    reachable_only: bool
    # Choices that a server keeps outside of object_info, by route.
    remote_choices: Mapping[str, list[Any]] | None
    limits: Limits


class Conversion(NamedTuple):
    """`exposed` are the inputs of the prompt that subgraphs show under names of their own."""

    prompt: Prompt
    warnings: tuple[Warning, ...] = ()
    exposed: tuple[ExposedInput, ...] = ()


def convert(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], **options: Unpack[Options]
) -> Prompt:
    """The prompt as a new dict; the workflow is never modified."""
    prompt, _, _ = _convert(workflow, object_info, options)
    return prompt


def convert_with_report(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], **options: Unpack[Options]
) -> Conversion:
    """Also tells what was left out and why, and what the server is likely to refuse."""
    prompt, scopes, types = _convert(workflow, object_info, options)
    warnings = tuple(warnings_of(prompt, scopes, types))
    return Conversion(prompt, warnings, tuple(exposed_inputs(scopes, prompt)))


def _convert(
    workflow: Mapping[str, Any], object_info: Mapping[str, Any], options: Options
) -> tuple[Prompt, list[Scope], NodeTypes]:
    limits, now = options.get("limits", DEFAULT_LIMITS), options.get("now")
    types = NodeTypes(object_info, options.get("remote_choices"))
    parsed = unique_ids(parse(workflow, limits=limits))
    parsed = expand_group_nodes(parsed, types, limits=limits)
    graphs = {
        key: settle_types(wired) for key, wired in wire_all(parsed, types, limits=limits).items()
    }
    fill = Patterns(graphs, now).fill
    graphs = {
        key: apply_primitives(wired, partial(fill, graph_id=key)) for key, wired in graphs.items()
    }
    scopes = expand(graphs, limits)
    if options.get("strict"):
        refuse_unknown_types(scopes)
    keep_unknown = options.get("unknown") == "keep"
    patterns = Patterns(graphs, now)
    resolver = Resolver(scopes, inline_values=not keep_unknown)
    prompt = emit(scopes, Emission(resolver, patterns, limits, options.get("rng"), keep_unknown))
    if options.get("strict"):
        refuse_missing_inputs(prompt, scopes, types)
    if options.get("reachable_only"):
        prompt = only_reachable(prompt, types)
    return prompt, scopes, types
