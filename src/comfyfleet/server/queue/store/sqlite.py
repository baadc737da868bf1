"""Implements the queue's hot path on SQLite. `postgres.py` is its counterpart.

Each batch is one transaction. It starts with `BEGIN IMMEDIATE`, so there is no other writer, and
one commit covers all concurrent calls. The commit is not written to disk here. Callers await the
database's `persist` before they respond.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from sqlite3 import Connection
from typing import Any
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.server.db import Database
from comfyfleet.server.db.central_tables import BOUND, FREE
from comfyfleet.server.db.coordination import MAINTENANCE
from comfyfleet.server.db.dialect import from_micros, to_micros
from comfyfleet.server.db.driver import SqliteDriver
from comfyfleet.server.queue.model import (
    Dispatch,
    DispatchCandidate,
    DispatchLease,
    ExtendedLease,
    NewDispatch,
    QueueLane,
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

SECOND = 1_000_000  # in microseconds, the unit of stored times
_SEEN = """
    id, priority, rank, queued_at, model_key, model_set, backend_affinity, avoid_worker_id,
    avoid_until, preferred_worker_id"""
_IN_LANE = """workflow_id = ? AND stage = ? AND provider = ?
    AND EXISTS (SELECT 1 FROM workflows WHERE id = workflow_id AND is_active AND NOT is_paused)"""
_ABLE = """(? = '[]' OR model_set IS NULL OR model_set NOT IN (SELECT value FROM json_each(?)))"""
_ORDER = "workflow_id, stage, provider, priority DESC, rank, id LIMIT ?"
PEEK = f"""SELECT {_SEEN} FROM ai_job_dispatches
    WHERE {FREE} AND {_IN_LANE} AND {_ABLE} ORDER BY {_ORDER}"""
PEEK_BOUND = f"""SELECT {_SEEN} FROM ai_job_dispatches
    WHERE {BOUND} AND backend_affinity = ? AND {_IN_LANE} AND {_ABLE}
    ORDER BY backend_affinity, {_ORDER}"""
IS_BOUND = f"SELECT 1 FROM ai_job_dispatches WHERE {BOUND} AND backend_affinity = ? LIMIT 1"
# An operator's order must take effect immediately, however long the worker has been waiting. So the
# statement that leases the job checks the workflow, the maintenance mode and the worker.
_IS_OPEN = f"""EXISTS (SELECT 1 FROM workflows WHERE id = :workflow AND is_active AND NOT is_paused)
    AND NOT EXISTS (
        SELECT 1 FROM control_state WHERE name = '{MAINTENANCE}' AND value = 'true')"""
_IS_ENTITLED = """(:key IS NULL OR EXISTS (
        SELECT 1 FROM comfyui_workers AS w JOIN comfyui_workflow_fleets AS a USING (fleet_id)
        WHERE w.key_hash = :key AND w.worker_id = :worker AND w.is_approved AND NOT w.is_draining
            AND w.backend_problem IS NULL
            AND a.workflow_id = :workflow))
    AND (:held_max IS NULL OR :held_max >= (
        SELECT count(*) FROM ai_job_dispatches AS h
        WHERE h.status = 'leased' AND h.worker_id = :worker))"""
IS_REFUSED = f"SELECT NOT ({_IS_OPEN} AND {_IS_ENTITLED})"
CLAIM = f"""
UPDATE ai_job_dispatches SET
    status = 'leased', lease_token = :token, worker_id = :worker, is_prefetched = :is_prefetched,
    attempts = attempts + 1, lease_number = lease_number + 1,
    lease_expires_at = :ends, leased_at = :now, started_at = NULL, heard_at = NULL,
    recall_requested = false
WHERE id = :id AND status = 'queued' AND attempts < max_attempts
    AND {_IS_OPEN} AND {_IS_ENTITLED}
RETURNING tenant_id, tenant_job_id, lease_number, attempts
"""
COMPLETE = """
UPDATE ai_job_dispatches SET
    status = 'completed', duration_seconds = ?, ended_at = ?, lease_expires_at = NULL
WHERE id = ? AND lease_token = ? AND status = 'leased'
RETURNING tenant_id, worker_id, attempts, lease_number
"""
EXTEND = """
UPDATE ai_job_dispatches SET
    lease_expires_at = :ends,
    heard_at = :now,
    started_at = CASE WHEN :started THEN coalesce(started_at, :now) ELSE started_at END,
    is_prefetched = is_prefetched AND NOT :started,
    recall_requested = recall_requested AND NOT :started AND started_at IS NULL
WHERE id = :id AND lease_token = :token AND status = 'leased'
    AND (:worker IS NULL OR worker_id = :worker)
RETURNING lease_expires_at, cancel_requested, recall_requested, tenant_id, tenant_job_id,
    lease_number, attempts, worker_id
