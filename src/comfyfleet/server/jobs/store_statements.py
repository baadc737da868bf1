"""Submits or completes a job, with all related rows, in a single PostgreSQL statement.

The submission takes no locks. It counts the active jobs in a snapshot, and then changes the user's
wallet only if the wallet was not changed or locked in the meantime (`xmin` is the version of the
row). All submissions of a user change or lock the wallet, so two of them can't rely on the same
count. The loser of a race writes nothing.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Insert,
    Integer,
    Select,
    Table,
    and_,
    bindparam,
    exists,
    func,
    insert,
    literal,
    select,
    union_all,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.driver import PreparedStatement
from comfyfleet.server.db.tenant_tables import (
    ai_jobs,
    files,
    job_events,
    outbox,
    token_transactions,
)
from comfyfleet.server.jobs import store
from comfyfleet.server.jobs.caches import ActiveJobLimits
from comfyfleet.server.jobs.model import Job, JobResult, JobStatus
from comfyfleet.server.jobs.store import INSERTED_COLUMNS, active_counts
from comfyfleet.server.media import store as media_store
from comfyfleet.server.media.model import File
from comfyfleet.server.notifications.model import EventKind
from comfyfleet.server.tenants import store as tenant_store
from comfyfleet.server.tenants.model import TransactionType
from comfyfleet.server.tenants.store import debit_statement, is_unchanged, version_of_wallet

_PRICE = bindparam("amount_taken", type_=BigInteger)
_NOW = bindparam("job_submitted_at", type_=ai_jobs.c.submitted_at.type)


class NewJobRows(NamedTuple):
    """The rows of a new job and of its first event."""

    job: Mapping[str, Any]
    event: Mapping[str, Any]


def _parameter(table: Table, prefix: str, name: str) -> ColumnElement[Any]:
    return bindparam(f"{prefix}_{name}", type_=table.c[name].type)


def _of_job(table: Table, name: str, column: str) -> ColumnElement[Any]:
    return bindparam(f"job_{name}", type_=table.c[column].type)


def _admitted() -> CTE:
    """Selects the wallet's version if the user and the tenant may have more active jobs and the job
    is new.
    """
    active = active_counts().cte("active")
    mine = and_(
        ai_jobs.c.tenant_id == _parameter(ai_jobs, "job", "tenant_id"),
        ai_jobs.c.user_id == _parameter(ai_jobs, "job", "user_id"),
        ai_jobs.c.idempotency_key == _parameter(ai_jobs, "job", "idempotency_key"),
    )
    return (
        select(version_of_wallet().label("version"))
        .select_from(active)
        .where(
            active.c.of_user < bindparam("most_of_user", type_=Integer),
            active.c.of_tenant < bindparam("most_of_tenant", type_=Integer),
            ~exists().where(ai_jobs.c.id == _parameter(ai_jobs, "job", "id")),
            ~exists().where(mine),
        )
        .cte("admitted")
    )


def _added(taken: CTE) -> CTE:
    values = select(*(_parameter(ai_jobs, "job", name) for name in INSERTED_COLUMNS)).where(
        select(taken.c.balance).exists()
    )
    return (
        insert(ai_jobs).from_select(INSERTED_COLUMNS, values).returning(ai_jobs.c.id).cte("added")
    )


def _if_added(table: Table, values: Mapping[str, ColumnElement[Any]], added: CTE) -> Insert:
    chosen = select(*values.values()).where(select(added.c.id).exists())
    return insert(table).from_select(list(values), chosen)


def _reserve_insert(added: CTE) -> Insert:
    lines = token_transactions
    values = {
        "tenant_id": _of_job(lines, "tenant_id", "tenant_id"),
        "user_id": _of_job(lines, "user_id", "user_id"),
        "job_id": _of_job(lines, "id", "job_id"),
        "type": literal(TransactionType.JOB_RESERVE.value, lines.c.type.type),
        "amount": -_PRICE,
        "created_at": _NOW,
    }
    chosen = select(*values.values()).where(select(added.c.id).exists(), _PRICE > 0)
    return insert(lines).from_select(list(values), chosen)


def _event_insert(added: CTE) -> Insert:
    values = {
        "tenant_id": _of_job(job_events, "tenant_id", "tenant_id"),
        "job_id": _of_job(job_events, "id", "job_id"),
        "kind": _parameter(job_events, "event", "kind"),
        "data": _parameter(job_events, "event", "data"),
        "created_at": _NOW,
    }
    return _if_added(job_events, values, added)


def _dispatch_outbox_insert(added: CTE) -> Insert:
    values = {
        "tenant_id": _of_job(outbox, "tenant_id", "tenant_id"),
        "job_id": _of_job(outbox, "id", "job_id"),
        "kind": literal("dispatch", outbox.c.kind.type),
        "payload": literal({}, outbox.c.payload.type),
        "not_before": _NOW,
        "created_at": _NOW,
    }
    return _if_added(outbox, values, added)


def _build_submit(_tx: Tx) -> Select[Any]:
    admitted = _admitted()
    one = token_transactions.c.job_id == _of_job(token_transactions, "id", "job_id")
    # Free jobs update the wallet as well, because the user's other submissions detect this one by
    # the wallet's version.
    debited = debit_statement(one).where(is_unchanged(admitted)).cte("taken")
    added = _added(debited)
    outbox_row = _dispatch_outbox_insert(added).returning(outbox.c.id).cte("outbox_row")
    others = _reserve_insert(added).cte("line"), _event_insert(added).cte("event")
    return select(outbox_row.c.id).add_cte(*others)


_ADD = PreparedStatement(_build_submit)


async def add_single(tx: Tx, new: NewJobRows, most: ActiveJobLimits) -> int | None:
    """Adds a job with all related rows and returns the outbox id.

    Writes nothing and returns None if the job exists, too many jobs are active, there aren't enough
    tokens, or another submission of the user came first.
    """
    values = {f"job_{name}": value for name, value in new.job.items()}
    values |= {f"event_{name}": value for name, value in new.event.items()}
    row = await _ADD.first(
        tx,
        {
            **values,
            "of_tenant": new.job["tenant_id"],
            "of_user": new.job["user_id"],
            "amount_taken": new.job["reserved_tokens"],
            "most_of_user": most.of_user,
            "most_of_tenant": most.of_tenant,
            "at_most": most.of_tenant,
        },
    )
    return row["id"] if row else None


# Maximum number of files. Each number of files needs a separate statement, which the database must
# plan.
FILES_MAX = 8
_OUTPUTS = bindparam("with_outputs", type_=job_events.c.data.type)
_OF_JOB = ("user_id", "tenant_id")  # columns whose values a file copies from its job


class CompletedRows(NamedTuple):
    job: Job
    outbox_id: int
    has_held: bool


def _events_insert(done: CTE) -> Insert:
    """Builds a single INSERT for all events, so that their ids have the right order."""
    kinds = (
        (EventKind.OUTPUTS, _OUTPUTS),
        (EventKind.STATUS, store.status_event_data(done, JobStatus.COMPLETED)),
    )
    new_events = union_all(
        *(
            select(
                literal(place, Integer).label("place"),
                done.c.tenant_id,
                done.c.id.label("job_id"),
                literal(kind.value).label("kind"),
                data.label("data"),
            ).where(done.c.user_id.is_not(None))
            for place, (kind, data) in enumerate(kinds)
        )
    ).subquery("told")
    columns = ["tenant_id", "job_id", "kind", "data", "created_at"]
    rows = select(*(new_events.c[name] for name in columns[:-1]), store.NOW).order_by(
        new_events.c.place
    )
    return insert(job_events).from_select(columns, rows)


def _outbox_insert(done: CTE, kind: ColumnElement[Any], payload: ColumnElement[Any]) -> Insert:
    values = {
        "tenant_id": done.c.tenant_id,
        "job_id": done.c.id,
        "kind": kind,
        "payload": payload,
        "not_before": store.NOW,
        "created_at": store.NOW,
    }
    rows = select(*values.values()).where(kind.is_not(None))
    return insert(outbox).from_select(list(values), rows)


def _file_insert(done: CTE, place: int) -> Insert:
    values = {
        name: done.c[name] if name in _OF_JOB else _file_param(name, place)
        for name in File.__slots__
    }
    return insert(files).from_select(list(values), select(*values.values()).select_from(done))


def _file_param(name: str, place: int) -> ColumnElement[Any]:
    return bindparam(f"{name}_{place}", type_=files.c[name].type)


def _build_complete(tx: Tx, file_count: int) -> Select[Any]:
    done = store.completion_update().cte("done")
    run_payload = func.jsonb_build_object(
        "run_id", done.c.run_id, "status", JobStatus.COMPLETED.value, type_=outbox.c.payload.type
    )
    nothing = literal({}, outbox.c.payload.type)
    outbox_row = _outbox_insert(done, literal("dispatch", outbox.c.kind.type), nothing).returning(
        outbox.c.id
    )
    dispatch_row = outbox_row.cte("outbox_row")
    others = [
        tenant_store.consumption(tx, done.c.tenant_id, done.c.id, store.NOW).cte("consumed"),
        media_store.end_job_update(done, store.status_event_data(done, JobStatus.COMPLETED)).cte(
            "media"
        ),
        _outbox_insert(done, done.c.run_kind, run_payload).cte("run_outbox_row"),
        _events_insert(done).cte("events"),
        *(_file_insert(done, place).cte(f"file_{place}") for place in range(file_count)),
    ]
    return (
        select(dispatch_row.c.id.label("outbox_id"), *done.c)
        .join_from(dispatch_row, done, literal(True))
        .add_cte(*others)
    )


@cache
def _complete_statement(file_count: int) -> PreparedStatement:
    return PreparedStatement(lambda tx: _build_complete(tx, file_count))


async def complete(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    stored: Sequence[File],
    *,
    now: datetime,
) -> CompletedRows | None:
    """Completes a job and returns it. Writes nothing and returns None if the lease is no longer
    held, the job is metered, its user has webhooks, or there are too many files.
    """
    if len(stored) > FILES_MAX:
        return None
    file_values = {
        f"{name}_{place}": getattr(file, name)
        for place, file in enumerate(stored)
        for name in File.__slots__
        if name not in _OF_JOB
    }
    params = store.completion_params(tenant_id, job_id, token, values, now=now)
    params["with_outputs"] = JobResult.from_row(values["result_metadata"]).event_data
    row = await _complete_statement(len(stored)).first(tx, {**file_values, **params})
    return (
        CompletedRows(store.ended_job(row, values), row["outbox_id"], row["has_held"])
        if row
        else None
    )
