"""The queue of waiting prompts, the running prompt, and the history of finished prompts.

They exist only in memory, as in ComfyUI.
"""

import heapq
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from comfyfleet.protocol.payloads import QueuedPrompt, Record


@dataclass(frozen=True, slots=True)
class RunningPrompt:
    """The running prompt. Each one has its own `interrupted` event, so that an interrupt can't
    affect the next prompt."""

    item: QueuedPrompt
    interrupted: threading.Event = field(default_factory=threading.Event)


Entry = tuple[Any, ...]
Order = Callable[[QueuedPrompt, int], Entry]


def by_number_then_arrival(item: QueuedPrompt, arrival: int) -> Entry:
    return (item.number, item.prompt_id, arrival, item)


def as_comfyui_compares(item: QueuedPrompt, arrival: int) -> Entry:
    """Returns a sort key that compares whole items like ComfyUI. If two items have the same number
    and id, comparing their dicts raises TypeError."""
    return (item.number, item.prompt_id, item.prompt, item.extra_data, item)


class PromptQueue:
    """A queue that the event loop and the executor thread share.

    `changed` is called for every change while the lock is held.
    """

    def __init__(
        self, changed: Callable[[int], None], order: Order = by_number_then_arrival
    ) -> None:
        self._changed = changed
        self._order = order
        self._awake = threading.Condition(threading.RLock())
        self._heap: list[Entry] = []
        self._running: RunningPrompt | None = None
        self._arrivals = itertools.count()
        self._woken = False

    def remaining(self) -> int:
        with self._awake:
            return len(self._heap) + (self._running is not None)

    def put(self, item: QueuedPrompt) -> None:
        with self._awake:
            heapq.heappush(self._heap, self._order(item, next(self._arrivals)))
            self._notify()
            self._awake.notify()

    def take(self) -> RunningPrompt | None:
        """Waits for the next prompt and marks it as running. Returns None if the thread was woken
        for another reason."""
        with self._awake:
            while not self._heap and not self._woken:
                self._awake.wait()
            self._woken = False
            if not self._heap:
                return None
            self._running = RunningPrompt(heapq.heappop(self._heap)[-1])
            self._notify()
            return self._running

    def wake(self) -> None:
        """Wakes the executor thread although no prompt was added."""
        with self._awake:
            self._woken = True
            self._awake.notify()

    def done(self, record: Callable[[], None]) -> None:
        """Ends the running prompt. Calls `record` before clients are notified."""
        with self._awake:
            self._running = None
            record()
            self._notify()

    def listed(self) -> tuple[list[QueuedPrompt], list[QueuedPrompt]]:
        """Returns the running and the waiting prompts. The waiting ones are in heap order and not
        sorted."""
        with self._awake:
            running = [self._running.item] if self._running else []
            return running, list(self._waiting())

    def clear(self) -> None:
        with self._awake:
            self._heap = []
            self._notify()

    def delete(self, prompt_id: str) -> bool:
        """Removes one waiting prompt with this id."""
        with self._awake:
            for index, item in enumerate(self._waiting()):
                if item.prompt_id == prompt_id:
                    self._remove(index)
                    return True
        return False

    def interrupt(self, prompt_id: str | None = None) -> bool:
        """Interrupts the running prompt if it has this id. Without an id, interrupts any prompt."""
        with self._awake:
            if self._running is None or prompt_id not in (None, self._running.item.prompt_id):
                return False
            self._running.interrupted.set()
            return True

    def cancel(self, prompt_id: str) -> bool:
        """Interrupts or deletes the prompt. Holds the lock throughout, so that the prompt can't
        start in between."""
        with self._awake:
            return self.interrupt(prompt_id) or self.delete(prompt_id)

    def _waiting(self) -> Iterator[QueuedPrompt]:
        return (entry[-1] for entry in self._heap)

    def _remove(self, index: int) -> None:
        # Like ComfyUI, this notifies clients twice when the last prompt is removed.
        if len(self._heap) == 1:
            self.clear()
        else:
            del self._heap[index]
            heapq.heapify(self._heap)
        self._notify()

    def _notify(self) -> None:
        self._changed(self.remaining())


HISTORY_ITEMS_MAX = 10_000


class History:
    """The records of finished prompts. The executor thread writes them, and the event loop reads
    them."""

    def __init__(self, items_max: int = HISTORY_ITEMS_MAX) -> None:
        self._items_max = items_max
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}

    def add(self, prompt_id: str, entry: Record) -> None:
        with self._lock:
            if len(self._records) > self._items_max:
                del self._records[next(iter(self._records))]
            self._records[prompt_id] = entry

    def get(self, prompt_id: str) -> dict[str, Record]:
        """Returns the record under its id, or an empty dict."""
        with self._lock:
            entry = self._records.get(prompt_id)
        return {} if entry is None else {prompt_id: entry}

    def page(self, max_items: int | None = None, offset: int | None = None) -> dict[str, Record]:
        """Returns records, oldest first. `max_items` without `offset` selects the newest ones."""
        with self._lock:
            start = -1 if offset is None else offset
            if start < 0 and max_items is not None:
                start = len(self._records) - max_items
            records = islice(self._records.items(), max(start, 0), None)
            # Like in ComfyUI, a page contains at least one record, even if `max_items` is 0.
            return dict(islice(records, None if max_items is None else max(max_items, 1)))

    def clear(self) -> None:
        with self._lock:
            self._records = {}

    def delete(self, prompt_id: str) -> None:
        with self._lock:
            self._records.pop(prompt_id, None)
