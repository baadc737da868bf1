"""SQL for jobs, batches and the outbox. Queries include the tenant, except for those of sweeps and
operators.
"""

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    CTE,
    ColumnElement,
    Integer,
    Row,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.sql.dml import ReturningUpdate

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import (
    Moment,
    for_update,
    insert_if_new,
    is_one_of,
    is_sqlite,
    without_index,
)
from comfyfleet.server.db.driver import (
    PreparedForIds,
    PreparedInsert,
    PreparedStatement,
    StatementCall,
)
from comfyfleet.server.db.tenant_tables import (
    HAS_OLD_PROMPT,
    IS_ACTIVE,
    IS_HELD,
    IS_REUSABLE,
    ai_jobs,
    batches,
    job_attempts,
    job_events,
    outbox,
    webhooks,
)
from comfyfleet.server.jobs.model import (
    PRICE_PER_SECOND,
    STATE_COLUMNS,
    Failure,
    HeldJob,
    Job,
    JobAttempt,
    JobBatch,
    JobSpec,
    JobStatus,
    added_job,
    job_from_row,
    new_job_row,
)
from comfyfleet.server.notifications.model import EventKind
from comfyfleet.server.queue.model import DispatchLease
from comfyfleet.server.run_log import store as run_log_store

ATTEMPTS_MAX = 200  # maximum number of attempts that are listed for a job
# Active jobs are counted up to this many above the limit, so that a refusal can report their
# number.
COUNTED_BEYOND_MAX = 1000
# Columns that are only written after the submission and are not part of the insert.
_LATER = {*STATE_COLUMNS, "prompt_removed_at", "hidden_at"} - {"id", "tenant_id", "submitted_at"}
INSERTED_COLUMNS = tuple(column.name for column in ai_jobs.c if column.name not in _LATER)
_ADD = PreparedInsert(ai_jobs, INSERTED_COLUMNS, returning=[ai_jobs.c.id])


async def add(
    tx: Tx, tenant_id: UUID, specs: Mapping[UUID, JobSpec], *, now: datetime
) -> list[Job]:
    """Adds jobs and returns the new ones. Skips jobs whose id or idempotency key already exists."""
    rows = [new_job_row(tenant_id, job_id, spec, now) for job_id, spec in specs.items()]
    added = [row["id"] for row in await _ADD.add(tx, rows)]
    return [added_job(tenant_id, job_id, specs[job_id], now) for job_id in added]


def _one(tenant_id: Any, job_id: Any) -> tuple[Any, Any]:
    return ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.id == job_id


_GET = PreparedStatement(
    lambda tx: select(ai_jobs).where(*_one(bindparam("of_tenant"), bindparam("of_job")))
)


