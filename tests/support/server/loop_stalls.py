"""Measures how long an attack keeps the event loop of a control plane in this process from turning."""

import asyncio
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar

WAKE_SECONDS = 0.001
STALL_MS_MAX = 100.0
# Noise only adds CPU time, so the smallest of these measurements of a call is the best estimate of its cost.
ATTEMPTS_MAX = 3

# The CPU time of `reference_work` when nothing else runs: on the machine on which the figures of the stall tests
# were measured (2 virtual cores, Python 3.11), the smallest of 900 runs took 5.8 ms and the median 6.1 to 6.6 ms.
REFERENCE_MS = 6.0
# The smallest of these counts: one interruption must not raise the limit.
REFERENCE_RUNS = 3
REFERENCE_ROWS = [
    {"id": number, "name": f"node {number}", "at": [1, 2.5], "inputs": {"a": number, "b": ["1", 0]}}
    for number in range(2_000)
]


class LoopStalled(AssertionError):
    """Raised if the event loop was blocked for longer than the limit in each attempt."""


@dataclass
class StallRecord:
    """The measurements of a test in all its attempts."""

    calls: list[str] = field(default_factory=list)
    # For each measurement of the test, in order: its value in each attempt.
    values_ms: list[list[float]] = field(default_factory=list)
    position: int = 0
    is_stalled: bool = False

    # The record of the running test, or None outside of a test that is measured again.
    current: ClassVar["StallRecord | None"] = None

    def start_attempt(self) -> None:
        self.position, self.is_stalled = 0, False

    def add(self, call: str, stall_ms: float) -> None:
        if self.position == len(self.calls):
            self.calls.append(call)
            self.values_ms.append([])
        self.values_ms[self.position].append(stall_ms)
        self.position += 1

    def check(self) -> None:
        """Raises LoopStalled if a measurement was above the limit in every attempt so far."""
        if stalled := self._above(min):
            self.is_stalled = True
            raise LoopStalled(f"the loop didn't turn for {STALL_MS_MAX:.0f} ms or more: {stalled}")

    def above_limit(self) -> str:
        """Returns the measurements that were above the limit in any attempt, with all their values."""
        return self._above(max)

    def _above(self, choose: Callable[[list[float]], float]) -> str:
        return "; ".join(
            f"{call} {', '.join(f'{value:.0f}' for value in values)} ms"
            for call, values in zip(self.calls, self.values_ms, strict=True)
            if choose(values) >= STALL_MS_MAX
        )


def reference_work() -> None:
    """A fixed amount of what large calls consist of: JSON, and loops over small objects."""
    rows: list[dict[str, Any]] = json.loads(json.dumps(REFERENCE_ROWS))
    values = {row["name"]: [part * 2 for part in row["at"]] for row in rows}
    links = sum(isinstance(value, list) for row in rows for value in row["inputs"].values())
    assert len(values) == links == len(REFERENCE_ROWS)


def slowness() -> float:
    """Returns how many times its usual CPU time the reference work takes now; at least 1.

    A virtual machine counts the time in which the host runs another one as CPU time, and two threads that share a core
    are slower than one.
    """
    best_ms = float("inf")
    for _ in range(REFERENCE_RUNS):
        before = time.process_time()
        reference_work()
        best_ms = min(best_ms, (time.process_time() - before) * 1000)
    return max(1.0, best_ms / REFERENCE_MS)


class LoopStalls:
    """A task on the running loop wakes every millisecond and reads the CPU time of all threads of this process.

    The largest difference between two readings is the worst stall. It includes work in threads that hold the
    interpreter lock. Clients must not count: start them with `send_from_outside`, or prepare their requests before and
    read the answers after the measurement.

        async with LoopStalls("POST /prompt"):
            answers = await send_from_outside(url, [request])

    The worst stall, divided by the slowness of the machine at the time, must be below STALL_MS_MAX. A test in
    tests/security/stalls that exceeds it is measured again (see `stall_attempts`).
    """

    def __init__(self, call: str, record: StallRecord | None = None) -> None:
        self._call = call
        self._record = record or StallRecord.current
        self.worst_ms = 0.0
        self.turns = 0

    async def __aenter__(self) -> "LoopStalls":
        assert self._record is not None, "tests that measure stalls belong in tests/security/stalls"
        # The heap of a test run is many times that of a control plane: collecting it is no stall of the product.
        gc.collect()
        gc.freeze()
        self._slowness = slowness()
        self._probe = asyncio.create_task(self._measure(), name="loop stalls")
        await asyncio.sleep(10 * WAKE_SECONDS)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What the attack left to be done counts, too.
        await asyncio.sleep(10 * WAKE_SECONDS)
        self._probe.cancel()
        await asyncio.gather(self._probe, return_exceptions=True)
        gc.unfreeze()
        if kind is None:
            slower = max(self._slowness, slowness())
            assert self._record is not None
            self._record.add(self._call, self.worst_ms / slower)

    async def _measure(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(WAKE_SECONDS)
            now = time.process_time()
            self.worst_ms = max(self.worst_ms, (now - before) * 1000)
            self.turns += 1
            before = now
