"""A small executor for tests of nodes: no validation, no server, no threads."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from comfyfleet.engine.node import EngineNodeType, Folders, NodeResult
from comfyfleet.engine.nodes import registry

NODES = registry()
NOON = datetime(2026, 3, 4, 12, 5, 6)  # noqa: DTZ001 - file names carry local time
COERCIONS = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


@dataclass
class RecordingContext:
    """Keeps what a node told; waits for nobody."""

    folders: Folders
    prompt: Mapping[str, Any] = field(default_factory=dict)
    extra_pnginfo: Mapping[str, Any] | None = None
    node_id: str = "1"
    random: Random = field(default_factory=lambda: Random(1))
    memory: dict[str, Any] = field(default_factory=dict)
    steps: list[tuple[float, float, bytes | None]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    paused_s: float = 0.0

    def now(self) -> datetime:
        return NOON

    def progress(self, done: float, total: float, preview: bytes | None = None) -> None:
        self.steps.append((done, total, preview))

    def show_text(self, text: str) -> None:
        self.texts.append(text)

    def pause(self, seconds: float) -> None:
        self.paused_s += seconds


def folders_in(base: Path, inputs: Path | None = None) -> Folders:
    folders = Folders(inputs or base / "input", base / "output", base / "temp")
    for folder in (folders.input, folders.output, folders.temp):
        folder.mkdir(parents=True, exist_ok=True)
    return folders


def run(class_type: str, context: RecordingContext | None = None, /, **inputs: Any) -> NodeResult:
    """One node with plain values."""
    nowhere = Folders(Path("/nowhere"), Path("/nowhere"), Path("/nowhere"))
    return NODES[class_type].run(context or RecordingContext(nowhere), **inputs)


def value(class_type: str, /, **inputs: Any) -> Any:
    """The only output of one node."""
    (only,) = run(class_type, **inputs).outputs
    return only


class NodeStopped(Exception):
    def __init__(self, node_id: str, error: Exception) -> None:
        super().__init__(f"node {node_id}: {error}")
        self.node_id = node_id
        self.error = error


@dataclass
class PromptRun:
    """Runs what the output nodes of a prompt need; equal nodes run once."""

    prompt: Mapping[str, Any]
    context: RecordingContext
    _results: dict[str, NodeResult] = field(default_factory=dict)
    _ran: dict[str, str] = field(default_factory=dict)

    def history(self) -> dict[str, Any]:
        for node_id, node in self.prompt.items():
            if NODES[node["class_type"]].is_output:
                self.result(node_id)
        shown = {
            node_id: self._results[key].ui
            for node_id, key in self._ran.items()
            if self._results[key].ui is not None
        }
        return dict(json.loads(json.dumps(shown)))

    def result(self, node_id: str) -> NodeResult:
        if node_id not in self._ran:
            key = self._key(node_id)
            if key not in self._results:
                self._results[key] = self._execute(node_id)
            self._ran[node_id] = key
        return self._results[self._ran[node_id]]

    def _key(self, node_id: str) -> str:
        node = self.prompt[node_id]
        inputs = {
            name: [self._key(given[0]), given[1]] if _is_link(given) else given
            for name, given in sorted(node["inputs"].items())
        }
        return json.dumps([node["class_type"], inputs])

    def _execute(self, node_id: str) -> NodeResult:
        node = self.prompt[node_id]
        node_type = NODES[node["class_type"]]
        inputs = self._inputs(node_type, node["inputs"])
        self.context.node_id = node_id
        try:
            return node_type.run(self.context, **inputs)
        except Exception as error:
            raise NodeStopped(node_id, error) from error

    def _inputs(self, node_type: EngineNodeType, given: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        lazy = _lazy_inputs(node_type)
        for name, raw in given.items():
            if not _is_link(raw):
                known[name] = _coerced(node_type, name, raw)
            elif name not in lazy:
                known[name] = self.result(raw[0]).outputs[raw[1]]
        for name in node_type.needed(known) if node_type.needed else ():
            known[name] = self.result(given[name][0]).outputs[given[name][1]]
        return known


def _is_link(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2


def _declared(node_type: EngineNodeType) -> dict[str, Any]:
    groups = node_type.info["input"]
    return {**groups["required"], **groups.get("optional", {})}


def _lazy_inputs(node_type: EngineNodeType) -> set[str]:
    declared = _declared(node_type).items()
    return {name for name, entry in declared if len(entry) > 1 and entry[1].get("lazy")}


def _coerced(node_type: EngineNodeType, name: str, raw: Any) -> Any:
    kind = _declared(node_type).get(name, [None])[0]
    coerce = COERCIONS.get(kind) if isinstance(kind, str) else None
    return coerce(raw) if coerce else raw
