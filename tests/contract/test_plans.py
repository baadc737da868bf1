"""Lists are read along indexes, on PostgreSQL with enough rows that it has a choice."""

import re
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

from tests.support.databases.factory import Databases
from tests.support.databases.query_plans import statements_of
from tests.support.jobs.context import START

from comfyfleet.clock import utc_now
from comfyfleet.server.db import Tx, metrics_queries
from comfyfleet.server.db import metrics_queries as plane
from comfyfleet.server.db.schema import History
from comfyfleet.server.graphs import store as graph_store
from comfyfleet.server.jobs import store as job_store
from comfyfleet.server.jobs import store_lists
from comfyfleet.server.jobs.model import JobFilter, JobStatus
from comfyfleet.server.maintenance import store as upkeep
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import DispatchStatus, QueueLane
from comfyfleet.server.queue.store import reads

ROWS = 20_000
LATER = START + timedelta(days=3650)
WORKFLOW = """
    INSERT INTO workflows (id, slug, version, required_capabilities, is_active, created_at)
    VALUES (1, 'w', 1, '[]', true, now())"""
TENANT, USER, EFFECT = uuid4(), uuid4(), uuid4()
DISPATCHES = """
    INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, provider, status, priority,
        rank, created_at, queued_at, ended_at, worker_id, is_poisoned)
    SELECT CASE WHEN n % 100 = 0 THEN 'TENANT'::uuid ELSE gen_random_uuid() END,
        gen_random_uuid(), 1, 'self_hosted', CASE WHEN n % 500 = 0 THEN 'cancelled'
            WHEN n % 50 = 0 THEN 'queued' ELSE 'completed' END,
        0, n, now(), now(), CASE WHEN n % 50 = 0 AND n % 500 <> 0 THEN NULL ELSE now() - interval '1 second' * n END,
        'worker-' || n % 200, n % 5000 = 0
    FROM generate_series(1, ROWS) n"""
AUDIT = """
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT now() - interval '1 second' * (ROWS - n), 'worker:' || n % 200, 'lease',
        'dispatch:' || n, CASE WHEN n % 100 = 0 THEN 'TENANT'::uuid ELSE gen_random_uuid() END, '{}'
    FROM generate_series(1, ROWS) n"""
JOBS = """
    INSERT INTO ai_jobs (id, tenant_id, user_id, workflow_id, workflow_slug, workflow_version, stage,
        provider, priority, status, prompt, properties, assets, submitted_at, completed_at, effect_id)
    SELECT gen_random_uuid(), 'TENANT', 'USER', 1, 'w', 1, 'production', 'self_hosted', 0,
        CASE WHEN n % 500 = 0 THEN 'cancelled' ELSE 'completed' END, '{}', '{}', '[]',
        now() - interval '1 second' * n, now() - interval '1 second' * n,
        CASE WHEN n % 1000 = 0 THEN 'EFFECT'::uuid WHEN n % 2 = 0 THEN 'TENANT'::uuid END
    FROM generate_series(1, ROWS) n"""
MEDIA = """
    INSERT INTO videos (id, tenant_id, user_id, kind, original_file_id, processing_details, created_at)
    SELECT gen_random_uuid(), 'TENANT', 'USER', 'image', gen_random_uuid(), '{}', now()
    FROM generate_series(1, ROWS) n"""

TRIGGERS = """
    INSERT INTO triggers (id, tenant_id, user_id, name, kind, inputs, timezone, catch_up, tokens_per_day, is_paused,
        next_at, missed, secret_number, created_at)
    SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid, gen_random_uuid(), gen_random_uuid(), 't',
        'schedule', '{}', 'UTC', false, 5, n % 2 = 0, now() + interval '1 second' * n, 0, 1, now()
    FROM generate_series(1, ROWS) n"""
FIRINGS = """
    INSERT INTO trigger_firings (id, tenant_id, trigger_id, cause, day, status, granted_tokens, missed, tries, not_before,
        created_at)
    SELECT gen_random_uuid(), gen_random_uuid(), ('00000000-0000-0000-0000-' || lpad((n % 200 + 1)::text, 12, '0'))::uuid,
        'schedule', '2026-11-16', 'started', 1, 0, 1, now(), now() - interval '1 second' * n
    FROM generate_series(1, ROWS) n"""


@asynccontextmanager
async def _filled(databases: Databases, history: History, *statements: str) -> AsyncIterator[Tx]:
    database = await databases.open(history, is_new=True)
    try:
        async with database.transaction() as tx:
            for statement in (*statements, "ANALYZE"):
                await tx.exec_driver_sql(_with_values(statement))
        async with database.read() as tx:
            yield tx
    finally:
        await database.close()


def _with_values(statement: str) -> str:
    for name, value in {"TENANT": TENANT, "USER": USER, "EFFECT": EFFECT, "ROWS": ROWS}.items():
        statement = statement.replace(name, str(value))
    return statement


async def require_index(tx: Tx, asking: Awaitable[Any]) -> None:
    """What it asks is answered along an index, from few rows."""
    with statements_of(tx) as sent:
        await asking
    for statement, given in sent:
        await _require_index(tx, statement, given)


async def _require_index(tx: Tx, statement: str, given: Any) -> None:
    plan = await tx.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", given)
    told = str(plan.scalar_one())
    assert "Seq Scan" not in told, told
    assert _removed(told) < ROWS // 10, told


def _removed(plan: str) -> int:
    return sum(map(int, re.findall(r"Rows Removed by [A-Za-z ]+'?\"?: (\d+)", plan)))


