"""Implements the queue's hot path on PostgreSQL. `sqlite.py` is its counterpart."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any
from uuid import UUID

from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import BOUND, FREE
from comfyfleet.server.db.coordination import MAINTENANCE
from comfyfleet.server.db.driver import PostgresDriver
from comfyfleet.server.queue.model import (
    Dispatch,
    DispatchCandidate,
    DispatchLease,
    ExtendedLease,
    NewDispatch,
)
from comfyfleet.server.queue.store import (
    Chooser,
    Claim,
    ClaimResult,
    Completion,
    Extension,
    HeldLease,
    Probe,
    writes,
)
from comfyfleet.server.queue.store.writes import dispatch_from_row, lock_keys

_SEEN = """
    id, place, priority, rank, queued_at, model_key, model_set, backend_affinity,
    avoid_worker_id, avoid_until, preferred_worker_id"""
_IN_LANE = "workflow_id = lane.workflow_id AND stage = lane.stage AND provider = lane.provider"
_ABLE = "(model_set IS NULL OR model_set <> ALL($6::text[]))"

# Makes one index probe per lane. It takes no locks, so it doesn't block other statements. Rows that
# are bound to a backend have a separate index. Without such rows, that index costs only one more
# probe.
PEEK = f"""
WITH lane AS MATERIALIZED (
    SELECT each.* FROM unnest($1::bigint[], $2::text[], $3::text[]) WITH ORDINALITY
        AS each(workflow_id, stage, provider, place)
    WHERE EXISTS (SELECT 1 FROM workflows
        WHERE workflows.id = each.workflow_id AND is_active AND NOT is_paused)
), affinity AS MATERIALIZED (
    SELECT name FROM unnest($4::text[]) AS name, LATERAL (
        SELECT 1 FROM ai_job_dispatches WHERE {BOUND} AND backend_affinity = name LIMIT 1) AS waits
    WHERE EXISTS (SELECT 1 FROM ai_job_dispatches WHERE {BOUND})
)
SELECT free.* FROM lane, LATERAL (
    SELECT {_SEEN} FROM ai_job_dispatches WHERE {FREE} AND {_IN_LANE} AND {_ABLE}
    ORDER BY workflow_id, stage, provider, priority DESC, rank, id LIMIT $5) AS free
