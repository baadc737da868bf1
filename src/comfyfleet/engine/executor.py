"""Runs prompts one after the other. Lives in the worker thread."""

import math
from collections.abc import Callable, Mapping, MutableMapping
from random import Random
from typing import Any

from comfyfleet.engine.cache import NodeCache
from comfyfleet.engine.context import Surroundings
from comfyfleet.engine.history import Outcome
from comfyfleet.engine.inputs import is_link
from comfyfleet.engine.node import Folders, NodeType
from comfyfleet.engine.progress import Progress
from comfyfleet.engine.queue import Running
from comfyfleet.engine.run import Run, Tools
from comfyfleet.engine.signature import Signer
from comfyfleet.engine.sockets import Audience
from comfyfleet.engine.validate import Prompt


class Executor:
    """What stays from one run to the next: results, and what nodes remember."""

    def __init__(
        self,
        *,
        nodes: Mapping[str, NodeType],
        folders: Folders,
        audience: Audience,
        clock: Callable[[], float],
        random: Random,
        dangling_link_kills: bool = False,
    ) -> None:
        # Which node runs for which client: a socket that opens in mid-run is told.
        self.executing: tuple[Any, str] | None = None
        self._nodes = nodes
        self._folders = folders
        self._audience = audience
        self._clock = clock
        self._random = random
        self._dangling_link_kills = dangling_link_kills
        self.reset()

    def reset(self) -> None:
        """Forget all results (`/free`)."""
        self._cache = NodeCache()
        self._signer = Signer(self._nodes)
        self._memories: dict[tuple[str, str], dict[str, Any]] = {}
        self._success = True

    def run(self, running: Running) -> Outcome:
        item = running.item
        self._forget_absent(item.prompt)
        around = Surroundings(
            folders=self._folders,
            prompt=self._prepare(item.prompt),
            prompt_id=item.prompt_id,
            client_id=item.client_id,
            extra_pnginfo=item.extra_data.get("extra_pnginfo"),
            audience=self._audience,
            progress=Progress(item.prompt_id),
            interrupted=running.interrupted,
        )
        run = Run(self._tools(), around, item.outputs, success=self._success)
        try:
            outcome = run.execute(dangling_link_kills=self._dangling_link_kills)
        finally:
            self.executing = None
        self._success = outcome.success
        return outcome

    def _tools(self) -> Tools:
        return Tools(
            nodes=self._nodes,
            cache=self._cache,
            signer=self._signer,
            clock=self._clock,
            random=self._random,
            memory_of=self._memory_of,
            announce=self._announce,
        )

    def _announce(self, client_id: Any, node_id: str) -> None:
        self.executing = (client_id, node_id)

    def _memory_of(self, node_id: str, class_type: str) -> MutableMapping[str, Any]:
        return self._memories.setdefault((node_id, class_type), {})

    def _forget_absent(self, prompt: Prompt) -> None:
        """ComfyUI keeps a node object only while prompts follow each other that all have it."""
        present = {(node_id, node["class_type"]) for node_id, node in prompt.items()}
        self._memories = {key: kept for key, kept in self._memories.items() if key in present}

    def _prepare(self, prompt: Prompt) -> Prompt:
        """As nodes see it and files keep it: with `is_changed` where more than inputs count."""
        return {node_id: self._prepare_node(node) for node_id, node in prompt.items()}

    def _prepare_node(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        if "inputs" not in node:
            # Not checked when nothing but an undeclared link leads to it.
            node = {**node, "inputs": {}}
        kind = self._nodes[node["class_type"]]
        if kind.fingerprint is None or "is_changed" in node:
            return node
        return {**node, "is_changed": self._fingerprint(kind, node["inputs"])}

    def _fingerprint(self, kind: NodeType, inputs: Mapping[str, Any]) -> Any:
        constants = {name: value for name, value in inputs.items() if not is_link(value)}
        try:
            return [kind.fingerprint(self._folders, constants)] if kind.fingerprint else None
        except Exception:  # noqa: BLE001 - what can't be read is never the same
            return math.nan
