"""Results of nodes, kept by signature so that an unchanged part of a prompt runs once."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CACHE_BYTES_MAX = 512 * 1024 * 1024
CACHE_ENTRIES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node gave: its outputs, and what history shows (with the node that made it)."""

    outputs: tuple[Any, ...] = ()
    ui: Mapping[str, Any] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(int(getattr(value, "nbytes", 0)) for value in self.outputs)


class NodeCache:
    """The entries used last, within a size. Only the worker thread touches it."""

    def __init__(
        self, bytes_max: int = CACHE_BYTES_MAX, entries_max: int = CACHE_ENTRIES_MAX
    ) -> None:
        self._bytes_max = bytes_max
        self._entries_max = entries_max
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._bytes = 0

    def get(self, signature: str) -> Entry | None:
        entry = self._entries.get(signature)
        if entry is not None:
            self._entries.move_to_end(signature)
        return entry

    def put(self, signature: str, entry: Entry) -> None:
        if old := self._entries.pop(signature, None):
            self._bytes -= old.size_bytes
        self._entries[signature] = entry
        self._bytes += entry.size_bytes
        while self._bytes > self._bytes_max or len(self._entries) > self._entries_max:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= dropped.size_bytes
