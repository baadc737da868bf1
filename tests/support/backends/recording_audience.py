"""An audience that records the engine's messages, and an executor that sends to it."""

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.support.backends.nodes import NODES

from comfyfleet.engine.engine import Executor
from comfyfleet.engine.node import Folders
from comfyfleet.engine.queue import RunningPrompt
from comfyfleet.protocol.payloads import QueuedPrompt, RunOutcome


class RecordingAudience:
    def __init__(self) -> None:
        self.received: list[tuple[Any, str, Any]] = []
        self.metadata = False
        self.deaf = False

    def send(self, event: str, data: Mapping[str, Any], to: Any = None) -> None:
        if self.deaf:
            return
        self.received.append((to, event, copy.deepcopy(data)))

    def send_frame(self, frame: bytes, to: Any = None) -> None:
        self.received.append((to, "binary", frame))

    def wants_metadata(self, client_id: Any) -> bool:
        return self.metadata

    def events(self) -> list[str]:
        """Event and node, short: `executing 2`, `executed 9`; node states as `1+ 2-` (done, running)."""
        return [short for _, event, data in self.received if (short := _short(event, data))]

    def take(self) -> list[str]:
        events = self.events()
        self.received.clear()
        return events


def _short(event: str, data: Any) -> str:
    if event == "progress_state":
        states = ((key, value["state"]) for key, value in data["nodes"].items())
        return " ".join(f"{key}{'+' if state == 'finished' else '-'}" for key, state in states)
    if event == "execution_cached":
        return f"cached {','.join(data['nodes'])}".strip()
    if event == "binary":
        return f"binary {data[3]}"
    name = event.removeprefix("execution_")
    return f"{name} {data.get('node_id') or data.get('node') or ''}".strip()


class ExecutorSetup:
    """An executor with a recording audience, for running prompts and reading their messages."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folders = Folders(folder, folder, folder)
        self.listener = RecordingAudience()
        self.executor = Executor(
            nodes=NODES,
            folders=self.folders,
            audience=self.listener,
            clock=lambda: 1000.0,
            random=Random(1),
            **options,
        )

    def run(
        self,
        prompt: Mapping[str, Any],
        *outputs: str,
        client_id: str | None = "alice",
        interrupted: threading.Event | None = None,
    ) -> RunOutcome:
        extra_data = {} if client_id is None else {"client_id": client_id}
        item = QueuedPrompt(0, "p", prompt, extra_data, outputs or ("9",))
        return self.executor.run(RunningPrompt(item, interrupted or threading.Event()))
