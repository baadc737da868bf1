"""The engine accepts prompts and runs them one by one in its own thread, so that the event loop is
free to handle requests."""

import asyncio
import itertools
import logging
import math
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from comfyfleet.engine.node import EngineNodeType, Folders, NodesInFolders
from comfyfleet.engine.queue import (
    History,
    PromptQueue,
    RunningPrompt,
    as_comfyui_compares,
    by_number_then_arrival,
)
from comfyfleet.engine.run import (
    NodeCache,
    NodeSigner,
    PromptProgress,
    PromptRun,
    RunContext,
    RunTools,
)
from comfyfleet.protocol.payloads import (
    QueuedPrompt,
    RefusedPrompt,
    RunOutcome,
    history_record,
    parse_submission,
    read_number,
)
from comfyfleet.protocol.sockets import Audience, Sockets
from comfyfleet.protocol.validation import Prompt, is_link, traceback_lines, type_name, validate


class Executor:
    """Runs prompts, and holds the state that outlives a run: cached results and nodes' memory."""

    def __init__(
        self,
        *,
        nodes: Mapping[str, EngineNodeType],
        folders: Folders,
        audience: Audience,
        clock: Callable[[], float],
        random: Random,
        dangling_link_kills: bool = False,
    ) -> None:
        # The client and the id of the executing node. They are sent to sockets that connect during
        # a run.
        self.executing: tuple[Any, str] | None = None
        self._nodes = nodes
        self._folders = folders
        self._audience = audience
        self._clock = clock
        self._random = random
        self._dangling_link_kills = dangling_link_kills
        self.reset()

    def reset(self) -> None:
        """Drops all results (`/free`)."""
        self._cache = NodeCache()
        self._signer = NodeSigner(self._nodes)
        self._memories: dict[tuple[str, str], dict[str, Any]] = {}
        self._success = True

    def run(self, running: RunningPrompt) -> RunOutcome:
        item = running.item
        self._forget_absent(item.prompt)
        context = RunContext(
            folders=self._folders,
            prompt=self._prepare(item.prompt),
            prompt_id=item.prompt_id,
            client_id=item.client_id,
            extra_pnginfo=item.extra_data.get("extra_pnginfo"),
            audience=self._audience,
            progress=PromptProgress(item.prompt_id),
            interrupted=running.interrupted,
        )
        run = PromptRun(self._tools(), context, item.outputs, success=self._success)
        try:
            outcome = run.execute(dangling_link_kills=self._dangling_link_kills)
        finally:
            self.executing = None
        self._success = outcome.success
        return outcome

    def _tools(self) -> RunTools:
        return RunTools(
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
        """Drops the memory of nodes that this prompt doesn't contain. ComfyUI drops its node
        objects at the same point."""
        present = {(node_id, node["class_type"]) for node_id, node in prompt.items()}
        self._memories = {key: memory for key, memory in self._memories.items() if key in present}

    def _prepare(self, prompt: Prompt) -> Prompt:
        """Returns the prompt in the form that nodes and saved files get. Adds `is_changed` to nodes
        whose result depends on more than their inputs."""
        return {node_id: self._prepare_node(node) for node_id, node in prompt.items()}

    def _prepare_node(self, node: Mapping[str, Any]) -> Mapping[str, Any]:
        if "inputs" not in node:
            # Validation allows this for a node that is only linked to undeclared inputs.
            node = {**node, "inputs": {}}
        kind = self._nodes[node["class_type"]]
        if kind.fingerprint is None or "is_changed" in node:
            return node
        return {**node, "is_changed": self._fingerprint(kind, node["inputs"])}

    def _fingerprint(self, kind: EngineNodeType, inputs: Mapping[str, Any]) -> Any:
        constants = {name: value for name, value in inputs.items() if not is_link(value)}
        try:
            return [kind.fingerprint(self._folders, constants)] if kind.fingerprint else None
        except Exception:  # noqa: BLE001 - files that can't be read never match
            return math.nan


STOP_SECONDS = 5.0
# Delay in seconds before a prompt runs. Some clients subscribe to a prompt's events only after they
# have read the response to its submission. Without the delay, a cached run would be over by then.
HEAD_START_SECONDS = 0.002

log = logging.getLogger(__name__)


class ExecutorThread:
    """Runs prompts one by one until it is stopped.

    No prompt can end the thread. With `dies_like_comfyui`, it dies where ComfyUI's thread does, to
    test how clients handle that.
    """

    def __init__(
        self,
        *,
        queue: PromptQueue,
        history: History,
        executor: Executor,
        audience: Audience,
        clock: Callable[[], float],
        dies_like_comfyui: bool = False,
    ) -> None:
        self._queue = queue
        self._history = history
        self._executor = executor
        self._audience = audience
        self._clock = clock
        self._mortal = dies_like_comfyui
        self._free = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._queue.interrupt()
        self._queue.wake()
        self._thread.join(STOP_SECONDS)

    def free(self) -> None:
        """Drops cached results before the next prompt."""
        self._free.set()
        self._queue.wake()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._run_next()
            except Exception:
                log.exception("the executor thread encountered an error outside of any node")
                if self._mortal:
                    return

    def _run_next(self) -> None:
        running = self._queue.take()
        if self._free.is_set():
            self._free.clear()
            self._executor.reset()
        if running is not None:
            self._run(running)

    def _run(self, running: RunningPrompt) -> None:
        item = running.item
        running.interrupted.wait(self._head_start_left(item))
        try:
            outcome = self._executor.run(running)
        except Exception as error:
            if self._mortal:
                raise
            log.exception("prompt %s failed outside of any node", item.prompt_id)
            outcome = self._report_internal_error(item, error)
        self._queue.done(lambda: self._history.add(item.prompt_id, history_record(item, outcome)))
        if item.client_id is not None:
            ended = {"node": None, "prompt_id": item.prompt_id}
            self._audience.send("executing", ended, item.client_id)

    def _head_start_left(self, item: QueuedPrompt) -> float:
        """Returns the remaining part of the delay in seconds. It is 0 for a prompt that has already
        waited in the queue."""
        age = self._clock() - item.extra_data.get("create_time", 0) / 1000
        return max(HEAD_START_SECONDS - age, 0.0) if age >= 0 else 0.0

    def _report_internal_error(self, item: QueuedPrompt, error: Exception) -> RunOutcome:
        """Reports an internal error as if the first output node had failed, so that clients don't
        wait forever."""
        node_id = item.outputs[0]
        data = {
            "prompt_id": item.prompt_id,
            "node_id": node_id,
            "node_type": item.prompt[node_id]["class_type"],
            "executed": [],
            "exception_message": f"{error}\n",
            "exception_type": type_name(error),
            "traceback": traceback_lines(error),
            "current_inputs": {},
            "current_outputs": list(item.prompt),
            "timestamp": int(self._clock() * 1000),
        }
        if item.client_id is not None:
            self._audience.send("execution_error", data, item.client_id)
        return RunOutcome(success=False, messages=[("execution_error", data)], outputs={}, meta={})


@dataclass(frozen=True, slots=True)
class AcceptedPrompt:
    """A queued prompt. `node_errors` describes the outputs that were left out. All others run."""

    prompt_id: str
    number: float
    node_errors: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataFolder:
    """The folder of an engine's files, with the layout of ComfyUI's own."""

    root: Path

    @property
    def user(self) -> Path:
        return self.root / "user" / "default"

    def open(self) -> Folders:
        """Creates the folders and empties the temporary one."""
        folders = Folders(*(self.root / name for name in ("input", "output", "temp")))
        shutil.rmtree(folders.temp, ignore_errors=True)
        for path in (folders.input, folders.output, folders.temp):
            path.mkdir(parents=True, exist_ok=True)
        return folders


class Engine:
    """Connects the queue, the executor, the history and the clients' sockets. `dies_like_comfyui`
    is described in ExecutorThread."""

    def __init__(
        self,
        data: DataFolder,
        nodes: Mapping[str, EngineNodeType],
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = lambda: str(uuid.uuid4()),
        dies_like_comfyui: bool = False,
    ) -> None:
        self.data = data
        self.folders = data.open()
        self.nodes = nodes
        self.sockets = Sockets()
        self.history = History()
        order = as_comfyui_compares if dies_like_comfyui else by_number_then_arrival
        self.queue = PromptQueue(self._send_status, order)
        self.executor = Executor(
            nodes=nodes,
            folders=self.folders,
            audience=self.sockets,
            clock=clock,
            random=random.SystemRandom(),
            dangling_link_kills=dies_like_comfyui,
        )
        self._worker = ExecutorThread(
            queue=self.queue,
            history=self.history,
            executor=self.executor,
            audience=self.sockets,
            clock=clock,
            dies_like_comfyui=dies_like_comfyui,
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

    def submit(self, body: object, usage_source: str | None = None) -> AcceptedPrompt:
        """Queues a prompt, or raises RefusedPrompt."""
        number = self._number(body)
        submission = parse_submission(body)
        verdict = validate(
            submission.prompt,
            nodes=NodesInFolders(self.nodes, self.folders),
            targets=submission.targets,
        )
        if verdict.error is not None:
            raise RefusedPrompt(verdict.error, verdict.node_errors)
        extra_data = dict(submission.extra_data)
        if usage_source:
            extra_data.setdefault("comfy_usage_source", usage_source)
        extra_data["create_time"] = int(self._clock() * 1000)
        prompt_id = submission.prompt_id or self._new_id()
        self.queue.put(QueuedPrompt(number, prompt_id, verdict.prompt, extra_data, verdict.outputs))
        return AcceptedPrompt(prompt_id, number, verdict.node_errors or {})

    def status(self) -> dict[str, Any]:
        return _status(self.queue.remaining())

    def _number(self, body: object) -> float:
        """Returns the prompt's number. Refused prompts use up a number as well."""
        requested, front = read_number(body)
        if requested is not None:
            return requested
        number = next(self._numbers)
        return -number if front else number

    def _send_status(self, remaining: int) -> None:
        self.sockets.send("status", {"status": _status(remaining)})


def _status(remaining: int) -> dict[str, Any]:
    return {"exec_info": {"queue_remaining": remaining}}
