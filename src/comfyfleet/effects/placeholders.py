"""Texts that stand in a document for values. Pure.

A placeholder is found among the document's own values only, before any value of a user is near it,
and all are replaced at once: what a user wrote is never looked at. Until then a mark stands in its
place that survives the conversion, in which `{name}` would be read as a choice of words.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from comfyfleet.kernel.errors import LimitExceeded
from comfyfleet.workflow.setting.entries import as_link

VALUE_DEPTH_MAX = 100
_MARK = re.compile("\ue000comfyfleet-([0-9]+)\ue001")
Prompt = Mapping[str, Mapping[str, Any]]


def mark(number: int) -> str:
    """Of characters for private use, which nobody types."""
    return f"\ue000comfyfleet-{number}\ue001"


def marked_prompt(prompt: Prompt, placeholders: Sequence[str]) -> dict[str, Any]:
    """Only values of inputs: class names and ids stay, whatever the placeholder is."""
    return {
        node_id: {**node, "inputs": _inputs_mapped(node, _marker(placeholders))}
        for node_id, node in prompt.items()
    }


def marked_workflow(workflow: Mapping[str, Any], placeholders: Sequence[str]) -> dict[str, Any]:
    """Only saved values, those inside of subgraphs too."""
    marked = _in_saved_values(workflow, _marker(placeholders), VALUE_DEPTH_MAX)
    return dict(marked)


def places_of(prompt: Prompt, number: int) -> list[tuple[str, str, bool]]:
    """Node, input, and whether the input is nothing but the mark; in the order of the prompt."""
    wanted = mark(number)
    found = []
    for node_id, node in prompt.items():
        for name, value in node.get("inputs", {}).items():
            if value == wanted:
                found.append((node_id, name, True))
            elif number in marks_in(value):
                found.append((node_id, name, False))
    return found


def marks_in(value: Any) -> set[int]:
    found: set[int] = set()

    def look(text: str) -> Any:
        found.update(int(match[1]) for match in _MARK.finditer(text))
        return text

    _mapped(value, look)
    return found


def filled(prompt: Prompt, values: Mapping[int, Any]) -> dict[str, Any]:
    """A mark alone becomes the value itself; one inside a longer text becomes the value as a text."""

    def fill(text: str) -> Any:
        whole = _MARK.fullmatch(text)
        if whole:
            return as_input(values[int(whole[1])])
        return _MARK.sub(lambda match: as_text(values[int(match[1])]), text)

    return {
        node_id: {**node, "inputs": _inputs_mapped(node, fill)} for node_id, node in prompt.items()
    }


def as_input(value: Any) -> Any:
    """A list would be taken for a link; the server unwraps it."""
    return {"__value__": value} if isinstance(value, list) else value


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _marker(placeholders: Sequence[str]) -> Callable[[str], str]:
    if not placeholders:
        return lambda text: text
    numbers = {text: number for number, text in enumerate(placeholders)}
    # The longest first: where one begins like another, the whole of it is meant.
    ordered = sorted(placeholders, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, ordered)))
    return lambda text: pattern.sub(lambda match: mark(numbers[match[0]]), text)


def _inputs_mapped(node: Mapping[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """Links stay: the id of a node may well look like a placeholder."""
    return {
        name: value if as_link(value) else _mapped(value, change)
        for name, value in node.get("inputs", {}).items()
    }


def _mapped(value: Any, change: Callable[[str], Any], depth: int = VALUE_DEPTH_MAX) -> Any:
    """A new value with every text in it changed; keys stay."""
    if isinstance(value, str):
        return change(value)
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        raise LimitExceeded(
            f"a value is nested deeper than {VALUE_DEPTH_MAX}", limit=VALUE_DEPTH_MAX
        )
    if isinstance(value, dict):
        return {key: _mapped(inner, change, depth - 1) for key, inner in value.items()}
    return [_mapped(inner, change, depth - 1) for inner in value]


def _in_saved_values(value: Any, change: Callable[[str], Any], depth: int) -> Any:
    if depth == 0 or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        return [_in_saved_values(inner, change, depth - 1) for inner in value]
    return {
        key: _mapped(inner, change)
        if key == "widgets_values"
        else _in_saved_values(inner, change, depth - 1)
        for key, inner in value.items()
    }
