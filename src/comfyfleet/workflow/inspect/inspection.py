"""Inspects a workflow or prompt: its values, files, parts and shorthands, and the node types and
packs that it needs. With a server's object_info, it reports the requirements that the server
doesn't meet."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow
from comfyfleet.workflow.conversion import convert_with_report
from comfyfleet.workflow.edit import SHORTHANDS
from comfyfleet.workflow.edit.chains import find_segments
from comfyfleet.workflow.edit.documents import graph_at, graph_paths, nodes_of
from comfyfleet.workflow.edit.input_lookup import closest, read_entry, shown_value
from comfyfleet.workflow.edit.node_modes import Chain, dead_shells
from comfyfleet.workflow.edit.selectors import Canvas
from comfyfleet.workflow.edit.values import choices_of, declared_at, problem_with, takes_several
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.emit import title_of
from comfyfleet.workflow.group_nodes import expand_group_nodes
from comfyfleet.workflow.inspect.inputs_outputs import (
    list_inputs,
    list_outputs,
    named_files,
    shorthands_of,
    widgets_of_values,
)
from comfyfleet.workflow.inspect.node_view import NodeView, nodes_in_prompt, nodes_in_scopes
from comfyfleet.workflow.inspect.results import (
    ChainSummary,
    GroupSummary,
    InspectedInput,
    Inspection,
    LostInput,
    MissingParts,
    MissingType,
    NamedFile,
    NodeRef,
    RefusedValue,
    SubgraphSummary,
    SwitchedOff,
    UsedPack,
    UsedType,
)
from comfyfleet.workflow.model import (
    DEFAULT_LIMITS,
    Limits,
    Mode,
    ObjectInfo,
    Prompt,
    WorkflowGraph,
)
from comfyfleet.workflow.node_behaviours import CUSTOM_COMBO
from comfyfleet.workflow.node_inputs import input_spec
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.parse import parse, parse_groups
from comfyfleet.workflow.subgraphs import GraphScope, expand, unique_ids, wire_all


class Parts(NamedTuple):
    groups: tuple[GroupSummary, ...] = ()
    subgraphs: tuple[SubgraphSummary, ...] = ()
    chains: tuple[ChainSummary, ...] = ()
    switched_off: tuple[SwitchedOff, ...] = ()
    dead_shells: tuple[NodeRef, ...] = ()


def parts_of(
    document: dict[str, Any],
    definitions: Mapping[str, WorkflowGraph],
    scopes: list[GraphScope],
    limits: Limits,
) -> Parts:
    """Returns the parts of a workflow. `definitions` and `scopes` come from the conversion, which
    has turned group nodes into subgraphs.
    """
    return Parts(
        tuple(_groups(document, definitions)),
        tuple(_subgraphs(definitions, scopes)),
        tuple(_chain(chain) for chain in find_segments(document)),
        tuple(_switched_off(scopes, definitions)),
        tuple(
            NodeRef(shell.id, shell.definition, shell.title)
            for shell in dead_shells(document, limits=limits)
        ),
    )


def _groups(
    document: dict[str, Any], definitions: Mapping[str, WorkflowGraph]
) -> Iterator[GroupSummary]:
    for graph_id, path in graph_paths(document).items():
        graph = graph_at(document, path)
        canvas = Canvas(nodes_of(graph))
        for group in parse_groups(graph):
            name = definitions[graph_id].name if graph_id else None
            yield GroupSummary(group.title, len(canvas.inside(group)), name)


def _chain(chain: Chain) -> ChainSummary:
    return ChainSummary(
        chain.name,
        chain.kind,
        tuple(segment.title for segment in chain.segments),
        tuple(segment.title for segment in chain.off),
    )


def _subgraphs(
    definitions: Mapping[str, WorkflowGraph], scopes: list[GraphScope]
) -> Iterator[SubgraphSummary]:
    instances = Counter(scope.wired.graph.id for scope in scopes)
    for key, graph in definitions.items():
        yield SubgraphSummary(
            name=graph.name,
            nodes=len(graph.nodes),
            instances=instances[key],
            inputs=tuple(port.name for port in graph.inputs),
            outputs=tuple(port.name for port in graph.outputs),
        )


def _switched_off(
    scopes: list[GraphScope], definitions: Mapping[str, WorkflowGraph]
) -> Iterator[SwitchedOff]:
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if not node.node.is_inactive:
                continue
            definition = definitions.get(node.definition or "")
            class_type = definition.name if definition else node.node.type
            title = node.node.title or class_type if definition else title_of(node)
            ref = NodeRef(f"{scope.prefix}{node.node.id}", class_type, title)
            yield SwitchedOff(ref, "muted" if node.node.mode == Mode.MUTED else "bypassed")


CORE = "comfy-core"
# Folders from which ComfyUI itself loads node types.
CORE_MODULES = ("nodes", "comfy_extras", "comfy_api_nodes")
CUSTOM_MODULES = "custom_nodes."


def used_types(nodes: Iterable[NodeView], *, server_known: bool) -> tuple[UsedType, ...]:
    """Counts the node types of active nodes, most used first."""
    active = [node for node in nodes if node.is_active]
    counts = Counter(node.ref.class_type for node in active)
    packs: dict[str, str | None] = {}
    known: dict[str, bool] = {}
    for node in active:
        name = node.ref.class_type
        packs[name] = packs.get(name) or pack_of(node)
        known[name] = node.type is not None
    return tuple(
        UsedType(name, count, packs[name], known[name] if server_known else None)
        for name, count in counts.most_common()
    )


def used_packs(nodes: Iterable[NodeView]) -> tuple[UsedPack, ...]:
    """Returns the used packs: ComfyUI's own nodes first, then the other packs by name. Nodes
    without a known pack are ignored."""
    names: dict[str, str] = {}
    versions: dict[str, set[str]] = {}
    types: dict[str, set[str]] = {}
    for node in nodes:
        pack = pack_of(node) if node.is_active else None
        if pack is None:
            continue
        key = pack.lower()  # registry ids and folder names differ in case
        names.setdefault(key, pack)
        types.setdefault(key, set()).add(node.ref.class_type)
        versions.setdefault(key, set()).update(_version(node))
    return tuple(
        UsedPack(names[key], tuple(sorted(versions[key])), tuple(sorted(types[key])))
        for key in sorted(names, key=lambda key: (key != CORE, key))
    )


def pack_of(node: NodeView) -> str | None:
    """Returns the pack that the file names for the node, or else the pack from which the server
    loaded its type."""
    for key in ("cnr_id", "aux_id"):
        value = node.properties.get(key)
        if isinstance(value, str) and value:
            return value
    return _pack_of_module(node.type.pack) if node.type and node.type.pack else None


def _pack_of_module(module: str) -> str:
    if module.startswith(CUSTOM_MODULES):
        return module.removeprefix(CUSTOM_MODULES).partition(".")[0]
    return CORE if module.partition(".")[0] in CORE_MODULES else module


def _version(node: NodeView) -> tuple[str, ...]:
    version = node.properties.get("ver")
    return (version,) if isinstance(version, str) and version else ()


# Maximum number of refused values with suggestions. Finding the closest of thousands of choices
# takes 50 ms per value.
COMPARED_VALUES_MAX = 50


def missing_on_server(
    nodes: Iterable[NodeView], files: Iterable[NamedFile], object_info: ObjectInfo
) -> MissingParts:
    active = [node for node in nodes if node.is_active]
    return MissingParts(
        tuple(_missing_types(active)),
        tuple(_refused_values(active, object_info)),
        tuple(lost for node in active for lost in _lost_inputs(node)),
        tuple(_missing_files(files)),
    )


def _missing_types(nodes: Iterable[NodeView]) -> Iterator[MissingType]:
    refs: dict[str, list[NodeRef]] = {}
    packs: dict[str, str | None] = {}
    for node in nodes:
        if node.type is None:
            name = node.ref.class_type
            refs.setdefault(name, []).append(node.ref)
            packs[name] = packs.get(name) or pack_of(node)
    for name, type_refs in refs.items():
        yield MissingType(name, tuple(type_refs), packs[name])


def _refused_values(nodes: Iterable[NodeView], object_info: ObjectInfo) -> Iterator[RefusedValue]:
    compared = 0
    for node in nodes:
        declared = _declared(node, object_info)
        for name, value in node.values.items():
            problem = _problem(declared.get(name), value)
            if problem is None:
                continue
            compared += 1
            choices = _choices(declared[name]) if compared <= COMPARED_VALUES_MAX else ()
            yield RefusedValue(
                f"{node.ref.id}.{name}", node.ref, value, problem, _closest(value, choices)
            )


def _declared(node: NodeView, object_info: ObjectInfo) -> dict[str, Any]:
    """Returns all declared inputs at once, because the inputs of a growing group are found by
    examining all values."""
    raw = {"class_type": node.ref.class_type, "inputs": node.values}
    entry = read_entry(node.ref.id, raw, object_info)
    declared = entry.declared()
    if node.ref.class_type == CUSTOM_COMBO:
        declared["choice"] = declared_at(entry, "choice")
    return declared


def _problem(declared: Any, value: Any) -> str | None:
    """Describes why the server would refuse a value. Choices are checked here, because the closest
    ones are reported separately."""
    if declared is None:
        return None
    choices = _choices(declared)
    if not choices or takes_several(input_spec("", declared)):
        return problem_with(declared, value)
    return None if value in choices else f"{shown_value(value)} is not among the choices"


def _choices(declared: Any) -> Sequence[Any]:
    return choices_of(input_spec("", declared)) or ()


def _closest(value: Any, choices: Sequence[Any]) -> tuple[str, ...]:
    return tuple(closest(str(value), [str(choice) for choice in choices]))


def _lost_inputs(node: NodeView) -> Iterator[LostInput]:
    if node.type is None:
        return
    current_names = widgets_of_values(node.type, node.values)
    declared = {spec.name for spec in node.type.specs}
    for name in node.saved_widgets:
        if name not in current_names and name not in declared:
            yield LostInput(node.ref, name)


def _missing_files(files: Iterable[NamedFile]) -> Iterator[str]:
    for file in files:
        if file.kind == "input" and file.active and file.present is False:
            yield file.name


SHORTHAND_ORDER = {shorthand.name: index for index, shorthand in enumerate(SHORTHANDS)}
# Warnings of a conversion that an inspection reports in other fields.
REPORTED_ELSEWHERE = ("muted", "bypassed", "unknown_type", "refused_value")


class _Server(NamedTuple):
    """A server's declarations, or None if they are unknown."""

    object_info: Mapping[str, Any] | None
    remote_choices: Mapping[str, list[Any]] | None

    @property
    def types(self) -> NodeTypes:
        return NodeTypes(self.object_info or {}, self.remote_choices)


