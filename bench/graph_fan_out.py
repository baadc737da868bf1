"""Advances a fan-out in this process: completes each job like a worker, and notifies the run.

    python bench/graph_fan_out.py ITEMS [JOBS]     JOBS limits the number of completed jobs

All results are CPU time, because other load on the machine could look like growth.
"""

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from sqlalchemy import select, update
from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import graph, graph_setup_on, node, output

from comfyfleet.server.db import Database
from comfyfleet.server.db.tenant_tables import ai_jobs, outbox
from comfyfleet.server.graphs.runner import read_outbox

DOCUMENT = graph(
    [
        {"id": "widths", "type": "input", "value_type": "integer[]"},
        {
            "id": "each",
            "type": "fanout",
            "mode": "distribute",
            "per_item": True,
            "max_items": 10_000,
        },
        node("draw"),
        {"id": "all", "type": "merge", "over": "each"},
        output(),
    ],
    "widths.value > each.items",
    "each.item > draw.width",
    "draw.output > all.input_0",
    "all.output > result.value",
)


class Figures(NamedTuple):
    """The CPU time of a fan-out in milliseconds, without the jobs' own work."""

    jobs: int
    start: float
    first: float  # per job, in the first tenth of the jobs
    last: float  # per job, in the last tenth of the jobs
    end: float  # the advance that ends the run
    total: float
    peak_mb: float


async def fan_out(items: int, jobs_max: int | None = None) -> Figures:
    """Advances a fan-out until it ends, or until `jobs_max` jobs are complete."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "databases").mkdir()
        databases = Databases(folder / "databases")
        async with graph_setup_on(databases, folder / "plane", tokens=10**9) as graph_setup:
            pool = graph_setup.plane.pools["main"]
            begin = time.process_time()
            graph_run = await graph_setup.started(DOCUMENT, inputs={"widths": [64] * items})
            start = time.process_time() - begin
            spent: list[float] = []
            while len(spent) != jobs_max and await complete_one(pool):
                begin = time.process_time()
                await read_outbox(graph_setup.graphs, pool)
                spent.append(time.process_time() - begin)
            graph_run = await graph_setup.now(graph_run)
            is_over = len(spent) == items
            assert graph_run.run.status == ("completed" if is_over else "running"), (
                graph_run.run.error
            )
            return figures(start, spent, is_over=is_over)


def figures(start: float, spent: list[float], *, is_over: bool) -> Figures:
    steps = spent[:-1] if is_over and len(spent) > 1 else spent
    tenth = max(1, len(steps) // 10)
    return Figures(
        jobs=len(spent),
        start=1000 * start,
        first=1000 * sum(steps[:tenth]) / tenth,
        last=1000 * sum(steps[-tenth:]) / tenth,
        end=1000 * spent[-1],
        total=1000 * (start + sum(spent)),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


async def complete_one(pool: Database) -> bool:
    """Completes the oldest queued job like a worker, but only reports its result."""
    oldest = select(ai_jobs.c.id).where(ai_jobs.c.status == "queued").limit(1)
    result: dict[str, Any] = {"outputs": [], "execution_seconds": 0.1}
    async with pool.transaction() as tx:
        result_rows = await tx.execute(
            update(ai_jobs)
            .where(ai_jobs.c.id == oldest.scalar_subquery())
            .values(status="completed", result_metadata=result)
            .returning(ai_jobs)
        )
        row = result_rows.one_or_none()
        if row is None:
            return False
        message = {
            "tenant_id": row.tenant_id,
            "job_id": row.id,
            "kind": "graph",
            "payload": {"run_id": str(row.run_id)},
            "not_before": row.submitted_at,
            "created_at": row.submitted_at,
        }
        await tx.execute(outbox.insert().values(message))
    return True


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    print(json.dumps(asyncio.run(fan_out(*numbers))._asdict()))
