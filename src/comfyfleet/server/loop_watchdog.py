"""Reports stalls of the event loop, during which no request is processed.

The loop stalls if one of its own iterations takes too long, or if another thread holds the global
interpreter lock. The first kind is measured exactly, between two calls of the loop's selector. A
watchdog thread samples the stack about ten times a second. It detects the second kind when it is
woken too late itself.
"""

import asyncio
import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from time import monotonic, process_time
from types import CodeType, FrameType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)
# Minimum duration of a reported stall, and the interval between two samples, in seconds.
STALL_SECONDS = 0.1
LOOK_SECONDS = 0.1
# A stall that lasts longer than this many seconds is logged before it ends, because it may never
# end.
LASTING_SECONDS = 10.0
# Limit for logged stalls. Further stalls are only counted, and the next log line contains their
# number.
LINES_PER_MINUTE_MAX = 10
FRAMES_MAX = 30
THREADS_MAX = 3
STACKS_MAX = 100
# Innermost functions of threads that are waiting and therefore don't hold the interpreter lock.
_WAITING = frozenset({"_worker", "accept", "get", "poll", "recv", "select", "wait"})

Line: TypeAlias = tuple[CodeType, int]
Stack: TypeAlias = tuple[Line, ...]


class Stall(NamedTuple):
    """A stall of the event loop.

    `cpu_seconds` is the CPU time of all threads, with a resolution of about 0.1 s. If it is low,
    the loop waited for a file or a lock, or other processes used the CPU.
    """

    seconds: float
    cpu_seconds: float
    stack: str


class TurnClock:
    """Records when the current iteration of an event loop started, by wrapping its selector."""

    def __init__(self, selector: Any) -> None:
        self.began = 0.0  # 0 while the loop waits for events
        self.users: list[Callable[[float, float], None]] = []
        self._select = selector.select
        selector.select = self._timed_select

    def _timed_select(self, timeout: float | None = None) -> Any:
        started_at, self.began = self.began, 0.0
        if started_at and (ended := monotonic()) - started_at > STALL_SECONDS:
            for note in (*self.users,):
                note(started_at, ended)
        events = self._select(timeout)
        self.began = monotonic()
        return events


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, TurnClock] = WeakKeyDictionary()


def turn_clock_of(loop: asyncio.AbstractEventLoop) -> TurnClock | None:
    """Returns the shared clock of an event loop, or None if the loop has no `_selector`."""
    clock = _clocks.get(loop)
    if clock is None:
        selector = getattr(loop, "_selector", None)
        if selector is None:
            return None
        clock = _clocks[loop] = TurnClock(selector)
    return clock


@dataclass
class _Turn:
    """The samples of the loop iteration that started at `began`."""

    began: float = 0.0
    cpu_before: float = 0.0
    is_logged: bool = False
    stacks: Counter[Stack] = field(default_factory=Counter)

    def stack(self) -> str:
        return text_of(self.stacks.most_common(1)[0][0]) if self.stacks else "no stack was sampled"


