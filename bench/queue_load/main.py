"""Runs all measurements of the queue, and prints one table for each.

Only ratios count, because the peers run in turn in the same run. "pgqueuer (batch 10)", which the
target names, is its QueueManager with `batch_size=10`. Its documentation recommends that, and like
our queue it hands each job to a caller that requested one. A second row shows its bare dequeue and
log by 8 loops, which does neither. That is pgqueuer without its own dispatching, and has no target.
All of them write their log or audit rows, with the same `synchronous_commit`.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
from rich.console import Console
from rich.table import Table

from comfyfleet.server.db import Database
from queue_load import comfyfleet_queue, idle_polls, pickup
from support import exit_status

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.databases.postgres import create_database, running_postgres

WORKERS = 64
# Limits: how many times as fast as the peers, the share of the speed that remains with many rows,
# and the memory for 10,000 polls.
PGQUEUER_MIN, PROCRASTINATE_MIN, DEEP_MIN = 3, 5, 0.7
POLLS_MB_MAX = 200
MANAGED = "pgqueuer, its QueueManager, batch 10"
PROCRASTINATE = "procrastinate, its bare fetch and finish by 8 loops"
console = Console()
Way = Callable[[], Awaitable[float]]


def main() -> int:
    options = argparse.ArgumentParser(description="How fast the queue is.")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--quick", action="store_true", help="few jobs and rows, without the peers"
    )
    options.add_argument("--check", action="store_true", help="fail if a limit is missed")
    options.add_argument("--synchronous-commit", choices=["on", "off"], default="off")
    arguments = options.parse_args()
    bench = Bench(1 if arguments.quick else arguments.rounds, arguments.quick)
    with running_postgres(durable=True) as url:
        asyncio.run(bench.on_postgres(url, arguments.synchronous_commit))
    asyncio.run(bench.on_sqlite())
    return exit_status(is_met=bench.is_met)


class Bench:
    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds = rounds
        self.is_quick = quick
        self.is_met = True
        self.jobs = 200 if quick else 6_000
        self.many = 2_000 if quick else 1_000_000
        self.polls = min(idle_polls.polls_possible(), 50 if quick else idle_polls.POLLS_MAX)

    async def on_postgres(self, url: str, synchronous_commit: str) -> None:
        server = await asyncpg.connect(url)
        await server.execute(f"ALTER SYSTEM SET synchronous_commit = {synchronous_commit}")
        await server.execute("SELECT pg_reload_conf()")
        await server.close()
        console.print(
            f"PostgreSQL, synchronous_commit={synchronous_commit} for all, {self.rounds} rounds in turn"
        )
        database = await comfyfleet_queue.prepare(await create_database(url), 1_000)
        if not self.is_quick:
            await self.against_peers(database, url)
            await self.pickup(database, url)
        deep = await comfyfleet_queue.prepare(await create_database(url), self.many)
        await self.depth(database, deep)
        await deep.close()
        await self.idle_polls(database)
        await database.close()

    async def on_sqlite(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            database = await comfyfleet_queue.prepare(f"sqlite:///{folder}/shallow.sqlite3", 1_000)
            deep = await comfyfleet_queue.prepare(f"sqlite:///{folder}/deep.sqlite3", self.many)
            table = Table("SQLite, synchronous=FULL", "jobs a second")
            for workers in (1, 8, WORKERS):
                speed = await self._shallow(database, workers)
                table.add_row(f"lease + complete, {workers} workers", f"{speed:,.0f}")
            console.print(table)
            await self.depth(database, deep)
            await deep.close()
            await comfyfleet_queue.empty(database)
            medians = await pickup.of_ours(database, jobs=100)
            table = Table("a waiting worker has the job, p50 ms", "after commit", "after the call")
            table.add_row("SQLite", *(f"{figure:.1f}" for figure in medians))
            console.print(table)
            await self.idle_polls(database)
            await database.close()

    async def against_peers(self, database: Database, url: str) -> None:
        """Compares leases and completions with other queues, with the same number of jobs in
        progress."""
        from queue_load import peers

        pgqueuer, procrastinate = await create_database(url), await create_database(url)
        await peers.prepare_pgqueuer(pgqueuer)
        await peers.prepare_procrastinate(procrastinate)
        few = self.jobs // 10

        async def bare() -> float:
            await peers.fill_pgqueuer(pgqueuer, self.jobs)
            return await peers.pgqueuer_cycles(pgqueuer, jobs=self.jobs - 100)

        async def managed() -> float:
            await peers.fill_pgqueuer(pgqueuer, self.jobs)
            waiting = await peers.pgqueuer_waiting(pgqueuer)
            return await peers.pgqueuer_drained(pgqueuer, jobs=waiting)

        async def procrastinated() -> float:
            await peers.fill_procrastinate(procrastinate, few)
            return await peers.procrastinate_cycles(procrastinate, jobs=few)

        speeds = await self._in_turn(
            {
                "comfyfleet, 64 workers": lambda: self._shallow(database, WORKERS),
                MANAGED: managed,
                "pgqueuer, its bare dequeue and log by 8 loops, batch 10": bare,
                PROCRASTINATE: procrastinated,
            }
        )
        table = Table("lease + complete, audit rows included", "jobs a second", "ours is faster by")
        mine = speeds["comfyfleet, 64 workers"]
        aims = {MANAGED: PGQUEUER_MIN, PROCRASTINATE: PROCRASTINATE_MIN}
        for name, rates in speeds.items():
            ratio = statistics.median(own / other for own, other in zip(mine, rates, strict=True))
            table.add_row(name, f"{statistics.median(rates):,.0f}", f"{ratio:.1f}")
            self.is_met &= ratio >= aims.get(name, 0)
        console.print(table)
        console.print(
            f"Targets: {PGQUEUER_MIN} times pgqueuer (batch 10), {PROCRASTINATE_MIN} times procrastinate."
        )

    async def _in_turn(self, ways: dict[str, Way]) -> dict[str, list[float]]:
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self.rounds):
            for name, way in ways.items():
                speeds[name].append(await way())
        return speeds

    async def _shallow(self, database: Database, workers: int) -> float:
        """Returns the speed with about 1,000 rows queued at any time."""
        await comfyfleet_queue.empty(database)
        await comfyfleet_queue.fill(database, self.jobs + 1_000)
        return await comfyfleet_queue.cycles(database, jobs=self.jobs, workers=workers)

    async def pickup(self, database: Database, url: str) -> None:
        from queue_load import peers

        peer = await create_database(url)
        await peers.prepare_pgqueuer(peer)
        await comfyfleet_queue.empty(database)
        mine, theirs = [], []
        for _ in range(self.rounds):
            mine.append(await pickup.of_ours(database, jobs=100))
            theirs.append(await pickup.of_pgqueuer(peer, jobs=100))
        table = Table("a waiting worker has the job, p50 ms", "after commit", "after the call")
        medians = {
            name: [statistics.median(column) for column in zip(*pickups, strict=True)]
            for name, pickups in (("comfyfleet (target: ≤ pgqueuer)", mine), ("pgqueuer", theirs))
        }
        for name, figures in medians.items():
            table.add_row(name, *(f"{figure:.1f}" for figure in figures))
        console.print(table)
        own, other = medians.values()
        self.is_met &= own[-1] <= other[-1]

    async def depth(self, shallow: Database, deep: Database) -> None:
        speeds = await self._in_turn(
            {
                "1,000": lambda: self._shallow(shallow, WORKERS),
                f"{self.many:,}": lambda: comfyfleet_queue.cycles(
                    deep, jobs=self.jobs, workers=WORKERS
                ),
            }
        )
        few, many = (statistics.median(rates) for rates in speeds.values())
        table = Table("rows queued", "jobs a second", "ratio", "target")
        table.add_row("1,000", f"{few:,.0f}", "", "")
        table.add_row(f"{self.many:,}", f"{many:,.0f}", f"{many / few:.2f}", f"≥ {DEEP_MIN}")
        console.print(table)
        self.is_met &= many / few >= DEEP_MIN

    async def idle_polls(self, database: Database) -> None:
        table = Table(
            "idle long polls over HTTP",
            "polls",
            f"memory MB (target < {POLLS_MB_MAX})",
            "before",
            "KB a poll",
            "claims per job (target 1)",
            "ms per job",
        )
        whole = min(self.polls, idle_polls.WHOLE_POLLS_MAX)
        for name, polls in (("queue alone", self.polls), ("whole application", whole)):
            await comfyfleet_queue.empty(database)
            facts = await idle_polls.measured(database, polls, is_whole=name == "whole application")
            self.is_met &= facts["mb"] < POLLS_MB_MAX
            table.add_row(
                name,
                f"{facts['polls']:,.0f}",
                f"{facts['mb']:.0f}",
                f"{facts['mb_before']:.0f}",
                f"{1000 * (facts['mb'] - facts['mb_before']) / facts['polls']:.0f}",
                f"{facts['claims_per_job']:.2f}",
                f"{facts['ms_per_job']:.1f}",
            )
        console.print(table)
