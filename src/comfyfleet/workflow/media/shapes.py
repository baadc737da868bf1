"""What a JSON value is: a workflow, a prompt, or something that holds them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from comfyfleet.workflow.media.json_text import parse_json
from comfyfleet.workflow.media.limits import Limits

WRAPPER_DEPTH_MAX = 8
# Where others put them: the body of POST /prompt and a run in /history (`prompt`, `extra_data.extra_pnginfo`),
# the answer of /api/jobs (`workflow.prompt`), the editor's graphToPrompt (`output`), queues that wrap the body in
# `input`, and glTF (`asset.extras`).
WRAPPER_KEYS = (
    "workflow", "prompt", "output", "extra_pnginfo", "extra_data", "input", "asset", "extras",
)  # fmt: skip
# A queue entry and the `prompt` of a history item: [number, id, prompt, extra_data, outputs].
QUEUE_ENTRY_PARTS = slice(2, 4)


@dataclass(frozen=True, slots=True)
class Pieces:
    workflow: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return self.workflow is not None or self.prompt is not None

    def completed_by(self, other: "Pieces") -> "Pieces":
        return Pieces(
            workflow=other.workflow if self.workflow is None else self.workflow,
            prompt=other.prompt if self.prompt is None else self.prompt,
        )


def is_workflow(value: Any) -> bool:
    """A `nodes` list of typed nodes; those of glTF have no type. Whether it is a sound one is not asked here."""
    nodes = value.get("nodes") if isinstance(value, dict) else None
    return isinstance(nodes, list) and (not nodes or any(_has(node, "type") for node in nodes))


def is_prompt(value: Any) -> bool:
    """One node with a class is enough: whoever uses it can then say which of the others has none."""
    return isinstance(value, dict) and any(_has(node, "class_type") for node in value.values())


def is_history(value: Any) -> bool:
    """Runs by id, as /history answers."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_has(run, "prompt") and _has(run, "outputs") for run in value.values())
    )


def find_pieces(value: Any, limits: Limits, *, depth: int = WRAPPER_DEPTH_MAX) -> Pieces:
    """The workflow and the prompt in a value, by their shape: some write a prompt under the key `workflow`."""
    if is_workflow(value):
        return Pieces(workflow=value)
    if is_prompt(value):
        return Pieces(prompt=value)
    pieces = Pieces()
    if depth > 0:
        for inner in _inside(value, limits):
            pieces = pieces.completed_by(find_pieces(inner, limits, depth=depth - 1))
    return pieces


def _inside(value: Any, limits: Limits) -> Iterable[Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return [parse_json(value, what="a JSON text inside the JSON", limits=limits)]
    if isinstance(value, list):
        return value[QUEUE_ENTRY_PARTS]
    if is_history(value) and len(value) == 1:
        return list(value.values())
    if isinstance(value, dict):
        return [value[key] for key in WRAPPER_KEYS if key in value]
    return []


def _has(value: Any, key: str) -> bool:
    return isinstance(value, dict) and bool(value.get(key))
