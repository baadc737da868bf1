"""The thread in which nodes run, so that the event loop stays free to answer."""

import logging
import threading
from collections.abc import Callable

from comfyfleet.engine.executor import Executor
from comfyfleet.engine.faults import trace, type_name
from comfyfleet.engine.history import History, Outcome, record
from comfyfleet.engine.queue import Item, PromptQueue, Running
from comfyfleet.engine.sockets import Audience

STOP_SECONDS = 5.0
# Some clients listen for a prompt's events only once they have read the answer to its submission.
# ComfyUI is slow enough for them; a cached run here would be over before.
HEAD_START_SECONDS = 0.002

log = logging.getLogger(__name__)


class Worker:
    """Takes prompts one by one until it is stopped. No prompt can end it, unless it is told so:
    with `mortal` it dies where ComfyUI's does, to see what a client makes of that."""

    def __init__(
        self,
        *,
        queue: PromptQueue,
        history: History,
        executor: Executor,
        audience: Audience,
        clock: Callable[[], float],
        mortal: bool = False,
    ) -> None:
        self._queue = queue
        self._history = history
        self._executor = executor
        self._audience = audience
        self._clock = clock
        self._mortal = mortal
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
        """Drop cached results before the next prompt."""
        self._free.set()
        self._queue.wake()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._take_one()
            except Exception:
                log.exception("the worker thread met an error outside of any node")
                if self._mortal:
                    return

    def _take_one(self) -> None:
        running = self._queue.take()
        if self._free.is_set():
            self._free.clear()
            self._executor.reset()
        if running is not None:
            self._run(running)

    def _run(self, running: Running) -> None:
        item = running.item
        running.interrupted.wait(self._head_start(item))
        try:
            outcome = self._executor.run(running)
        except Exception as error:
            if self._mortal:
                raise
            log.exception("prompt %s failed outside of any node", item.prompt_id)
            outcome = self._broken(item, error)
        self._queue.done(lambda: self._history.add(item.prompt_id, record(item, outcome)))
        if item.client_id is not None:
            ended = {"node": None, "prompt_id": item.prompt_id}
            self._audience.send("executing", ended, item.client_id)

    def _head_start(self, item: Item) -> float:
        """What is left of it; nothing for a prompt that had to wait anyway."""
        age = self._clock() - item.extra_data.get("create_time", 0) / 1000
        return max(HEAD_START_SECONDS - age, 0.0) if age >= 0 else 0.0

    def _broken(self, item: Item, error: Exception) -> Outcome:
        """An error of ours, told as if the first output had failed: nothing may hang on it."""
        node_id = item.outputs[0]
        data = {
            "prompt_id": item.prompt_id,
            "node_id": node_id,
            "node_type": item.prompt[node_id]["class_type"],
            "executed": [],
            "exception_message": f"{error}\n",
            "exception_type": type_name(error),
            "traceback": trace(error),
            "current_inputs": {},
            "current_outputs": list(item.prompt),
            "timestamp": int(self._clock() * 1000),
        }
        if item.client_id is not None:
            self._audience.send("execution_error", data, item.client_id)
        return Outcome(success=False, messages=[("execution_error", data)], outputs={}, meta={})
