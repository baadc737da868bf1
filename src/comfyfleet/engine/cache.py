"""Results of nodes, kept by signature so that an unchanged part of a prompt runs once."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """What a node gave: its outputs, and what history shows (with the node that made it)."""

    outputs: tuple[Any, ...] = ()
    ui: Mapping[str, Any] | None = None


class NodeCache:
    """What the last prompt had. Only the worker thread touches it."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, signature: str) -> Entry | None:
        return self._entries.get(signature)

    def put(self, signature: str, entry: Entry) -> None:
        self._entries[signature] = entry

    def retain(self, signatures: Collection[str]) -> None:
        """Drop all others: pictures of prompts that are over are not worth their memory."""
        kept = self._entries.keys() & set(signatures)
        self._entries = {signature: self._entries[signature] for signature in kept}
