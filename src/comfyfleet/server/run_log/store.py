"""The SQL of logged messages and of users' file names. Every row is looked up with its tenant and user."""

import posixpath
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    text,
    true,
)

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import insert_if_new, is_one_of, is_sqlite, upsert_sum
from comfyfleet.server.db.driver import PreparedStatement
from comfyfleet.server.db.tenant_tables import (
    IS_ACTIVE,
    ai_jobs,
    files,
    gateway_counters,
    gateway_files,
    run_events,
)
from comfyfleet.server.run_log.model import (
    REPLACED,
    LoggedEvents,
    LoggedRun,
    LogLook,
    UserFile,
)

_ADDED = (*LoggedRun._fields, "events", "record", "created_at")
_LOCK_BITS = 2**64 - 1
_USER_KEY = ("tenant_id", "user_id", "folder", "prefix")


_ADD_EVENTS = PreparedStatement(
    lambda tx: (
        insert(run_events)
        .values({name: bindparam(f"new_{name}", type_=run_events.c[name].type) for name in _ADDED})
        .returning(run_events.c.id)
    )
)
# Ids of a user's rows are in the order in which they are committed: a reader who goes on from one
# misses none. SQLite has one writer anyway.
_LOCK_LOG = PreparedStatement(
    lambda tx: select(func.pg_advisory_xact_lock(bindparam("key", type_=BigInteger)))
)


async def add_events(
    tx: Tx,
    run: LoggedRun,
    events: Sequence[Any],
    record: Mapping[str, Any] | None,
    *,
    now: datetime,
) -> int:
    row = {**run._asdict(), "events": list(events), "record": record, "created_at": now}
    if not is_sqlite(tx):
        await _LOCK_LOG.first(tx, {"key": (run.user_id.int & _LOCK_BITS) - 2**63})
    added = await _ADD_EVENTS.first(tx, {f"new_{name}": row[name] for name in _ADDED})
    assert added is not None  # noqa: S101  an INSERT returns its row
    return int(added["id"])


def _events(row: Mapping[Any, Any]) -> LoggedEvents:
    return LoggedEvents(
        id=row["id"],
        job_id=row["job_id"],
        lease_number=row["lease_number"],
        client_id=row["client_id"],
        prompt_id=row["prompt_id"],
        events=[(kind, data) for kind, data in row["events"]],
        record=row["record"],
        created_at=row["created_at"],
    )


def _active_prompts(tx: Tx, tenant_id: UUID, user_id: UUID, but: Collection[UUID]) -> Select[Any]:
    query = select(func.count().label("active")).where(
        ai_jobs.c.tenant_id == tenant_id,
        ai_jobs.c.user_id == user_id,
        ai_jobs.c.gateway.is_not(None),
        ai_jobs.c.hidden_at.is_(None),
        ai_jobs.c.completed_at.is_(None),
    )
    return query.where(not_(is_one_of(tx, ai_jobs.c.id, but))) if but else query


async def look(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    after_id: int,
    but_jobs: Collection[UUID],
    limit: int,
) -> LogLook:
    """One statement, so that the count and the rows are of the same moment."""
    count = _active_prompts(tx, tenant_id, user_id, but_jobs).subquery("counted")
    news = (
        select(run_events)
        .where(
            run_events.c.tenant_id == tenant_id,
            run_events.c.user_id == user_id,
            run_events.c.id > after_id,
        )
        .order_by(run_events.c.id)
        .limit(limit)
        .subquery("news")
    )
    both = select(count, news).select_from(count.outerjoin(news, true())).order_by(news.c.id)
    found = list(await tx.execute(both))
    return LogLook(found[0].active, [_events(row._mapping) for row in found if row.id is not None])


async def events_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, after_id: int, to_id: int, limit: int
) -> list[LoggedEvents]:
    query = (
        select(run_events)
        .where(
            run_events.c.tenant_id == tenant_id,
            run_events.c.user_id == user_id,
            run_events.c.client_id == client_id,
            run_events.c.id > after_id,
            run_events.c.id <= to_id,
        )
        .order_by(run_events.c.id)
        .limit(limit)
    )
    return [_events(row._mapping) for row in await tx.execute(query)]


