"""Pass 6: every node that is executed becomes an entry of the prompt, in topological order.

All widget values first, then links over them; an input that leads to a node that is not emitted is
left out.
"""

import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidWorkflow
from comfyfleet.workflow.behaviours import BEHAVIOURS, CUSTOM_COMBO
from comfyfleet.workflow.limits import Limits
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.naming import Patterns, title_of
from comfyfleet.workflow.places import join_places
from comfyfleet.workflow.resolve import HostValue, Resolver, Source
from comfyfleet.workflow.scopes import Scope
from comfyfleet.workflow.texts import Random, choose, javascript_text
from comfyfleet.workflow.values import option_index
from comfyfleet.workflow.widgettypes import ABSENT, Widget
from comfyfleet.workflow.wiring import WiredNode

FILE_NAME_INPUT = "filename_prefix"
# For each entry of a prompt: its linked inputs, and the entries that those lead to.
Links = dict[str, list[tuple[str, str]]]
PACK_KEYS = frozenset(("cnr_id", "aux_id", "ver"))


class Emission(NamedTuple):
    """What emitting needs beside the graph."""

    resolver: Resolver
    patterns: Patterns
    limits: Limits
    rng: Random | None
    keep_unknown: bool


def emit(scopes: list[Scope], emission: Emission) -> Prompt:
    prompt: Prompt = {}
    links: Links = {}
    for scope in scopes:
        for node in scope.wired.nodes.values():
            if node.is_executed or _is_kept(node, emission):
                key = scope.prefix + node.node.id
                links[key] = []
                prompt[key] = _entry(scope, node, emission, links[key])
    return in_topological_order(prompt, links)


def _is_kept(node: WiredNode, emission: Emission) -> bool:
    """Nodes that the server doesn't know are emitted only on request."""
    if not emission.keep_unknown or node.type is not None:
        return False
    return not node.is_virtual and not node.node.is_inactive


def _entry(
    scope: Scope, node: WiredNode, emission: Emission, links: list[tuple[str, str]]
) -> dict[str, Any]:
    inputs = _widget_inputs(scope, node, emission)
    for index, slot in enumerate(node.inputs):
        link = slot.link
        if link is None:
            continue
        origin = scope.wired.nodes.get(link.origin)
        if origin is not None and origin.is_executed:  # most links end at once
            origin_id = scope.prefix + link.origin
            inputs[slot.name] = [origin_id, link.origin_slot]
            links.append((slot.name, origin_id))
            continue
        resolved = emission.resolver.resolve(scope, node, index)
        if isinstance(resolved, Source):
            inputs[slot.name] = [resolved.node_id, resolved.slot]
            links.append((slot.name, resolved.node_id))
        elif isinstance(resolved, HostValue):
            if resolved.value is ABSENT:
                inputs.pop(slot.name, None)
            else:
                inputs[slot.name] = _wrapped(
                    _checked(resolved.value, scope, node, slot.name, emission)
                )
    if node.node.type == CUSTOM_COMBO and node.type is not None:
        _set_option_index(node, inputs)
    entry: dict[str, Any] = {"inputs": inputs}
    if node.type is not None:
        entry["class_type"] = node.type.name
    entry["_meta"] = _meta(node)
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


def _widget_inputs(scope: Scope, node: WiredNode, emission: Emission) -> dict[str, Any]:
    if node.type is None:
        return dict(_unknown_widgets(node))
    inputs: dict[str, Any] = {}
    values = node.values
    for widget in node.widgets:
        if not widget.sent:
            continue
        value = values[widget.name]
        if isinstance(value, str):
            value = _worked_text(value, widget, node, emission)
            if not value.isascii():
                value = _checked(value, scope, node, widget.name, emission)
        elif not isinstance(value, int) or widget.kind in ("multiline", "curve"):
            value = _worked_value(value, scope, node, widget, emission)
        if value is not ABSENT:
            inputs[widget.name] = value
    return inputs


def _worked_value(
    value: Any, scope: Scope, node: WiredNode, widget: Widget, emission: Emission
) -> Any:
    if value is ABSENT:
        return value
    if widget.kind == "multiline":
        return "" if value is None else javascript_text(value)
    value = _checked(value, scope, node, widget.name, emission)
    if widget.kind == "curve" and value is not None:
        return {"__type__": "CURVE", "__value__": value}
    return _wrapped(value)


def _worked_text(value: str, widget: Widget, node: WiredNode, emission: Emission) -> str:
    if widget.options.get("dynamicPrompts") is True and widget.input_type == "STRING":
        return choose(value, emission.rng, limits=emission.limits)
    if widget.name == FILE_NAME_INPUT and "%" in value:
        behaviour = BEHAVIOURS.get(node.node.type)
        if behaviour and behaviour.saves_files:
            return emission.patterns.fill(value)
    return value


def _unknown_widgets(node: WiredNode) -> Iterator[tuple[str, Any]]:
    """The editor shows the values of a node that it doesn't know under names of its own."""
    values = node.node.values
    for index, value in enumerate(values if isinstance(values, list) else ()):
        name = "UNKNOWN" if index == 0 else f"UNKNOWN_{index}"
        if isinstance(value, dict | list) or value is None:
            value = javascript_json(value)
        yield name, value


def javascript_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _wrapped(value: Any) -> Any:
    """A list would be taken for a link, so lists are wrapped; the server unwraps them."""
    return {"__value__": value} if isinstance(value, list) else value


def _set_option_index(node: WiredNode, inputs: dict[str, Any]) -> None:
    choice = inputs.get("choice")
    if not isinstance(choice, list):
        inputs["index"] = option_index(node.values, choice)


def _checked(value: Any, scope: Scope, node: WiredNode, name: str, emission: Emission) -> Any:
    """The value as it may stand in JSON: a copy of its own, finite, and text that can be encoded."""
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
        raise ValueError("the text holds half a character (a lone surrogate)") from None


def _json_value(value: Any, depth_left: int) -> Any:
    if isinstance(value, str):
        if not value.isascii():
            _refuse_half_characters(value)
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number that JSON knows")
    if depth_left == 0:
        raise ValueError("the value is nested too deeply")
    if isinstance(value, list):
        return [_json_value(item, depth_left - 1) for item in value]
    if isinstance(value, dict):
        return {key: _json_value(item, depth_left - 1) for key, item in value.items()}
    return value


def in_topological_order(prompt: Prompt, links: Links) -> Prompt:
    """Each entry after those that feed it; entries of a cycle stay in the order they came. An input
    that leads to a node which is not there is taken out."""
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