class _InspectedNodes(NamedTuple):
    nodes: list[NodeView]
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
    """Returns the inputs, outputs and requirements of a file. With an object_info, the result
    contains the requirements that the server doesn't meet.

    Raises InvalidWorkflow or LimitExceeded if the document can't be parsed at all. A document that
    can be parsed but not converted is inspected as far as possible, and a note gives the reason.
    """
    server = _Server(object_info, remote_choices)
    if opened.workflow is not None:
        seen = _inspect_workflow(opened, server, limits)
    else:
        prompt = opened.prompt or {}
        seen = _InspectedNodes(list(nodes_in_prompt(prompt, server.types)), prompt)
    shorthands = shorthands_of(seen.prompt or {}, object_info or {})
    takes = tuple(sorted(list_inputs(seen.nodes, shorthands), key=_rank))
    files = named_files(seen.nodes, (opened.workflow or {}).get("models"))
    return Inspection(
        file_kind=opened.kind,
        form="prompt" if opened.workflow is None else "workflow",
        nodes=sum(node.is_active for node in seen.nodes),
        takes=takes,
        makes=tuple(list_outputs(seen.nodes)),
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


def _rank(candidate: InspectedInput) -> int:
    """Returns a sort key. Inputs with a shorthand come first, in the order of the shorthands,
    because most users set no others."""
    return (
        SHORTHAND_ORDER[candidate.shorthands[0]] if candidate.shorthands else len(SHORTHAND_ORDER)
    )


def _inspect_workflow(opened: Opened, server: _Server, limits: Limits) -> _InspectedNodes:
    types = server.types
    parsed = expand_group_nodes(unique_ids(parse(opened.workflow, limits=limits)), types)
    scopes = expand(wire_all(parsed, types, limits=limits), limits)
    prompt, notes = _prompt_of(opened, server, limits)
    return _InspectedNodes(
        list(nodes_in_scopes(scopes, prompt, parsed.group_nodes)),
        prompt,
        parts_of(opened.workflow or {}, parsed.definitions, scopes, limits),
        notes,
    )


def _prompt_of(
    opened: Opened, server: _Server, limits: Limits
) -> tuple[Prompt | None, tuple[str, ...]]:
    """Returns the prompt, and notes about its conversion. Without a server, this is the prompt that
    was saved with the workflow, which provides the names of values."""
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
        return None, (f"The workflow can't be converted: {error.message}",)
    messages = [
        warning.message for warning in converted.warnings if warning.code not in REPORTED_ELSEWHERE
    ]
    return converted.prompt, tuple(messages)
