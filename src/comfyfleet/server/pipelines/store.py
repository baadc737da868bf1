"""The SQL for pipelines."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import (
    ColumnElement,
    RowMapping,
    Table,
    Text,
    case,
    cast,
    func,
    insert,
    literal,
    null,
    or_,
    select,
    tuple_,
    update,
)

from comfyfleet.api.values import is_storable
from comfyfleet.server.db import Tx
from comfyfleet.server.db.dialect import Moment, for_update, insert_if_new, is_one_of
from comfyfleet.server.db.tenant_tables import (
    pipeline_events,
    pipeline_jobs,
    pipeline_judgements,
    pipeline_runs,
    pipeline_votes,
    pipelines,
)
from comfyfleet.server.pipelines.decide import PairVote
from comfyfleet.server.pipelines.model import (
    CandidateStatus,
    JudgedBy,
    PipelineRunEvent,
    PipelineRunStatus,
    RunLimits,
    StoredPipeline,
    StoredPipelineRun,
    StoredRun,
)
from comfyfleet.server.pipelines.parse import parse_definition


class Judgement(NamedTuple):
    id: int
    before: CandidateStatus
    judged_by: JudgedBy


async def add_event(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(pipeline_events).values(dict(row)))


def _events(rows: Any) -> list[PipelineRunEvent]:
    return [
        PipelineRunEvent(
            row.id, row.tenant_id, row.run_id, row.kind, row.actor, row.data, row.created_at
        )
        for row in rows
    ]


async def events_after(
    tx: Tx, run_id: UUID, *, after_id: int, limit: int
) -> list[PipelineRunEvent]:
    rows = await tx.execute(
        select(pipeline_events)
        .where(pipeline_events.c.run_id == run_id, pipeline_events.c.id > after_id)
        .order_by(pipeline_events.c.id)
        .limit(limit)
    )
    return _events(rows)


async def last_event_id(tx: Tx, run_id: UUID) -> int:
    last_id = await tx.scalar(
        select(func.max(pipeline_events.c.id)).where(pipeline_events.c.run_id == run_id)
    )
    return int(last_id or 0)


async def unaudited_events(tx: Tx, *, limit: int) -> list[PipelineRunEvent]:
    rows = await tx.execute(
        select(pipeline_events)
        .where(~pipeline_events.c.is_audited)
        .order_by(pipeline_events.c.id)
        .limit(limit)
    )
    return _events(rows)


async def mark_audited(tx: Tx, ids: Sequence[int]) -> None:
    await tx.execute(
        update(pipeline_events)
        .where(is_one_of(tx, pipeline_events.c.id, ids))
        .values(is_audited=True)
    )


async def add_judgement(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(pipeline_judgements).values(dict(row)))


async def last_judgements(tx: Tx, candidate_id: UUID, *, limit: int) -> list[Judgement]:
    """Returns the last judgments that were not undone, newest first."""
    rows = await tx.execute(
        select(pipeline_judgements)
        .where(
            pipeline_judgements.c.candidate_id == candidate_id,
            pipeline_judgements.c.undone_at.is_(None),
        )
        .order_by(pipeline_judgements.c.id.desc())
        .limit(limit)
    )
    return [Judgement(row.id, CandidateStatus(row.before), JudgedBy(row.judged_by)) for row in rows]


async def undo_judgement(tx: Tx, judgement_id: int, *, now: datetime) -> None:
    await tx.execute(
        update(pipeline_judgements)
        .where(pipeline_judgements.c.id == judgement_id)
        .values(undone_at=now)
    )


async def add_vote(tx: Tx, row: Mapping[str, Any]) -> bool:
    """Adds a vote. Returns False if it was added before."""
    added = await tx.execute(
        insert_if_new(tx, pipeline_votes, [row]).returning(pipeline_votes.c.number)
    )
    return added.first() is not None


async def count_votes(tx: Tx, run_id: UUID) -> int:
    """Counts votes, including undone ones, which take as much space."""
    query = select(func.count()).where(pipeline_votes.c.run_id == run_id)
    return int((await tx.execute(query)).scalar_one())


async def votes_of(tx: Tx, run_id: UUID) -> list[PairVote]:
    """Returns the votes that were not undone, oldest first."""
    rows = await tx.execute(
        select(pipeline_votes)
        .where(pipeline_votes.c.run_id == run_id, pipeline_votes.c.undone_at.is_(None))
        .order_by(pipeline_votes.c.number)
    )
    return [PairVote(row.id, row.winner_id, row.loser_id, row.is_tie) for row in rows]


async def get_vote(tx: Tx, run_id: UUID, vote_id: UUID) -> tuple[PairVote, bool] | None:
    """Returns a vote, and whether it still counts."""
    rows = await tx.execute(
        select(pipeline_votes).where(
            pipeline_votes.c.run_id == run_id, pipeline_votes.c.id == vote_id
        )
    )
    row = rows.first()
    if row is None:
        return None
    return PairVote(row.id, row.winner_id, row.loser_id, row.is_tie), row.undone_at is None


async def undo_vote(tx: Tx, vote_id: UUID, *, now: datetime) -> None:
    await tx.execute(
        update(pipeline_votes).where(pipeline_votes.c.id == vote_id).values(undone_at=now)
    )


_ALIKE = (
    "tenant_id",
    "user_id",
    "pipeline_id",
    "request_hash",
    "created_at",
    "changed_at",
    "pause_reason",
    "reason",
    "trouble",
    "trouble_seconds",
    "idempotency_key",
    "look_at",
    "served_at",
    "alerted_at",
    "files_removed_at",
)


def _pipeline(row: RowMapping) -> StoredPipeline:
    parsed = parse_definition(row["document"]).pipeline
    return StoredPipeline(
        row["id"],
        row["tenant_id"],
        row["user_id"],
        parsed,
        row["document"],
        row["created_at"],
        row["deleted_at"],
    )


def _run(row: RowMapping) -> StoredRun:
    limits = RunLimits(
        candidates=row["candidates_max"],
        tokens=row["tokens_max"],
        concurrent_jobs=row["concurrent_jobs"],
        until=row["until"],
        bytes=row["bytes_max"],
    )
    run = StoredPipelineRun(
        id=row["id"],
        base_candidates=row["base_candidates"],
        target_folder=row["target_folder"],
        variables=row["variables"] or {},
        status=PipelineRunStatus(row["status"]),
        limits=limits,
        tokens=int(row["tokens"]),
    )
    return StoredRun(run=run, **{name: row[name] for name in _ALIKE})


def limit_columns(limits: RunLimits) -> dict[str, Any]:
    return {
        "candidates_max": limits.candidates,
        "tokens_max": limits.tokens,
        "bytes_max": limits.bytes,
        "concurrent_jobs": limits.concurrent_jobs,
        "until": limits.until,
    }


def _run_row(stored: StoredRun) -> dict[str, Any]:
    run = stored.run
    return {
        **{name: getattr(stored, name) for name in _ALIKE},
        **limit_columns(run.limits),
        "id": run.id,
        "target_folder": run.target_folder,
        "variables": dict(run.variables),
        "base_candidates": run.base_candidates,
        "status": run.status,
    }


# The reserved and consumed tokens of a run are always the sum over its jobs.
_TOKENS = (
    select(func.coalesce(func.sum(pipeline_jobs.c.tokens), 0))
    .where(pipeline_jobs.c.run_id == pipeline_runs.c.id)
    .scalar_subquery()
    .label("tokens")
)
_RUNS = select(pipeline_runs, _TOKENS)
# Lists leave out larger variables, which would take long to parse. A single run includes them.
LISTED_VARIABLES_MAX = 4_096
_IS_SMALL = func.length(cast(pipeline_runs.c.variables, Text)) <= LISTED_VARIABLES_MAX
_LISTED_RUNS = select(
    *(column for column in pipeline_runs.c if column.name != "variables"),
    case((_IS_SMALL, pipeline_runs.c.variables), else_=null()).label("variables"),
    _TOKENS,
)


async def add_pipeline(tx: Tx, stored: StoredPipeline) -> None:
    row = {
        "id": stored.id,
        "tenant_id": stored.tenant_id,
        "user_id": stored.user_id,
        "name": stored.pipeline.name,
        "document": dict(stored.document),
        "created_at": stored.created_at,
    }
    await tx.execute(insert(pipelines).values(row))


async def get_pipeline(tx: Tx, tenant_id: UUID, pipeline_id: UUID) -> StoredPipeline | None:
    rows = await tx.execute(
        select(pipelines).where(pipelines.c.tenant_id == tenant_id, pipelines.c.id == pipeline_id)
    )
    row = rows.mappings().one_or_none()
    return _pipeline(row) if row else None


async def delete_pipeline(tx: Tx, pipeline_id: UUID, *, now: datetime) -> None:
    await tx.execute(update(pipelines).where(pipelines.c.id == pipeline_id).values(deleted_at=now))


async def names_of(tx: Tx, pipeline_ids: Collection[UUID]) -> dict[UUID, str]:
    query = select(pipelines.c.id, pipelines.c.name).where(
        is_one_of(tx, pipelines.c.id, pipeline_ids)
    )
    return {row.id: row.name for row in await tx.execute(query)}


async def list_pipelines(
    tx: Tx, tenant_id: UUID, user_id: UUID, *, before: StoredPipeline | None, limit: int
) -> list[StoredPipeline]:
    """Returns a page of pipelines, newest first."""
    query = select(pipelines).where(
        pipelines.c.tenant_id == tenant_id,
        pipelines.c.user_id == user_id,
        pipelines.c.deleted_at.is_(None),
    )
    if before:
        query = query.where(_is_older(pipelines, before.created_at, before.id))
    newest = (pipelines.c.created_at.desc(), pipelines.c.id.desc())
    rows = await tx.execute(query.order_by(*newest).limit(limit))
    return [_pipeline(row) for row in rows.mappings()]


async def pipelines_named(
    tx: Tx, tenant_id: UUID, user_id: UUID, name: str, *, limit: int
) -> list[StoredPipeline]:
    """Returns the user's pipelines with this name, newest first."""
    if not is_storable(name):
        return []
    query = select(pipelines).where(
        pipelines.c.tenant_id == tenant_id,
        pipelines.c.user_id == user_id,
        pipelines.c.name == name,
        pipelines.c.deleted_at.is_(None),
    )
    newest = (pipelines.c.created_at.desc(), pipelines.c.id.desc())
    rows = await tx.execute(query.order_by(*newest).limit(limit))
    return [_pipeline(row) for row in rows.mappings()]


