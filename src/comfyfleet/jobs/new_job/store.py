"""A new job and all that belongs to it in one statement of PostgreSQL: tokens, event, outbox word.

It takes no lock before: it counts and looks as of one moment, and then changes the user's wallet only
if nobody has changed or locked it since (`xmin`, the version of the row). All submits of a user change or
lock their wallet, so no two of them rest on the same count; whoever comes too late finds nothing written.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    insert,
    literal,
    select,
)

from comfyfleet.db import Tx
from comfyfleet.db.statement import Statement
from comfyfleet.db.tenant import ai_jobs, job_events, outbox, token_transactions
from comfyfleet.jobs.caps import ActiveMax
from comfyfleet.jobs.rows import SUBMITTED
from comfyfleet.jobs.store import active_counts
from comfyfleet.ledger.model import TransactionType
from comfyfleet.ledger.store import is_unchanged, taking, version_of_wallet

_PRICE = bindparam("amount_taken", type_=BigInteger)
_NOW = bindparam("job_submitted_at", type_=ai_jobs.c.submitted_at.type)


class NewRows(NamedTuple):
    """What is written for a job. `job` is its row, `event` what a reader of its events is told."""

    job: Mapping[str, Any]
    event: Mapping[str, Any]


def _given(table: Table, prefix: str, name: str) -> ColumnElement[Any]:
    return bindparam(f"{prefix}_{name}", type_=table.c[name].type)


def _of_job(table: Table, name: str, column: str) -> ColumnElement[Any]:
    return bindparam(f"job_{name}", type_=table.c[column].type)


def _admitted() -> CTE:
    """The version of the wallet, if user and tenant have room and the job is new."""
    active = active_counts().cte("active")
    mine = and_(
        ai_jobs.c.tenant_id == _given(ai_jobs, "job", "tenant_id"),
        ai_jobs.c.user_id == _given(ai_jobs, "job", "user_id"),
        ai_jobs.c.idempotency_key == _given(ai_jobs, "job", "idempotency_key"),
    )
    return (
        select(version_of_wallet().label("version"))
        .select_from(active)
        .where(
            active.c.of_user < bindparam("most_of_user", type_=Integer),
            active.c.of_tenant < bindparam("most_of_tenant", type_=Integer),
            ~exists().where(ai_jobs.c.id == _given(ai_jobs, "job", "id")),
            ~exists().where(mine),
        )
        .cte("admitted")
    )


def _added(taken: CTE) -> CTE:
    values = select(*(_given(ai_jobs, "job", name) for name in SUBMITTED)).where(
        select(taken.c.balance).exists()
    )
    return insert(ai_jobs).from_select(SUBMITTED, values).returning(ai_jobs.c.id).cte("added")


def _if_added(table: Table, values: Mapping[str, ColumnElement[Any]], added: CTE) -> Insert:
    chosen = select(*values.values()).where(select(added.c.id).exists())
    return insert(table).from_select(list(values), chosen)


def _reserve_line(added: CTE) -> Insert:
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


def _event(added: CTE) -> Insert:
    values = {
        "tenant_id": _of_job(job_events, "tenant_id", "tenant_id"),
        "job_id": _of_job(job_events, "id", "job_id"),
        "kind": _given(job_events, "event", "kind"),
        "data": _given(job_events, "event", "data"),
        "created_at": _NOW,
    }
    return _if_added(job_events, values, added)


def _word(added: CTE) -> Insert:
    values = {
        "tenant_id": _of_job(outbox, "tenant_id", "tenant_id"),
        "job_id": _of_job(outbox, "id", "job_id"),
        "kind": literal("dispatch", outbox.c.kind.type),
        "payload": literal({}, outbox.c.payload.type),
        "not_before": _NOW,
        "created_at": _NOW,
    }
    return _if_added(outbox, values, added)


def _built(_tx: Tx) -> Select[Any]:
    admitted = _admitted()
    one = token_transactions.c.job_id == _of_job(token_transactions, "id", "job_id")
    # Also of a job that costs nothing: it is what others of the user are told by.
    taken = taking(one).where(is_unchanged(admitted)).cte("taken")
    added = _added(taken)
    word = _word(added).returning(outbox.c.id).cte("word")
    others = _reserve_line(added).cte("line"), _event(added).cte("event")
    return select(word.c.id).add_cte(*others)


_ADD = Statement(_built)


async def add(tx: Tx, new: NewRows, most: ActiveMax) -> int | None:
    """The word left for it. None, and nothing is written, if anything stands in the way: it is known
    already, too many are active, the tokens don't suffice, or another submit of its user came first.
    """
    values = {f"job_{name}": value for name, value in new.job.items()}
    values |= {f"event_{name}": value for name, value in new.event.items()}
    found = await _ADD.first(
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
    return found["id"] if found else None
