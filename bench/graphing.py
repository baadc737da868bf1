"""A fan-out advanced in this process: each job is completed as a worker would, and the run hears."""

import tempfile
import time
from pathlib import Path
from typing import Any

from sqlalchemy import select, update
from tests.dbkit.databases import Databases
from tests.graphskit.playing import graph, node, output, play_on

from comfyfleet.db import Database
from comfyfleet.db.tenant import ai_jobs, outbox
from comfyfleet.graphs.going import hear

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


async def fan_out(items: int, jobs_max: int | None = None) -> tuple[float, float]:
    """Seconds of the start, and of the advances of one job on average; the work itself is left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "databases").mkdir()
        databases = Databases(folder / "databases")
        async with play_on(databases, folder / "plane", tokens=10**9) as play:
            pool = play.plane.pools["main"]
            began = time.perf_counter()
            kept = await play.started(DOCUMENT, inputs={"widths": [64] * items})
            start, spent, jobs = time.perf_counter() - began, 0.0, 0
            while jobs != jobs_max and await complete_one(pool):
                began = time.perf_counter()
                await hear(play.graphs, pool)
                spent += time.perf_counter() - began
                jobs += 1
            kept = await play.now(kept)
            assert kept.run.status == ("completed" if jobs == items else "running"), kept.run.error
            return start, spent / jobs


async def complete_one(pool: Database) -> bool:
    """The oldest of those that wait, as if a worker had done it; with its word, and nothing else."""
    oldest = select(ai_jobs.c.id).where(ai_jobs.c.status == "queued").limit(1)
    result: dict[str, Any] = {"outputs": [], "execution_seconds": 0.1}
    async with pool.begin() as tx:
        done = await tx.execute(
            update(ai_jobs)
            .where(ai_jobs.c.id == oldest.scalar_subquery())
            .values(status="completed", result_metadata=result)
            .returning(ai_jobs)
        )
        row = done.one_or_none()
        if row is None:
            return False
        word = {
            "tenant_id": row.tenant_id,
            "job_id": row.id,
            "kind": "graph",
            "payload": {"run_id": str(row.run_id)},
            "not_before": row.submitted_at,
            "created_at": row.submitted_at,
        }
        await tx.execute(outbox.insert().values(word))
    return True
