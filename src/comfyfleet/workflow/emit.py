"""Emits every executed node as an entry of the prompt, in topological order and with %Node.widget%
patterns filled in. Other nodes are left out."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidWorkflow, LimitExceeded
from comfyfleet.workflow.model import CharacterBudget, Limits, Prompt, join_places
from comfyfleet.workflow.node_behaviours import BEHAVIOURS, CUSTOM_COMBO
from comfyfleet.workflow.node_inputs import ABSENT, Widget
from comfyfleet.workflow.object_info import NodeTypes
from comfyfleet.workflow.resolve import HostValue, InputSource, Resolver
from comfyfleet.workflow.subgraphs import GraphScope
from comfyfleet.workflow.text_patterns import (
    Random,
    choice_budget,
    choose,
    fill_budget,
    fill_patterns,
    javascript_text,
)
from comfyfleet.workflow.widget_values import option_index
from comfyfleet.workflow.wire import WiredGraph, WiredNode

SEARCH_NAME = "Node name for S&R"


class Budgets:
    """The amounts that one conversion may still read and produce. They are limited because strings
    can refer to each other and subgraphs can repeat them.
    """

    def __init__(self, limits: Limits) -> None:
        self.choices = choice_budget(limits)
        self.filled = fill_budget(limits)
        self.prompt = CharacterBudget(limits.text_characters_max, "prompts")
        self._nodes_left = limits.nodes_max

    def take_nodes(self, nodes: Iterable[WiredNode]) -> Iterator[WiredNode]:
        """Counts the nodes that are searched for names in patterns. Each graph also searches the
        nodes of its subgraphs."""
        for node in nodes:
            self._nodes_left -= 1
            if self._nodes_left < 0:
                raise LimitExceeded("%Node.widget% patterns occur in too many subgraphs")
            yield node


class Patterns:
    """Fills in patterns with values from a graph's nodes and from its subgraphs."""

    def __init__(
        self, graphs: Mapping[str, WiredGraph], now: datetime | None, budgets: "Budgets"
    ) -> None:
        self._graphs = graphs
        self._now = now
        self._budgets = budgets
        self._nodes: dict[str, dict[str | None, WiredNode]] = {}

    def fill(self, text: str, graph_id: str = "") -> str:
        if "%" not in text:
            return text
        if graph_id not in self._nodes:
            nodes_in = self._budgets.take_nodes(_inner_first(self._graphs, graph_id))
            self._nodes[graph_id] = _by_name(list(nodes_in))
        nodes = self._nodes[graph_id]

        def find(node_name: str, widget_name: str) -> Any:
            node = nodes.get(node_name)
            return ABSENT if node is None else node.values.get(widget_name, ABSENT)

        return fill_patterns(text, find, self._now, ABSENT, budget=self._budgets.filled)


def _by_name(nodes: list[WiredNode]) -> dict[str | None, WiredNode]:
    """Indexes nodes by name. Names for search and replace take precedence over titles, and the
    first node with a name counts."""
    nodes_by_name: dict[str | None, WiredNode] = {}
    for name_of in (_search_name, title_of):
        for node in nodes:
            nodes_by_name.setdefault(name_of(node), node)
    return nodes_by_name


def title_of(node: WiredNode) -> str:
    return node.node.title or (node.type.display_name if node.type else node.node.type)


def _inner_first(graphs: Mapping[str, WiredGraph], graph_id: str) -> Iterator[WiredNode]:
    seen = {graph_id}
    stack = [iter(graphs[graph_id].nodes.values())]
    held: list[WiredNode] = []
    while stack:
        node = next(stack[-1], None)
        if node is None:
            stack.pop()
            if held:
                yield held.pop()
        elif node.definition is not None and node.definition not in seen:
            seen.add(node.definition)
            held.append(node)
            stack.append(iter(graphs[node.definition].nodes.values()))
        else:
            yield node


def _search_name(node: WiredNode) -> str | None:
    saved = node.node.properties.get(SEARCH_NAME)
    if saved is not None or node.type is None:
        return saved if isinstance(saved, str) else None
    behaviour = BEHAVIOURS.get(node.type.name)
    return None if behaviour and behaviour.saves_files else node.type.name


