"""What routes cost when a tenant has had a million jobs, against one that has had few.

    python bench/service_scale.py [JOBS] [--only sqlite|postgres] [--rounds N] [--quick]
    python bench/service_scale.py --memory 50000

Both control planes are in this process and are asked in turn, so that a busy machine is busy for both.
CPU is this process's own, without what an empty answer costs. Read: rows on PostgreSQL, steps on SQLite.
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
        "--memory", type=int, help="so many jobs go through a server; does it grow?"
    )
    options.add_argument("--quick", action="store_true", help="few jobs, one round")
    given = options.parse_args()
    if given.quick:
        given.jobs, given.rounds = 2 * FEW, 2
    for kind in ("sqlite", "postgres"):
        if given.only in (None, kind):
            server = running_postgres() if kind == "postgres" else nullcontext()
            with server as url, tempfile.TemporaryDirectory() as folder:
                act = memory if given.memory else compare
                asyncio.run(act(Databases(Path(folder), url), Path(folder), given, kind))


async def memory(databases: Databases, folder: Path, given: Any, kind: str) -> None:
    """Resident memory of a separate server after each tenth. The first fills the caches."""
    table = Table("jobs", "MB", "bytes a job since the first tenth", title=f"{kind}, memory")
    url, tenth = databases.server_url, given.memory // 10
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


async def compare(databases: Databases, folder: Path, given: Any, kind: str) -> None:
    async with AsyncExitStack() as stack:
        few = await stack.enter_async_context(
            control_plane_with_jobs(databases, folder / "few", FEW)
        )
        many = await stack.enter_async_context(
            control_plane_with_jobs(databases, folder / "many", given.jobs)
        )
        read = [await each.read_by_route() for each in (few, many)]
        turn = (
            asyncio.Lock()
        )  # whoever has waited longer has it next: they alternate, route by route
        costs = [Costs(each, turn) for each in (few, many)]
        for _ in range(given.rounds):
            await asyncio.gather(*(each.measure() for each in costs))
    table = Table(
        "route", "CPU ms", "after", "ratio", "read", "after", "pages", "after", title=kind
    )
    for name in read[0]:
        before, after = (each.typical(name) for each in costs)
        rows, pages = ([_sums(each[name])[part] for each in read] for part in (0, 1))
        worse = after > GROWTH_MAX * before or rows[1] > GROWTH_MAX * rows[0] + 100
        cells = [name, f"{before * 1000:.2f}", f"{after * 1000:.2f}", f"{after / before:.2f}"]
        table.add_row(*cells, *map(str, rows), *map(str, pages), style="red" if worse else None)
    console.print(table)


def _sums(reads: list[Read]) -> tuple[int, int]:
    return sum(each.rows for each in reads), sum(each.pages for each in reads)


class Costs:
    """CPU seconds by route."""

    def __init__(self, filled: FilledControlPlane, turn: asyncio.Lock) -> None:
        self.filled = filled
        self.turn = turn
        self.taken: dict[str, list[float]] = {}

    async def measure(self) -> None:
        async def noted(name: str, act: Callable[[], Awaitable[Any]]) -> Any:
            async with self.turn:
                begun = process_time()
                answer = await act()
                self.taken.setdefault(name, []).append(process_time() - begun)
                return answer

        await noted("nothing", self.filled.nothing)
        await self.filled.each_route(noted)

    def typical(self, name: str) -> float:
        """The lower quartile, because disturbances only add."""
        quartile, nothing = (
            statistics.quantiles(self.taken[each], n=4)[0] for each in (name, "nothing")
        )
        return max(quartile - nothing, 1e-6)


if __name__ == "__main__":
    main()
