"""Checks the databases and the storage after a run, without any code of the control plane."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
from tests.chaos.load import BATCH, CANDIDATES, Accepted, Tally
from tests.chaos.report import Moment
from tests.chaos.world import POOLS, World

REST_SECONDS_MAX = 240
LOOK_SECONDS = 1.0
SHOWN_MAX = 10
GROWTH_MAX = 0.05
MIDDLE_SECONDS, LONG_SECONDS = 20 * 60, 29 * 60
TRACEBACK = "Traceback (most recent call last)"
_BUSY = """
SELECT (SELECT count(*) FROM ai_jobs WHERE status IN ('queued', 'processing'))
     + (SELECT count(*) FROM graph_runs WHERE status IN ('pending', 'running', 'waiting_for_user'))
     + (SELECT count(*) FROM pipeline_jobs WHERE status = 'in_flight')
     + (SELECT count(*) FROM pipeline_runs WHERE status = 'active' AND reason IS DISTINCT FROM 'complete')
     + (SELECT count(*) FROM trigger_firings WHERE status = 'starting')
     + (SELECT count(*) FROM outbox)
     + (SELECT count(*) FROM webhook_deliveries WHERE status = 'pending')
"""
_BUSY_QUEUE = "SELECT count(*) FROM ai_job_dispatches WHERE status IN ('queued', 'leased')"
# Jobs whose transactions are not one reservation and one settlement that fits the job's end.
_LEDGER_OF_JOBS = """
SELECT j.id, j.status, j.reserved_tokens, array_agg(t.type || ' ' || t.amount ORDER BY t.id) AS lines
FROM ai_jobs j LEFT JOIN token_transactions t ON t.tenant_id = j.tenant_id AND t.job_id = j.id
WHERE j.status IN ('completed', 'failed', 'cancelled') AND j.reserved_tokens > 0
GROUP BY j.id, j.status, j.reserved_tokens
HAVING count(*) FILTER (WHERE t.type = 'JOB_RESERVE') <> 1
    OR coalesce(sum(t.amount) FILTER (WHERE t.type = 'JOB_RESERVE'), 0) <> -j.reserved_tokens
    OR count(*) FILTER (WHERE t.type = 'JOB_CONSUME') <> (j.status = 'completed')::int
    OR count(*) FILTER (WHERE t.type = 'JOB_REFUND') <> (j.status <> 'completed')::int
    OR coalesce(sum(t.amount), 0) <> CASE WHEN j.status = 'completed' THEN -j.reserved_tokens ELSE 0 END
"""
_WALLETS = """
SELECT w.user_id, w.balance, coalesce(sum(t.amount), 0)::bigint AS total
FROM token_wallets w LEFT JOIN token_transactions t USING (tenant_id, user_id)
GROUP BY w.user_id, w.balance HAVING w.balance <> coalesce(sum(t.amount), 0)
"""
_RUN_LOG = """
SELECT j.id, count(e.id) FILTER (WHERE e.record IS NOT NULL) AS records,
       count(e.id) FILTER (WHERE e.has_start) AS starts, count(e.id) FILTER (WHERE e.has_end) AS ends
FROM ai_jobs j LEFT JOIN run_events e ON e.job_id = j.id
WHERE j.gateway IS NOT NULL AND j.status = 'completed' GROUP BY j.id
HAVING count(e.id) FILTER (WHERE e.record IS NOT NULL) <> 1
    OR count(e.id) FILTER (WHERE e.has_start) <> 1 OR count(e.id) FILTER (WHERE e.has_end) <> 1
"""
_REPORTS = """
SELECT job_id, lease_number, report, count(*) FROM run_events WHERE report IS NOT NULL
GROUP BY job_id, lease_number, report HAVING count(*) > 1
"""
_OUTPUT_NAMES = """
SELECT user_id, folder, output, job_id, count(*) FROM gateway_files WHERE job_id IS NOT NULL
GROUP BY user_id, folder, output, job_id HAVING count(*) > 1
"""
_MISSED_DELIVERIES = """
SELECT j.id, j.status, w.id, count(d.id)
FROM ai_jobs j JOIN webhooks w USING (tenant_id, user_id)
LEFT JOIN webhook_deliveries d
    ON d.webhook_id = w.id AND d.job_id = j.id AND d.event = 'job.' || j.status