FILE_NAME_INPUT = "filename_prefix"
# The linked inputs of each entry of a prompt, with the entries that they are linked to.
Links = dict[str, list[tuple[str, str]]]
PACK_KEYS = frozenset(("cnr_id", "aux_id", "ver"))


class Emission(NamedTuple):
    """The parameters for emitting a graph, except for the graph itself."""

    resolver: Resolver
    patterns: Patterns
    limits: Limits
    budgets: Budgets
    rng: Random | None
    keep_unknown: bool


def emit(scopes: list[GraphScope], emission: Emission) -> Prompt:
    prompt: Prompt = {}
    links: Links = {}
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if node.is_executed or _is_kept(node, emission):
                key = scope.prefix + node.node.id
                emission.budgets.prompt.take(len(key))
                links[key] = []
                prompt[key] = _entry(scope, node, emission, links[key])
    return in_topological_order(prompt, links)


def _is_kept(node: WiredNode, emission: Emission) -> bool:
    """Checks whether to emit a node although the server doesn't know its type, which is only done
    on request. Returns False for nodes of known types."""
    if not emission.keep_unknown or node.type is not None:
        return False
    return not node.is_virtual and not node.node.is_inactive


def _entry(
    scope: GraphScope, node: WiredNode, emission: Emission, links: list[tuple[str, str]]
) -> dict[str, Any]:
    inputs = _widget_inputs(scope, node, emission)
    for index, slot in enumerate(node.inputs):
        link = slot.link
        if link is None:
            continue
        origin = scope.wired.nodes.get(link.origin)
        if origin is not None and origin.is_executed:  # the usual case: the link needs no resolving
            origin_id = scope.prefix + link.origin
            inputs[slot.name] = [origin_id, link.origin_slot]
            links.append((slot.name, origin_id))
            continue
        resolved = emission.resolver.resolve(scope, node, index)
        if isinstance(resolved, InputSource):
            inputs[slot.name] = [resolved.node_id, resolved.slot]
            links.append((slot.name, resolved.node_id))
        elif isinstance(resolved, HostValue):
            if resolved.value is ABSENT:
                inputs.pop(slot.name, None)
            else:
                emission.budgets.prompt.take_value(resolved.value)
                inputs[slot.name] = _wrapped(
                    _checked(resolved.value, scope, node, slot.name, emission)
                )
    if node.node.type == CUSTOM_COMBO and node.type is not None:
        _set_option_index(node, inputs)
    entry: dict[str, Any] = {"inputs": inputs}
    if node.type is not None:
        entry["class_type"] = node.type.name
    entry["_meta"] = _meta(node)
    emission.budgets.prompt.take(sum(map(len, entry["_meta"].values())))
    return entry


def _meta(node: WiredNode) -> dict[str, str]:
    meta = {"title": node.node.title or title_of(node)}
    properties = node.node.properties
    if not PACK_KEYS.isdisjoint(properties):
        for key in PACK_KEYS:
            value = properties.get(key)
            if value and isinstance(value, str):
                meta[key] = value
    return meta


def _widget_inputs(scope: GraphScope, node: WiredNode, emission: Emission) -> dict[str, Any]:
    if node.type is None:
        emission.budgets.prompt.take_value(node.node.values)
        return dict(_unknown_widgets(node))
    inputs: dict[str, Any] = {}
    values = node.values
    for widget in node.widgets:
        if not widget.sent:
            continue
        value = values[widget.name]
        if isinstance(value, str):
            value = _filled_text(value, widget, node, emission)
            emission.budgets.prompt.take(len(value))
            if not value.isascii():
                value = _checked(value, scope, node, widget.name, emission)
        elif not isinstance(value, int) or widget.kind in ("multiline", "curve"):
            value = _filled_value(value, scope, node, widget, emission)
        if value is not ABSENT:
            inputs[widget.name] = value
    return inputs


def _filled_value(
    value: Any, scope: GraphScope, node: WiredNode, widget: Widget, emission: Emission
) -> Any:
    if value is ABSENT:
        return value
    emission.budgets.prompt.take_value(value)
    if widget.kind == "multiline":
        return "" if value is None else javascript_text(value)
    value = _checked(value, scope, node, widget.name, emission)
    if widget.kind == "curve" and value is not None:
        return {"__type__": "CURVE", "__value__": value}
    return _wrapped(value)


