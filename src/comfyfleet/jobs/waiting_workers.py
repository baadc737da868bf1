"""Looks after the workers whose polls wait in this process: many with one statement.

Each is seen, so that none passes for offline, and those whose rights have changed unnoticed are sent to
ask anew. The hints between control planes are quicker; they may be lost.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from comfyfleet.db import Tx
from comfyfleet.db.outages import level_of
from comfyfleet.dispatch.model import Waiter
from comfyfleet.dispatch.waiting import Asked
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.decide import part_of
from comfyfleet.fleets.model import Lane, Worker
from comfyfleet.jobs import shared
from comfyfleet.jobs.polling import is_alone
from comfyfleet.jobs.sides import Sides
from comfyfleet.kernel.errors import FleetError

logger = logging.getLogger(__name__)
# A change of which another control plane told us in vain is noticed after so long.
PASS_SECONDS = 30.0
WORKERS_PER_LOOK = 500


class WaitingWorkers:
    """One pass over all of them takes as long as one may go unseen; it goes on in small steps."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        every = part_of(sides.settings.unseen_seconds_max)
        self._pass_seconds = min(PASS_SECONDS, every.total_seconds())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            pages = _pages(self._sides.queue.parked_ones()) or [[]]
            for page in pages:
                await asyncio.sleep(self._pass_seconds / len(pages))
                await self._look([asked.waiter for asked in page if not asked.future.done()])

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _look(self, waiters: Collection[Waiter]) -> None:
        try:
            await look_at(self._sides, waiters)
        except FleetError as error:
            logger.log(level_of(error), "who waits can't be looked at: %s", error.message)


def _pages(waiting: Sequence[Asked]) -> list[Sequence[Asked]]:
    starts = range(0, len(waiting), WORKERS_PER_LOOK)
    return [waiting[start : start + WORKERS_PER_LOOK] for start in starts]


async def look_at(sides: Sides, waiters: Iterable[Waiter]) -> None:
    """Notes that these workers are there, and wakes those whose rights are not what they were."""
    by_key = {each.key_hash: each for each in waiters if each.key_hash is not None}
    if not by_key:
        return
    now = sides.clock()
    async with sides.central.look() as tx:
        known = {each.key_hash: each for each in await fleets.with_keys(tx, by_key)}
        changed = await _changed(sides, tx, by_key, known)
    unseen_since = now - part_of(sides.settings.unseen_seconds_max) / 3
    unseen = [each for each in known.values() if each.last_seen_at < unseen_since]
    if unseen:
        async with sides.central.begin() as tx:
            await fleets.note_seen(tx, unseen, now=now)
    if changed:
        sides.queue.dismiss(changed)


async def _changed(
    sides: Sides, tx: Tx, waiters: Mapping[str, Waiter], known: Mapping[str, Worker]
) -> set[str]:
    """The ids of workers that must ask anew; of those without a row the key is no longer good."""
    lanes: dict[str, frozenset[Lane]] = {}
    if not await shared.in_maintenance(tx):
        lanes = await fleets.lanes_of_all(
            tx, known.values(), abilities=sides.abilities, now=sides.clock()
        )
    found: set[str] = set()
    for key, waiter in waiters.items():
        worker: Worker | None = known.get(key)
        now_has: frozenset[tuple[int, str, str]] = lanes.get(key, frozenset())
        if (
            worker is None
            or worker.next_key is not None
            or now_has != waiter.lanes
            or (now_has and waiter.is_alone != await is_alone(sides, tx, worker, now_has))
        ):
            found.add(waiter.worker_id)
    return found
