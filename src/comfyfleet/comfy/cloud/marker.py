"""A sign of ours inside a prompt, by which a job whose submit was cut off is found again."""

import json
from collections.abc import Mapping
from typing import Any

MARKER_KEY = "comfyfleet_run"


def marker_of(prompt_id: str) -> str:
    return f"comfyfleet-run-{prompt_id}"


def with_marker(prompt: Mapping[str, Any], prompt_id: str) -> dict[str, Any]:
    """The prompt with our sign in the `_meta` of each node.

    `_meta` is kept by servers and takes no part in execution, so names of outputs and what may come
    from the cache stay as they are. Each node has it because a server may keep only some.
    """
    marker = marker_of(prompt_id)
    return {node_id: _marked(node, marker) for node_id, node in prompt.items()}


def is_marked(document: object, prompt_id: str) -> bool:
    """Whether our sign is anywhere in what a server shows of a job."""
    return marker_of(prompt_id) in json.dumps(document)


def _marked(node: Any, marker: str) -> Any:
    if not isinstance(node, Mapping):
        return node
    meta = node.get("_meta")
    kept = meta if isinstance(meta, Mapping) else {}
    return {**node, "_meta": {**kept, MARKER_KEY: marker}}