async def events_of_job(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0
) -> list[LoggedEvents]:
    query = (
        select(run_events)
        .where(
            run_events.c.tenant_id == tenant_id,
            run_events.c.job_id == job_id,
            run_events.c.id > after_id,
        )
        .order_by(run_events.c.id)
    )
    return [_events(row._mapping) for row in await tx.execute(query)]


async def records_of(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[int, Mapping[str, Any]]]:
    """The lease and the record of each job that has one; the last lease's."""
    query = (
        select(run_events.c.job_id, run_events.c.lease_number, run_events.c.record)
        .where(
            run_events.c.tenant_id == tenant_id,
            is_one_of(tx, run_events.c.job_id, job_ids),
            run_events.c.record.is_not(None),
        )
        .order_by(run_events.c.id)
    )
    return {row.job_id: (row.lease_number, row.record) for row in await tx.execute(query)}


async def last_id(tx: Tx, tenant_id: UUID, user_id: UUID) -> int:
    query = select(func.max(run_events.c.id)).where(
        run_events.c.tenant_id == tenant_id, run_events.c.user_id == user_id
    )
    return int((await tx.execute(query)).scalar() or 0)


async def first_id_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, since: datetime
) -> int | None:
    """Of the oldest report for a client that is not older than this."""
    query = select(func.min(run_events.c.id)).where(
        run_events.c.tenant_id == tenant_id,
        run_events.c.user_id == user_id,
        run_events.c.client_id == client_id,
        run_events.c.created_at >= since,
    )
    found = (await tx.execute(query)).scalar()
    return None if found is None else int(found)


async def was_logged(tx: Tx, run: LoggedRun) -> bool:
    """Whether a run of the job, under this lease or one before, has told anything."""
    query = (
        select(run_events.c.id)
        .where(run_events.c.tenant_id == run.tenant_id, run_events.c.job_id == run.job_id)
        .limit(1)
    )
    return (await tx.execute(query)).first() is not None


async def prune_live(tx: Tx, *, before: datetime, limit: int) -> int:
    """Removes messages of ended runs; records stay as long as the prompts of their jobs."""
    # Row by row: SQLite would walk an index over all jobs ever to list the active ones.
    active = select(ai_jobs.c.id).where(ai_jobs.c.id == run_events.c.job_id, text(IS_ACTIVE))
    old = (
        select(run_events.c.id)
        .where(
            run_events.c.record.is_(None),
            run_events.c.created_at < before,
            ~active.exists(),
        )
        .limit(limit)
    )
    return int((await tx.execute(delete(run_events).where(run_events.c.id.in_(old)))).rowcount)


async def remove_of_jobs(tx: Tx, job_ids: Sequence[UUID]) -> None:
    await tx.execute(delete(run_events).where(is_one_of(tx, run_events.c.job_id, job_ids)))


async def take_numbers(
    tx: Tx, tenant_id: UUID, user_id: UUID, needed: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    """Advances each counter; how many numbers were used before, by folder and prefix."""
    before: dict[tuple[str, str], int] = {}
    for (folder, prefix), count in sorted(needed.items()):
        row = {
            "tenant_id": tenant_id,
            "user_id": user_id,
            "folder": folder,
            "prefix": prefix,
            "last": count,
        }
        statement = upsert_sum(tx, gateway_counters, row, key=_USER_KEY)
        last = await tx.execute(statement.returning(gateway_counters.c.last))
        before[folder, prefix] = int(last.scalar_one()) - count
    return before


async def add_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> bool:
    """False: the name is taken."""
    row = {"tenant_id": tenant_id, "user_id": user_id, **file._asdict(), "created_at": now}
    statement = insert_if_new(tx, gateway_files, [row]).returning(gateway_files.c.path)
    return (await tx.execute(statement)).first() is not None


async def get_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str
) -> UserFile | None:
    query = select(gateway_files).where(
        gateway_files.c.tenant_id == tenant_id,
        gateway_files.c.user_id == user_id,
        gateway_files.c.folder == folder,
        gateway_files.c.path == path,
    )
    row = (await tx.execute(query)).first()
    return None if row is None else _file(row)


