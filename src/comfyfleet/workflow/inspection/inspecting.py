"""Looks at a document, and at what a server would make of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.convert import convert_with_report
from comfyfleet.workflow.groupnodes import expand_group_nodes
from comfyfleet.workflow.ids import unique_ids
from comfyfleet.workflow.inspection.files import named_files
from comfyfleet.workflow.inspection.makes import made
from comfyfleet.workflow.inspection.missing import missing_on_server
from comfyfleet.workflow.inspection.model import Inspection, Taken
from comfyfleet.workflow.inspection.parts import Parts, parts_of
from comfyfleet.workflow.inspection.requirements import used_packs, used_types
from comfyfleet.workflow.inspection.shorthands import shorthands_of
from comfyfleet.workflow.inspection.takes import taken
from comfyfleet.workflow.inspection.view import SeenNode, seen_in_prompt, seen_in_scopes
from comfyfleet.workflow.limits import DEFAULT_LIMITS, Limits
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.nodetypes import NodeTypes
from comfyfleet.workflow.parse import parse
from comfyfleet.workflow.scopes import expand
from comfyfleet.workflow.setting import SHORTHANDS
from comfyfleet.workflow.subgraphs import wire_all

SHORTHAND_ORDER = {each.name: index for index, each in enumerate(SHORTHANDS)}
# Warnings of a conversion that an inspection says in places of their own.
TOLD_ELSEWHERE = ("muted", "bypassed", "unknown_type", "refused_value")


class _Server(NamedTuple):
    """What is known of a server, if anything is."""

    object_info: Mapping[str, Any] | None
    remote_choices: Mapping[str, list[Any]] | None

    @property
    def types(self) -> NodeTypes:
        return NodeTypes(self.object_info or {}, self.remote_choices)


class _Seen(NamedTuple):
    nodes: list[SeenNode]
    prompt: Mapping[str, Any] | None
    parts: Parts = Parts()
    notes: tuple[str, ...] = ()


def inspect(
    opened: Opened,
    object_info: Mapping[str, Any] | None = None,
    *,
    remote_choices: Mapping[str, list[Any]] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Inspection:
    """What a file takes, makes and needs; with an object_info also what that server lacks.

    Raises InvalidWorkflow or LimitExceeded for a document that can't be read at all. One that can be
    read and not be converted is inspected as far as that goes, and a note says why.
    """
    server = _Server(object_info, remote_choices)
    if opened.workflow is not None:
        seen = _workflow_seen(opened, server, limits)
    else:
        prompt = opened.prompt or {}
        seen = _Seen(list(seen_in_prompt(prompt, server.types)), prompt)
    shorthands = shorthands_of(seen.prompt or {}, object_info or {})
    takes = tuple(sorted(taken(seen.nodes, shorthands), key=_rank))
    files = named_files(seen.nodes, (opened.workflow or {}).get("models"))
    return Inspection(
        file_kind=opened.kind,
        form="prompt" if opened.workflow is None else "workflow",
        nodes=sum(node.is_active for node in seen.nodes),
        takes=takes,
        makes=tuple(made(seen.nodes)),
        files=files,
        node_types=used_types(seen.nodes, server_known=object_info is not None),
        packs=used_packs(seen.nodes),
        groups=seen.parts.groups,
        subgraphs=seen.parts.subgraphs,
        chains=seen.parts.chains,
        switched_off=seen.parts.switched_off,
        dead_shells=seen.parts.dead_shells,
        missing=None if object_info is None else missing_on_server(seen.nodes, files, object_info),
        notes=(*opened.notes, *seen.notes),
    )


def _rank(taken: Taken) -> int:
    """What has a shorthand comes first, in the order of the shorthands: most people set no more."""
    return SHORTHAND_ORDER[taken.shorthands[0]] if taken.shorthands else len(SHORTHAND_ORDER)


def _workflow_seen(opened: Opened, server: _Server, limits: Limits) -> _Seen:
    types = server.types
    parsed = expand_group_nodes(unique_ids(parse(opened.workflow, limits=limits)), types)
    scopes = expand(wire_all(parsed, types, limits=limits), limits)
    prompt, notes = _prompt_of(opened, server, limits)
    return _Seen(
        list(seen_in_scopes(scopes, prompt, parsed.group_nodes)),
        prompt,
        parts_of(opened.workflow or {}, parsed.definitions, scopes, limits),
        notes,
    )


def _prompt_of(
    opened: Opened, server: _Server, limits: Limits
) -> tuple[Prompt | None, tuple[str, ...]]:
    """Without a server, a prompt that was saved beside the workflow knows the names of its values."""
    if opened.workflow is None or server.object_info is None:
        return opened.prompt, ()
    try:
        converted = convert_with_report(
            opened.workflow,
            server.object_info,
            remote_choices=server.remote_choices,
            limits=limits,
        )
    except InvalidWorkflow as error:
        return None, (f"It can't be converted: {error.message}",)
    told = [each.message for each in converted.warnings if each.code not in TOLD_ELSEWHERE]
    return converted.prompt, tuple(told)
