"""What a running node is given: its surroundings, and a voice."""

import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import datetime
from random import Random
from typing import Any

from comfyfleet.engine import frames
from comfyfleet.engine.node import Folders
from comfyfleet.engine.progress import Progress
from comfyfleet.engine.sockets import Audience
from comfyfleet.engine.validate import Prompt
from comfyfleet.kernel.errors import Interrupted


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all nodes of one run share."""

    folders: Folders
    prompt: Prompt
    prompt_id: str
    client_id: Any
    extra_pnginfo: Mapping[str, Any] | None
    audience: Audience
    progress: Progress
    interrupted: threading.Event

    def stop_if_interrupted(self) -> None:
        if self.interrupted.is_set():
            raise Interrupted("the run was interrupted")

    def tell_progress(self) -> None:
        self.audience.send("progress_state", self.progress.state(), self.client_id)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node's view of them."""

    around: Surroundings
    node_id: str
    random: Random
    memory: MutableMapping[str, Any]
    started_at: datetime

    @property
    def folders(self) -> Folders:
        return self.around.folders

    @property
    def prompt(self) -> Prompt:
        return self.around.prompt

    @property
    def extra_pnginfo(self) -> Mapping[str, Any] | None:
        return self.around.extra_pnginfo

    def now(self) -> datetime:
        return self.started_at

    def progress(self, done: float, total: float, preview: bytes | None = None) -> None:
        self.around.stop_if_interrupted()
        self.around.progress.update(self.node_id, done, total)
        self.around.tell_progress()
        # ComfyUI sends a preview with metadata before the progress, one without after it.
        wants_metadata = self.around.audience.wants_metadata(self.around.client_id)
        if preview and wants_metadata:
            self._send(frames.image_with_metadata(preview, self._metadata()))
        self._tell_step(done, total)
        if preview and not wants_metadata:
            self._send(frames.image(preview))

    def show_text(self, text: str) -> None:
        # To everybody, whoever has sent the prompt: so does ComfyUI.
        self.around.audience.send_frame(frames.text(self.node_id, text))

    def pause(self, seconds: float) -> None:
        self.around.interrupted.wait(seconds)
        self.around.stop_if_interrupted()

    def _tell_step(self, done: float, total: float) -> None:
        step = {"value": done, "max": total, "prompt_id": self.around.prompt_id}
        self.around.audience.send("progress", {**step, "node": self.node_id}, self.around.client_id)

    def _send(self, frame: bytes) -> None:
        self.around.audience.send_frame(frame, self.around.client_id)

    def _metadata(self) -> dict[str, Any]:
        return {
            "node_id": self.node_id,
            "prompt_id": self.around.prompt_id,
            "display_node_id": self.node_id,
            "parent_node_id": None,
            "real_node_id": self.node_id,
        }