def _is_older(table: Table, at: datetime, row_id: UUID) -> Any:
    return tuple_(table.c.created_at, table.c.id) < tuple_(literal(at, Moment()), row_id)


async def add_run(tx: Tx, stored: StoredRun) -> bool:
    """Adds a run. Returns False if a run with this idempotency key exists."""
    added = await tx.execute(
        insert_if_new(tx, pipeline_runs, [_run_row(stored)]).returning(pipeline_runs.c.id)
    )
    return added.first() is not None


async def get_run(
    tx: Tx, tenant_id: UUID, run_id: UUID, *, is_locked: bool = False
) -> StoredRun | None:
    """Returns a run. `is_locked` locks its row until the transaction ends."""
    mine = (pipeline_runs.c.tenant_id == tenant_id, pipeline_runs.c.id == run_id)
    if is_locked:
        await tx.execute(for_update(tx, select(pipeline_runs.c.id).where(*mine)))
    rows = await tx.execute(_RUNS.where(*mine))
    row = rows.mappings().one_or_none()
    return _run(row) if row else None


async def run_by_key(tx: Tx, tenant_id: UUID, idempotency_key: str) -> StoredRun | None:
    rows = await tx.execute(
        _RUNS.where(
            pipeline_runs.c.tenant_id == tenant_id,
            pipeline_runs.c.idempotency_key == idempotency_key,
        )
    )
    row = rows.mappings().one_or_none()
    return _run(row) if row else None


