"""The names that a backend gave to uploaded files, written into the prompt. Pure."""

from collections.abc import Mapping
from typing import Any

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.wire.files import Asset

DEPTH_MAX = 64


def filled(prompt: Mapping[str, Any], names: Mapping[str, str], assets: tuple[Asset, ...]) -> Any:
    """A new prompt; `names`: asset → what a loader's input takes."""
    new: Any = dict(prompt)
    for asset in assets:
        value = names[asset.name]
        if asset.binding is not None:
            new = _bound(new, asset.binding, value)
        if asset.placeholder:
            new = _replaced(new, asset.placeholder, value, 0)
    return new


def _bound(prompt: Mapping[str, Any], binding: str, value: str) -> dict[str, Any]:
    # Ids of nodes inside subgraphs hold colons and may hold dots; names of inputs don't.
    node_id, dot, name = binding.rpartition(".")
    node = prompt.get(node_id)
    if not dot or not isinstance(node, Mapping):
        raise InvalidInput(f"the prompt has no node for the binding {binding!r}", binding=binding)
    inputs = {**node.get("inputs", {}), name: value}
    return {**prompt, node_id: {**node, "inputs": inputs}}


def _replaced(value: Any, placeholder: str, name: str, depth: int) -> Any:
    """In every text: alone or as a part of a longer one."""
    if depth > DEPTH_MAX:
        raise InvalidInput(f"the prompt is nested more than {DEPTH_MAX} deep")
    if isinstance(value, str):
        return value.replace(placeholder, name)
    if isinstance(value, Mapping):
        return {key: _replaced(each, placeholder, name, depth + 1) for key, each in value.items()}
    if isinstance(value, list):
        return [_replaced(each, placeholder, name, depth + 1) for each in value]
    return value
