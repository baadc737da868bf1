"""What only grows is thinned: audit, ended dispatches, prompts of ended jobs, readings, events.

In steps of some hundred rows, each a transaction of its own, with a pause after it that is as long as
the step was: whoever submits, leases or completes meanwhile waits for one step at most.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from time import monotonic
from typing import TypeAlias

from comfyfleet.audit import service as audit
from comfyfleet.db import Database
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import EndedRow
from comfyfleet.events import service as events
from comfyfleet.fleets import service as fleets
from comfyfleet.jobs import store as jobs
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError
from comfyfleet.webhooks import service as webhooks

log = logging.getLogger(__name__)
ROWS_PER_STEP = 500
STEPS_PER_PASS_MAX = 200
PAUSE_SECONDS_MAX = 1.0
# One step, with the most rows that it may remove: how many it has.
Step: TypeAlias = Callable[[int], Awaitable[int]]


async def thin(sides: Sides) -> dict[str, int]:
    """How much went of what. What is kept for 0 days is kept for ever."""
    settings, central = sides.settings, sides.central
    gone: dict[str, int] = {}
    if before := _before(sides, days=settings.audit_keep_days):
        gone["audit"] = await _in_steps(_step(central, audit.prune, before))
    if before := _before(sides, hours=settings.reading_keep_hours):
        gone["readings"] = await _in_steps(_step(central, fleets.thin_readings, before))
    if before := _before(sides, days=settings.dispatch_keep_days):
        gone["dispatches"] = await remove_dispatches(sides, before)
    for name, pool in sides.pools.items():
        try:
            for what, count in (await _thin_pool(sides, pool)).items():
                gone[what] = gone.get(what, 0) + count
        except FleetError as error:
            log.warning("pool %s was not thinned: %s", name, error.message)
    return gone


async def _thin_pool(sides: Sides, pool: Database) -> dict[str, int]:
    settings, gone = sides.settings, {}
    if before := _before(sides, days=settings.event_keep_days):
        gone["events"] = await _in_steps(_step(pool, events.prune, before))
    if before := _before(sides, days=settings.delivery_keep_days):
        gone["deliveries"] = await _in_steps(_step(pool, webhooks.prune, before))
    if before := _before(sides, days=settings.prompt_keep_days):
        gone["prompts"] = await _in_steps(_prompts(sides, pool, before))
    return gone


def _before(sides: Sides, **kept: int) -> datetime | None:
    """None: for ever."""
    age = timedelta(**kept)
    return sides.clock() - age if age else None


def _step(database: Database, prune: Callable[..., Awaitable[int]], before: datetime) -> Step:
    async def step(limit: int) -> int:
        async with database.begin() as tx:
            return await prune(tx, before=before, limit=limit)

    return step


def _prompts(sides: Sides, pool: Database, before: datetime) -> Step:
    async def step(limit: int) -> int:
        async with pool.begin() as tx:
            return await jobs.remove_prompts(
                tx, ended_before=before, now=sides.clock(), limit=limit
            )

    return step


async def _in_steps(step: Step) -> int:
    total = 0
    for _ in range(STEPS_PER_PASS_MAX):
        begun = monotonic()
        count = await step(ROWS_PER_STEP)
        total += count
        if count < ROWS_PER_STEP:
            break
        await _pause(begun)
    return total


async def _pause(begun: float) -> None:
    await asyncio.sleep(min(PAUSE_SECONDS_MAX, monotonic() - begun))


async def remove_dispatches(sides: Sides, before: datetime) -> int:
    """Those that ended before then, and whose jobs have ended too.

    Without its dispatch an active job would get a second one, so that what can't be compared stays.
    """
    total, last = 0, None
    for _ in range(STEPS_PER_PASS_MAX):
        begun = monotonic()
        async with sides.central.look() as tx:
            page = await dispatch.ended_before(tx, before, after=last, limit=ROWS_PER_STEP)
        may_go = await _of_ended_jobs(sides, page)
        async with sides.central.begin() as tx:
            total += await dispatch.remove(tx, may_go)
        if len(page) < ROWS_PER_STEP:
            break
        last = page[-1]
        await _pause(begun)
    return total


async def _of_ended_jobs(sides: Sides, page: Sequence[EndedRow]) -> list[int]:
    parts: dict[str | None, list[EndedRow]] = defaultdict(list)
    for row in page:
        parts[await sides.pool_name_of(row.tenant_id)].append(row)
    may_go = [row.id for row in parts.pop(None, [])]  # of tenants that are gone
    for name, part in parts.items():
        try:
            async with sides.pools[name or ""].look() as tx:
                known = await jobs.known(tx, [row.job_id for row in part])
        except FleetError as error:
            log.warning("dispatches of pool %s are kept for now: %s", name, error.message)
            continue
        active = {keys for keys, status in known.items() if status.is_active}
        may_go += [row.id for row in part if (row.tenant_id, row.job_id) not in active]
    return may_go