async def list_runs(
    tx: Tx,
    tenant_id: UUID,
    user_id: UUID,
    *,
    pipeline_id: UUID | None,
    before: StoredRun | None,
    limit: int,
) -> list[StoredRun]:
    """Returns a page of runs, newest first, without large variables."""
    mine = (pipeline_runs.c.tenant_id == tenant_id, pipeline_runs.c.user_id == user_id)
    query = _LISTED_RUNS.where(*mine)
    if pipeline_id:
        query = query.where(pipeline_runs.c.pipeline_id == pipeline_id)
    if before:
        query = query.where(_is_older(pipeline_runs, before.created_at, before.id))
    newest = (pipeline_runs.c.created_at.desc(), pipeline_runs.c.id.desc())
    rows = await tx.execute(query.order_by(*newest).limit(limit))
    return [_run(row) for row in rows.mappings()]


async def change_run(tx: Tx, run_id: UUID, values: Mapping[str, Any]) -> None:
    await tx.execute(update(pipeline_runs).where(pipeline_runs.c.id == run_id).values(dict(values)))


async def record_sweep_result(tx: Tx, seen: StoredRun, values: Mapping[str, Any]) -> bool:
    """Records the result of a sweep. If the run has changed since it was read, records nothing, and
    the run remains due."""
    done = await tx.execute(
        update(pipeline_runs)
        .where(
            pipeline_runs.c.id == seen.id,
            pipeline_runs.c.look_at == seen.look_at,
            pipeline_runs.c.changed_at == seen.changed_at,
        )
        .values(dict(values))
    )
    return bool(done.rowcount)


