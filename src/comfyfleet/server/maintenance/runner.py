"""Runs sweeps periodically: each on its own, none able to stop another."""

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
# A pass that a stop finds at work may end in order for so long.
STOP_SECONDS_MAX = 5.0
DONE, PARTIAL, FAILED, ELSEWHERE = "done", "partial", "failed", "elsewhere"


@dataclass(frozen=True, slots=True)
class Sweep:
    name: str
    # One pass. What it answers is not looked at, but for True: there is more, come again at once.
    run: Callable[[], Awaitable[object]]
    seconds: float  # between the end of a pass and the next one, at most
    # False: each control plane runs it whatever the others do.
    in_turn: bool = True
    # Whether a pass would find anything; asked before the turn is taken, which is two statements.
    is_due: Callable[[], Awaitable[bool]] | None = None
    # Is given what to call when there is something to do at once.
    woken_by: Callable[[Callable[[], None]], None] | None = None


class SweepRunner:
    """All sweeps of one control plane."""

    def __init__(
        self, sweeps: Iterable[Sweep], turns: AdvisoryLocks, meters: ProcessMetrics, clock: Clock
    ) -> None:
        self._sweeps = {sweep.name: sweep for sweep in sweeps}
        self._wanted = {name: asyncio.Event() for name in self._sweeps}
        self._turns = turns
        self._meters = meters
        self._clock = clock
        self._is_stopping = False
        self._cut_short: set[str] = set()  # sweeps whose database was away when they passed last
        for sweep in self._sweeps.values():
            if sweep.woken_by is not None:
                sweep.woken_by(partial(self.wake, sweep.name))

    def wake(self, name: str) -> None:
        """Starts a pass now. If one is running, another follows."""
        if name in self._wanted:
            self._wanted[name].set()

    def stop(self) -> None:
        self._is_stopping = True
        for wanted in self._wanted.values():
            wanted.set()

    async def run(self) -> None:
        """Runs until `stop`. Cancelling is safe: a pass that is cut off is repeated later."""
        await asyncio.gather(*map(self._repeat, self._sweeps.values()))

    async def pass_once(self, sweep: Sweep) -> bool:
        """Runs one pass; returns whether there is more to do at once. Never raises."""
        with bind_ids(sweep=sweep.name):
            try:
                outcome, has_more = await self._turn(sweep)
            except Unavailable as error:
                self._note_cut_short(sweep, error)
                outcome, has_more = FAILED, False
            except Exception as error:  # noqa: BLE001 — logged, and the sweep runs again
                log_failure(logger, error, "the sweep %s failed; it will run again", sweep.name)
                outcome, has_more = FAILED, False
            if outcome != FAILED and sweep.name in self._cut_short:
                self._cut_short.discard(sweep.name)
                logger.warning("the sweep %s passes again", sweep.name)
        self._meters.passes.labels(sweep.name, outcome).inc()
        if outcome == DONE:
            self._meters.last_pass.labels(sweep.name).set(self._clock().timestamp())
        return has_more

    def _note_cut_short(self, sweep: Sweep, error: Unavailable) -> None:
        """Logs one line when the database is away, and none if its outage is logged already."""
        is_new = sweep.name not in self._cut_short and not is_logged(error)
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "the sweep %s was cut short: %s", sweep.name, error.message)
        if is_new:
            self._cut_short.add(sweep.name)

    async def _repeat(self, sweep: Sweep) -> None:
        wanted = self._wanted[sweep.name]
        while not self._is_stopping:
            wanted.clear()
            if await self.pass_once(sweep):
                continue
            try:
                async with asyncio.timeout(sweep.seconds):
                    await wanted.wait()
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
        """A pass that leaves out a pool is not one that is done: alerts wait for those."""
        with count_failed_pools() as failed:
            has_more = await sweep.run() is True
        return PARTIAL if failed else DONE, has_more


@asynccontextmanager
async def run_sweeps(sweeps: SweepRunner) -> AsyncIterator[SweepRunner]:
    """Runs the sweeps during the `with` block, and lets them end in order."""
    work = asyncio.create_task(sweeps.run(), name="sweeps")
    try:
        yield sweeps
    finally:
        sweeps.stop()
        await asyncio.wait({work}, timeout=STOP_SECONDS_MAX)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
