"""Who hears of a run while it goes on: a program that reads JSON, or a person who reads lines."""

import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from comfyfleet.cli.running.progress import Standing
from comfyfleet.cli.world import World
from comfyfleet.comfy import OutputValue
from comfyfleet.comfy.events import (
    Blocked,
    Event,
    NodeStarted,
    NodeText,
    Preview,
    Progress,
    Queued,
    Reconnected,
    Started,
    Succeeded,
)
from comfyfleet.kernel.errors import FleetError

# So that a log of a long run stays readable.
STEPS_SAID_EVERY_SECONDS = 5.0
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Reporter(AbstractContextManager["Reporter"], Protocol):
    """Everything is told in the order in which it happened."""

    def row(self, number: int, total: int, unit: str) -> None: ...
    def uploaded(self, path: Path, name: str) -> None: ...
    def submitted(self, run_id: str, target: str) -> None: ...
    def heard(self, event: Event, standing: Standing) -> None: ...
    def saved(self, path: Path, node_id: str) -> None: ...
    def shown(self, value: OutputValue) -> None: ...
    def failed(self, error: FleetError) -> None: ...


class JsonLines:
    """One JSON object per line on stdout; `event` tells which. Previews are told, not sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._row: dict[str, Any] = {}

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open."""

    def row(self, number: int, total: int, unit: str) -> None:
        self._row = {"row": number}

    def uploaded(self, path: Path, name: str) -> None:
        self._write("uploaded", {"path": str(path), "name": name})

    def submitted(self, run_id: str, target: str) -> None:
        self._write("submitted", {"run_id": run_id, "target": target})

    def heard(self, event: Event, standing: Standing) -> None:
        name = event_name(event)
        if isinstance(event, Preview):
            told: dict[str, Any] = {"run_id": event.run_id, "node_id": event.node_id}
            told |= {"content_type": event.content_type, "bytes": len(event.data)}
        else:
            told = asdict(event)
        self._write(name, told | {"fraction": standing.fraction})

    def saved(self, path: Path, node_id: str) -> None:
        self._write("saved", {"path": str(path), "node_id": node_id})

    def shown(self, value: OutputValue) -> None:
        told = {"node_id": value.node_id, "name": value.key, "value": value.value}
        self._write("value", told)

    def failed(self, error: FleetError) -> None:
        self._write("error", {"code": error.code, "message": error.message})

    def _write(self, event: str, told: Mapping[str, Any]) -> None:
        line = json.dumps({"event": event, **self._row, **told}, ensure_ascii=False, default=str)
        self._world.stdout.write(line.encode() + b"\n")
        self._world.stdout.flush()


def event_name(event: Event) -> str:
    """`NodeStarted` is `node_started`."""
    return _WORDS.sub("_", type(event).__name__).lower()


class PlainLines:
    """For logs and pipes: a line for each node, and now and then one for its steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps_said = 0.0

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open."""

    def row(self, number: int, total: int, unit: str) -> None:
        self._world.say(f"{unit} {number} of {total}")

    def uploaded(self, path: Path, name: str) -> None:
        self._world.say(f"uploaded {path}" if path.name == name else f"uploaded {path} as {name}")

    def submitted(self, run_id: str, target: str) -> None:
        self._world.say(f"run {run_id} on {target}")

    def heard(self, event: Event, standing: Standing) -> None:
        if (line := self._line(event, standing)) is not None:
            self._world.say(line)

    def saved(self, path: Path, node_id: str) -> None:
        """Said on stdout by the command."""

    def shown(self, value: OutputValue) -> None:
        """Said by the command."""

    def failed(self, error: FleetError) -> None:
        """Said by the command."""

    def _line(self, event: Event, standing: Standing) -> str | None:
        match event:
            case Progress(node_id=node_id, done=done, total=total):
                if standing.now - self._steps_said < STEPS_SAID_EVERY_SECONDS:
                    return None
                self._steps_said = standing.now
                return f"{standing.plan.name(node_id)}: step {done:g} of {total:g}"
            case NodeStarted():
                self._steps_said = standing.now
        return spoken(event, standing)


def spoken(event: Event, standing: Standing) -> str | None:
    """An event in words, if it is worth a line."""
    match event:
        case Queued(ahead=ahead) if ahead:
            return f"waits in the queue, {ahead} ahead"
        case Started():
            return "started"
        case NodeStarted(display_id=node_id):
            whole = f" ({len(standing.done) + 1} of {standing.total})" if standing.total else ""
            return f"{standing.plan.name(node_id)}{whole}"
        case NodeText(node_id=node_id, text=text):
            return f"{standing.plan.name(node_id)}: {text}"
        case Blocked(node_id=node_id, message=message):
            return f"{standing.plan.name(node_id)} does not run: {message}"
        case Reconnected():
            return "the connection was lost and is there again"
        case Succeeded() if standing.total and len(standing.reused) == standing.total:
            return "nothing to do: an earlier run had made it all"
    return None
