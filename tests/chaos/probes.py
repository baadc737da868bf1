"""Probes run a tiny job in each pool every second, even if earlier probes have no answer yet."""

import asyncio
import contextlib
import itertools
import random
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx
from tests.chaos.load import Customer

INTERVAL_SECONDS, SECONDS_MAX = 1.0, 6.0
ROUNDS_AT_ONCE_MAX = 4
WAIT_SECONDS = 4
NO_TLS = ssl.SSLContext(
    ssl.PROTOCOL_TLS_CLIENT
)  # loading certificates for each probe would take long


class ProbeUser(Customer):
    """A user of its own, so that no limit of a user counts probes and load together."""

    async def run(self) -> None:
        """Does nothing; the probes use its key."""

    def change_key(self, key: str) -> None:
        self.key = key


@dataclass(frozen=True)
class Seen:
    """The result of one round, in which both pools are probed."""

    started: float
    ended: float
    is_fine: bool


@dataclass
class Probes:
    users: Sequence[Customer]
    rounds: list[Seen] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        places = asyncio.Semaphore(ROUNDS_AT_ONCE_MAX)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await places.acquire()
                tasks.create_task(self._round()).add_done_callback(lambda _: places.release())
                await asyncio.sleep(INTERVAL_SECONDS)

    async def _round(self) -> None:
        started, number = time.monotonic(), next(self._numbers)
        results = await asyncio.gather(*(self._is_fine(user, number) for user in self.users))
        self.rounds.append(Seen(started, time.monotonic(), all(results)))

    def recovered_at(self, ended: float) -> float | None:
        """The time of the first success after a fault ended."""
        return min(
            (seen.ended for seen in self.rounds if seen.is_fine and seen.ended > ended),
            default=None,
        )

    def has_failed(self, started: float, recovered: float) -> bool:
        """Whether a round failed that began during the fault or before the first success after it."""
        return any(not seen.is_fine for seen in self.rounds if started < seen.started < recovered)

    def longest_gap(self, started: float, recovered: float) -> float:
        """The longest time without any success, in seconds."""
        times = [seen.ended for seen in self.rounds if seen.is_fine]
        inside = sorted(at for at in times if started < at < recovered)
        points = [started, *inside, recovered]
        return max(later - earlier for earlier, later in itertools.pairwise(points))

    async def _is_fine(self, user: Customer, number: int) -> bool:
        headers = {"Authorization": f"Bearer {user.key}"}
        body = {
            "effect_id": user.things["effect"],
            "idempotency_key": f"probe-{number}",
            "properties": {"color": random.randrange(2**24), "steps": 1},
        }
        try:
            async with asyncio.timeout(SECONDS_MAX):
                async with httpx.AsyncClient(
                    base_url=user.url, headers=headers, verify=NO_TLS
                ) as http:
                    answer = await http.post(
                        "/api/ai-jobs", json=body, params={"wait": WAIT_SECONDS}
                    )
                    if not answer.is_success:
                        return False
                    job = answer.json()
                    if job["status"] != "completed":
                        # It would keep later probes waiting.
                        await http.delete(f"/api/ai-jobs/{job['id']}")
                    return bool(job["status"] == "completed")
        except (httpx.HTTPError, TimeoutError):
            return False
