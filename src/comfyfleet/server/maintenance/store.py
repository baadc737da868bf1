"""SQL across several tables of a tenant, for maintenance only."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    Column,
    Select,
    Table,
    and_,
    bindparam,
    delete,
    null,
    or_,
    select,
    text,
    tuple_,
    update,
)

from comfyfleet.server.db import Tx, tenant_tables
from comfyfleet.server.db.central_tables import backend_uploads, dispatches, route_calls
from comfyfleet.server.db.dialect import for_update, is_one_of, without_index
from comfyfleet.server.db.driver import PreparedStatement
from comfyfleet.server.db.tenant_tables import (
    IS_ACTIVE,
    IS_REPLACED,
    ai_jobs,
    batches,
    files,
    gateway_files,
    graph_runs,
    graphs,
    job_attempts,
    job_events,
    users,
    videos,
    webhook_deliveries,
    webhooks,
)
from comfyfleet.server.jobs.model import PRICE_PER_SECOND
from comfyfleet.server.media import store as media_store
from comfyfleet.server.media.model import File
from comfyfleet.server.run_log.model import REPLACED
from comfyfleet.server.tenants.model import JobLedgerFacts

# Literal SQL that matches the conditions of the partial indexes. With bound parameters, the planner
# would not use them.
_ACTIVE = text(IS_ACTIVE)
_ENDED = ~ai_jobs.c.status.in_(("queued", "processing"))
# Tables whose rows are deleted when a tenant is erased, in an order that leaves no references to
# deleted rows. Every new table must be added here, or to one of the sets below.
PRIVATE: Mapping[str, Table] = {
    table.name: table
    for table in (
        *(
            tenant_tables.pipeline_events,
            tenant_tables.pipeline_votes,
            tenant_tables.pipeline_judgements,
        ),
        *(
            tenant_tables.pipeline_candidates,
            tenant_tables.pipeline_jobs,
            tenant_tables.pipeline_runs,
        ),
        *(tenant_tables.trigger_firings, tenant_tables.triggers),
        *(tenant_tables.pipelines, graph_runs, graphs),
        *(job_events, webhook_deliveries, webhooks, batches, tenant_tables.shares, videos, files),
        *(tenant_tables.run_events, gateway_files, tenant_tables.gateway_counters),
        tenant_tables.job_previews,
        tenant_tables.gateway_userdata,
    )
}
# Tables whose rows are deleted together with the rows they belong to.
GO_ALONG = frozenset(
    {"graph_executions", "graph_versions", "job_attempts", "trigger_delivery_keys"}
)
# Tables whose rows are kept when a tenant is erased: the ledger, and rows without private data.
KEPT = frozenset(
    {"ai_jobs", "users", "outbox", "storage_use", "token_wallets", "token_transactions"}
)
_SCRUBBED: Mapping[str, Any] = {
    "prompt": {},
    "properties": {},
    "assets": [],
    "input_file_id": None,
    "output_file_id": None,
    "video_id": None,
    "result_metadata": null(),
    "error_message": None,
    "raw_error": None,
    "idempotency_key": None,
    "request_hash": None,
    "gateway": None,
    "fingerprint": None,
}


async def known_paths(tx: Tx, paths: Collection[str]) -> set[str]:
    rows = await tx.execute(select(files.c.path).where(is_one_of(tx, files.c.path, paths)))
    return {row.path for row in rows}


async def active_among(tx: Tx, job_ids: Collection[UUID]) -> set[UUID]:
    rows = await tx.execute(
        select(ai_jobs.c.id).where(is_one_of(tx, ai_jobs.c.id, job_ids), _ACTIVE)
    )
    return {row.id for row in rows}


async def unchecked(tx: Tx, *, announced_before: datetime, limit: int) -> list[File]:
    """Returns unchecked files, oldest first. Leaves out recently announced files, which may still
    be uploading."""
    query = (
        select(files)
        .where(
            files.c.checked_at.is_(None),
            or_(files.c.size.is_not(None), files.c.created_at < announced_before),
        )
        .order_by(files.c.created_at)
        .limit(limit)
    )
    return [File(**row) for row in (await tx.execute(query)).mappings()]


class Checked(NamedTuple):
    """A checked file, with the result and the time of the check."""

    file: File
    metadata: Mapping[str, Any]
    at: datetime


_NOTE_CHECKED = PreparedStatement(
    lambda tx: (
        update(files)
        .where(files.c.id == bindparam("of_file"), files.c.checked_at.is_(None))
        .values(metadata=bindparam("learnt"), checked_at=bindparam("at_now"))
        .returning(files.c.size)
    )
)


async def note_checked(tx: Tx, checked: Sequence[Checked]) -> None:
    """Stores the results of checks, and adds up the bytes of each tenant's files.

    A file that is locked by another transaction is skipped and checked again later, because waiting
    for it while holding other locks could deadlock."""
    is_one = is_one_of(tx, files.c.id, [entry.file.id for entry in checked])
    free = await tx.scalars(for_update(tx, select(files.c.id).where(is_one), skip_locked=True))
    mine, sizes = set(free), Counter[UUID]()
    for file, metadata, at in checked:
        if file.id not in mine:
            continue
        noted = {"of_file": file.id, "learnt": dict(metadata), "at_now": at}
        for (size,) in await _NOTE_CHECKED.tuples(tx, noted):
            sizes[file.tenant_id] += size
    # In a fixed order, so that two control planes can't wait for each other's rows.
    for tenant_id in sorted(sizes):
        await media_store.add_storage_bytes(tx, tenant_id, sizes[tenant_id])


async def old_files(
    tx: Tx, tenant_id: UUID, *, before: datetime, after: File | None, limit: int
) -> list[File]:
    """Returns a page of old files, oldest first. Skips locked files."""
    query = select(files).where(
        files.c.tenant_id == tenant_id,
        files.c.created_at < before,
        or_(files.c.kept_from.is_(None), files.c.kept_from < before),
    )
    if after is not None:
        at = files.c.created_at
        query = query.where(
            or_(at > after.created_at, and_(at == after.created_at, files.c.id > after.id))
        )
    query = query.order_by(files.c.created_at, files.c.id).limit(limit)
    rows = await tx.execute(for_update(tx, query, skip_locked=True))
    return [File(**row) for row in rows.mappings()]


async def named_by_media(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> set[UUID]:
    """Returns the files that belong to media that have not expired."""
    query = select(videos.c.original_file_id, videos.c.processed_file_id).where(
        videos.c.tenant_id == tenant_id,
        videos.c.expired_at.is_(None),
        or_(
            is_one_of(tx, videos.c.original_file_id, file_ids),
            is_one_of(tx, videos.c.processed_file_id, file_ids),
        ),
    )
    return {file_id for row in await tx.execute(query) for file_id in row if file_id}


def _active_of(tenant_id: UUID, column: Column[Any]) -> Select[Any]:
    """Selects active jobs in the order of their index. Otherwise, SQLite would use an index over
    all jobs."""
    mine = select(column).where(ai_jobs.c.tenant_id == tenant_id, _ACTIVE)
    return mine.order_by(ai_jobs.c.id)


async def named_by_active_jobs(tx: Tx, tenant_id: UUID) -> set[UUID]:
    rows = await tx.execute(_active_of(tenant_id, ai_jobs.c.assets))
    return {UUID(asset["file_id"]) for row in rows for asset in row.assets}


async def jobs_of_living_runs(
    tx: Tx, tenant_id: UUID, job_ids: Collection[UUID], *, since: datetime
) -> set[UUID]:
    """Returns the jobs that belong to an active graph run, or to a pipeline run that has not
    ended."""
    graphs_ = select(graph_runs.c.id).where(
        graph_runs.c.tenant_id == tenant_id,
        graph_runs.c.status.in_(("pending", "running", "waiting_for_user")),
    )
    runs = tenant_tables.pipeline_runs
    pipelines_ = select(runs.c.id).where(
        runs.c.tenant_id == tenant_id, runs.c.status != "cancelled", runs.c.changed_at >= since
    )
    query = select(ai_jobs.c.id).where(
        is_one_of(tx, ai_jobs.c.id, job_ids),
        or_(ai_jobs.c.run_id.in_(graphs_), ai_jobs.c.run_id.in_(pipelines_)),
    )
    return set((await tx.execute(query)).scalars())


async def remove_file_names(
    tx: Tx, tenant_id: UUID, file_ids: Collection[UUID], job_ids: Collection[UUID]
) -> None:
    """Deletes the file names that the gateway's users see for these uploads and for these jobs'
    outputs."""
    named = or_(
        is_one_of(tx, gateway_files.c.file_id, file_ids),
        is_one_of(tx, gateway_files.c.job_id, job_ids),
    )
    mine = without_index(tx, gateway_files.c.tenant_id) == tenant_id
    await tx.execute(delete(gateway_files).where(mine, named))


async def replaced_files(tx: Tx, *, before: datetime, limit: int) -> dict[UUID, list[File]]:
    """Returns uploads whose name another upload has taken, by tenant. Leaves out uploads that have
    another name as well."""
    other = gateway_files.alias()
    has_other = (
        select(other.c.path)
        .where(other.c.file_id == gateway_files.c.file_id, other.c.folder != REPLACED)
        .exists()
    )
    query = (
        select(files)
        .join(gateway_files, gateway_files.c.file_id == files.c.id)
        .where(
            # Must match the partial index's condition literally, or the planner won't use the
            # index.
            text(f"gateway_files.{IS_REPLACED}"),
            gateway_files.c.created_at < before,
            gateway_files.c.tenant_id == files.c.tenant_id,
            ~has_other,
        )
        .order_by(gateway_files.c.created_at)
        .limit(limit)
    )
    replaced: dict[UUID, list[File]] = {}
    for row in (await tx.execute(query)).mappings():
        replaced.setdefault(row["tenant_id"], []).append(File(**row))
    return replaced


async def remove_files(tx: Tx, tenant_id: UUID, file_ids: Collection[UUID]) -> None:
    mine = without_index(tx, files.c.tenant_id) == tenant_id
    deleted = await tx.execute(
        delete(files)
        .where(mine, is_one_of(tx, files.c.id, file_ids))
        .returning(files.c.size, files.c.checked_at)
    )
    if size := sum(row.size for row in deleted if row.checked_at is not None):
        await media_store.add_storage_bytes(tx, tenant_id, -size)


async def active_jobs(tx: Tx, tenant_id: UUID, *, limit: int) -> list[UUID]:
    rows = await tx.execute(_active_of(tenant_id, ai_jobs.c.id).limit(limit))
    return [row.id for row in rows]


async def remove_rows(tx: Tx, name: str, tenant_id: UUID, *, limit: int) -> int:
    table = PRIVATE[name]
    key = tuple(table.primary_key.columns)
    some = select(*key).where(table.c.tenant_id == tenant_id).limit(limit)
    deleted = await tx.execute(delete(table).where(tuple_(*key).in_(some)).returning(*key))
    return len(deleted.all())


async def scrub_jobs(tx: Tx, tenant_id: UUID, *, after: UUID | None, limit: int) -> UUID | None:
    """Deletes the requests and results of jobs. The rows remain for the ledger."""
    query = select(ai_jobs.c.id).where(ai_jobs.c.tenant_id == tenant_id, _ENDED)
    if after is not None:
        query = query.where(ai_jobs.c.id > after)
    ids: list[UUID] = [
        row.id for row in await tx.execute(query.order_by(ai_jobs.c.id).limit(limit))
    ]
    if not ids:
        return None
    await tx.execute(
        update(ai_jobs).where(is_one_of(tx, ai_jobs.c.id, ids)).values(dict(_SCRUBBED))
    )
    await tx.execute(delete(job_attempts).where(is_one_of(tx, job_attempts.c.job_id, ids)))
    return ids[-1]


async def scrub_users(tx: Tx, tenant_id: UUID) -> None:
    await tx.execute(
        update(users)
        .where(users.c.tenant_id == tenant_id)
        .values(email=None, name=None, is_active=False)
    )


async def scrub_dispatches(tx: Tx, tenant_id: UUID) -> None:
    """Deletes the errors of a tenant's dispatches from the central database, because they may quote
    requests."""
    await tx.execute(
        update(dispatches)
        .where(dispatches.c.tenant_id == tenant_id, dispatches.c.last_error.is_not(None))
        .values(last_error=None)
    )


async def remove_route_calls(tx: Tx, tenant_id: UUID) -> None:
    """Deletes a tenant's route calls, and the records of its users' uploads."""
    for table in (route_calls, backend_uploads):
        await tx.execute(delete(table).where(table.c.tenant_id == tenant_id))


_PRICE_PER_SECOND = ai_jobs.c.gateway[PRICE_PER_SECOND].as_float().label("price_per_second")
_FACTS = (ai_jobs.c.id, ai_jobs.c.reserved_tokens, ai_jobs.c.status, _PRICE_PER_SECOND)


async def priced_jobs(
    tx: Tx, *, tenant_id: UUID | None, after: tuple[UUID, UUID] | None, limit: int
) -> list[tuple[UUID, JobLedgerFacts]]:
    """Returns a page of (tenant, ledger facts) for jobs with reserved tokens."""
    query = select(ai_jobs.c.tenant_id, *_FACTS).where(ai_jobs.c.reserved_tokens > 0)
    if tenant_id is not None:
        query = query.where(ai_jobs.c.tenant_id == tenant_id)
    place = (ai_jobs.c.tenant_id, ai_jobs.c.id)
    if after is not None:
        query = query.where(tuple_(*place) > tuple_(*after))
    rows = await tx.execute(query.order_by(*place).limit(limit))
    return [(row.tenant_id, _facts(row)) for row in rows]


async def lock_job_facts(
    tx: Tx, tenant_id: UUID, job_ids: Collection[UUID]
) -> list[JobLedgerFacts]:
    """Reads and locks jobs, so that they can't end during the transaction."""
    query = select(*_FACTS).where(
        without_index(tx, ai_jobs.c.tenant_id) == tenant_id, is_one_of(tx, ai_jobs.c.id, job_ids)
    )
    return [_facts(row) for row in await tx.execute(for_update(tx, query))]


def _facts(row: Any) -> JobLedgerFacts:
    is_ended = row.status not in ("queued", "processing")
    is_metered = row.price_per_second is not None
    return JobLedgerFacts(
        row.id, row.reserved_tokens, is_ended, row.status == "completed", is_metered
    )


async def remove_announced(tx: Tx, file: File) -> bool:
    """Deletes an announced file. Returns False if it has been uploaded in the meantime."""
    statement = delete(files).where(files.c.id == file.id, files.c.size.is_(None))
    return (await tx.execute(statement.returning(files.c.id))).first() is not None
