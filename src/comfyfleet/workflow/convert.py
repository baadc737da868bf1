"""A workflow becomes a prompt exactly as the editor's own `graphToPrompt()` would make it."""

from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, Literal

from comfyfleet.workflow.emit import Emission, emit
from comfyfleet.workflow.groupnodes import expand_group_nodes
from comfyfleet.workflow.ids import unique_ids
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.naming import filled
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.primitives import apply_primitives
from comfyfleet.workflow.resolve import Resolver
from comfyfleet.workflow.scopes import expand
from comfyfleet.workflow.slottypes import settle_types
from comfyfleet.workflow.subgraphs import wire_all
from comfyfleet.workflow.texts import Random


def convert(
    workflow: Mapping[str, Any],
    object_info: Mapping[str, Any],
    *,
    now: datetime | None = None,
    rng: Random | None = None,
    unknown: Literal["drop", "keep"] = "drop",
    remote_choices: Mapping[str, list[Any]] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Prompt:
    types = NodeTypes(object_info, remote_choices)
    parsed = expand_group_nodes(unique_ids(parse(workflow, limits=limits)), types)
    graphs = {
        key: settle_types(wired) for key, wired in wire_all(parsed, types, limits=limits).items()
    }
    graphs = {
        key: apply_primitives(wired, partial(filled, graphs=graphs, graph_id=key, now=now))
        for key, wired in graphs.items()
    }
    scopes = expand(graphs, limits)
    emission = Emission(Resolver(scopes), graphs, limits, now, rng, unknown == "keep")
    return emit(scopes, emission)
