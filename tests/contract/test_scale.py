"""What a route reads doesn't grow with the jobs that a tenant ever had."""

from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.databases.reads import Read
from tests.support.server.routes import control_plane_with_jobs

FEW, MANY = 300, 3_000
GROWTH_MAX = 1.5
# PostgreSQL rather walks the newest rows for a page of what one in twenty is.
SLACK = 250


@pytest.mark.slow
async def test_no_route_reads_more_when_a_tenant_has_had_many_jobs(
    databases: Databases, tmp_path: Path
) -> None:
    async with control_plane_with_jobs(databases, tmp_path / "few", FEW) as few:
        before = await few.read_by_route()
    async with control_plane_with_jobs(databases, tmp_path / "many", MANY) as many:
        after = await many.read_by_route()
    grown = [
        _told(name, before[name], now) for name, now in after.items() if _grew(before[name], now)
    ]
    assert not grown, "\n".join(grown)


def _grew(before: list[Read], now: list[Read]) -> bool:
    return _rows(now) > GROWTH_MAX * _rows(before) + SLACK


def _rows(reads: list[Read]) -> int:
    return sum(each.rows for each in reads)


def _told(name: str, before: list[Read], now: list[Read]) -> str:
    worst = max(now, key=lambda each: each.rows)
    return f"{name}: {_rows(before)} -> {_rows(now)}, most by {worst.statement}: {worst.plan}"
