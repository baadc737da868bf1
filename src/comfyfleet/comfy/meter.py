"""Calls counted and timed, for metrics. Who keeps the figures comes in as an argument."""

import threading
from collections import Counter
from typing import Protocol

# Enough for a percentile of the recent past; older ones are forgotten.
LATENCIES_KEPT_MAX = 1000


class Meter(Protocol):
    """`operation` is a method and route without ids: `POST /prompt`."""

    def called(self, operation: str, *, ok: bool, seconds: float) -> None: ...

    def unexpected(self, operation: str) -> None:
        """An answer of a shape that we don't know: worth an alert, the server has changed."""
        ...


class Tally:
    """A meter that keeps its figures in memory."""

    def __init__(self) -> None:
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.unexpected_answers: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def called(self, operation: str, *, ok: bool, seconds: float) -> None:
        with self._lock:
            (self.successes if ok else self.failures)[operation] += 1
            kept = self.latencies.setdefault(operation, [])
            kept.append(seconds)
            del kept[:-LATENCIES_KEPT_MAX]

    def unexpected(self, operation: str) -> None:
        with self._lock:
            self.unexpected_answers[operation] += 1
