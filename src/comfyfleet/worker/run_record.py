"""The record of a run: the backend's own messages, kept for clients that speak ComfyUI's protocol. Pure."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from comfyfleet.api.worker import RUN_EVENTS_MAX, RunEvent
from comfyfleet.comfy.backend import Outputs
from comfyfleet.comfy.events import Event, NodeText, Preview

# Our own types, beside ComfyUI's: what it sends as binary frames.
TEXT, PICTURE = "comfyfleet_text", "comfyfleet_picture"
# Nodes whose pictures are results, which nobody may lose; those of others are previews.
SENDS_RESULTS = frozenset({"SaveImageWebsocket"})
PICTURE_BYTES_MAX = 16 * 1024 * 1024
# Of these many can be left out: the next one tells all that they told.
REPLACEABLE = frozenset({"progress_state", "progress"})
NOT_OF_THE_RUN = frozenset({"status", "feature_flags", "crystools.monitor"})


class RunRecord:
    """`folder`: the job's own on the backend, which no client gets to see."""

    def __init__(self, prompt: Mapping[str, Any], folder: str) -> None:
        self._prompt = prompt
        self._folder = folder
        self._untold: list[RunEvent] = []

    def take(self, raw: str) -> None:
        """A text message, as the backend sent it."""
        message = json.loads(raw)
        kind, data = message.get("type"), message.get("data")
        if not isinstance(kind, str) or not isinstance(data, dict) or kind in NOT_OF_THE_RUN:
            return
        # The end is told by the control plane, once the result is there.
        if kind != "executing" or data.get("node") is not None:
            self._add((kind, hide_folder(data, self._folder)))

    def note(self, event: Event) -> None:
        """What came as a binary frame."""
        match event:
            case NodeText(node_id=node_id, text=text):
                self._add((TEXT, {"node": node_id, "text": text}))
            case Preview(node_id=str(node_id)) if self._sends_results(node_id):
                self._add((PICTURE, _picture(event)))

    def pop_live(self) -> tuple[RunEvent, ...]:
        """Those that can be told at once: a file that a message names is delivered with the result."""
        told = tuple(each for each in self._untold if not _names_file(each))
        self._untold = [each for each in self._untold if _names_file(each)]
        return told

    def put_back(self, events: Sequence[RunEvent]) -> None:
        """Those that could not be told."""
        self._untold = [*events, *self._untold]

    def pop_all(self) -> tuple[RunEvent, ...]:
        told, self._untold = tuple(self._untold), []
        return told

    @property
    def has_live(self) -> bool:
        return any(not _names_file(each) for each in self._untold)

    def history(self, outputs: Outputs) -> dict[str, Any] | None:
        if outputs.history is None:
            return None
        hidden: dict[str, Any] = hide_folder(outputs.history, self._folder)
        return hidden

    def _sends_results(self, node_id: str) -> bool:
        return self._prompt.get(node_id, {}).get("class_type") in SENDS_RESULTS

    def _add(self, event: RunEvent) -> None:
        last = self._untold[-1] if self._untold else None
        is_full = len(self._untold) >= RUN_EVENTS_MAX - 100
        if is_full and event[0] in REPLACEABLE:
            if last is not None and last[0] == event[0]:
                self._untold[-1] = event
            return
        self._untold.append(event)


def hide_folder(value: Any, folder: str) -> Any:
    """The same value without the folder's name in any of its texts."""
    if isinstance(value, str):
        plain = value.replace(f"{folder}/", "").replace(folder.replace("/", "\\"), "")
        return plain.replace(folder, "")
    if isinstance(value, Mapping):
        return {key: hide_folder(each, folder) for key, each in value.items()}
    return [hide_folder(each, folder) for each in value] if isinstance(value, list) else value


def _picture(preview: Preview) -> dict[str, Any]:
    data = preview.data if len(preview.data) <= PICTURE_BYTES_MAX else b""
    return {
        "node": preview.node_id,
        "content_type": preview.content_type,
        "base64": base64.b64encode(data).decode(),
    }


def _names_file(event: RunEvent) -> bool:
    kind, data = event
    output = data.get("output") if kind == "executed" else None
    if not isinstance(output, dict):
        return False
    return any(
        isinstance(each, dict) and "filename" in each
        for listed in output.values()
        if isinstance(listed, list)
        for each in listed
    )
