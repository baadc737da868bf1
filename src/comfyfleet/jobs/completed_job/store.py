"""A job's completion and all that follows from it in one statement of PostgreSQL: tokens, media, events,
files, outbox words.

Without a transaction around it, three of its four round trips are saved. It writes what
`service.complete` writes step by step, which is for SQLite and for users with webhooks.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    CTE,
    ColumnElement,
    Insert,
    Integer,
    Select,
    bindparam,
    func,
    insert,
    literal,
    select,
    union_all,
)

from comfyfleet.db import Tx
from comfyfleet.db.statement import Statement
from comfyfleet.db.tenant import files, job_events, outbox
from comfyfleet.events.model import EventKind
from comfyfleet.files.model import File
from comfyfleet.jobs import store
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.ledger import store as ledger
from comfyfleet.media import store as media

# Each number of files has a text of its own, which the database plans anew.
FILES_MAX = 8
_OUTPUTS = bindparam("with_outputs", type_=job_events.c.data.type)
_OF_JOB = ("user_id", "tenant_id")  # columns of a file that are those of its job


class Completed(NamedTuple):
    job: Job
    word: int
    has_held: bool


def _events(done: CTE) -> Insert:
    """One INSERT in their order, so that their numbers follow each other."""
    kinds = (
        (EventKind.OUTPUTS, _OUTPUTS),
        (EventKind.STATUS, store.told_by(done, JobStatus.COMPLETED)),
    )
    told = union_all(
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
    rows = select(*(told.c[name] for name in columns[:-1]), store.NOW).order_by(told.c.place)
    return insert(job_events).from_select(columns, rows)


def _word(done: CTE, kind: ColumnElement[Any], payload: ColumnElement[Any]) -> Insert:
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


def _file(done: CTE, place: int) -> Insert:
    values = {
        name: done.c[name] if name in _OF_JOB else _given(name, place) for name in File.__slots__
    }
    return insert(files).from_select(list(values), select(*values.values()).select_from(done))


def _given(name: str, place: int) -> ColumnElement[Any]:
    return bindparam(f"{name}_{place}", type_=files.c[name].type)


def _built(tx: Tx, file_count: int) -> Select[Any]:
    done = store.completing().cte("done")
    told_run = func.jsonb_build_object(
        "run_id", done.c.run_id, "status", JobStatus.COMPLETED.value, type_=outbox.c.payload.type
    )
    nothing = literal({}, outbox.c.payload.type)
    word = _word(done, literal("dispatch", outbox.c.kind.type), nothing).returning(outbox.c.id)
    left = word.cte("word")
    others = [
        ledger.consumption(tx, done.c.tenant_id, done.c.id, store.NOW).cte("consumed"),
        media.ending(done, store.told_by(done, JobStatus.COMPLETED)).cte("media"),
        _word(done, done.c.run_kind, told_run).cte("run_word"),
        _events(done).cte("events"),
        *(_file(done, place).cte(f"file_{place}") for place in range(file_count)),
    ]
    return (
        select(left.c.id.label("word"), *done.c)
        .join_from(left, done, literal(True))
        .add_cte(*others)
    )


@cache
def _complete(file_count: int) -> Statement:
    return Statement(lambda tx: _built(tx, file_count))


async def complete(
    tx: Tx,
    tenant_id: UUID,
    job_id: UUID,
    token: UUID,
    values: Mapping[str, Any],
    stored: Sequence[File],
    *,
    now: datetime,
) -> Completed | None:
    """None, and nothing is written: the lease is not held, its user has webhooks, or there are too
    many files."""
    if len(stored) > FILES_MAX:
        return None
    given = {
        f"{name}_{place}": getattr(file, name)
        for place, file in enumerate(stored)
        for name in File.__slots__
        if name not in _OF_JOB
    }
    said = store.completion(tenant_id, job_id, token, values, now=now)
    outputs = {"with_outputs": {"outputs": values["result_metadata"].get("outputs", [])}}
    row = await _complete(len(stored)).first(tx, {**given, **said, **outputs})
    return Completed(store.ended_job(row, values), row["word"], row["has_held"]) if row else None
