"""Runs sweeps periodically and independently, so that none can stop another."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from comfyfleet.clock import Clock
from comfyfleet.errors import Unavailable, is_logged
from comfyfleet.log_context import bind_ids
from comfyfleet.server.app import ProcessMetrics
from comfyfleet.server.db import count_failed_pools
from comfyfleet.server.db.coordination import AdvisoryLocks
from comfyfleet.server.db.outages import log_failure

logger = logging.getLogger(__name__)
# Time for a pass that is running at shutdown to finish cleanly.
STOP_SECONDS_MAX = 5.0
DONE, PARTIAL, FAILED, ELSEWHERE = "done", "partial", "failed", "elsewhere"


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str
    # Runs one pass. Only the result True is used; it means that there is more to do immediately.
    run: Callable[[], Awaitable[object]]
    seconds: float  # maximum time between the end of a pass and the next one
    # False means every control plane runs the sweep, regardless of the others.
    in_turn: bool = True
    # Checks whether a pass would find anything. Runs before the sweep takes its turn, because
    # taking a turn costs two statements.
    is_due: Callable[[], Awaitable[bool]] | None = None
    # Receives a function to call when there is something to do immediately.
    woken_by: Callable[[Callable[[], None]], None] | None = None


class SweepRunner:
    """All sweeps of a control plane."""

    def __init__(
        self, sweeps: Iterable[Sweep], turns: AdvisoryLocks, meters: ProcessMetrics, clock: Clock
    ) -> None:
        self._sweeps = {sweep.name: sweep for sweep in sweeps}
        self._wanted = {name: asyncio.Event() for name in self._sweeps}
        self._turns = turns
        self._meters = meters
        self._clock = clock
        self._is_stopping = False
        # sweeps whose database was unavailable during the last pass
        self._cut_short: set[str] = set()
        for sweep in self._sweeps.values():
            if sweep.woken_by is not None:
                sweep.woken_by(partial(self.wake, sweep.name))

    def wake(self, name: str) -> None:
        """Starts a pass now. If one is already running, another one follows."""
        if name in self._wanted:
            self._wanted[name].set()

    def stop(self) -> None:
        self._is_stopping = True
        for event in self._wanted.values():
            event.set()

    async def run(self) -> None:
        """Runs until `stop` is called. Cancelling is safe, because an interrupted pass is repeated
        later."""
        await asyncio.gather(*map(self._repeat, self._sweeps.values()))

    async def pass_once(self, sweep: Sweep) -> bool:
        """Runs one pass. Returns whether there is more to do immediately. Never raises an error."""
        with bind_ids(sweep=sweep.name):
            try:
                outcome, has_more = await self._turn(sweep)
            except Unavailable as error:
                self._note_cut_short(sweep, error)
                outcome, has_more = FAILED, False
            except Exception as error:  # noqa: BLE001 — logged, and the sweep runs again
                log_failure(logger, error, "the %s sweep failed and will be retried", sweep.name)
                outcome, has_more = FAILED, False
            if outcome != FAILED and sweep.name in self._cut_short:
                self._cut_short.discard(sweep.name)
                logger.warning("the %s sweep works again", sweep.name)
        self._meters.passes.labels(sweep.name, outcome).inc()
        if outcome == DONE:
            self._meters.last_pass.labels(sweep.name).set(self._clock().timestamp())
        return has_more

    def _note_cut_short(self, sweep: Sweep, error: Unavailable) -> None:
        """Logs a single line when the database is unavailable, and none if its outage has already
        been logged."""
        is_new = sweep.name not in self._cut_short and not is_logged(error)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "the %s sweep was interrupted: %s", sweep.name, error.message)
        if is_new:
            self._cut_short.add(sweep.name)

    async def _repeat(self, sweep: Sweep) -> None:
        woken = self._wanted[sweep.name]
        while not self._is_stopping:
            woken.clear()
            if await self.pass_once(sweep):
                continue
            try:
                async with asyncio.timeout(sweep.seconds):
                    await woken.wait()
            except TimeoutError:
                continue

    async def _turn(self, sweep: Sweep) -> tuple[str, bool]:
        if sweep.is_due is not None and not await sweep.is_due():
            return DONE, False
        if not sweep.in_turn:
            return await self._pass(sweep)
        if not await self._turns.take(sweep.name):
            return ELSEWHERE, False
        try:
            return await self._pass(sweep)
        finally:
            await self._turns.give(sweep.name)

    async def _pass(self, sweep: Sweep) -> tuple[str, bool]:
        """Runs a pass. A pass that leaves out a pool doesn't count as done, because alerts depend
        on the last complete pass."""
        with count_failed_pools() as failed:
            has_more = await sweep.run() is True
        return PARTIAL if failed else DONE, has_more


@asynccontextmanager
async def run_sweeps(sweeps: SweepRunner) -> AsyncIterator[SweepRunner]:
    """Runs the sweeps during the `with` block, and lets them finish cleanly."""
    work = asyncio.create_task(sweeps.run(), name="sweeps")
    try:
        yield sweeps
    finally:
        sweeps.stop()
        await asyncio.wait({work}, timeout=STOP_SECONDS_MAX)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
