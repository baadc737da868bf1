"""Measures the cost of routes for a tenant with a million jobs, compared with one with few jobs.

    python bench/service_scale.py [JOBS] [--only sqlite|postgres] [--rounds N] [--quick]
    python bench/service_scale.py --memory 50000

Both control planes run in this process and are called alternately, so a busy machine affects both.
The CPU time is that of this process, without the cost of an empty response. The "read" columns
count rows on PostgreSQL and virtual machine steps on SQLite.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from time import process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from service_load.baseline import ROOT
from service_load.job_lifecycle import running_control_plane
from service_load.measures import throughput
from service_load.server import control_plane
from support import exit_on_sigterm, is_quick

sys.path.append(str(ROOT))
from tests.support.databases.factory import Databases
from tests.support.databases.postgres import create_database, running_postgres
from tests.support.databases.reads import Read
from tests.support.server.routes import FilledControlPlane, control_plane_with_jobs

FEW = 100 if is_quick() else 600
GROWTH_MAX = 1.5
CLIENTS, WORKERS = 8, 16
MB = 1024**2
console = Console(width=120)


def main() -> None:
    exit_on_sigterm()
    options = argparse.ArgumentParser(description="What routes cost after a million jobs.")
    options.add_argument("jobs", nargs="?", type=int, default=1_000_000)
    options.add_argument("--only", choices=("sqlite", "postgres"))
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument(
        "--memory", type=int, help="run this many jobs through a server, and measure its memory"
    )
    options.add_argument("--quick", action="store_true", help="few jobs, one round")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.jobs, arguments.rounds = 2 * FEW, 2
    for kind in ("sqlite", "postgres"):
        if arguments.only in (None, kind):
            server = running_postgres() if kind == "postgres" else nullcontext()
            with server as url, tempfile.TemporaryDirectory() as folder:
                act = memory if arguments.memory else compare
                asyncio.run(act(Databases(Path(folder), url), Path(folder), arguments, kind))


async def memory(databases: Databases, folder: Path, arguments: Any, kind: str) -> None:
    """Prints the resident memory of a separate server after each tenth of the jobs. The first tenth
    fills the caches."""
    table = Table("jobs", "MB", "bytes a job since the first tenth", title=f"{kind}, memory")
    url, tenth = databases.server_url, arguments.memory // 10
    urls = [await create_database(url) for _ in range(2)] if url else []
    command, environ = control_plane(ROOT, folder / "server", urls)
    async with running_control_plane(command, environ, WORKERS) as (server, life):
        sizes = []
        for number in range(1, 11):
            await throughput(server, life, jobs=tenth, clients=CLIENTS, workers=WORKERS)
            sizes.append(server.memory_bytes())
            since = (sizes[-1] - sizes[0]) / (tenth * (number - 1)) if number > 1 else 0
            table.add_row(f"{tenth * number:,}", f"{sizes[-1] / MB:.1f}", f"{since:,.0f}")
            console.print(kind, tenth * number, f"{sizes[-1] / MB:.1f} MB")
    console.print(table)


async def compare(databases: Databases, folder: Path, arguments: Any, kind: str) -> None:
    async with AsyncExitStack() as stack:
        few = await stack.enter_async_context(
            control_plane_with_jobs(databases, folder / "few", FEW)
        )
        many = await stack.enter_async_context(
            control_plane_with_jobs(databases, folder / "many", arguments.jobs)
        )
        read = [await filled.read_by_route() for filled in (few, many)]
        turn = asyncio.Lock()  # The lock is fair, so the two alternate after each route.
        costs = [Costs(filled, turn) for filled in (few, many)]
        for _ in range(arguments.rounds):
            await asyncio.gather(*(cost.measure() for cost in costs))
    table = Table(
        "route", "CPU ms", "after", "ratio", "read", "after", "pages", "after", title=kind
    )
    for name in read[0]:
        before, after = (cost.typical(name) for cost in costs)
        rows, pages = ([_sums(reads[name])[part] for reads in read] for part in (0, 1))
        worse = after > GROWTH_MAX * before or rows[1] > GROWTH_MAX * rows[0] + 100
        cells = [name, f"{before * 1000:.2f}", f"{after * 1000:.2f}", f"{after / before:.2f}"]
        table.add_row(*cells, *map(str, rows), *map(str, pages), style="red" if worse else None)
    console.print(table)


def _sums(reads: list[Read]) -> tuple[int, int]:
    return sum(read.rows for read in reads), sum(read.pages for read in reads)


class Costs:
    """Measures the CPU seconds of one control plane, by route."""

    def __init__(self, filled: FilledControlPlane, turn: asyncio.Lock) -> None:
        self.filled = filled
        self.turn = turn
        self.seconds: dict[str, list[float]] = {}

    async def measure(self) -> None:
        async def noted(name: str, act: Callable[[], Awaitable[Any]]) -> Any:
            async with self.turn:
                begin = process_time()
                answer = await act()
                self.seconds.setdefault(name, []).append(process_time() - begin)
                return answer

        await noted("nothing", self.filled.nothing)
        await self.filled.each_route(noted)

    def typical(self, name: str) -> float:
        """Returns the lower quartile, because disturbances only add time."""
        quartile, nothing = (
            statistics.quantiles(self.seconds[route], n=4)[0] for route in (name, "nothing")
        )
        return max(quartile - nothing, 1e-6)


if __name__ == "__main__":
    main()
