"""Stalls of the event loop are logged with their stack and counted."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from comfyfleet.server import loop_watchdog
from comfyfleet.server.loop_watchdog import LINES_PER_MINUTE_MAX, LOOK_SECONDS, LoopWatchdog


class Watched:
    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.stalls: list[float] = []
        self._caplog = caplog

    @property
    def lines(self) -> list[logging.LogRecord]:
        name = loop_watchdog.logger.name
        return [record for record in self._caplog.records if record.name == name]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def watching(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Watched]:
    watched = Watched(caplog)
    watchdog = LoopWatchdog(watched.stalls.append)
    running = asyncio.create_task(watchdog.run())
    await asyncio.sleep(2 * LOOK_SECONDS)
    caplog.clear()
    watched.stalls.clear()
    try:
        yield watched
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await watchdog.close()


def spin(seconds: float) -> None:
    """Computes for so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_a_stall_is_logged_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    async with watching(caplog) as watched:
        spin(0.3)
        await watched.until(lambda: bool(watched.lines))
    line = watched.lines[0]
    assert "test_loop_watchdog.py" in line.getMessage()
    assert line.getMessage().endswith("spin")
    assert vars(line)["stall_seconds"] >= 0.3
    assert vars(line)["cpu_seconds"] > 0.1
    assert watched.stalls[0] >= 0.3


async def test_a_wait_for_a_file_or_lock_is_a_stall_without_cpu(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching(caplog) as watched:
        time.sleep(0.3)  # noqa: ASYNC251
        await watched.until(lambda: bool(watched.lines))
    assert vars(watched.lines[0])["stall_seconds"] >= 0.3
    assert vars(watched.lines[0])["cpu_seconds"] < 0.2


async def test_a_call_into_c_that_holds_the_lock_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_logged() -> bool:
        return any("holds_the_lock_is_logged" in line.getMessage() for line in watched.lines)

    async with watching(caplog) as watched:
        # On a busy machine the watchdog may wake too late to see the stack.
        for _ in range(20):
            if is_logged():
                break
            logged = len(watched.lines)
            sum(range(20_000_000))
            await watched.until(lambda logged=logged: len(watched.lines) > logged)  # type: ignore[misc]
    assert is_logged()


async def test_a_thread_that_holds_the_lock_stalls_the_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watching(caplog) as watched:
        await asyncio.to_thread(sum, range(60_000_000))
        await watched.until(lambda: bool(watched.lines))
    assert watched.stalls[0] > 0.1


async def test_an_idle_loop_and_short_turns_are_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However loaded the machine is, no turn lasts so long.
    monkeypatch.setattr(loop_watchdog, "STALL_SECONDS", 30.0)
    async with watching(caplog) as watched:
        for _ in range(20):
            spin(0.01)
            await asyncio.sleep(0)
        await asyncio.sleep(4 * LOOK_SECONDS)
    assert watched.lines == []
    assert watched.stalls == []


async def test_an_idle_loop_costs_no_stacks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(loop_watchdog, "stack_of", taken.append)
    async with watching(caplog):
        taken.clear()
        await asyncio.sleep(5 * LOOK_SECONDS)
        assert len(taken) <= 1  # the loop may have been looked at while it woke


async def test_more_stalls_are_counted_than_logged(caplog: pytest.LogCaptureFixture) -> None:
    many = LINES_PER_MINUTE_MAX + 3
    async with watching(caplog) as watched:
        for _ in range(many):
            time.sleep(0.11)  # noqa: ASYNC251
            await asyncio.sleep(0)
        await watched.until(lambda: len(watched.stalls) >= many)
    assert len(watched.lines) == LINES_PER_MINUTE_MAX


async def test_a_stall_that_lasts_is_logged_before_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watchdog, "LASTING_SECONDS", 0.3)
    async with watching(caplog) as watched:
        deadline = time.monotonic() + 30
        while not watched.lines and time.monotonic() < deadline:
            spin(0.01)
        assert "is stalled" in watched.lines[0].getMessage()


async def test_frames_that_change_while_they_are_read_end_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = SimpleNamespace(f_code={}, f_lineno=1, f_back=None)

    def changed_frames() -> dict[int | None, SimpleNamespace]:
        return {thread.ident: changed for thread in threading.enumerate()}

    async with watching(caplog) as watched:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "_current_frames", changed_frames)
            spin(0.3)
            await watched.until(lambda: bool(watched.lines))
        caplog.clear()
        spin(0.3)
        await watched.until(lambda: bool(watched.lines))


async def test_two_watchdogs_share_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with watching(caplog) as first, watching(caplog) as second:
        spin(0.2)
        await first.until(lambda: bool(first.stalls and second.stalls))
    async with watching(caplog) as third:
        spin(0.2)
        await third.until(lambda: bool(third.stalls))
        assert len(first.stalls) == 1
