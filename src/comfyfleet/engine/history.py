"""What has ended, in the order of ending. Memory only, as ComfyUI's."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from comfyfleet.engine.queue import Item

HISTORY_ITEMS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended and what it showed."""

    success: bool
    messages: Sequence[tuple[str, Mapping[str, Any]]]
    outputs: Mapping[str, Any]
    meta: Mapping[str, Any]


Record = Mapping[str, Any]


def record(item: Item, outcome: Outcome) -> Record:
    """A history item as `/history` shows it."""
    return {
        "prompt": item.row(),
        "outputs": outcome.outputs,
        "status": {
            "status_str": "success" if outcome.success else "error",
            "completed": outcome.success,
            "messages": outcome.messages,
        },
        "meta": outcome.meta,
    }


class History:
    """Written by the worker thread, read by the event loop."""

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
        """The one record under its id, or nothing."""
        with self._lock:
            entry = self._records.get(prompt_id)
        return {} if entry is None else {prompt_id: entry}

    def page(self, max_items: int | None = None, offset: int | None = None) -> dict[str, Record]:
        """Oldest first; `max_items` alone means the last ones."""
        with self._lock:
            start = -1 if offset is None else offset
            if start < 0 and max_items is not None:
                start = len(self._records) - max_items
            records = islice(self._records.items(), max(start, 0), None)
            # ComfyUI looks whether there are enough after adding one: none can't be asked for.
            return dict(islice(records, None if max_items is None else max(max_items, 1)))

    def clear(self) -> None:
        with self._lock:
            self._records = {}

    def delete(self, prompt_id: str) -> None:
        with self._lock:
            self._records.pop(prompt_id, None)
