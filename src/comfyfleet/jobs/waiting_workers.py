"""Looks after the workers whose polls wait in this process: many with one statement.

Each is seen, so that none passes for offline, and those whose rights have changed unnoticed are sent to
ask anew. The hints between control planes are quicker; they may be lost.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping

from comfyfleet.db import Tx
from comfyfleet.db.outages import level_of
from comfyfleet.dispatch.model import Waiter
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
LOOKS_PER_PASS = 10


class WaitingWorkers:
    """Each is looked at when it has waited for as long as one may go unseen, and again after as long."""

    def __init__(self, sides: Sides) -> None:
        self._sides = sides
        every = part_of(sides.settings.unseen_seconds_max)
        self._pass_seconds = min(PASS_SECONDS, every.total_seconds())

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._pass_seconds / LOOKS_PER_PASS)
            await self.look()

    async def look(self) -> None:
        """At those who are due. None of them is held from here to the next time: polls that were
        answered long ago would stay in memory."""
        now = asyncio.get_running_loop().time()
        due = self._sides.queue.not_looked_at_since(now - self._pass_seconds)
        for start in range(0, len(due), WORKERS_PER_LOOK):
            page = [each for each in due[start:][:WORKERS_PER_LOOK] if not each.future.done()]
            await self._look([each.waiter for each in page])
            for each in page:
                each.looked_at = now

    async def close(self) -> None:
        """Nothing is kept open."""

    async def _look(self, waiters: Collection[Waiter]) -> None:
        try:
            await look_at(self._sides, waiters)
        except FleetError as error:
            logger.log(level_of(error), "who waits can't be looked at: %s", error.message)


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
