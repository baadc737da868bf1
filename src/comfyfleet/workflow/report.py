"""Warnings about a conversion, and the node types that a server lacks."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow, UnknownNodeTypes
from comfyfleet.workflow.edit import problem_with
from comfyfleet.workflow.emit import needed_by_outputs
from comfyfleet.workflow.model import Mode, Prompt, join_places
from comfyfleet.workflow.node_behaviours import CUSTOM_COMBO
from comfyfleet.workflow.node_inputs import LOADING, InputSpec
from comfyfleet.workflow.object_info import NodeType, NodeTypes
from comfyfleet.workflow.resolve import is_inlined
from comfyfleet.workflow.subgraphs import GraphScope
from comfyfleet.workflow.wire import WiredNode

PACK_PROPERTIES = ("cnr_id", "aux_id")
# The type of a node that is an instance of a subgraph: the subgraph's id.
SUBGRAPH_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
REFUSED_VALUES_MAX = 100


class Warning(NamedTuple):
    """A warning about a conversion. `code` is stable and intended for programs. `message` is
    intended for people and includes the location."""

    code: str
    message: str
    node_id: str
    input: str = ""


class UnknownNode(NamedTuple):
    type: str
    node_id: str
    title: str
    pack: str


def warnings_of(prompt: Prompt, scopes: list[GraphScope], types: NodeTypes) -> Iterator[Warning]:
    reported: set[tuple[str, str]] = set()
    for scope in scopes:
        for node in scope.wired.nodes.values():
            for warning in _node_warnings(scope, node, prompt):
                reported.add((warning.node_id, warning.input))
                yield warning
    missing = missing_inputs(prompt, scopes, types)
    yield from (warning for warning in missing if (warning.node_id, warning.input) not in reported)
    yield from _refused_values(prompt, scopes, types)


def refuse_missing_inputs(prompt: Prompt, scopes: list[GraphScope], types: NodeTypes) -> None:
    missing = [warning.message for warning in missing_inputs(prompt, scopes, types)]
    if missing:
        raise InvalidWorkflow("\n".join(missing), problems=missing)


def missing_inputs(prompt: Prompt, scopes: list[GraphScope], types: NodeTypes) -> Iterator[Warning]:
    """Yields warnings about inputs that need a link but have none.

    Only nodes that an output node needs are checked, because the server ignores all others.
    """
    needed = needed_by_outputs(prompt, types)
    for scope in scopes:
        for node in scope.wired.nodes.values():
            key = scope.prefix + node.node.id
            if key not in needed or node.type is None:
                continue
            for name in node.type.required_sockets:
                if name not in prompt[key]["inputs"]:
                    where = join_places(scope.place_of(node), f"input {name}")
                    message = f"{where} is required, but it isn't connected"
                    yield Warning("missing_input", message, key, name)


def refuse_unknown_types(scopes: list[GraphScope]) -> None:
    unknown = list(unknown_nodes(scopes))
    if not unknown:
        return
    by_type: dict[str, list[UnknownNode]] = {}
    for node in unknown:
        by_type.setdefault(node.type, []).append(node)
    lines = [f"  {name}: {_places(nodes)}{_pack(nodes)}" for name, nodes in sorted(by_type.items())]
    kinds = "1 node type" if len(by_type) == 1 else f"{len(by_type)} node types"
    raise UnknownNodeTypes(
        f"the server lacks {kinds} that the workflow needs:\n" + "\n".join(lines),
        nodes=[node._asdict() for node in unknown],
    )


def unknown_nodes(scopes: list[GraphScope]) -> Iterator[UnknownNode]:
    """Yields active nodes of a type that neither the server nor the editor knows."""
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if _is_lacking(node):
                key = scope.prefix + node.node.id
                yield UnknownNode(node.node.type, key, node.node.title, pack_of(node))


def _is_lacking(node: WiredNode) -> bool:
    inactive = node.is_virtual or node.node.is_inactive or is_inlined(node)
    return node.type is None and not inactive


def pack_of(node: WiredNode) -> str:
    """Returns the node pack that the file names for a node, or an empty string."""
    for key in PACK_PROPERTIES:
        value = node.node.properties.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def _places(nodes: list[UnknownNode]) -> str:
    return ", ".join(
        f'node {node.node_id} "{node.title}"' if node.title else f"node {node.node_id}"
        for node in nodes
    )


def _pack(nodes: list[UnknownNode]) -> str:
    packs = sorted({node.pack for node in nodes if node.pack})
    return f" (node pack {', '.join(packs)})" if packs else ""


def _node_warnings(scope: GraphScope, node: WiredNode, prompt: Prompt) -> Iterator[Warning]:
    key, place = scope.prefix + node.node.id, scope.place_of(node)
    if node.node.is_inactive:
        state = "muted" if node.node.mode == Mode.MUTED else "bypassed"
        yield Warning(state, f"{place} is left out: {state}", key)
        return
    if node.is_virtual:
        return
    if node.type is None:
        yield _unknown_type(node, place, key, is_sent=key in prompt)
        return
    yield from _value_count(node, key, place)
    yield from _lost_inputs(node, key, place)
    yield from _only_in_editor(node, key, place)


def _unknown_type(node: WiredNode, place: str, key: str, *, is_sent: bool) -> Warning:
    if is_inlined(node) and not is_sent:
        message = f"{place}: the server has no such node type; its value is written to the inputs that it feeds"
        return Warning("inlined", message, key)
    verb = "is emitted without a class" if is_sent else "is left out"
    if SUBGRAPH_ID.fullmatch(node.node.type):
        message = f"{place} {verb}: it is an instance of a subgraph that the file doesn't have"
        return Warning("missing_subgraph", message, key)
    pack = pack_of(node)
    hint = f"; it comes with the node pack {pack}" if pack else ""
    message = f"{place} {verb}: the server has no such node type{hint}"
    return Warning("unknown_type", message, key)


def _value_count(node: WiredNode, key: str, place: str) -> Iterator[Warning]:
    """Warns if values may be assigned to widgets other than the ones that they were saved from."""
    saved = node.node.values
    if not isinstance(saved, list) or node.value_slots in (0, len(saved)):
        return
    more = "more" if len(saved) > node.value_slots else "fewer"
    values = "1 value" if len(saved) == 1 else f"{len(saved)} values"
    yield Warning(
        "value_count",
        f"{place} was saved with {values}, {more} than the {node.value_slots} that its "
        "class has now; they are read in order, so some may end up in the wrong widget",
        key,
    )


def _lost_inputs(node: WiredNode, key: str, place: str) -> Iterator[Warning]:
    """Warns about inputs that were linked when the file was saved, and have lost their link or
    their declaration."""
    names = {slot.name for slot in node.inputs}
    declared = node.type.slots if node.type else {}
    linked = {slot.link.id for slot in node.inputs if slot.link is not None}
    for slot in node.node.inputs:
        if slot.link is None:
            continue
        where = join_places(place, f"input {slot.name}")
        if slot.link not in linked:
            reason = "its link was lost" if slot.name in names else "its class lacks this input now"
            yield Warning("lost_link", f"{where}: {reason}", key, slot.name)
        elif slot.name not in declared and "." not in slot.name:
            message = f"{where} is not an input of its class; the link is still sent"
            yield Warning("unknown_input", message, key, slot.name)


def _only_in_editor(node: WiredNode, key: str, place: str) -> Iterator[Warning]:
    for widget in node.widgets:
        where = join_places(place, f"input {widget.name}")
        if widget.kind == "remote" and node.values.get(widget.name) == LOADING:
            message = f"{where}: its choices are unknown, because their server was not queried"
            yield Warning("unknown_choices", message, key, widget.name)
        if widget.kind == "view" and widget.sent and widget.input_type in ("LOAD_3D", "WEBCAM"):
            message = f"{where}: only the editor can render it; the server may refuse the node"
            yield Warning("needs_editor", message, key, widget.name)


def _refused_values(
    prompt: Prompt, scopes: list[GraphScope], types: NodeTypes
) -> Iterator[Warning]:
    """Warns about values that the server would refuse. The number is limited, because finding the
    closest choices is slow."""
    nodes = {
        scope.prefix + key: (scope, node)
        for scope in scopes
        for key, node in scope.wired.nodes.items()
    }
    count = 0
    for key, entry in prompt.items():
        node_type = types.get(entry.get("class_type", ""))
        # the choices of this node are its own widgets
        if node_type is None or node_type.name == CUSTOM_COMBO:
            continue
        for spec, problem in _problems(node_type, entry["inputs"]):
            count += 1
            if count > REFUSED_VALUES_MAX:
                yield Warning("refused_value", "the server would refuse further values", key)
                return
            where = join_places(nodes[key][0].place_of(nodes[key][1]), f"input {spec.name}")
            yield Warning("refused_value", f"{where}: {problem}", key, spec.name)


def _problems(node_type: NodeType, inputs: dict[str, Any]) -> Iterator[tuple[InputSpec, str]]:
    for spec in node_type.specs:
        if spec.name in inputs and not isinstance(inputs[spec.name], list):
            problem = problem_with(_declared(spec), inputs[spec.name])
            if problem:
                yield spec, problem


def _declared(spec: InputSpec) -> list[Any]:
    return [spec.type if spec.choices is None else spec.choices, spec.options]
