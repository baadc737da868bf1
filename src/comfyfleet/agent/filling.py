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


def differences(prompt: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Inputs that are other in what was sent, by node: what an operator needs to see it whole."""
    found: dict[str, dict[str, Any]] = {}
    for node_id, node in sent.items():
        before = prompt.get(node_id, {}).get("inputs", {})
        changed = {
            name: value
            for name, value in node.get("inputs", {}).items()
            if name not in before or before[name] != value
        }
        if changed:
            found[node_id] = changed
    return found


def _bound(prompt: Mapping[str, Any], binding: str, value: str) -> dict[str, Any]:
    node_id, name = _split(binding, prompt)
    node = prompt[node_id]
    inputs = {**node.get("inputs", {}), name: value}
    return {**prompt, node_id: {**node, "inputs": inputs}}


def _split(binding: str, prompt: Mapping[str, Any]) -> tuple[str, str]:
    """Both ids and names of inputs may hold dots: the prompt tells where the id ends."""
    parts = binding.split(".")
    for count in range(1, min(len(parts), DEPTH_MAX)):
        node_id, name = ".".join(parts[:count]), ".".join(parts[count:])
        if name and isinstance(prompt.get(node_id), Mapping):
            return node_id, name
    raise InvalidInput(f"the prompt has no node for the binding {binding!r}", binding=binding)


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
