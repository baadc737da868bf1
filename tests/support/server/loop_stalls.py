"""Measures how long an attack keeps the event loop of a control plane in this process from turning."""

import asyncio
import gc
import time
from types import TracebackType

WAKE_SECONDS = 0.001
STALL_MS_MAX = 100.0


class LoopStalls:
    """A task on the running loop wakes every millisecond and reads the CPU time of all threads of this process.

    The largest difference between two readings is the figure. It does not depend on the load of the machine, and it
    includes work in threads that hold the interpreter lock. Clients must not count: start them with
    `send_from_outside`, or prepare their requests before and read the answers after the measurement.

        async with LoopStalls() as stalls:
            answers = await send_from_outside(url, [request])
        assert stalls.worst_ms < STALL_MS_MAX
    """

    def __init__(self) -> None:
        self.worst_ms = 0.0
        self.turns = 0

    async def __aenter__(self) -> "LoopStalls":
        # The heap of a test run is many times that of a control plane: collecting it is no stall of the product.
        gc.collect()
        gc.freeze()
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

    async def _measure(self) -> None:
        before = time.process_time()
        while True:
            await asyncio.sleep(WAKE_SECONDS)
            now = time.process_time()
            self.worst_ms = max(self.worst_ms, (now - before) * 1000)
            self.turns += 1
            before = now
