"""Measures the gain by several processes behind one port, and their waits in PostgreSQL."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg

from service_load.measures import Throughput

POLL_SECONDS = 0.02
WAITS = """
    SELECT wait_event_type || ':' || wait_event AS event, left(query, 60) AS query
    FROM pg_stat_activity
    WHERE state <> 'idle' AND wait_event_type IN ('Lock', 'LWLock', 'IO') AND pid <> pg_backend_pid()"""


@dataclass(frozen=True)
class ProcessComparison:
    processes: int
    throughput: Throughput
    looks: int
    waits: Counter[str]  # how often a connection was waiting, by cause

    def summary(self) -> str:
        return ", ".join(
            f"{event} {count / max(1, self.looks):.2f}"
            for event, count in self.waits.most_common(3)
        )


@asynccontextmanager
async def watched(url: str) -> AsyncIterator[tuple[Counter[str], list[int]]]:
    """Samples the waits of all connections. Yields their counts, and the number of samples as a
    list of one."""
    waits: Counter[str] = Counter()
    looks = [0]
    connection = await asyncpg.connect(url)

    async def look() -> None:
        while True:
            rows = await connection.fetch(WAITS)
            waits.update(_named(row["event"], row["query"]) for row in rows)
            looks[0] += 1
            await asyncio.sleep(POLL_SECONDS)

    looking = asyncio.create_task(look())
    try:
        yield waits, looks
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        connection.terminate()


def _named(event: str, query: str) -> str:
    """Returns the name of a wait. For a lock, it contains the waiting statement."""
    return f"{event} ({' '.join(query.split())})" if event.startswith("Lock") else event
