"""Thousands of jobs with their dispatches, written in bulk."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import event, insert
from tests.support.jobs.context import PROMPT

from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import dispatches
from comfyfleet.server.db.tenant_tables import ai_jobs
from comfyfleet.server.jobs.context import JobContext

ROWS_AT_ONCE = 1000


def job_row(tenant_id: UUID, now: datetime, **changes: Any) -> dict[str, Any]:
    return {
        "id": uuid4(),
        "tenant_id": tenant_id,
        "user_id": None,
        "workflow_id": 1,
        "workflow_slug": "workflow-1",
        "workflow_version": 1,
        "stage": "production",
        "provider": "self_hosted",
        "priority": 0,
        "status": "queued",
        "prompt": PROMPT,
        "properties": {},
        "assets": [],
        "submitted_at": now,
        "completed_at": None,
        **changes,
    }


def dispatch_row(job: dict[str, Any], rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "tenant_id": job["tenant_id"],
        "tenant_job_id": job["id"],
        "workflow_id": 1,
        "stage": "production",
        "provider": "self_hosted",
        "status": "queued",
        "priority": 0,
        "rank": rank,
        "created_at": job["submitted_at"],
        "queued_at": job["submitted_at"],
        "ended_at": None,
        "worker_id": None,
        **changes,
    }


async def add_jobs(pool: Database, rows: list[dict[str, Any]]) -> None:
    await _add(pool, ai_jobs, rows)


async def add_dispatches(central: Database, rows: list[dict[str, Any]]) -> None:
    await _add(central, dispatches, rows)


async def _add(database: Database, table: Any, rows: list[dict[str, Any]]) -> None:
    for start in range(0, len(rows), ROWS_AT_ONCE):
        async with database.transaction() as tx:
            await tx.execute(insert(table), rows[start : start + ROWS_AT_ONCE])


async def queue_many(context: JobContext, tenant_id: UUID, count: int) -> list[UUID]:
    """Waiting jobs, each with its dispatch."""
    jobs = [job_row(tenant_id, context.clock()) for _ in range(count)]
    await add_jobs(context.pools["main"], jobs)
    await add_dispatches(
        context.central, [dispatch_row(job, rank) for rank, job in enumerate(jobs)]
    )
    return [job["id"] for job in jobs]


@contextmanager
def counting(*databases: Database) -> Iterator[list[tuple[str, Any]]]:
    """The statements that SQLAlchemy sends inside the block, each with its parameters."""
    sent: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        sent.append((statement, parameters))

    for database in databases:
        event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        for database in databases:
            event.remove(database.engine.sync_engine, "before_cursor_execute", note)
