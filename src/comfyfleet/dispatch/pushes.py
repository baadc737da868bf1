"""Heartbeats that wait for news of their lease, so that an order need not wait for the next one."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

# The id of a dispatch, or of a worker.
Subject: TypeAlias = int | str


class Pushes:
    def __init__(self) -> None:
        self._waiting: dict[Subject, set[asyncio.Event]] = {}

    @contextmanager
    def waiting(self, *subjects: Subject) -> Iterator[asyncio.Event]:
        """The event is set when something is pushed about any of the subjects."""
        event = asyncio.Event()
        for subject in subjects:
            self._waiting.setdefault(subject, set()).add(event)
        try:
            yield event
        finally:
            for subject in subjects:
                self._waiting[subject].discard(event)
                if not self._waiting[subject]:
                    del self._waiting[subject]

    def push(self, subjects: Iterable[Subject] | None) -> None:
        """None: to all."""
        for subject in list(self._waiting) if subjects is None else subjects:
            for event in self._waiting.get(subject, ()):
                event.set()
