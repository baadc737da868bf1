"""SQL for logged messages and users' file names. Rows are looked up with their tenant and user."""

import json
import posixpath
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    Select,
    Table,
    Text,
    Uuid,
    all_,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import for_update, is_one_of, is_sqlite, upsert_sum
from comfyfleet.server.db.driver import PreparedInsert, PreparedStatement
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
    Cursor,
    LoggedEvents,
    LoggedRun,
    LoggedState,
    LogLook,
    LogPage,
    StartedAttempt,
    UserFile,
    is_ended,
    starts,
)

_ADDED = (*LoggedRun._fields, "events", "record", "created_at", "has_start", "has_end")
_LOCK_BITS = 2**64 - 1
_IS_FIRST = "run_events.start_id = 0"  # matches the index's condition
_USER_KEY = ("tenant_id", "user_id", "folder", "prefix")


def _new_values(table: Table, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns the bind parameters for the values that `_as_new` returns."""
    return {
        name: bindparam(f"new_{name}", type_=table.c[name].type)
        for name in (table.columns.keys() if names is None else names)
    }


def _as_new(row: Mapping[str, Any]) -> dict[str, Any]:
    return {f"new_{name}": value for name, value in row.items()}


_ADD_EVENTS = PreparedStatement(
    lambda tx: insert(run_events).values(_new_values(run_events, _ADDED)).returning(run_events.c.id)
)
# This lock ensures that a user's rows are committed in the order of their ids, so a reader that
# continues after an id misses no rows. SQLite needs no lock, because it has only one writer.
_LOCK_LOG = PreparedStatement(
    lambda tx: select(func.pg_advisory_xact_lock(bindparam("key", type_=BigInteger)))
)


async def lock_log(tx: Tx, user_id: UUID) -> None:
    """Locks a user's log. To prevent deadlocks, a transaction must lock the log before it locks a
    job's row.
    """
    if not is_sqlite(tx):
        await _LOCK_LOG.first(tx, {"key": (user_id.int & _LOCK_BITS) - 2**63})


async def add_events(
    tx: Tx,
    run: LoggedRun,
    events: Sequence[Any],
    record: Mapping[str, Any] | None,
    *,
    now: datetime,
) -> int:
    """Adds a row and returns its id. The caller must have locked the log and checked its state.
    Unique indexes reject repeated rows.
    """
    row = {**run._asdict(), "events": list(events), "record": record, "created_at": now}
    row |= {"has_start": starts(events), "has_end": record is not None or is_ended(events)}
    ((row_id,),) = await _ADD_EVENTS.tuples(tx, _as_new(row))
    return int(row_id)


def _exists_for_job(*where: Any) -> Any:
    return exists().where(run_events.c.job_id == ai_jobs.c.id, *where)


def _state(tx: Tx) -> Select[Any]:
    start = select(run_events.c.lease_number).where(
        run_events.c.job_id == ai_jobs.c.id, text("run_events.has_start")
    )
    is_reported = _exists_for_job(
        run_events.c.lease_number == ai_jobs.c.lease_number,
        run_events.c.report == bindparam("report", type_=BigInteger),
    )
    attempt = (
        select(run_events.c.id)
        .where(
            run_events.c.job_id == ai_jobs.c.id,
            run_events.c.lease_number == ai_jobs.c.lease_number,
            text(_IS_FIRST),
        )
        .order_by(run_events.c.id)
        .limit(1)
    )
    query = select(
        ai_jobs.c.lease_token,
        ai_jobs.c.lease_number,
        (ai_jobs.c.status == "processing").label("is_running"),
        start.scalar_subquery().label("start_lease"),
        _exists_for_job(text("run_events.has_end")).label("has_end"),
        is_reported.label("is_reported"),
        attempt.scalar_subquery().label("start_id"),
    ).where(
        ai_jobs.c.tenant_id == bindparam("of_tenant"),
        ai_jobs.c.user_id == bindparam("of_user"),
        ai_jobs.c.id == bindparam("of_job"),
    )
    return for_update(tx, query, of=ai_jobs)


_STATE = PreparedStatement(_state)


async def lock_run(
    tx: Tx, tenant_id: UUID, user_id: UUID, job_id: UUID, report: int | None
) -> LoggedState | None:
    """Locks the user's log and then the job's row, and returns the state of the run. Every writer
    of the log does the same, so the state can't change until the transaction ends.
    """
    await lock_log(tx, user_id)
    values = {"of_tenant": tenant_id, "of_user": user_id, "of_job": job_id, "report": report}
    rows = await _STATE.tuples(tx, values)
    return LoggedState(*rows[0]) if rows else None


async def is_reported(
    tx: Tx, tenant_id: UUID, job_id: UUID, lease_number: int, report: int
) -> bool:
    query = select(run_events.c.id).where(
        run_events.c.tenant_id == tenant_id,
        run_events.c.job_id == job_id,
        run_events.c.lease_number == lease_number,
        run_events.c.report == report,
    )
    return (await tx.execute(query)).first() is not None


# The columns of an event row, without the record, which is large and only read for the history.
_EVENTS = (
    run_events.c.id,
    run_events.c.job_id,
    run_events.c.client_id,
    run_events.c.prompt_id,
    run_events.c.events,
    run_events.c.record.is_not(None).label("is_last"),
    run_events.c.start_id,
)
_OF_USER = (
    run_events.c.tenant_id == bindparam("of_tenant"),
    run_events.c.user_id == bindparam("of_user"),
    run_events.c.id > bindparam("after_id", type_=BigInteger),
)


def _events(row: Sequence[Any]) -> LoggedEvents:
    row_id, job_id, client_id, prompt_id, events, is_last, start_id = row
    typed_events = [(kind, data) for kind, data in events]
    start_id = row_id if start_id == 0 else start_id
    return LoggedEvents(row_id, job_id, client_id, prompt_id, typed_events, bool(is_last), start_id)


# Maximum size of a page in bytes. A row can be up to 16 MB, and takes several times as much memory
# when it is read and sent. A page has at least one row.
PAGE_BYTES_MAX = 4 * 1024 * 1024


def _page(tx: Tx, where: Sequence[Any], order: Sequence[Any]) -> Select[Any]:
    """Builds the query for the first rows, up to `most` rows and `page_bytes` bytes. Each row also
    contains the number of available rows, which is at most `most`.

    Sizes are cheap: PostgreSQL doesn't read the externally stored part of a large row to determine
    its size.
    """
    size = func.length if is_sqlite(tx) else func.pg_column_size
    keys = [key.label(f"key_{place}") for place, key in enumerate(order)]
    columns = run_events.c.id.label("row_id"), size(run_events.c.events).label("size"), *keys
    first = (
        select(*columns)
        .where(*where)
        .order_by(*order)
        .limit(bindparam("most", type_=Integer))
        .subquery("first_rows")
    )
    in_order = [first.c[key.name] for key in keys]
    sizes = func.sum(first.c.size).over(order_by=in_order, rows=(None, 0))
    sized = select(
        first.c.row_id,
        (sizes - first.c.size).label("bytes_before"),
        func.count().over().label("available"),
    ).subquery("sized")
    rows = select(*_EVENTS, sized.c.available).join(sized, sized.c.row_id == run_events.c.id)
    return rows.where(sized.c.bytes_before < bindparam("page_bytes", type_=BigInteger))


def _limits(rows_max: int) -> dict[str, int]:
    """Returns the limits of a page. One additional row is counted to find out whether there are
    more.
    """
    return {"most": rows_max + 1, "page_bytes": PAGE_BYTES_MAX}


def _read_page(rows: Sequence[Sequence[Any]], rows_max: int) -> LogPage:
    events = [_events(row[:-1]) for row in rows[:rows_max]]
    return LogPage(events, bool(rows) and rows[0][-1] > len(events))


def _is_none_of(tx: Tx) -> Any:
    """Builds a condition that excludes the given jobs. Its SQL text is the same for any number of
    ids."""
    if is_sqlite(tx):
        # SQLite stores ids as hexadecimal text.
        others = text("ai_jobs.id NOT IN (SELECT value FROM json_each(:but_jobs))")
        return others.bindparams(bindparam("but_jobs", type_=Text))
    return ai_jobs.c.id != all_(bindparam("but_jobs", type_=ARRAY(Uuid)))


def _look(tx: Tx) -> Select[Any]:
    count = (
        select(func.count().label("active"))
        .where(
            ai_jobs.c.tenant_id == bindparam("of_tenant"),
            ai_jobs.c.user_id == bindparam("of_user"),
            ai_jobs.c.gateway.is_not(None),
            ai_jobs.c.hidden_at.is_(None),
            ai_jobs.c.completed_at.is_(None),
            _is_none_of(tx),
        )
        .subquery("counted")
    )
    news = _page(tx, _OF_USER, [run_events.c.id]).subquery("news")
    return select(count, news).select_from(count.outerjoin(news, true())).order_by(news.c.id)


_LOOK = PreparedStatement(_look)


async def look(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    after_id: int,
    but_jobs: Collection[UUID],
    limit: int,
) -> LogLook:
    """Counts prompts, and returns a page of the rows after an id. Uses a single statement, so that
    the count and the rows come from the same snapshot.
    """
    excluded = json.dumps([job_id.hex for job_id in but_jobs]) if is_sqlite(tx) else list(but_jobs)
    values = {"of_tenant": tenant_id, "of_user": user_id, "after_id": after_id}
    rows = await _LOOK.tuples(tx, {**values, "but_jobs": excluded, **_limits(limit)})
    page = _read_page([row[1:] for row in rows if row[1] is not None], limit)
    return LogLook(rows[0][0], *page)


async def events_of_client(
    tx: Tx, tenant_id: UUID, user_id: UUID, client_id: str, *, after_id: int, to_id: int, limit: int
) -> LogPage:
    """Returns a page of a client's rows that are sent regardless of other prompts, oldest first."""
    where = (
        run_events.c.tenant_id == tenant_id,
        run_events.c.user_id == user_id,
        run_events.c.client_id == client_id,
        run_events.c.id > after_id,
        run_events.c.id <= to_id,
        run_events.c.start_id.is_(None),
    )
    query = _page(tx, where, [run_events.c.id]).order_by(run_events.c.id)
    return _read_page([tuple(row) for row in await tx.execute(query, _limits(limit))], limit)


_start_id = case((run_events.c.start_id == 0, run_events.c.id), else_=run_events.c.start_id)


async def events_in_order(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    client_id: str,
    cursor: Cursor,
    *,
    to_id: int,
    limit: int,
) -> LogPage:
    is_of_shown = and_(_start_id == cursor.start_id, run_events.c.id > cursor.row)
    where = (
        run_events.c.tenant_id == tenant_id,
        run_events.c.user_id == user_id,
        run_events.c.client_id == client_id,
        run_events.c.id > cursor.floor,
        run_events.c.id <= to_id,
        or_(_start_id > cursor.start_id, is_of_shown),
    )
    order = _start_id, run_events.c.id
    query = _page(tx, where, order).order_by(*order)
    return _read_page([tuple(row) for row in await tx.execute(query, _limits(limit))], limit)


_ATTEMPT = PreparedStatement(
    lambda tx: select(run_events.c.job_id).where(
        run_events.c.tenant_id == bindparam("of_tenant"),
        run_events.c.id == bindparam("start", type_=BigInteger),
    )
)


async def job_of_attempt(tx: Tx, tenant_id: UUID, start_id: int) -> UUID | None:
    rows = await _ATTEMPT.tuples(tx, {"of_tenant": tenant_id, "start": start_id})
    return rows[0][0] if rows else None


def _unfinished(tx: Tx) -> Select[Any]:
    later = run_events.alias("later")
    is_held = exists().where(
        ai_jobs.c.id == run_events.c.job_id,
        ai_jobs.c.status == "processing",
        ai_jobs.c.lease_number == run_events.c.lease_number,
    )
    has_more = exists().where(
        later.c.job_id == run_events.c.job_id, later.c.id > bindparam("to_id", type_=BigInteger)
    )
    return select(run_events.c.id).where(
        run_events.c.tenant_id == bindparam("of_tenant"),
        run_events.c.id == bindparam("start", type_=BigInteger),
        or_(is_held, has_more),
    )


_UNFINISHED = PreparedStatement(_unfinished)


async def is_attempt_over(tx: Tx, tenant_id: UUID, start_id: int, *, to_id: int) -> bool:
    """Checks whether an attempt is over. Uses a single statement, so that the rows and the lease
    come from the same snapshot."""
    values = {"of_tenant": tenant_id, "start": start_id, "to_id": to_id}
    return not await _UNFINISHED.tuples(tx, values)


_RUNNING_ATTEMPTS = PreparedStatement(
    lambda tx: (
        select(run_events.c.id, run_events.c.job_id, run_events.c.client_id)
        .select_from(ai_jobs)
        .join(
            run_events,
            and_(
                run_events.c.job_id == ai_jobs.c.id,
                run_events.c.lease_number == ai_jobs.c.lease_number,
                text(_IS_FIRST),
            ),
        )
        .where(
            ai_jobs.c.tenant_id == bindparam("of_tenant"),
            ai_jobs.c.user_id == bindparam("of_user"),
            text(f"ai_jobs.{IS_ACTIVE}"),
            ai_jobs.c.status == "processing",
        )
        .order_by(run_events.c.id)
        .limit(bindparam("most", type_=Integer))
    )
)


async def running_attempts(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, limit: int
) -> list[StartedAttempt]:
    values = {"of_tenant": tenant_id, "of_user": user_id, "most": limit}
    return [StartedAttempt(*row) for row in await _RUNNING_ATTEMPTS.tuples(tx, values)]


def _of_job(tx: Tx) -> Select[Any]:
    where = (
        run_events.c.tenant_id == bindparam("of_tenant"),
        run_events.c.job_id == bindparam("of_job"),
        run_events.c.id > bindparam("after_id", type_=BigInteger),
    )
    return _page(tx, where, [run_events.c.id]).order_by(run_events.c.id)


_OF_JOB = PreparedStatement(_of_job)


async def events_of_job(
    tx: Tx, tenant_id: UUID, job_id: UUID, *, after_id: int = 0, limit: int
) -> LogPage:
    values = {"of_tenant": tenant_id, "of_job": job_id, "after_id": after_id, **_limits(limit)}
    return _read_page(await _OF_JOB.tuples(tx, values), limit)


async def records_of(
    tx: Tx, tenant_id: UUID, job_ids: Sequence[UUID]
) -> dict[UUID, tuple[int, Mapping[str, Any]]]:
    """Returns the lease number and the history record of each job that has a record."""
    query = select(run_events.c.job_id, run_events.c.lease_number, run_events.c.record).where(
        run_events.c.tenant_id == tenant_id,
        is_one_of(tx, run_events.c.job_id, job_ids),
        run_events.c.record.is_not(None),
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
    """Returns the id of the client's first report since a given time, or None if there hasn't been
    one."""
    query = select(func.min(run_events.c.id)).where(
        run_events.c.tenant_id == tenant_id,
        run_events.c.user_id == user_id,
        run_events.c.client_id == client_id,
        run_events.c.created_at >= since,
    )
    row_id = (await tx.execute(query)).scalar()
    return None if row_id is None else int(row_id)


async def prune_live(tx: Tx, *, before: datetime, limit: int) -> int:
    """Removes old messages of ended runs. Their history records are kept as long as the prompts of
    their jobs.

    Messages are also kept while a prompt that started earlier is running, because their client may
    have to see that prompt first.
    """
    # This is a correlated subquery, because SQLite would otherwise scan an index over all jobs to
    # list the active ones.
    active = select(ai_jobs.c.id).where(ai_jobs.c.id == run_events.c.job_id, text(IS_ACTIVE))
    earlier = select(ai_jobs.c.id).where(
        run_events.c.start_id.is_not(None),
        ai_jobs.c.tenant_id == run_events.c.tenant_id,
        ai_jobs.c.user_id == run_events.c.user_id,
        text(IS_ACTIVE),
        ai_jobs.c.started_at <= run_events.c.created_at,
    )
    old = (
        select(run_events.c.id)
        .where(
            run_events.c.record.is_(None),
            run_events.c.created_at < before,
            ~active.exists(),
            ~earlier.exists(),
        )
        .limit(limit)
    )
    return int((await tx.execute(delete(run_events).where(run_events.c.id.in_(old)))).rowcount)


async def remove_of_jobs(tx: Tx, job_ids: Sequence[UUID]) -> None:
    await tx.execute(delete(run_events).where(is_one_of(tx, run_events.c.job_id, job_ids)))


_TAKE_NUMBERS = PreparedStatement(
    lambda tx: upsert_sum(
        tx, gateway_counters, _new_values(gateway_counters), key=_USER_KEY
    ).returning(gateway_counters.c.last)
)


async def take_numbers(
    tx: Tx, tenant_id: UUID, user_id: UUID, needed: Mapping[tuple[str, str], int]
) -> dict[tuple[str, str], int]:
    """Advances each counter. Returns the previous values by folder and prefix."""
    before: dict[tuple[str, str], int] = {}
    for (folder, prefix), count in sorted(needed.items()):
        row = {
            "tenant_id": tenant_id,
            "user_id": user_id,
            "folder": folder,
            "prefix": prefix,
            "last": count,
        }
        ((last,),) = await _TAKE_NUMBERS.tuples(tx, _as_new(row))
        before[folder, prefix] = int(last) - count
    return before


_ADD_FILE = PreparedInsert(
    gateway_files, gateway_files.columns.keys(), returning=[gateway_files.c.path]
)


async def add_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> bool:
    """Adds a file. Returns False if its name is already in use."""
    row = {"tenant_id": tenant_id, "user_id": user_id, **file._asdict(), "created_at": now}
    return bool(await _ADD_FILE.add(tx, [row]))


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


_FILES_OF_JOB = PreparedStatement(
    lambda tx: select(
        gateway_files.c.folder,
        gateway_files.c.path,
        gateway_files.c.file_id,
        gateway_files.c.job_id,
        gateway_files.c.output,
    ).where(
        gateway_files.c.tenant_id == bindparam("of_tenant"),
        gateway_files.c.job_id == bindparam("of_job"),
    )
)


async def files_of_job(tx: Tx, tenant_id: UUID, job_id: UUID) -> list[UserFile]:
    rows = await _FILES_OF_JOB.tuples(tx, {"of_tenant": tenant_id, "of_job": job_id})
    return [UserFile(*row) for row in rows]


def _is_output(tenant_id: UUID, job_id: UUID, file: UserFile) -> ColumnElement[bool]:
    return and_(
        gateway_files.c.tenant_id == tenant_id,
        gateway_files.c.job_id == job_id,
        gateway_files.c.folder == file.folder,
        gateway_files.c.path == file.path,
    )


async def set_file(tx: Tx, tenant_id: UUID, job_id: UUID, file: UserFile, file_id: UUID) -> None:
    """Points the name of a job's output at this file."""
    statement = update(gateway_files).where(_is_output(tenant_id, job_id, file))
    await tx.execute(statement.values(file_id=file_id))


async def settle_file(tx: Tx, tenant_id: UUID, job_id: UUID, file: UserFile, output: str) -> None:
    """Points an output name at the corresponding output of the job's result."""
    statement = update(gateway_files).where(_is_output(tenant_id, job_id, file))
    await tx.execute(statement.values(file_id=None, output=output))


async def remove_name(tx: Tx, tenant_id: UUID, job_id: UUID, file: UserFile) -> None:
    await tx.execute(delete(gateway_files).where(_is_output(tenant_id, job_id, file)))


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
    """Returns the files in a folder, newest first."""
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


async def count_uploads(tx: Tx, tenant_id: UUID, user_id: UUID, *, most: int) -> int:
    some = (
        select(gateway_files.c.path)
        .where(
            gateway_files.c.tenant_id == tenant_id,
            gateway_files.c.user_id == user_id,
            gateway_files.c.file_id.is_not(None),
        )
        .limit(most)
        .subquery()
    )
    return int((await tx.execute(select(func.count()).select_from(some))).scalar() or 0)


async def numbered_files(
    tx: Tx, tenant_id: UUID, user_id: UUID, folder: str, path: str, *, limit: int
) -> list[tuple[UserFile, str | None]]:
    """Returns a file such as `a.png` and all files whose paths start with `a (`, each with its
    content hash. The numbered copies of `a.png` are among them.
    """
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
    """Compares the start of the path. LIKE would ignore case on SQLite, and a range would follow
    the collation on PostgreSQL.
    """
    return func.substr(gateway_files.c.path, 1, len(prefix)) == prefix


async def replace_file(
    tx: Tx, tenant_id: UUID, user_id: UUID, file: UserFile, *, now: datetime
) -> None:
    """Assigns the name to this file. If another upload had the name, that upload is marked for
    removal.
    """
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
