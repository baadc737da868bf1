"""New rows, each with its fair rank and its audit row. On PostgreSQL that is one statement."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from comfyfleet.db import Tx
from comfyfleet.db.central import FREE, QUEUED
from comfyfleet.db.dialect import is_sqlite
from comfyfleet.db.engine import driver_of
from comfyfleet.dispatch.model import Dispatch, NewDispatch, Status
from comfyfleet.dispatch.store import moves
from comfyfleet.dispatch.store.rows import FIELDS, as_dispatch

_IN_SHARE = """workflow_id = share.to_workflow AND stage = share.to_stage
        AND provider = share.to_provider AND priority = share.at_priority"""

# A tenant's next job stands behind virtual time (the smallest rank that waits in the lane), and behind
# its own last that still waits. The orders are those of the indexes, so that each is one probe.
ENQUEUE = f"""
WITH wanted AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[], $6::int[],
        $7::int[], $8::text[], $9::text[], $10::text[]) WITH ORDINALITY AS each(of_tenant, job,
        to_workflow, to_stage, to_provider, at_priority, attempts_max, heavy, models, affinity, place)
), share AS MATERIALIZED (
    SELECT DISTINCT of_tenant, to_workflow, to_stage, to_provider, at_priority FROM wanted
), floor AS MATERIALIZED (
    SELECT share.*, greatest(coalesce(head.rank, 0), coalesce(last.rank, 0)) AS after FROM share
    LEFT JOIN LATERAL (
        SELECT rank FROM ai_job_dispatches WHERE {FREE} AND {_IN_SHARE}
        ORDER BY workflow_id, stage, provider, priority DESC, rank, id LIMIT 1) AS head ON true
    LEFT JOIN LATERAL (
        SELECT rank FROM ai_job_dispatches
        WHERE {QUEUED} AND tenant_id = share.of_tenant AND {_IN_SHARE}
        ORDER BY tenant_id DESC, workflow_id DESC, stage DESC, provider DESC, priority DESC,
            rank DESC LIMIT 1) AS last ON true
), added AS (
    INSERT INTO ai_job_dispatches (tenant_id, tenant_job_id, workflow_id, stage, provider, status,
        priority, rank, max_attempts, model_key, model_set, backend_affinity, created_at, queued_at)
    SELECT of_tenant, job, to_workflow, to_stage, to_provider, 'queued', at_priority,
        after + row_number() OVER (
            PARTITION BY of_tenant, to_workflow, to_stage, to_provider, at_priority ORDER BY place),
        attempts_max, heavy, models, affinity, $11, $11
    FROM wanted
    JOIN floor USING (of_tenant, to_workflow, to_stage, to_provider, at_priority)
    ORDER BY place
    ON CONFLICT DO NOTHING
    RETURNING {FIELDS}
), noted AS (
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT $11, 'tenant:' || tenant_id, 'submit', 'dispatch:' || id, tenant_id,
        jsonb_build_object('attempt', attempts, 'lease', lease_number)
    FROM added
)
SELECT * FROM added
"""


async def enqueue(tx: Tx, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
    """Those that are new: a job has one dispatch, however often its submit is repeated."""
    shares = shares_of(new)
    distinct = list(dict.fromkeys(shares.values()))
    if not is_sqlite(tx):
        await moves.take_turns(tx, distinct)
        rows = await driver_of(tx).fetch(ENQUEUE, *columns(new), now)
        return [as_dispatch(row) for row in rows]
    last = await moves.floors(tx, distinct)
    ranked = []
    for each in new:
        last[shares[each]] += 1
        ranked.append((each, last[shares[each]]))
    values = {"status": Status.QUEUED, "created_at": now, "queued_at": now}
    added = await moves.add(tx, ranked, values)
    await moves.note(tx, added, actor=None, action="submit", now=now, details={})
    return added


def shares_of(new: Iterable[NewDispatch]) -> dict[NewDispatch, moves.Share]:
    return {each: moves.Share(each.tenant_id, each.lane, each.priority) for each in new}


def columns(new: Sequence[NewDispatch]) -> list[list[Any]]:
    rows = (
        (
            each.tenant_id,
            each.job_id,
            *each.lane,
            each.priority,
            each.max_attempts,
            each.model_key,
            each.model_set,
            each.backend_affinity,
        )
        for each in new
    )
    return [list(column) for column in zip(*rows, strict=True)]