UNION ALL
SELECT bound.* FROM affinity, lane, LATERAL (
    SELECT {_SEEN} FROM ai_job_dispatches
    WHERE {BOUND} AND backend_affinity = name AND {_IN_LANE} AND {_ABLE}
    ORDER BY backend_affinity, workflow_id, stage, provider, priority DESC, rank, id LIMIT $5
) AS bound
"""

# Rows must be found by their ids. With a plain `status = …`, the planner might scan a partial index
# instead, which contains the whole queue.
_QUEUED = "status || '' = 'queued'"
_LEASED = "status || '' = 'leased'"

# An operator's order must take effect immediately, regardless of which control plane received it
# and how long the worker has been waiting here. So the statement that leases the job checks the
# worker's key, approval, drain state and assignments.
_ENTITLED = f"""
    EXISTS (SELECT 1 FROM workflows WHERE id = workflow AND is_active AND NOT is_paused)
    AND NOT EXISTS (
        SELECT 1 FROM control_state WHERE name = '{MAINTENANCE}' AND value = 'true'::jsonb)
    AND (key IS NULL OR EXISTS (
        SELECT 1 FROM comfyui_workers JOIN comfyui_workflow_fleets USING (fleet_id)
        WHERE key_hash = key AND worker_id = worker AND is_approved AND NOT is_draining
            AND backend_problem IS NULL
            AND workflow_id = workflow))
    AND (held_max IS NULL OR held_max >= (
        SELECT count(*) FROM ai_job_dispatches WHERE status = 'leased' AND worker_id = worker))"""

# Skips locked rows without waiting, because another transaction is about to change them. Also
# returns the ids of the claims that the worker isn't entitled to.
CLAIM = f"""
WITH wanted AS MATERIALIZED (
    SELECT *, {_ENTITLED} AS is_entitled
    FROM unnest($1::bigint[], $2::uuid[], $3::text[], $6::text[], $7::bigint[], $8::int[])
        AS each(dispatch_id, token, worker, key, workflow, held_max)
), mine AS MATERIALIZED (
    SELECT id, token, worker
    FROM wanted JOIN ai_job_dispatches ON id = dispatch_id
    WHERE is_entitled AND {_QUEUED} AND attempts < max_attempts
    FOR UPDATE OF ai_job_dispatches SKIP LOCKED
), leased AS (
    UPDATE ai_job_dispatches SET
        status = 'leased', lease_token = token, worker_id = worker,
        is_prefetched = ai_job_dispatches.id = ANY($4::bigint[]),
        attempts = attempts + 1, lease_number = lease_number + 1,
        lease_expires_at = now() + make_interval(secs => $5), leased_at = now(),
        started_at = NULL, heard_at = NULL, recall_requested = false
    FROM mine WHERE ai_job_dispatches.id = mine.id
    RETURNING ai_job_dispatches.id, tenant_id, tenant_job_id, lease_number, attempts,
        lease_expires_at, worker_id
), noted AS (
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT now(), 'worker:' || worker_id, 'lease', 'dispatch:' || id, tenant_id,
        jsonb_build_object('attempt', attempts, 'lease', lease_number)
    FROM leased
)
SELECT id, tenant_id, tenant_job_id, lease_number, attempts, lease_expires_at FROM leased
UNION ALL
SELECT dispatch_id, NULL, NULL, NULL, NULL, NULL FROM wanted WHERE NOT is_entitled
"""

COMPLETE = f"""
WITH ended AS (
    UPDATE ai_job_dispatches SET
        status = 'completed', duration_seconds = duration, ended_at = now(),
        lease_expires_at = NULL
    FROM unnest($1::bigint[], $2::uuid[], $3::float8[]) AS said(dispatch_id, token, duration)
    WHERE id = dispatch_id AND lease_token = token AND {_LEASED}
    RETURNING id, lease_token, tenant_id, worker_id, attempts, lease_number
), noted AS (
    INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    SELECT now(), coalesce('worker:' || worker_id, 'sweep'), 'complete', 'dispatch:' || id,
        tenant_id, jsonb_build_object('attempt', attempts, 'lease', lease_number)
    FROM ended
)
SELECT id, lease_token FROM ended
"""

EXTEND = """
UPDATE ai_job_dispatches AS d SET
    lease_expires_at = clock_timestamp() + make_interval(secs => $4),
    heard_at = clock_timestamp(),
    started_at = CASE WHEN started THEN coalesce(d.started_at, clock_timestamp())
        ELSE d.started_at END,
    is_prefetched = d.is_prefetched AND NOT started,
    recall_requested = d.recall_requested AND NOT started AND d.started_at IS NULL
FROM unnest($1::bigint[], $2::uuid[], $3::bool[], $5::text[])
    AS said(dispatch_id, token, started, worker)
    JOIN ai_job_dispatches AS before ON before.id = dispatch_id
WHERE d.id = dispatch_id AND d.lease_token = token AND d.status || '' = 'leased'
    AND (worker IS NULL OR d.worker_id = worker)
RETURNING d.id, d.lease_token, d.lease_expires_at, d.cancel_requested, d.recall_requested,
    d.tenant_id, d.tenant_job_id, started AND before.is_prefetched,
    d.lease_number, d.attempts, d.worker_id