class LoopWatchdog:
    """Watches the running event loop, and calls `observe` with the seconds of each stall."""

    def __init__(self, observe: Callable[[float], object]) -> None:
        self._observe = observe
        self._ended: deque[tuple[float, float]] = deque(maxlen=1_000)
        self._stop = threading.Event()
        self._turn = _Turn()
        self._looked, self._cpu = monotonic(), process_time()
        self._lines: deque[float] = deque(maxlen=LINES_PER_MINUTE_MAX)
        self._unlogged = 0
        self._loop_thread = 0
        self._clock: TurnClock | None = None

    async def run(self) -> None:
        self._loop_thread = threading.get_ident()
        self._clock = turn_clock_of(asyncio.get_running_loop())
        note = self._note
        if self._clock is not None:
            self._clock.users.append(note)
        self._stop.clear()
        thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            if self._clock is not None:
                self._clock.users.remove(note)
            self._stop.set()

    async def close(self) -> None:
        self._stop.set()

    def _note(self, began: float, ended: float) -> None:
        self._ended.append((began, ended))

    def _watch(self) -> None:
        self._looked, self._cpu = monotonic(), process_time()
        while not self._stop.wait(LOOK_SECONDS):
            self.look(monotonic(), process_time())

    def look(self, now: float, cpu: float) -> None:
        """Samples the stack of the current iteration, and reports stalls that have ended since the
        last call."""
        began = self._clock.began if self._clock else 0.0
        is_reported = self._report_ended(cpu)
        if began:
            self._sample(began, now, cpu)
        elif not is_reported:
            self._report_held_lock(now, cpu)
        self._looked, self._cpu = now, cpu

    def _sample(self, began: float, now: float, cpu: float) -> None:
        if began != self._turn.began:
            self._turn = _Turn(began, self._cpu)
        turn, frame = self._turn, sys._current_frames().get(self._loop_thread)
        if frame is not None and len(turn.stacks) < STACKS_MAX:
            turn.stacks[stack_of(frame)] += 1
        if now - began > LASTING_SECONDS and not turn.is_logged:
            turn.is_logged = True
            self._log(Stall(now - began, cpu - turn.cpu_before, turn.stack()), "is stalled")

    def _report_ended(self, cpu: float) -> bool:
        is_any = bool(self._ended)
        while self._ended:
            began, ended = self._ended.popleft()
            turn = self._turn if self._turn.began == began else _Turn(began, self._cpu)
            self._report(Stall(ended - began, cpu - turn.cpu_before, turn.stack()))
        return is_any

    def _report_held_lock(self, now: float, cpu: float) -> None:
        """Reports a stall if this thread woke up too late because another thread held the
        interpreter lock."""
        late, used = now - self._looked - LOOK_SECONDS, cpu - self._cpu
        if late > STALL_SECONDS and used > STALL_SECONDS:
            busy = self._busy_threads()
            self._report(Stall(late, used, f"another thread held the interpreter lock: {busy}"))

    def _busy_threads(self) -> str:
        own = (self._loop_thread, threading.get_ident())
        frames = [frame for ident, frame in sys._current_frames().items() if ident not in own]
        busy = [frame for frame in frames if _is_busy(frame)]
        return (
            " | ".join(text_of(stack_of(frame)) for frame in busy[:THREADS_MAX])
            or "the thread has finished"
        )

    def _report(self, stall: Stall) -> None:
        self._observe(stall.seconds)
        self._log(stall, "stalled")

    def _log(self, stall: Stall, what: str) -> None:
        now = monotonic()
        if len(self._lines) == LINES_PER_MINUTE_MAX and now - self._lines[0] < 60:
            self._unlogged += 1
            return
        self._lines.append(now)
        figures: dict[str, float] = {
            "stall_seconds": round(stall.seconds, 3),
            "cpu_seconds": round(stall.cpu_seconds, 3),
        }
        if self._unlogged:
            figures["unlogged_stalls"], self._unlogged = self._unlogged, 0
        logger.warning("the event loop %s: %s", what, stall.stack, extra=figures)


def _is_busy(frame: FrameType) -> bool:
    code = _code_of(frame)
    return code is not None and code.co_name not in _WAITING


def stack_of(frame: FrameType) -> Stack:
    """Returns the innermost calls of a stack, with the innermost call last.

    The result contains only code and line numbers, never values.
    """
    return tuple(_lines_from(frame))[::-1]


def _lines_from(frame: FrameType | None) -> Iterator[Line]:
    for _ in range(FRAMES_MAX):
        code = _code_of(frame)
        # Stops at the event loop's own frames, which are always the same.
        if frame is None or code is None or code.co_name == "_run_once":
            return
        yield code, frame.f_lineno
        frame = frame.f_back


def _code_of(frame: FrameType | None) -> CodeType | None:
    """Returns the code of a frame, or None if the frame is no longer valid.

    The other thread may continue while its frames are read. On a busy machine, CPython 3.11
    sometimes returns a dictionary as the code of a frame.
    """
    code = getattr(frame, "f_code", None)
    return code if isinstance(code, CodeType) else None


def text_of(stack: Stack) -> str:
    """Formats a stack on one line."""
    return " > ".join(
        f"{'/'.join(PurePath(code.co_filename).parts[-3:])}:{line} {code.co_name}"
        for code, line in stack
    )
