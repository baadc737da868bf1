"""Writes that nobody waits for, done a moment later and many at once.

What is lost when the process dies does no harm: a word of the outbox that was not forgotten is delivered
again by the sweep, which changes nothing; a duration is an estimate for people, and what was sent to a
backend is for people who look into a job; and objects that no row names are found by the sweep of
leftovers.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TypeAlias
from uuid import UUID

from comfyfleet.db import Database
from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Attempt
from comfyfleet.kernel.errors import FleetError
from comfyfleet.storage.model import ObjectStore

log = logging.getLogger(__name__)
DELAY_SECONDS = 0.05
Attempts: TypeAlias = dict[tuple[UUID, int], Attempt]  # by job and lease: the first counts


class Deferred:
    """Collects until `DELAY_SECONDS` after the first; then one transaction for each database."""

    def __init__(self) -> None:
        self._words: defaultdict[Database, list[int]] = defaultdict(list)
        self._attempts: defaultdict[Database, Attempts] = defaultdict(dict)
        self._durations: defaultdict[tuple[Database, UUID], list[float]] = defaultdict(list)
        self._objects: defaultdict[ObjectStore, list[str]] = defaultdict(list)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def forget_words(self, pool: Database, words: Sequence[int]) -> None:
        """Words of the outbox that were delivered."""
        if words:
            self._words[pool] += words
            self._start()

    def note_attempt(self, pool: Database, attempt: Attempt) -> None:
        """What was sent to a backend."""
        self._attempts[pool].setdefault((attempt.job_id, attempt.lease_number), attempt)
        self._start()

    def note_duration(self, central: Database, effect_id: UUID, seconds: float) -> None:
        self._durations[central, effect_id].append(seconds)
        self._start()

    def delete_objects(self, objects: ObjectStore, keys: Sequence[str]) -> None:
        """Objects that nothing names any more."""
        if keys:
            self._objects[objects] += keys
            self._start()

    async def flush(self) -> None:
        """All that was collected until now is written when this returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._begin()
        while self._writing:
            await asyncio.wait(self._writing)

    def _start(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(DELAY_SECONDS, self._begin)

    def _begin(self) -> None:
        self._timer = None
        writing = asyncio.get_running_loop().create_task(self._write())
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)

    async def _write(self) -> None:
        words, self._words = self._words, defaultdict(list)
        attempts, self._attempts = self._attempts, defaultdict(dict)
        durations, self._durations = self._durations, defaultdict(list)
        objects, self._objects = self._objects, defaultdict(list)
        for pool in dict.fromkeys([*words, *attempts]):
            forgotten, noted = words.get(pool, []), [*attempts.get(pool, {}).values()]
            with _logged(
                f"{len(forgotten)} words of the outbox are left to the sweep, "
                f"and {len(noted)} attempts are not noted"
            ):
                await _write_to(pool, forgotten, noted)
        # In one order, so that no two control planes wait for each other's rows.
        for (central, effect_id), seconds in sorted(durations.items(), key=lambda each: each[0][1]):
            with _logged(f"a duration of effect {effect_id} is not noted"):
                async with central.say() as tx:
                    await catalogue.note_duration(tx, effect_id, fmean(seconds))
        for each, keys in objects.items():
            with _logged(f"{len(keys)} objects are left to the sweep of leftovers"):
                await each.delete(*keys)


async def _write_to(pool: Database, words: Sequence[int], attempts: Sequence[Attempt]) -> None:
    if not attempts:
        async with pool.say() as tx:
            await store.forget_words(tx, words)
        return
    async with pool.begin() as tx:
        await store.add_attempts(tx, attempts)
        if words:
            await store.forget_words(tx, words)


@contextmanager
def _logged(what: str) -> Iterator[None]:
    """One that can't be written holds up no other."""
    try:
        yield
    except Exception as error:
        odd = not isinstance(error, FleetError)
        log.warning("%s: %s", what, error, exc_info=odd)
