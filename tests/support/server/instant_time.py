"""Runs a coroutine on an event loop that skips the time it would wait.

Tests of timeouts of several minutes end immediately, and no deadline passes too early on a busy
machine. Suitable for coroutines that only wait for timers, not for files, sockets or threads.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


def run_instantly(work: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=_InstantLoop) as runner:
        return runner.run(work)


class _InstantSelector(selectors.DefaultSelector):
    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.seconds += timeout
        return ready if ready or timeout is not None else super().select(None)


class _InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        return self._instant.seconds