"""

# Jumps from one affinity to the next in the index, however many rows each of them has.
AFFINITIES = f"""
WITH RECURSIVE waiting AS (
    (SELECT backend_affinity AS name FROM ai_job_dispatches WHERE {BOUND}
     ORDER BY backend_affinity LIMIT 1)
    UNION ALL
    SELECT (SELECT backend_affinity FROM ai_job_dispatches
            WHERE {BOUND} AND backend_affinity > waiting.name ORDER BY backend_affinity LIMIT 1)
    FROM waiting WHERE waiting.name IS NOT NULL
)
SELECT name FROM waiting WHERE name IS NOT NULL LIMIT $1
"""


class PostgresQueueStore:
    def __init__(self, database: Database) -> None:
        self._driver = PostgresDriver(database)

    async def enqueue(self, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
        locks = lock_keys(writes.shares_of(new).values())
        rows = await self._driver.fetch(
            writes.ENQUEUE, *writes.enqueue_columns(new), now, locks=locks
        )
        return [dispatch_from_row(tuple(row)) for row in rows]

    async def lease(self, probe: Probe, choose: Chooser, *, seconds: int) -> ClaimResult:
        columns = zip(*probe.lanes, strict=True)
        rows = await self._driver.fetch(
            PEEK, *map(list, columns), probe.affinities, probe.limit, list(probe.without)
        )
        if not rows:
            return ClaimResult([])
        lanes = probe.lanes
        claims = choose([DispatchCandidate(row[0], lanes[row[1] - 1], *row[2:]) for row in rows])
        return await self._claim(claims, seconds=seconds) if claims else ClaimResult([])

    async def _claim(self, claims: Sequence[Claim], *, seconds: int) -> ClaimResult:
        claim_by_id = {claim.candidate.id: claim for claim in claims}
        ids = sorted(claim_by_id)
        in_order = [claim_by_id[dispatch_id] for dispatch_id in ids]
        rows = await self._driver.fetch(
            CLAIM,
            ids,
            [claim.token for claim in in_order],
            [claim.worker_id for claim in in_order],
            [dispatch_id for dispatch_id in ids if claim_by_id[dispatch_id].is_prefetched],
            seconds,
            [claim.key_hash for claim in in_order],
            [claim.candidate.lane.workflow_id for claim in in_order],
            _held_max(in_order),
        )
        return ClaimResult(
            [_as_lease(claim_by_id[row[0]], *row) for row in rows if row[1] is not None],
            frozenset(row[0] for row in rows if row[1] is None),
        )

    async def complete(self, batch: Sequence[Completion]) -> list[HeldLease]:
        rows = await self._driver.fetch(COMPLETE, *_columns(batch))
        return [(row[0], row[1]) for row in rows]

    async def extend(
        self, batch: Sequence[Extension], *, seconds: int
    ) -> dict[HeldLease, ExtendedLease]:
        *columns, workers = _columns(batch)
        rows = await self._driver.fetch(EXTEND, *columns, seconds, workers)
        return {(row[0], row[1]): ExtendedLease(*row[2:]) for row in map(tuple, rows)}

    async def bound(self, *, limit: int) -> list[str]:
        return [row[0] for row in await self._driver.fetch(AFFINITIES, limit)]

    async def close(self) -> None:
        await self._driver.close()


def _held_max(claims: Iterable[Claim]) -> list[int | None]:
    """Returns the limit of each claim, reduced by one for each earlier claim of the same worker,
    because a statement doesn't see its own writes.
    """
    before: Counter[str] = Counter()
    limits = []
    for claim in claims:
        held_max = claim.held_max
        limits.append(None if held_max is None else held_max - before[claim.worker_id])
        before[claim.worker_id] += 1
    return limits


def _columns(batch: Iterable[tuple[Any, ...]]) -> Iterable[list[Any]]:
    """Transposes a batch. Its rows are sorted by id, so that concurrent statements can't
    deadlock.
    """
    return map(list, zip(*sorted(batch, key=itemgetter(0)), strict=True))


def _as_lease(
    claim: Claim,
    dispatch_id: int,
    tenant_id: UUID,
    job_id: UUID,
    number: int,
    attempt: int,
    expires_at: datetime,
) -> DispatchLease:
    candidate = claim.candidate
    return DispatchLease(
        dispatch_id,
        tenant_id,
        job_id,
        candidate.lane,
        claim.worker_id,
        claim.token,
        number,
        attempt,
        expires_at,
        claim.is_prefetched,
        candidate.model_key,
        candidate.model_set,
    )
