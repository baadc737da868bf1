"""Handlers for signals that end a program, on all operating systems."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def on_ending_signals(act: Callable[[signal.Signals], object]) -> Iterator[None]:
    """Calls `act` with the signal in the event loop for each SIGTERM and SIGINT, if signals can be
    handled."""
    loop = asyncio.get_running_loop()
    removals = [_handle(loop, number, partial(act, number)) for number in ENDING]
    try:
        yield
    finally:
        for remove in removals:
            remove()


def _handle(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, act: Callable[[], object]
) -> Callable[[], object]:
    """Sets a handler. Returns a function that restores the previous one."""
    try:
        loop.add_signal_handler(number, act)
    except NotImplementedError:
        return _handle_without_loop(loop, number, act)
    except (RuntimeError, ValueError):
        return lambda: None  # not in the main thread
    return lambda: loop.remove_signal_handler(number)


def _handle_without_loop(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, act: Callable[[], object]
) -> Callable[[], object]:
    """Sets a handler without the event loop, because Windows' event loops don't support signal
    handlers."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(act)

    try:
        before = signal.signal(number, handle)
    except ValueError:
        return lambda: None  # not in the main thread
    return lambda: signal.signal(number, before)