"""
IS_PREFETCHED = "SELECT 1 FROM ai_job_dispatches WHERE id = :id AND is_prefetched"
NOTE = """INSERT INTO audit_log (at, actor, action, subject, tenant_id, details)
    VALUES (?, ?, ?, ?, ?, ?)"""
AFFINITIES = f"""
WITH RECURSIVE waiting(name) AS (
    SELECT (SELECT min(backend_affinity) FROM ai_job_dispatches WHERE {BOUND})
    UNION ALL
    SELECT (SELECT min(backend_affinity) FROM ai_job_dispatches
            WHERE {BOUND} AND backend_affinity > waiting.name)
    FROM waiting WHERE waiting.name IS NOT NULL
)
SELECT name FROM waiting WHERE name IS NOT NULL LIMIT ?
"""


class SqliteQueueStore:
    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._driver = SqliteDriver(database)
        self._clock = clock

    async def enqueue(self, new: Sequence[NewDispatch], *, now: datetime) -> list[Dispatch]:
        async with self._database.transaction(persists=False) as tx:
            return await writes.enqueue(tx, new, now=now)

    async def lease(self, probe: Probe, choose: Chooser, *, seconds: int) -> ClaimResult:
        now = to_micros(self._clock())

        def act(connection: Connection) -> ClaimResult:
            leases, refused = [], set()
            for claim in choose(_peek(connection, probe)):
                values = _values(claim, now, now + seconds * SECOND)
                lease = _claim_one(connection, claim, values)
                if lease is not None:
                    leases.append(lease)
                elif connection.execute(IS_REFUSED, values).fetchone()[0]:
                    refused.add(claim.candidate.id)
            return ClaimResult(leases, frozenset(refused))

        return await self._driver.run(act, calls=len(probe.lanes) + len(probe.affinities))

    async def complete(self, batch: Sequence[Completion]) -> list[HeldLease]:
        now = to_micros(self._clock())

        def act(connection: Connection) -> list[HeldLease]:
            ended = []
            for item in batch:
                values = (item.duration, now, item.dispatch_id, item.token.hex)
                for tenant, worker, *lease in connection.execute(COMPLETE, values).fetchall():
                    ended.append((item.dispatch_id, item.token))
                    _add_audit(connection, now, "complete", item.dispatch_id, tenant, worker, lease)
            return ended

        return await self._driver.run(act, calls=len(batch))

    async def extend(
        self, batch: Sequence[Extension], *, seconds: int
    ) -> dict[HeldLease, ExtendedLease]:
        now = to_micros(self._clock())

        def act(connection: Connection) -> dict[HeldLease, ExtendedLease]:
            extended_leases: dict[HeldLease, ExtendedLease] = {}
            for item in batch:
                values = {
                    "ends": now + seconds * SECOND,
                    "started": item.started,
                    "now": now,
                    "id": item.dispatch_id,
                    "token": item.token.hex,
                    "worker": item.worker_id,
                }
                extended = _extend_one(connection, values)
                if extended is not None:
                    extended_leases[item.dispatch_id, item.token] = extended
            return extended_leases

        return await self._driver.run(act, calls=len(batch))

    async def bound(self, *, limit: int) -> list[str]:
        def act(connection: Connection) -> list[str]:
            return [row[0] for row in connection.execute(AFFINITIES, (limit,))]

        return await self._driver.run(act, calls=1)

    async def close(self) -> None:
        await self._driver.close()


def _extend_one(connection: Connection, values: dict[str, Any]) -> ExtendedLease | None:
    is_prefetched = values["started"] and connection.execute(IS_PREFETCHED, values).fetchone()
    row = connection.execute(EXTEND, values).fetchone()
    if row is None:
        return None
    ends, cancel, recall, tenant, job, *lease = row
    ids = UUID(tenant), UUID(job)
    return ExtendedLease(
        from_micros(ends), bool(cancel), bool(recall), *ids, bool(is_prefetched), *lease
    )


def _peek(connection: Connection, probe: Probe) -> list[DispatchCandidate]:
    candidates = []
    without = json.dumps(list(probe.without))
    for lane in probe.lanes:
        for row in connection.execute(PEEK, (*lane, without, without, probe.limit)):
            candidates.append(_as_candidate(lane, row))
    for affinity in probe.affinities:
        if connection.execute(IS_BOUND, (affinity,)).fetchone():
            for lane in probe.lanes:
                values = (affinity, *lane, without, without, probe.limit)
                for row in connection.execute(PEEK_BOUND, values):
                    candidates.append(_as_candidate(lane, row))
    return candidates


def _as_candidate(lane: QueueLane, row: Any) -> DispatchCandidate:
    dispatch_id, priority, rank, queued_at, key, model_set, affinity, avoided, until, preferred = (
        row
    )
    return DispatchCandidate(
        dispatch_id,
        lane,
        priority,
        rank,
        from_micros(queued_at),
        key,
        model_set,
        affinity,
        avoided,
        None if until is None else from_micros(until),
        preferred,
    )


def _values(claim: Claim, now: int, ends: int) -> dict[str, Any]:
    return {
        "id": claim.candidate.id,
        "token": claim.token.hex,
        "worker": claim.worker_id,
        "is_prefetched": claim.is_prefetched,
        "key": claim.key_hash,
        "held_max": claim.held_max,
        "workflow": claim.candidate.lane.workflow_id,
        "now": now,
        "ends": ends,
    }


def _claim_one(
    connection: Connection, claim: Claim, values: dict[str, Any]
) -> DispatchLease | None:
    row = connection.execute(CLAIM, values).fetchone()
    if row is None:
        return None
    candidate, worker_id = claim.candidate, claim.worker_id
    tenant_id, job_id, number, attempt = row
    _add_audit(
        connection, values["now"], "lease", candidate.id, tenant_id, worker_id, (attempt, number)
    )
    return DispatchLease(
        dispatch_id=candidate.id,
        tenant_id=UUID(tenant_id),
        job_id=UUID(job_id),
        lane=candidate.lane,
        worker_id=worker_id,
        token=claim.token,
        number=number,
        attempt=attempt,
        expires_at=from_micros(values["ends"]),
        is_prefetched=claim.is_prefetched,
        model_key=candidate.model_key,
        model_set=candidate.model_set,
    )


def _add_audit(
    connection: Connection,
    now: int,
    action: str,
    dispatch_id: int,
    tenant_id: str,
    worker_id: str | None,
    lease: Sequence[int],
) -> None:
    actor = f"worker:{worker_id}" if worker_id else "sweep"
    details = json.dumps({"attempt": lease[0], "lease": lease[1]})
    values = (now, actor, action, f"dispatch:{dispatch_id}", tenant_id, details)
    connection.execute(NOTE, values)