def _filled_text(value: str, widget: Widget, node: WiredNode, emission: Emission) -> str:
    if widget.options.get("dynamicPrompts") is True and widget.input_type == "STRING":
        return choose(value, emission.rng, limits=emission.limits, budget=emission.budgets.choices)
    if widget.name == FILE_NAME_INPUT and "%" in value:
        behaviour = BEHAVIOURS.get(node.node.type)
        if behaviour and behaviour.saves_files:
            return emission.patterns.fill(value)
    return value


def _unknown_widgets(node: WiredNode) -> Iterator[tuple[str, Any]]:
    """Yields the values of a node that the editor doesn't know, under the names that the editor
    makes up for them."""
    values = node.node.values
    for index, value in enumerate(values if isinstance(values, list) else ()):
        name = "UNKNOWN" if index == 0 else f"UNKNOWN_{index}"
        if isinstance(value, dict | list) or value is None:
            value = javascript_json(value)
        yield name, value


def javascript_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _wrapped(value: Any) -> Any:
    """Wraps a list, which could be mistaken for a link. The server unwraps it."""
    return {"__value__": value} if isinstance(value, list) else value


def _set_option_index(node: WiredNode, inputs: dict[str, Any]) -> None:
    choice = inputs.get("choice")
    if not isinstance(choice, list):
        inputs["index"] = option_index(node.values, choice)


def _checked(value: Any, scope: GraphScope, node: WiredNode, name: str, emission: Emission) -> Any:
    """Returns a copy of the value that is valid in JSON: numbers are finite, and strings can be
    encoded."""
    if isinstance(value, int) or value is None or (isinstance(value, str) and value.isascii()):
        return value
    try:
        return _json_value(value, emission.limits.value_depth_max)
    except ValueError as error:
        where = join_places(scope.place_of(node), f"input {name}")
        raise InvalidWorkflow(f"{where}: {error}") from None


def _refuse_half_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text contains half a character (a lone surrogate)") from None


def _json_value(value: Any, depth_left: int) -> Any:
    if isinstance(value, str):
        if not value.isascii():
            _refuse_half_characters(value)
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a valid JSON number")
    if depth_left == 0:
        raise ValueError("the value is nested too deeply")
    if isinstance(value, list):
        return [_json_value(item, depth_left - 1) for item in value]
    if isinstance(value, dict):
        return {key: _json_value(item, depth_left - 1) for key, item in value.items()}
    return value


def in_topological_order(prompt: Prompt, links: Links) -> Prompt:
    """Sorts entries after the entries that feed them. Entries that are in a cycle or depend on one
    come last, in their original order.

    An input that is linked to a missing node is removed.
    """
    waiting = dict.fromkeys(prompt, 0)
    feeds: dict[str, list[str]] = {key: [] for key in prompt}
    for key, inputs in links.items():
        for name, origin in inputs:
            if origin in feeds:
                feeds[origin].append(key)
                waiting[key] += 1
            else:
                del prompt[key]["inputs"][name]
    ready = [key for key, count in waiting.items() if count == 0]
    for key in ready:
        for fed in feeds[key]:
            waiting[fed] -= 1
            if waiting[fed] == 0:
                ready.append(fed)
    ordered = {key: prompt[key] for key in ready}
    if len(ordered) < len(prompt):
        ordered.update((key, entry) for key, entry in prompt.items() if key not in ordered)
    return ordered


def only_reachable(prompt: Prompt, types: NodeTypes) -> Prompt:
    reached = needed_by_outputs(prompt, types)
    if not reached:
        raise InvalidWorkflow("the workflow has no active output node, so it would produce nothing")
    return {key: entry for key, entry in prompt.items() if key in reached}


def needed_by_outputs(prompt: Prompt, types: NodeTypes) -> set[str]:
    """Returns the ids of the output nodes and of all nodes that feed them."""
    reached = {key for key, entry in prompt.items() if _is_output(entry.get("class_type"), types)}
    pending = list(reached)
    while pending:
        for value in prompt[pending.pop()]["inputs"].values():
            if isinstance(value, list) and value[0] not in reached:
                reached.add(value[0])
                pending.append(value[0])
    return reached


def _is_output(class_type: str | None, types: NodeTypes) -> bool:
    node_type = types.get(class_type) if class_type else None
    return node_type is not None and node_type.is_output
