"""What routes cost when a tenant has had a million jobs, against one that has had few.

    python bench/service_scale.py [JOBS] [--only sqlite|postgres] [--rounds N]
    python bench/service_scale.py --memory 50000

Both control planes are in this process and are asked in turn, so that a busy machine is busy for both.
CPU is this process's own, without what an empty answer costs. Read: rows on PostgreSQL, steps on SQLite.
"""

import argparse
import asyncio
import gc
import resource
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

sys.path.append(str(Path(__file__).parents[1]))
from tests.dbkit.databases import Databases
from tests.dbkit.postgres import running_postgres
from tests.scalekit.reads import Read
from tests.scalekit.routes import Filled, filled_on

FEW = 600
GROWTH_MAX = 1.5
console = Console(width=120)


def main() -> None:
    options = argparse.ArgumentParser(description="What routes cost after a million jobs.")
    options.add_argument("jobs", nargs="?", type=int, default=1_000_000)
    options.add_argument("--only", choices=("sqlite", "postgres"))
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--memory", type=int, help="so many jobs go through; what grows?")
    given = options.parse_args()
    for kind in ("sqlite", "postgres"):
        if given.only in (None, kind):
            server = running_postgres() if kind == "postgres" else nullcontext()
            with server as url, tempfile.TemporaryDirectory() as folder:
                act = memory if given.memory else compare
                asyncio.run(act(Databases(Path(folder), url), Path(folder), given, kind))


async def memory(databases: Databases, folder: Path, given: Any, kind: str) -> None:
    """Objects alive and resident memory of this process, clients included, after each tenth."""
    table = Table("jobs", "MB", "objects", "objects a job since", title=f"{kind}, memory")
    async with filled_on(databases, folder, FEW) as filled:
        for _ in range(given.memory // 20):  # caches fill
            await filled.finish_one()
        before = _objects()
        for tenth in range(11):
            for _ in range(given.memory // 10 if tenth else 0):
                await filled.finish_one()
            done, alive = tenth * (given.memory // 10), _objects()
            since = f"{(alive - before) / done:.2f}" if done else ""
            table.add_row(f"{done:,}", f"{_resident_mb():.0f}", f"{alive:,}", since)
    console.print(table)


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024**2


async def compare(databases: Databases, folder: Path, given: Any, kind: str) -> None:
    async with AsyncExitStack() as stack:
        few = await stack.enter_async_context(filled_on(databases, folder / "few", FEW))
        many = await stack.enter_async_context(filled_on(databases, folder / "many", given.jobs))
        read = [await each.read_by_route() for each in (few, many)]
        costs = [Costs(each) for each in (few, many)]
        for _ in range(given.rounds):
            for each in costs:
                await each.measure()
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

    def __init__(self, filled: Filled) -> None:
        self.filled = filled
        self.taken: dict[str, list[float]] = {}

    async def measure(self) -> None:
        async def noted(name: str, act: Callable[[], Awaitable[Any]]) -> Any:
            begun = process_time()
            answer = await act()
            self.taken.setdefault(name, []).append(process_time() - begun)
            return answer

        await noted("nothing", self.filled.nothing)
        await self.filled.each_route(noted)

    def typical(self, name: str) -> float:
        """The lower quartile: what disturbs only ever adds."""
        quartile, nothing = (
            statistics.quantiles(self.taken[each], n=4)[0] for each in (name, "nothing")
        )
        return max(quartile - nothing, 1e-6)


if __name__ == "__main__":
    main()