async def due_runs(tx: Tx, *, now: datetime, limit: int) -> list[StoredRun]:
    """Returns due runs, longest-waiting first, so that no run is passed over."""
    rows = await tx.execute(
        _RUNS.where(pipeline_runs.c.look_at <= now).order_by(pipeline_runs.c.look_at).limit(limit)
    )
    return [_run(row) for row in rows.mappings()]


class StuckRunFilter(NamedTuple):
    """Selects stuck runs. None matches everything."""

    tenant_id: UUID | None = None
    user_id: UUID | None = None
    run_id: UUID | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        filters = {
            pipeline_runs.c.tenant_id: self.tenant_id,
            pipeline_runs.c.user_id: self.user_id,
            pipeline_runs.c.id: self.run_id,
        }
        return [
            pipeline_runs.c.look_at.is_not(None),
            pipeline_runs.c.trouble_seconds.is_not(None),
            *(column == value for column, value in filters.items() if value is not None),
        ]


async def has_stuck_runs(tx: Tx, wanted: StuckRunFilter) -> bool:
    query = select(pipeline_runs.c.id).where(*wanted.conditions()).limit(1)
    return await tx.scalar(query) is not None


async def wake_stuck_runs(tx: Tx, wanted: StuckRunFilter, *, now: datetime) -> list[UUID]:
    """Makes stuck runs due and returns their ids. The result of a check in progress is then
    discarded, because it may have read the old state."""
    query = update(pipeline_runs).where(*wanted.conditions()).values(look_at=now)
    return list(await tx.scalars(query.returning(pipeline_runs.c.id)))


async def last_served(tx: Tx, tenant_id: UUID) -> UUID | None:
    run_id: UUID | None = await tx.scalar(
        select(pipeline_runs.c.id)
        .where(pipeline_runs.c.tenant_id == tenant_id, pipeline_runs.c.served_at.is_not(None))
        .order_by(pipeline_runs.c.served_at.desc())
        .limit(1)
    )
    return run_id


async def old_runs(tx: Tx, *, unchanged_since: datetime, limit: int) -> Sequence[StoredRun]:
    """Returns runs that still have files and have not changed since the given time."""
    rows = await tx.execute(
        _RUNS.where(
            pipeline_runs.c.changed_at < unchanged_since,
            pipeline_runs.c.files_removed_at.is_(None),
            or_(
                pipeline_runs.c.look_at.is_(None),
                pipeline_runs.c.status != PipelineRunStatus.ACTIVE,
            ),
        )
        .order_by(pipeline_runs.c.changed_at)
        .limit(limit)
    )
    return [_run(row) for row in rows.mappings()]