async def files_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[UserFile]:
    query = select(gateway_files).where(
        gateway_files.c.tenant_id == tenant_id, gateway_files.c.job_id == job_id
    )
    return [_file(row) for row in await tx.execute(query)]


async def files_of_jobs(tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]) -> list[UserFile]:
    query = select(gateway_files).where(
        gateway_files.c.tenant_id == tenant_id, is_one_of(tx, gateway_files.c.job_id, job_ids)
    )
    return [_file(row) for row in await tx.execute(query)]


def _is_file(tenant_id: UUID, user_id: UUID, file_id: UUID) -> ColumnElement[bool]:
    return and_(
        gateway_files.c.tenant_id == tenant_id,
        gateway_files.c.user_id == user_id,
        gateway_files.c.file_id == file_id,
    )


async def names_of_file(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> list[UserFile]:
    query = select(gateway_files).where(
        _is_file(tenant_id, user_id, file_id), gateway_files.c.folder != REPLACED
    )
    rows = await tx.execute(query.order_by(gateway_files.c.folder, gateway_files.c.path))
    return [_file(row) for row in rows]


async def delete_names(tx: Tx, tenant_id: UUID, user_id: UUID, file_id: UUID) -> None:
    await tx.execute(delete(gateway_files).where(_is_file(tenant_id, user_id, file_id)))


async def list_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, *, limit: int
) -> list[UserFile]:
    """The newest first."""
    query = (
        select(gateway_files)
        .where(
            gateway_files.c.tenant_id == tenant_id,
            gateway_files.c.user_id == user_id,
            gateway_files.c.folder == folder,
        )
        .order_by(gateway_files.c.created_at.desc(), gateway_files.c.path)
        .limit(limit)
    )
    return [_file(row) for row in await tx.execute(query)]


async def numbered_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str, *, limit: int
) -> list[tuple[UserFile, str | None]]:
    """Those called `a.png`, and all that begin with `a (`."""
    stem = f"{posixpath.splitext(path)[0]} ("
    query = (
        select(gateway_files, files.c.content_hash)
        .outerjoin(
            files, and_(files.c.id == gateway_files.c.file_id, files.c.tenant_id == tenant_id)
        )
        .where(
            _in_folder(tenant_id, user_id, folder),
            or_(gateway_files.c.path == path, _begins_with(stem)),
        )
        .limit(limit)
    )
    return [(_file(row), row.content_hash) for row in await tx.execute(query)]


async def has_files_under(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, subfolder: str
) -> bool:
    query = (
        select(gateway_files.c.path)
        .where(_in_folder(tenant_id, user_id, folder), _begins_with(f"{subfolder}/"))
        .limit(1)
    )
    return (await tx.execute(query)).first() is not None


def _in_folder(tenant_id: UUID, user_id: UUID, folder: str) -> ColumnElement[bool]:
    return and_(
        gateway_files.c.tenant_id == tenant_id,
        gateway_files.c.user_id == user_id,
        gateway_files.c.folder == folder,
    )


def _begins_with(prefix: str) -> ColumnElement[bool]:
    """Neither LIKE, which ignores case on SQLite, nor a range, which follows the collation on
    PostgreSQL."""
    return func.substr(gateway_files.c.path, 1, len(prefix)) == prefix


async def replace_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> None:
    """The name means this file from now on; an upload that had it is noted, to be removed later."""
    removed = await tx.execute(
        delete(gateway_files)
        .where(_in_folder(tenant_id, user_id, file.folder), gateway_files.c.path == file.path)
        .returning(gateway_files.c.file_id)
    )
    for row in removed:
        if row.file_id is not None and row.file_id != file.file_id:
            old = UserFile(REPLACED, str(row.file_id), row.file_id)
            await add_file(tx, tenant_id, user_id, old, now=now)
    await add_file(tx, tenant_id, user_id, file, now=now)


def _file(row: Any) -> UserFile:
    return UserFile(row.folder, row.path, row.file_id, row.job_id, row.output)