async def get(tx: Tx, tenant_id: UUID, job_id: UUID) -> Job | None:
    row = await _GET.first(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return job_from_row(row) if row else None


def _select_many(is_one: Any, *what: Any) -> Select[Any]:
    mine = select(*what).where(ai_jobs.c.tenant_id == bindparam("of_tenant"), is_one)
    return mine.order_by(ai_jobs.c.id)


_GET_MANY = PreparedForIds(ai_jobs.c.id, lambda tx, is_one: _select_many(is_one, ai_jobs))
_LOCK = PreparedForIds(
    ai_jobs.c.id, lambda tx, is_one: for_update(tx, _select_many(is_one, ai_jobs.c.id))
)


async def get_many(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[Job]:
    """Returns jobs ordered by id. Ids of missing jobs are left out."""
    if not job_ids:
        return []
    rows = await _GET_MANY.of(tx, job_ids, {"of_tenant": tenant_id})
    return sorted((job_from_row(row) for row in rows), key=lambda job: job.id)


# Maximum size, in bytes and in jobs, of a part whose JSON is decoded without a pause.
READ_BYTES_MAX, READ_JOBS_MAX = 1024**2, 20
_STORED_BYTES = func.octet_length(cast(ai_jobs.c.prompt, Text)) + func.coalesce(
    func.octet_length(cast(ai_jobs.c.gateway, Text)), 0
)
_BYTES = PreparedForIds(
    ai_jobs.c.id,
    lambda tx, is_one: _select_many(is_one, ai_jobs.c.id, _STORED_BYTES.label("bytes")),
)


async def get_in_parts(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> AsyncIterator[list[Job]]:
    """Yields the jobs in parts that are small enough to be decoded without a pause."""
    for start in range(0, len(job_ids), READ_JOBS_MAX):
        for part in await _small_parts(tx, tenant_id, job_ids[start : start + READ_JOBS_MAX]):
            yield await get_many(tx, tenant_id, part)


async def _small_parts(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[list[UUID]]:
    if is_sqlite(tx) or len(job_ids) == 1:
        return [[job_id] for job_id in job_ids]  # SQLite reads one row per statement
    rows = await _BYTES.of(tx, job_ids, {"of_tenant": tenant_id})
    bytes_of = {row["id"]: row["bytes"] for row in rows}
    parts: list[list[UUID]] = []
    size = READ_BYTES_MAX + 1
    for job_id in job_ids:
        size += bytes_of.get(job_id, 0)
        if size > READ_BYTES_MAX:
            parts.append([])
            size = bytes_of.get(job_id, 0)
        parts[-1].append(job_id)
    return parts


async def lock(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> None:
    """Locks rows in the order of their ids to prevent deadlocks. Does nothing on SQLite."""
    if job_ids and not is_sqlite(tx):
        await _LOCK.of(tx, job_ids, {"of_tenant": tenant_id})


async def by_idempotency_key(
    tx: Tx, tenant_id: UUID, user_id: UUID | None, idempotency_key: str
) -> Job | None:
    """Finds a job by its user's idempotency key. Operators' jobs have no user, so their keys are
    unique per tenant.
    """
    result = await tx.execute(
        select(ai_jobs).where(
            ai_jobs.c.tenant_id == tenant_id,
            ai_jobs.c.user_id == user_id,  # rendered as IS NULL for operators' jobs
            ai_jobs.c.idempotency_key == idempotency_key,
        )
    )
    row = result.mappings().one_or_none()
    return job_from_row(row) if row else None


async def statuses_of(tx: Tx, job_ids: Sequence[UUID]) -> dict[tuple[UUID, UUID], JobStatus]:
    """Returns the statuses of these jobs by tenant and id. Missing jobs are left out."""
    rows = await tx.execute(
        select(ai_jobs.c.tenant_id, ai_jobs.c.id, ai_jobs.c.status).where(
            is_one_of(tx, ai_jobs.c.id, job_ids)
        )
    )
    return {(row.tenant_id, row.id): JobStatus(row.status) for row in rows}


async def active_after(
    tx: Tx, after: tuple[UUID, UUID] | None, *, before: datetime, limit: int
) -> list[tuple[UUID, UUID]]:
    """Returns a page of active jobs that were submitted before a point in time, as (tenant, id)."""
    query = select(ai_jobs.c.tenant_id, ai_jobs.c.id).where(
        text(IS_ACTIVE), ~ai_jobs.c.is_held, ai_jobs.c.submitted_at < before
    )
    if after:
        query = query.where(tuple_(ai_jobs.c.tenant_id, ai_jobs.c.id) > tuple_(*after))
    rows = await tx.execute(query.order_by(ai_jobs.c.tenant_id, ai_jobs.c.id).limit(limit))
    return [(row.tenant_id, row.id) for row in rows]


_ADD_ATTEMPT = PreparedInsert(
    job_attempts, job_attempts.columns.keys(), returning=[job_attempts.c.lease_number]
)


async def add_attempts(tx: Tx, attempts: Iterable[JobAttempt]) -> None:
    """Adds attempts. Existing ones are not changed."""
    await _ADD_ATTEMPT.add(tx, [asdict(attempt) for attempt in attempts])


async def attempts_of(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[JobAttempt]:
    """Returns the attempts in the order of their leases."""
    query = select(job_attempts).where(
        job_attempts.c.tenant_id == tenant_id, job_attempts.c.job_id == job_id
    )
    rows = await tx.execute(query.order_by(job_attempts.c.lease_number).limit(ATTEMPTS_MAX))
    return [JobAttempt(**row) for row in rows.mappings()]


async def find_in_pool(tx: Tx, job_id: UUID) -> Job | None:
    """Finds a job of any tenant of the pool. For operators only."""
    row = (await tx.execute(select(ai_jobs).where(ai_jobs.c.id == job_id))).mappings().first()
    return job_from_row(row) if row else None


async def remove_prompts(tx: Tx, *, ended_before: datetime, now: datetime, limit: int) -> int:
    """Removes prompts, inputs sent by attempts, and entries in the gateway's history, all for jobs
    that ended before a point in time. Starts with the jobs that ended first.
    """
    old = (
        select(ai_jobs.c.id)
        .where(text(HAS_OLD_PROMPT), ai_jobs.c.completed_at < ended_before)
        .order_by(ai_jobs.c.completed_at)
        .limit(limit)
    )
    ids = list((await tx.execute(old)).scalars())
    if ids:
        those = is_one_of(tx, ai_jobs.c.id, ids)
        removed_values = {"prompt": {}, "prompt_removed_at": now, "gateway": None}
        await tx.execute(update(ai_jobs).where(those).values(removed_values))
        await run_log_store.remove_of_jobs(tx, ids)
        sent = update(job_attempts).where(is_one_of(tx, job_attempts.c.job_id, ids))
        await tx.execute(sent.values(filled_in=None))
    return len(ids)


def _counted(*mine: Any) -> Any:
    some = (
        # The text must match the index's condition. With bound parameters, the planner wouldn't use
        # it.
        select(ai_jobs.c.id)
        .where(ai_jobs.c.tenant_id == bindparam("of_tenant"), text(IS_ACTIVE), ~ai_jobs.c.is_held)
        .where(*mine)
        .limit(bindparam("at_most", type_=Integer))
        .subquery()
    )
    return select(func.count()).select_from(some).scalar_subquery()


def active_counts() -> Select[Any]:
    """Builds the query that counts the active jobs of a user and of the tenant, up to a limit. Held
    jobs don't count.
    """
    return select(
        _counted(ai_jobs.c.user_id == bindparam("of_user")).label("of_user"),
        _counted(ai_jobs.c.user_id.is_not(None)).label("of_tenant"),
    )


_COUNT_ACTIVE = PreparedStatement(lambda tx: active_counts())


async def count_active(tx: Tx, tenant_id: UUID, user_id: UUID, *, most: int) -> tuple[int, int]:
    values = {"of_tenant": tenant_id, "of_user": user_id, "at_most": most + COUNTED_BEYOND_MAX}
    (counted,) = await _COUNT_ACTIVE.rows(tx, values)
    return int(counted["of_user"]), int(counted["of_tenant"])


async def list_page(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    before: Job | None,
    status: JobStatus | None,
    limit: int,
) -> list[Job]:
    query = select(ai_jobs).where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.user_id == user_id)
    if status:
        query = query.where(ai_jobs.c.status == status)
    if before:
        place = tuple_(ai_jobs.c.submitted_at, ai_jobs.c.id)
        query = query.where(place < tuple_(literal(before.submitted_at, Moment()), before.id))
    newest = (ai_jobs.c.submitted_at.desc(), ai_jobs.c.id.desc())
    rows = await tx.execute(query.order_by(*newest).limit(limit))
    return [job_from_row(row) for row in rows.mappings()]


async def list_of_media(tx: Tx, tenant_id: UUID, media_id: UUID, *, limit: int) -> list[Job]:
    """Returns the latest jobs of a media item, the newest first."""
    rows = await tx.execute(
        select(ai_jobs)
        .where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.video_id == media_id)
        .order_by(ai_jobs.c.submitted_at.desc(), ai_jobs.c.batch_position.desc())
        .limit(limit)
    )
    return [job_from_row(row) for row in rows.mappings()]


async def list_of_batch(tx: Tx, tenant_id: UUID, batch_id: UUID) -> list[Job]:
    """Returns the jobs of a batch in the order of their positions."""
    rows = await tx.execute(
        select(ai_jobs)
        .where(ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.batch_id == batch_id)
        .order_by(ai_jobs.c.batch_position)
    )
    return [job_from_row(row) for row in rows.mappings()]


async def users_with_held(tx: Tx, *, limit: int) -> list[tuple[UUID, UUID]]:
    """Returns the users whose jobs are held, as (tenant, user)."""
    rows = await tx.execute(
        select(ai_jobs.c.tenant_id, ai_jobs.c.user_id)
        .where(text(IS_HELD), ai_jobs.c.user_id.is_not(None))
        .distinct()
        .limit(limit)
    )
    return [(row.tenant_id, row.user_id) for row in rows]


async def held_of(tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int) -> list[HeldJob]:
    """Returns a user's held jobs, the oldest first."""
    rows = await tx.execute(
        select(ai_jobs.c.id, ai_jobs.c.batch_id)
        .where(text(IS_HELD), ai_jobs.c.tenant_id == tenant_id, ai_jobs.c.user_id == user_id)
        .order_by(ai_jobs.c.submitted_at, ai_jobs.c.batch_position, ai_jobs.c.id)
        .limit(limit)
    )
    return [HeldJob(*row) for row in rows]


async def active_by_batch(tx: Tx, tenant_id: UUID, user_id: UUID) -> dict[UUID, int]:
    """Counts the queued and running jobs of a user by batch."""
    rows = await tx.execute(
        select(ai_jobs.c.batch_id, func.count())
        .where(
            text(IS_ACTIVE),
            ai_jobs.c.tenant_id == tenant_id,
            ai_jobs.c.user_id == user_id,
            ai_jobs.c.batch_id.is_not(None),
            ~ai_jobs.c.is_held,
        )
        .group_by(ai_jobs.c.batch_id)
    )
    return {row[0]: row[1] for row in rows}


async def admit(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[Job]:
    admitted = await tx.execute(
        update(ai_jobs)
        .where(
            without_index(tx, ai_jobs.c.tenant_id) == tenant_id,
            is_one_of(tx, ai_jobs.c.id, job_ids),
            ai_jobs.c.is_held,
            ai_jobs.c.status == JobStatus.QUEUED,
        )
        .values(is_held=False)
        .returning(ai_jobs)
    )
    return [job_from_row(row) for row in admitted.mappings()]


class EndedJob(NamedTuple):
    """A job that has just ended, and properties of its user that the same statement has read."""

    job: Job
    has_webhooks: bool
    has_held: bool  # whether any of the user's jobs are held


_held_jobs = ai_jobs.alias("held_jobs")
_USER_FACTS = (
    exists()
    .where(webhooks.c.tenant_id == ai_jobs.c.tenant_id, webhooks.c.user_id == ai_jobs.c.user_id)
    .label("has_webhooks"),
    exists()
    .where(
        _held_jobs.c.tenant_id == ai_jobs.c.tenant_id,
        _held_jobs.c.user_id == ai_jobs.c.user_id,
        text("held_jobs.is_held AND held_jobs.status = 'queued'"),  # matches the index's condition
    )
    .label("has_held"),
)
_IS_JOB = (ai_jobs.c.tenant_id == bindparam("of_tenant"), ai_jobs.c.id == bindparam("of_job"))
_IS_ACTIVE_JOB = (*_IS_JOB, text(IS_ACTIVE))
_LEASED_JOB = update(ai_jobs).where(
    *_IS_JOB,
    ai_jobs.c.status == JobStatus.PROCESSING,
    ai_jobs.c.lease_token == bindparam("of_token"),
)
NOW = bindparam("at_now", type_=Moment)


def _params(tenant_id: UUID, job_id: UUID, **values: Any) -> dict[str, Any]:
    return {"of_tenant": tenant_id, "of_job": job_id, **values}


async def _first_job(tx: Tx, statement: PreparedStatement, values: Mapping[str, Any]) -> Job | None:
    row = await statement.first(tx, values)
    return job_from_row(row) if row else None


def status_event_data(job: CTE, status: JobStatus) -> ColumnElement[Any]:
    """Builds the data of a status event in SQL. Must match `service.event_data`."""
    fields = {
        "job_id": job.c.id,
        "status": status.value,
        "error": job.c.error_message,
        "video_id": job.c.video_id,
        "effect_id": job.c.effect_id,
        "reserved_tokens": job.c.reserved_tokens,
    }
    pairs = (part for pair in fields.items() for part in pair)
    return func.jsonb_build_object(*pairs, type_=job_events.c.data.type)


async def _first_ended(
    tx: Tx, statement: PreparedStatement, values: Mapping[str, Any]
) -> EndedJob | None:
    row = await statement.first(tx, values)
    return EndedJob(job_from_row(row), row["has_webhooks"], row["has_held"]) if row else None


_START_UPDATE = (
    update(ai_jobs)
    .where(
        *_IS_ACTIVE_JOB,
        or_(
            ai_jobs.c.lease_number < bindparam("by_number"),
            and_(
                ai_jobs.c.lease_number == bindparam("by_number"),
                ai_jobs.c.lease_token == bindparam("by_token"),
            ),
        ),
    )
    .values(
        status=JobStatus.PROCESSING,
        lease_token=bindparam("by_token"),
        lease_number=bindparam("by_number"),
        attempt=bindparam("by_attempt"),
        started_at=bindparam("begun_at"),
    )
    .returning(ai_jobs)
)
_START = PreparedStatement(lambda tx: _START_UPDATE)


def _build_start_with_event() -> Any:
    """Builds a single PostgreSQL statement that starts a job and adds its status event."""
    started = _START_UPDATE.cte("started")
    event = select(
        started.c.tenant_id,
        started.c.id,
        literal(EventKind.STATUS.value),
        status_event_data(started, JobStatus.PROCESSING),
        bindparam("begun_at", type_=Moment),
    ).where(started.c.user_id.is_not(None))
    columns = ["tenant_id", "job_id", "kind", "data", "created_at"]
    noted = insert(job_events).from_select(columns, event).cte("noted")
    return select(*started.c).add_cte(noted)


_START_WITH_EVENT = PreparedStatement(lambda tx: _build_start_with_event())


async def start(
    tx: Tx, lease: DispatchLease, *, begun_at: datetime | None, with_event: bool = False
) -> Job | None:
    """Starts the job if it is active and has no newer lease. A repeated start with the same lease
    is accepted.

    With `with_event`, which requires PostgreSQL, the same statement adds the event if the job has a
    user.
    """
    values = {
        "by_token": lease.token,
        "by_number": lease.number,
        "by_attempt": lease.attempt,
        "begun_at": begun_at,
    }
    statement = _START_WITH_EVENT if with_event else _START
    return await _first_job(tx, statement, _params(lease.tenant_id, lease.job_id, **values))


_BEGIN = PreparedStatement(
    lambda tx: (
        _LEASED_JOB.where(ai_jobs.c.started_at.is_(None)).values(started_at=NOW).returning(ai_jobs)
    )
)


async def begin(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, *, now: datetime) -> Job | None:
    """Sets the start time. Returns None if it was already set or the lease is no longer held."""
    return await _first_job(tx, _BEGIN, _params(tenant_id, job_id, of_token=token, at_now=now))


_COMPLETE_UPDATE = _LEASED_JOB.values(
    status=JobStatus.COMPLETED,
    started_at=func.coalesce(ai_jobs.c.started_at, NOW),
    completed_at=NOW,
    provider_job_id=bindparam("by_provider"),
    output_file_id=bindparam("to_file"),
    result_metadata=bindparam("with_result"),
)
# Large columns that a completion doesn't read, with placeholder values.
_UNREAD: Mapping[str, Any] = {"prompt": {}, "properties": {}, "assets": ()}
_READ = [column for column in ai_jobs.c if column.name not in {*_UNREAD, "result_metadata"}]
_COMPLETE = PreparedStatement(lambda tx: _COMPLETE_UPDATE.returning(*_READ, *_USER_FACTS))


def completion_update() -> ReturningUpdate[Any]:
    """Builds the update that completes a job, as part of a larger PostgreSQL statement. Only
    matches a job that isn't metered and whose user has no webhooks.
    """
    has_webhooks, has_held = _USER_FACTS
    price = func.json_extract_path_text(ai_jobs.c.gateway, PRICE_PER_SECOND)
    is_fixed = or_(ai_jobs.c.reserved_tokens == 0, price.is_(None))
    return _COMPLETE_UPDATE.where(~has_webhooks.element, is_fixed).returning(*_READ, has_held)


def completion_params(
    tenant_id: UUID, job_id: UUID, token: UUID, values: Mapping[str, Any], *, now: datetime
) -> dict[str, Any]:
    return _params(
        tenant_id,
        job_id,
        of_token=token,
        at_now=now,
        by_provider=values.get("provider_job_id"),
        to_file=values.get("output_file_id"),
        with_result=values.get("result_metadata"),
    )


def ended_job(row: Mapping[str, Any], values: Mapping[str, Any]) -> Job:
    return job_from_row({**row, **_UNREAD, "result_metadata": values.get("result_metadata")})


async def complete(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, values: Mapping[str, Any], *, now: datetime
) -> EndedJob | None:
    """Completes a job and returns it without its prompt, properties and assets."""
    row = await _COMPLETE.first(tx, completion_params(tenant_id, job_id, token, values, now=now))
    if row is None:
        return None
    return EndedJob(ended_job(row, values), row["has_webhooks"], row["has_held"])


_COMPLETE_REUSED = PreparedStatement(
    lambda tx: (
        update(ai_jobs)
        .where(*_IS_ACTIVE_JOB)
        .values(
            status=JobStatus.COMPLETED,
            started_at=NOW,
            completed_at=NOW,
            provider_job_id=bindparam("by_provider"),
            output_file_id=bindparam("to_file"),
            result_metadata=bindparam("with_result"),
        )
        .returning(*_READ, *_USER_FACTS)
    )
)


async def complete_reused(tx: Tx, job: Job, source: Job, *, now: datetime) -> EndedJob | None:
    """Completes a job that was added in this transaction, with the result of another job."""
    values = {
        "by_provider": source.provider_job_id,
        "to_file": source.output_file_id,
        "with_result": source.result_metadata,
    }
    row = await _COMPLETE_REUSED.first(tx, _params(job.tenant_id, job.id, at_now=now, **values))
    if row is None:
        return None
    ended = ended_job(row, {"result_metadata": source.result_metadata})
    return EndedJob(ended, row["has_webhooks"], row["has_held"])


async def find_reusable(
    tx: Tx, tenant_id: UUID, user_id: UUID, fingerprints: Sequence[str], *, limit: int
) -> list[Job]:
    """Returns completed jobs with these fingerprints, without their prompts, the newest first."""
    rows = await tx.execute(
        select(*_READ, ai_jobs.c.result_metadata)
        .where(
            ai_jobs.c.tenant_id == tenant_id,
            ai_jobs.c.user_id == user_id,
            is_one_of(tx, ai_jobs.c.fingerprint, fingerprints),
            text(IS_REUSABLE),
        )
        .order_by(ai_jobs.c.completed_at.desc(), ai_jobs.c.id)
        .limit(limit)
    )
    return [job_from_row({**row, **_UNREAD}) for row in rows.mappings()]


_FAILED = {
    "status": JobStatus.FAILED,
    "error_message": bindparam("with_message"),
    "raw_error": bindparam("with_raw"),
    "completed_at": NOW,
}
_FAIL = PreparedStatement(lambda tx: _LEASED_JOB.values(_FAILED).returning(ai_jobs, *_USER_FACTS))


async def fail(
    tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID, why: Failure, *, now: datetime
) -> EndedJob | None:
    error = {"with_message": why.message, "with_raw": why.raw}
    return await _first_ended(
        tx, _FAIL, _params(tenant_id, job_id, of_token=token, at_now=now, **error)
    )


_REQUEUE = PreparedStatement(
    lambda tx: _LEASED_JOB.values(status=JobStatus.QUEUED).returning(ai_jobs)
)


async def requeue(tx: Tx, tenant_id: UUID, job_id: UUID, token: UUID) -> Job | None:
    return await _first_job(tx, _REQUEUE, _params(tenant_id, job_id, of_token=token))


_END_ACTIVE = PreparedStatement(
    lambda tx: (
        update(ai_jobs)
        .where(*_IS_ACTIVE_JOB)
        .values({**_FAILED, "status": bindparam("ended_as")})
        .returning(ai_jobs, *_USER_FACTS)
    )
)


async def end_active(
    tx: Tx, tenant_id: UUID, job_id: UUID, status: JobStatus, why: Failure | None, *, now: datetime
) -> EndedJob | None:
    """Ends an active job regardless of its lease. Used for cancellations and sweeps."""
    error = {
        "ended_as": status,
        "with_message": why.message if why else None,
        "with_raw": why.raw if why else None,
    }
    return await _first_ended(tx, _END_ACTIVE, _params(tenant_id, job_id, at_now=now, **error))


_ADD_OUTBOX = PreparedInsert(
    outbox,
    ("tenant_id", "job_id", "kind", "payload", "not_before", "created_at"),
    returning=[outbox.c.id],
)
_DELETE_OUTBOX = PreparedForIds(outbox.c.id, lambda tx, is_one: delete(outbox).where(is_one))


async def add_outbox(tx: Tx, jobs: Iterable[Job], *, now: datetime) -> list[int]:
    """Adds an outbox row for each job, so that its change is delivered to the central queue."""
    return [row["id"] for row in await _ADD_OUTBOX.add(tx, [_outbox_row(job, now) for job in jobs])]


def outbox_insert(job: Job, *, now: datetime) -> StatementCall:
    """Returns the insert of a job's outbox row, to be sent together with other statements."""
    return _ADD_OUTBOX, _outbox_row(job, now)


def outbox_insert_for_run(job: Job, *, now: datetime) -> StatementCall:
    """Returns the insert of the outbox row that notifies the job's run that the job has ended."""
    payload = {"run_id": str(job.spec.run_id), "status": job.status}
    return _ADD_OUTBOX, {**_outbox_row(job, now), "kind": job.spec.run_kind, "payload": payload}


def _outbox_row(job: Job, now: datetime) -> dict[str, Any]:
    return {
        "tenant_id": job.tenant_id,
        "job_id": job.id,
        "kind": "dispatch",
        "payload": {},
        "not_before": now,
        "created_at": now,
    }


_OUTBOX_OF_RUNS = PreparedStatement(
    lambda tx: (
        select(outbox.c.id, outbox.c.tenant_id, outbox.c.payload, outbox.c.job_id)
        .where(
            outbox.c.kind == bindparam("of_kind"),
            outbox.c.not_before <= bindparam("due"),
            outbox.c.id > bindparam("last"),
        )
        .order_by(outbox.c.id)
        .limit(bindparam("most"))
    )
)


async def outbox_of_runs(
    tx: Tx, kind: str, *, now: datetime, limit: int, after: int = 0
) -> list[tuple[int, UUID, UUID, UUID]]:
    """Returns a page of ended jobs, as (outbox id, tenant, run, job), the oldest rows first."""
    values = {"of_kind": kind, "due": now, "last": after, "most": limit}
    return [
        (outbox_id, tenant_id, UUID(payload["run_id"]), job_id)
        for outbox_id, tenant_id, payload, job_id in await _OUTBOX_OF_RUNS.tuples(tx, values)
    ]


async def due_outbox(tx: Tx, *, now: datetime, limit: int) -> list[tuple[int, UUID, UUID]]:
    rows = await tx.execute(
        select(outbox.c.id, outbox.c.tenant_id, outbox.c.job_id)
        .where(outbox.c.kind == "dispatch", outbox.c.not_before <= now)
        .order_by(outbox.c.not_before, outbox.c.id)
        .limit(limit)
    )
    return [(row.id, row.tenant_id, row.job_id) for row in rows]


async def delete_outbox(tx: Tx, ids: Sequence[int]) -> None:
    if ids:
        await _DELETE_OUTBOX.of(tx, ids)


async def reschedule_outbox(tx: Tx, ids: Sequence[int], *, until: datetime) -> None:
    await tx.execute(
        update(outbox)
        .where(is_one_of(tx, outbox.c.id, ids))
        .values(tries=outbox.c.tries + 1, not_before=until)
    )


async def add_batch(tx: Tx, batch: JobBatch) -> bool:
    """Adds a batch. Returns False if a batch with the same idempotency key exists."""
    inserted = await tx.execute(insert_if_new(tx, batches, [asdict(batch)]).returning(batches.c.id))
    return inserted.first() is not None


async def batch_by_key(
    tx: Tx, tenant_id: UUID, user_id: UUID, idempotency_key: str
) -> JobBatch | None:
    query = select(batches).where(
        batches.c.tenant_id == tenant_id,
        batches.c.user_id == user_id,
        batches.c.idempotency_key == idempotency_key,
    )
    row = (await tx.execute(query)).first()
    return _batch_from_row(row) if row else None


async def get_batch(tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID) -> JobBatch | None:
    query = select(batches).where(_is_batch(tenant_id, user_id, batch_id))
    row = (await tx.execute(query)).first()
    return _batch_from_row(row) if row else None


async def cancel_batch(
    tx: Tx, tenant_id: UUID, user_id: UUID, batch_id: UUID, now: datetime
) -> bool:
    """Marks a batch as cancelled. Returns False if it doesn't exist or was already cancelled."""
    statement = (
        update(batches)
        .where(_is_batch(tenant_id, user_id, batch_id), batches.c.cancelled_at.is_(None))
        .values(cancelled_at=now)
        .returning(batches.c.id)
    )
    return (await tx.execute(statement)).first() is not None


def _is_batch(tenant_id: UUID, user_id: UUID, batch_id: UUID) -> ColumnElement[bool]:
    return and_(
        batches.c.tenant_id == tenant_id, batches.c.user_id == user_id, batches.c.id == batch_id
    )


def _batch_from_row(row: Row[Any]) -> JobBatch:
    return JobBatch(**row._mapping)
