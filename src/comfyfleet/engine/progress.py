"""How far each node of a running prompt is, as `progress_state` tells it."""

from typing import Any


class Progress:
    """The states of the nodes that have started, in the order in which they did."""

    def __init__(self, prompt_id: str) -> None:
        self._prompt_id = prompt_id
        self._nodes: dict[str, dict[str, Any]] = {}

    def start(self, node_id: str) -> None:
        self._set(node_id, value=0.0, most=1.0, state="running")

    def update(self, node_id: str, done: float, total: float) -> None:
        self._set(node_id, value=done, most=total, state="running")

    def finish(self, node_id: str) -> None:
        # A cached node has never started: it is 1 of 1.
        most = self._nodes[node_id]["max"] if node_id in self._nodes else 1
        self._set(node_id, value=most, most=most, state="finished")

    def state(self) -> dict[str, Any]:
        return {"prompt_id": self._prompt_id, "nodes": self._nodes}

    def _set(self, node_id: str, *, value: float, most: float, state: str) -> None:
        self._nodes[node_id] = {
            "value": value,
            "max": most,
            "state": state,
            "node_id": node_id,
            "prompt_id": self._prompt_id,
            "display_node_id": node_id,
            "parent_node_id": None,
            "real_node_id": node_id,
        }