async def test_dispatches_are_listed_along_indexes(postgres_databases: Databases) -> None:
    async with _filled(postgres_databases, "central", WORKFLOW, DISPATCHES) as tx:
        for wanted in (
            {"status": DispatchStatus.CANCELLED},
            {"status": DispatchStatus.FAILED},
            {"is_poisoned": True},
            {"worker_id": "worker-7"},
            {"tenant_id": TENANT},
            {"tenant_id": TENANT, "status": DispatchStatus.COMPLETED},
        ):
            await require_index(tx, dispatch.list_dispatches(tx, **wanted, limit=20))
        await require_index(tx, dispatch.queued_after(tx, None, before=LATER, limit=20))
        await require_index(tx, dispatch.ended_before(tx, LATER, after=None, limit=20))


async def test_the_audit_is_read_along_indexes(postgres_databases: Databases) -> None:
    async with _filled(postgres_databases, "central", AUDIT) as tx:
        for wanted in (
            {"actor": "worker:7"},
            {"actor": "operator:ada"},
            {"tenant_id": TENANT},
            {"subject": "dispatch:77"},
        ):
            await require_index(tx, notifications.find_audit_entries(tx, **wanted, limit=20))


async def test_jobs_are_listed_along_indexes(postgres_databases: Databases) -> None:
    async with _filled(postgres_databases, "tenant", JOBS) as tx:
        for status in (JobStatus.CANCELLED, JobStatus.COMPLETED, None):
            page = job_store.list_page(tx, TENANT, USER, before=None, status=status, limit=20)
            await require_index(tx, page)
        await require_index(tx, job_store.active_after(tx, None, before=LATER, limit=20))
        await require_index(tx, plane.jobs_of_runs(tx))
        old = job_store.remove_prompts(
            tx, ended_before=START - timedelta(days=900), now=START, limit=20
        )
        await require_index(tx, old)


async def test_results_that_may_be_reused_are_found_along_an_index(
    postgres_databases: Databases,
) -> None:
    """However many results their user has."""
    known = "UPDATE ai_jobs SET fingerprint = md5(id::text)"
    async with _filled(postgres_databases, "tenant", JOBS, known) as tx:
        wanted = [letter * 32 for letter in "abcdef"]
        await require_index(tx, job_store.find_reusable(tx, TENANT, USER, wanted, limit=24))


async def test_operators_lists_of_jobs_are_read_along_indexes(
    postgres_databases: Databases,
) -> None:
    """Whatever is asked for, and however few match."""
    failed, completed = (JobStatus.FAILED,), (JobStatus.COMPLETED,)
    async with _filled(postgres_databases, "tenant", JOBS) as tx:
        for wanted in (
            JobFilter(),
            JobFilter(tenant_id=TENANT),
            JobFilter(effect_id=EFFECT),
            JobFilter(effect_id=EFFECT, statuses=completed),
            JobFilter(effect_id=EFFECT, statuses=failed),
            JobFilter(workflow_slug="w", statuses=(*failed, *completed)),
            JobFilter(error="nobody has it"),
            JobFilter(since=LATER - timedelta(days=1), until=LATER),
        ):
            page = store_lists.list_newest(tx, wanted, before=(LATER, TENANT), limit=20)
            await require_index(tx, page)


async def test_what_ended_in_a_minute_is_added_up_along_an_index(
    postgres_databases: Databases,
) -> None:
    minute = {"after": START, "until": START + timedelta(minutes=1)}
    async with _filled(postgres_databases, "central", WORKFLOW, DISPATCHES) as tx:
        await require_index(tx, metrics_queries.first_ended(tx, **minute))
        await require_index(tx, metrics_queries.ended_jobs(tx, **minute, buckets=(1.0, 2.0)))
        await require_index(tx, metrics_queries.is_any_active(tx))


async def test_media_are_found_by_their_files_along_indexes(postgres_databases: Databases) -> None:
    async with _filled(postgres_databases, "tenant", MEDIA) as tx:
        await require_index(tx, upkeep.named_by_media(tx, TENANT, [uuid4(), uuid4()]))


HELD = """
    INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, provider, status, priority,
        rank, created_at, queued_at, leased_at, worker_id, is_prefetched, recall_requested)
    SELECT gen_random_uuid(), gen_random_uuid(), 1, 'self_hosted', 'leased', 0, n, now(), now(),
        now(), 'worker-' || n % 200, n % 10000 = 0, n % 20000 = 0
    FROM generate_series(1, ROWS) n"""


async def test_what_is_prefetched_is_found_along_an_index_among_many_leases(
    postgres_databases: Databases,
) -> None:
    lanes = [QueueLane(1, "production", "self_hosted")]
    async with _filled(postgres_databases, "central", WORKFLOW, HELD) as tx:
        await _require_index(tx, reads._HAS_PREFETCHED.compiled(tx).text, ("worker-0", 1))
        await require_index(tx, dispatch.is_any_prefetched(tx, lanes, not_of="worker-0"))
        assert await dispatch.has_prefetched(tx, not_of="worker-1")
        assert not await dispatch.has_prefetched(tx, not_of="worker-0")


async def test_triggers_that_are_due_are_found_along_an_index(
    postgres_databases: Databases,
) -> None:
    now = utc_now()
    async with _filled(postgres_databases, "tenant", TRIGGERS, FIRINGS) as tx:
        await require_index(tx, graph_store.is_any_trigger_due(tx, now))
        await require_index(tx, graph_store.due_triggers(tx, now, limit=50))
        await require_index(tx, graph_store.stuck_firings(tx, now, limit=50))
