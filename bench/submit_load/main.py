"""Measures submissions per second against bare asyncpg, and the time of a media request.

Compare the ratios, because both run in turn.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.engine import make_url

from submit_load import bare_asyncpg, media_reads
from submit_load.submit_setup import JOBS_PER_USER, SubmitSetup, submit_setup_on
from support import exit_status

sys.path.append(str(Path(__file__).parents[2]))
from tests.support.databases.factory import Databases
from tests.support.databases.postgres import running_postgres
from tests.support.databases.recorder import COMMIT, Record, recording
from tests.support.server.control_plane import client_of

CLIENTS = (1, 8)
RATIO_MIN = 0.5
FEW, MANY = 100, 100_000
SLOWER_MAX = 1.5
console = Console()
One = Callable[[UUID], Awaitable[object]]


def main() -> int:
    options = argparse.ArgumentParser(
        description="How fast jobs are submitted, and media are read."
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--jobs", type=int, default=1_000, help="the number of jobs submitted in each round"
    )
    options.add_argument("--quick", action="store_true", help="fewer rounds and jobs")
    options.add_argument(
        "--hasty", action="store_true", help="turn synchronous_commit and fsync off"
    )
    options.add_argument("--check", action="store_true", help="fail if a limit is missed")
    options.add_argument("--profile", action="store_true", help="show where our time goes")
    arguments = options.parse_args()
    with (
        running_postgres(durable=not arguments.hasty) as url,
        tempfile.TemporaryDirectory() as folder,
    ):
        databases = Databases(Path(folder), url)
        is_fast = asyncio.run(submits(databases, Path(folder) / "data", arguments))
        is_flat = asyncio.run(shows(databases, Path(folder), arguments))
    return exit_status(is_met=is_fast and is_flat)


async def submits(databases: Databases, folder: Path, arguments: Any) -> bool:
    """Prints the table, and returns whether the ratios are within the limit."""
    is_met = True
    jobs, rounds = (40, 1) if arguments.quick else (arguments.jobs, arguments.rounds)
    async with submit_setup_on(databases, folder) as submit_setup:
        await _number_from_far(submit_setup)
        record, template = await _recorded(submit_setup)
        console.print(
            f"PostgreSQL, {'in haste' if arguments.hasty else 'durable'}; a submit is "
            f"{record.statements()} statements and {record.ends(COMMIT)} commits; "
            f"{rounds} rounds of {jobs:,} in turn"
        )
        table = Table("clients", "comfyfleet /s", "bare asyncpg /s", "ratio", "target")
        for clients in CLIENTS:
            ours, bares = await _in_turn(submit_setup, record, template, clients, jobs, rounds)
            ratio = statistics.median(a / b for a, b in zip(ours, bares, strict=True))
            is_met &= ratio >= RATIO_MIN
            table.add_row(
                str(clients),
                f"{statistics.median(ours):,.0f}",
                f"{statistics.median(bares):,.0f}",
                f"{ratio:.2f}",
                f"≥ {RATIO_MIN}",
            )
        console.print(table)
        if arguments.profile:
            await _profiled(submit_setup, jobs)
    return is_met


async def shows(databases: Databases, folder: Path, arguments: Any) -> bool:
    """Prints the table, and returns whether the ratio with many jobs is within the limit."""
    many, rounds = (1_000, 1) if arguments.quick else (MANY, arguments.rounds)
    async with AsyncExitStack() as stack:
        readers = {}
        for jobs in (FEW, many):
            submit_setup = await stack.enter_async_context(
                submit_setup_on(databases, folder / str(jobs))
            )
            reader = await media_reads.reader_of(submit_setup, jobs)
            client = await stack.enter_async_context(client_of(submit_setup.plane, reader.key))
            await reader.times(client, 1)
            readers[jobs] = (reader, client)
        p95s: dict[int, list[float]] = {FEW: [], many: []}
        for _ in range(rounds):
            for jobs, (reader, client) in readers.items():
                times = await reader.times(client, 3)
                p95s[jobs].append(statistics.quantiles(times, n=20)[-1])
    few, lots = (statistics.median(percentiles) for percentiles in p95s.values())
    table = Table("jobs in the tenant", "GET /api/videos/{id}, p95 ms", "ratio", "target")
    table.add_row(f"{FEW:,}", f"{few:.1f}", "", "")
    ratio = statistics.median(b / a for a, b in zip(*p95s.values(), strict=True))
    table.add_row(f"{many:,}", f"{lots:.1f}", f"{ratio:.2f}", f"≤ {SLOWER_MAX}")
    console.print(table)
    return bool(ratio <= SLOWER_MAX)


async def _recorded(submit_setup: SubmitSetup) -> tuple[Record, dict[str, Any]]:
    """Records one submission with warm caches and open connections."""
    user_id, key = (await submit_setup.users(1))[0], "key-of-the-recorded-one"
    for number in range(JOBS_PER_USER - 1):
        await submit_setup.submit(user_id, f"warm-{number}")
    context = {make_url(url).database or "": side for side, url in _urls(submit_setup).items()}
    with recording(context) as record:
        job = await submit_setup.submit(user_id, key)
    return record, {"user_id": user_id, "job_id": job.id, "key": key}


def _urls(submit_setup: SubmitSetup) -> dict[str, str]:
    return {
        "central": submit_setup.plane.central.url,
        "tenant": submit_setup.plane.pools["main"].url,
    }


async def _number_from_far(submit_setup: SubmitSetup) -> None:
    for database in (submit_setup.plane.central, submit_setup.plane.pools["main"]):
        async with database.transaction() as tx:
            sequences = await tx.execute(text("SELECT sequencename FROM pg_sequences"))
            for (name,) in sequences.all():
                await tx.execute(
                    text(f'ALTER SEQUENCE "{name}" RESTART WITH {bare_asyncpg.NUMBERS_BEGIN}')
                )


async def _in_turn(
    submit_setup: SubmitSetup,
    record: Record,
    template: dict[str, Any],
    clients: int,
    jobs: int,
    rounds: int,
) -> tuple[list[float], list[float]]:
    pools = await bare_asyncpg.open_pools(_urls(submit_setup), clients)

    async def one_of_ours(user_id: UUID) -> None:
        await submit_setup.submit(user_id, str(uuid4()))

    async def bare_one(user_id: UUID) -> None:
        new = {
            template["user_id"]: user_id,
            template["job_id"]: uuid4(),
            template["key"]: str(uuid4()),
        }
        new |= {str(old): str(fresh) for old, fresh in new.items()}
        await bare_asyncpg.replay(pools, record, new)

    ours, bares = [], []
    for _ in range(rounds):
        ours.append(await _speed(submit_setup, one_of_ours, clients, jobs))
        bares.append(await _speed(submit_setup, bare_one, clients, jobs))
    for pool in pools.values():
        await pool.close()
    return ours, bares


async def _speed(submit_setup: SubmitSetup, one: One, clients: int, jobs: int) -> float:
    """Returns the submissions per second of this many clients, each with its own users."""
    users = await submit_setup.users(jobs // JOBS_PER_USER + clients)
    for user_id in users[:clients]:
        await one(user_id)
    remaining = iter([user_id for user_id in users[clients:] for _ in range(JOBS_PER_USER)])

    async def client(mine: Iterator[UUID]) -> int:
        count = 0
        for user_id in mine:
            await one(user_id)
            count += 1
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(client(remaining) for _ in range(clients)))
    return sum(counts) / (time.perf_counter() - start)


async def _profiled(submit_setup: SubmitSetup, jobs: int) -> None:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    await _speed(submit_setup, lambda user_id: submit_setup.submit(user_id, str(uuid4())), 1, jobs)
    profile.disable()
    pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
