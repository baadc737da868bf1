"""The engine without its HTTP side: submit, run, remember."""

import asyncio
import itertools
import random
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comfyfleet.engine.executor import Executor
from comfyfleet.engine.history import History
from comfyfleet.engine.node import Folders, NodeType
from comfyfleet.engine.queue import (
    Item,
    PromptQueue,
    as_comfyui_compares,
    by_number_then_arrival,
)
from comfyfleet.engine.sockets import Sockets
from comfyfleet.engine.submission import RefusedPrompt, read_number, read_submission
from comfyfleet.engine.validate import validate
from comfyfleet.engine.worker import Worker


@dataclass(frozen=True, slots=True)
class Accepted:
    """`node_errors` names outputs that were left out; the rest runs."""

    prompt_id: str
    number: float
    node_errors: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Where an engine keeps its files: what ComfyUI has in its own folder."""

    root: Path

    @property
    def user(self) -> Path:
        return self.root / "user" / "default"

    def open(self) -> Folders:
        """Make the folders; what is temporary does not outlive a start."""
        folders = Folders(*(self.root / name for name in ("input", "output", "temp")))
        shutil.rmtree(folders.temp, ignore_errors=True)
        for path in (folders.input, folders.output, folders.temp):
            path.mkdir(parents=True, exist_ok=True)
        return folders


class Engine:
    """All parts together. `mortal`: see Worker."""

    def __init__(
        self,
        data: DataFolder,
        nodes: Mapping[str, NodeType],
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        mortal: bool = False,
    ) -> None:
        self.data = data
        self.folders = data.open()
        self.nodes = nodes
        self.sockets = Sockets()
        self.history = History()
        order = as_comfyui_compares if mortal else by_number_then_arrival
        self.queue = PromptQueue(self._tell_status, order)
        self.executor = Executor(
            nodes=nodes,
            folders=self.folders,
            audience=self.sockets,
            clock=clock,
            random=random.SystemRandom(),
            dangling_link_kills=mortal,
        )
        self._worker = Worker(
            queue=self.queue,
            history=self.history,
            executor=self.executor,
            audience=self.sockets,
            clock=clock,
            mortal=mortal,
        )
        self._clock = clock
        self._new_id = new_id
        self._numbers = itertools.count()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sockets.attach(loop)
        self._worker.start()

    def stop(self) -> None:
        self._worker.stop()
        self.sockets.attach(None)

    def free(self) -> None:
        self._worker.free()

    def submit(self, body: object, usage_source: str | None = None) -> Accepted:
        """Queue a prompt, or raise RefusedPrompt."""
        number = self._number(body)
        submission = read_submission(body)
        verdict = validate(
            submission.prompt, nodes=self.nodes, folders=self.folders, targets=submission.targets
        )
        if verdict.error is not None:
            raise RefusedPrompt(verdict.error, verdict.node_errors)
        extra_data = dict(submission.extra_data)
        if usage_source:
            extra_data.setdefault("comfy_usage_source", usage_source)
        extra_data["create_time"] = int(self._clock() * 1000)
        prompt_id = submission.prompt_id or self._new_id()
        self.queue.put(Item(number, prompt_id, verdict.prompt, extra_data, verdict.outputs))
        return Accepted(prompt_id, number, verdict.node_errors or {})

    def status(self) -> dict[str, Any]:
        return _status(self.queue.remaining())

    def _number(self, body: object) -> float:
        """A refused prompt uses up its number, too."""
        wanted, front = read_number(body)
        if wanted is not None:
            return wanted
        number = next(self._numbers)
        return -number if front else number

    def _tell_status(self, remaining: int) -> None:
        self.sockets.send("status", {"status": _status(remaining)})


def _status(remaining: int) -> dict[str, Any]:
    return {"exec_info": {"queue_remaining": remaining}}