WHERE j.status IN ('completed', 'failed', 'cancelled') AND w.url <> ''
GROUP BY j.id, j.status, w.id HAVING count(d.id) <> 1
"""
_ENDS = """
SELECT job_id, count(*) FROM job_events
WHERE kind = 'status' AND (data::jsonb)->>'status' IN ('completed', 'failed', 'cancelled')
GROUP BY job_id HAVING count(*) > 1
"""


@dataclass
class Audit:
    """Runs all checks. Each returns the violations that it found, as text."""

    world: World
    tally: Tally
    memory: Sequence[Moment] = ()
    violations: dict[str, list[str]] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)
    _connections: dict[str, Any] = field(default_factory=dict)

    def checks(self) -> dict[str, Callable[[], Awaitable[list[str]]]]:
        return {
            "accepted work is stored and ended": self.accepted,
            "no job failed": self.failed,
            "a job ends once": self.ended_once,
            "one submission makes one job": self.submitted_once,
            "the queue matches the jobs": self.queue,
            "the ledger is exact": self.ledger,
            "files are present and have an owner": self.files,
            "a prompt has one history record": self.run_log,
            "firings are neither lost nor repeated": self.firings,
            "each event reaches its webhook, with one id": self.webhooks,
            "no answer is 500": self.answers,
            "no log has a traceback": self.logs,
            "memory is flat": self.flat_memory,
        }

    async def run(self) -> None:
        try:
            await self._connect()
            self.violations["everything comes to rest"] = await self.rest()
            for name, check in self.checks().items():
                self.violations[name] = await check()
        finally:
            for connection in self._connections.values():
                await connection.close()

    async def _connect(self) -> None:
        urls = {pool: self.world.pool_url(pool) for pool in POOLS}
        for name, url in {"central": self.world.central_url(), **urls}.items():
            self._connections[name] = await asyncpg.connect(url)

    async def _rows(self, query: str, *values: Any, pools: Iterable[str] = POOLS) -> list[Any]:
        return [
            row for pool in pools for row in await self._connections[pool].fetch(query, *values)
        ]

    async def rest(self) -> list[str]:
        busy = 0
        for _ in range(int(REST_SECONDS_MAX / LOOK_SECONDS)):
            busy = await self._connections["central"].fetchval(_BUSY_QUEUE)
            for pool in POOLS:
                busy += await self._connections[pool].fetchval(_BUSY)
            if not busy:
                return []
            await asyncio.sleep(LOOK_SECONDS)
        return [f"{busy} jobs, runs or messages are still open after {REST_SECONDS_MAX} s"]

    async def accepted(self) -> list[str]:
        finders = {
            "job": self._ended_job,
            "prompt": self._ended_job,
            "v2 key": self._ended_key,
            "batch": self._ended_batch,
            "graph": self._ended_graph,
            "pipeline": self._ended_pipeline,
            "firing": self._ended_firing,
            "upload": self._stored_upload,
        }
        self.facts["accepted"] = len(self.tally.accepted)
        wrong = []
        for work in self.tally.accepted:
            if problem := await finders[work.kind](work):
                wrong.append(f"{work.kind} {work.id}: {problem}")
        return wrong

    async def _one(self, work: Accepted, query: str, *values: Any) -> Any:
        return await self._connections[work.pool].fetchrow(query, *values)

    async def _ended_job(self, work: Accepted) -> str:
        row = await self._one(work, "SELECT status FROM ai_jobs WHERE id = $1", UUID(work.id))
        return _problem(row, "completed", "failed", "cancelled")

    async def _ended_key(self, work: Accepted) -> str:
        key = f"v2:{hashlib.sha256(work.id.encode()).hexdigest()}"
        row = await self._one(work, "SELECT status FROM ai_jobs WHERE idempotency_key = $1", key)
        return _problem(row, "completed", "failed", "cancelled")

    async def _ended_batch(self, work: Accepted) -> str:
        query = "SELECT status FROM ai_jobs WHERE batch_id = $1"
        rows = await self._connections[work.pool].fetch(query, UUID(work.id))
        if len(rows) != BATCH:
            return f"{len(rows)} jobs instead of {BATCH}"
        return next(filter(None, (_problem(row, "completed") for row in rows)), "")

    async def _ended_graph(self, work: Accepted) -> str:
        query = "SELECT status FROM graph_runs WHERE id = $1"
        return _problem(await self._one(work, query, UUID(work.id)), "completed")

    async def _ended_pipeline(self, work: Accepted) -> str:
        query = "SELECT step, count(*) FROM pipeline_candidates WHERE run_id = $1 GROUP BY step"
        rows = await self._connections[work.pool].fetch(query, UUID(work.id))
        made = dict(rows)
        return "" if made == {0: CANDIDATES, 1: CANDIDATES} else f"it made {made} candidates"

    async def _ended_firing(self, work: Accepted) -> str:
        query = "SELECT status FROM trigger_firings WHERE id = $1"
        return _problem(await self._one(work, query, UUID(work.id)), "started")

    async def _stored_upload(self, work: Accepted) -> str:
        query = (
            "SELECT f.size FROM gateway_files g JOIN files f ON f.id = g.file_id"
            " WHERE g.folder = 'input' AND g.path = $1"
        )
        row = await self._one(work, query, work.id)
        if row is None:
            return "it is not stored"
        return "" if row[0] == int(work.detail) else f"it has {row[0]} bytes"

    async def failed(self) -> list[str]:
        query = "SELECT id, raw_error, error_message FROM ai_jobs WHERE status = 'failed'"
        return [str(tuple(row)) for row in await self._rows(query)]

    async def ended_once(self) -> list[str]:
        rows = await self._rows(_ENDS)
        query = (
            "SELECT subject, count(*) FROM audit_log WHERE action IN ('complete', 'fail')"
            " GROUP BY subject HAVING count(*) > 1"
        )
        rows += await self._rows(query, pools=["central"])
        return [f"{row[0]} ended {row[1]} times" for row in rows]

    async def submitted_once(self) -> list[str]:
        """Looks for a key, or a place in a run, that has more than one job."""
        queries = (
            "SELECT idempotency_key, count(*) FROM ai_jobs WHERE idempotency_key IS NOT NULL"
            " GROUP BY tenant_id, user_id, idempotency_key HAVING count(*) > 1",
            "SELECT batch_id, batch_position, count(*) FROM ai_jobs WHERE batch_id IS NOT NULL"
            " GROUP BY 1, 2 HAVING count(*) > 1",
            "SELECT run_id, step, parent_id, number, count(*) FROM pipeline_jobs"
            " GROUP BY 1, 2, 3, 4 HAVING count(*) FILTER (WHERE status = 'done') > 1",
        )
        found = [tuple(row) for query in queries for row in await self._rows(query)]
        return [f"more than one job for {row}" for row in found] + self.tally.wrong

    async def queue(self) -> list[str]:
        """Compares each job with its dispatch."""
        rows = await self._rows("SELECT id, status FROM ai_jobs WHERE reused_from IS NULL")
        jobs = {row[0]: row[1] for row in rows}
        self.facts["jobs"] = len(jobs)
        query = "SELECT tenant_job_id, status FROM ai_job_dispatches"
        dispatches = await self._rows(query, pools=["central"])
        counts = Counter(row[0] for row in dispatches)
        wrong = [f"job {job} has {count} dispatches" for job, count in counts.items() if count > 1]
        statuses = {row[0]: row[1] for row in dispatches}
        for job, status in jobs.items():
            # A job that was cancelled before it reached the queue needs no dispatch.
            if statuses.get(job, "cancelled") != status:
                wrong.append(f"job {job} is {status}, its dispatch {statuses.get(job, 'missing')}")
        return wrong + [f"dispatch without a job: {job}" for job in statuses.keys() - jobs.keys()]

    async def ledger(self) -> list[str]:
        wrong = [f"job {tuple(row)}" for row in await self._rows(_LEDGER_OF_JOBS)]
        wrong += [f"wallet {tuple(row)}" for row in await self._rows(_WALLETS)]
        query = "SELECT count(*) FROM token_transactions WHERE type = 'JOB_CONSUME'"
        self.facts["paid jobs"] = sum(row[0] for row in await self._rows(query))
        return wrong

    async def files(self) -> list[str]:
        bucket = self.world.s3.folder / self.world.s3.bucket
        rows = await self._rows("SELECT path, size FROM files")
        sizes = {path: size for path, size in rows if size is not None}
        wrong = [f"file {path}" for path, size in sizes.items() if _size(bucket / path) != size]
        query = (
            "SELECT j.id FROM ai_jobs j LEFT JOIN files f ON f.id = j.output_file_id"
            " WHERE j.status = 'completed' AND f.id IS NULL"
        )
        wrong += [f"the output of job {row[0]} is missing" for row in await self._rows(query)]
        # The daily sweep removes what a lost lease delivered, so this is not a violation.
        objects = {
            path.relative_to(bucket).as_posix()
            for path in (bucket / "tenants").rglob("*")
            if path.is_file()
        }
        self.facts["objects without a row"] = len(objects - {row[0] for row in rows})
        return wrong

    async def run_log(self) -> list[str]:
        wrong = [f"prompt {tuple(row)}" for row in await self._rows(_RUN_LOG)]
        wrong += [f"report {tuple(row)}" for row in await self._rows(_REPORTS)]
        return wrong + [f"output {tuple(row)}" for row in await self._rows(_OUTPUT_NAMES)]

    async def firings(self) -> list[str]:
        """A delivery has one firing with one run; a schedule has each minute once."""
        query = (
            "SELECT f.id, f.status, f.error FROM trigger_firings f"
            " LEFT JOIN graph_runs r ON r.id = f.run_id WHERE f.status = 'starting'"
            " OR f.status = 'refused' OR (f.status = 'started' AND r.id IS NULL)"
        )
        wrong = [f"firing {tuple(row)}" for row in await self._rows(query)]
        keys = {work.detail: work.id for work in self.tally.accepted if work.kind == "firing"}
        query = "SELECT count(*) FROM trigger_firings WHERE cause = 'webhook'"
        found = sum(row[0] for row in await self._rows(query))
        # A delivery that was sent at the very end may have a firing without an answer.
        senders = sum("hook" in customer.name for customer in self.world.customers)
        if not len(keys) <= found <= len(keys) + senders:
            wrong.append(f"{found} firings of {len(keys)} deliveries")
        query = (
            "SELECT trigger_id, min(planned_at), max(planned_at), count(DISTINCT planned_at),"
            " sum(CASE WHEN status = 'missed' THEN missed ELSE 1 END), sum(missed)"
            " FROM trigger_firings WHERE cause = 'schedule' GROUP BY trigger_id"
        )
        for trigger, first, last, _, total, missed in await self._rows(query):
            minutes = round((last - first).total_seconds() / 60) + 1
            self.facts["firings"] = self.facts.get("firings", found) + total
            if not minutes <= total <= minutes + missed:
                wrong.append(f"schedule {trigger}: {total} moments in {minutes} minutes")
        return wrong

    async def webhooks(self) -> list[str]:
        """Checks that each ended job has one delivery, which the receiver accepted under its only id."""
        receiver = self.world.receiver
        rows = await self._rows(_MISSED_DELIVERIES)
        wrong = [f"job {tuple(row)} has no delivery or several" for row in rows]
        query = "SELECT id, event, status, last_status, last_error FROM webhook_deliveries"
        deliveries = await self._rows(query)
        known = {str(row["id"]) for row in deliveries}
        wrong += [
            f"delivery {tuple(row)} was not received"
            for row in deliveries
            if str(row["id"]) not in receiver.accepted
        ]
        wrong += [f"delivery {id} is not stored" for id in receiver.accepted.keys() - known]
        self.facts["deliveries"] = len(known)
        self.facts["repeated deliveries"] = sum(count > 1 for count in receiver.accepted.values())
        return wrong + receiver.problems

    async def answers(self) -> list[str]:
        return self.tally.errors + self.world.operator_errors

    async def logs(self) -> list[str]:
        wrong = []
        for name, path in self.world.logs().items():
            wrong += [f"{name}: {text}" for text in tracebacks(path)]
        return wrong

    async def flat_memory(self) -> list[str]:
        """Compares each process with itself after 20 minutes, in runs of 30 minutes and more."""
        middle = next((moment for moment in self.memory if moment.at >= MIDDLE_SECONDS), None)
        if middle is None or self.memory[-1].at < LONG_SECONDS:
            return []
        return [
            f"{name} grew from {before.rss >> 20} to {after.rss >> 20} MiB"
            for name, after in self.memory[-1].samples.items()
            if (before := middle.samples.get(name))
            and before.pid == after.pid
            and after.rss > before.rss * (1 + GROWTH_MAX)
        ]


def tracebacks(path: Path) -> list[str]:
    """The last line of each traceback in a log, with the line before it."""
    lines = path.read_text(errors="replace").splitlines()
    return [line[-700:] for line in lines if TRACEBACK in line]


def _problem(row: Any, *wanted: str) -> str:
    if row is None:
        return "it is not stored"
    return "" if row[0] in wanted else f"it is {row[0]}"


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
