"""What people and the loop did: events, judgements, votes."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import insert, select, update

from comfyfleet.db import Tx
from comfyfleet.db.dialect import insert_if_new, is_one_of
from comfyfleet.db.pipelines import pipeline_events, pipeline_judgements, pipeline_votes
from comfyfleet.pipelines.elo import Vote
from comfyfleet.pipelines.model import PipelineEvent, Status


class Judgement(NamedTuple):
    id: int
    before: Status
    after: Status


async def add_event(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(pipeline_events).values(dict(row)))


def _events(rows: Any) -> list[PipelineEvent]:
    return [
        PipelineEvent(
            row.id, row.tenant_id, row.run_id, row.kind, row.actor, row.data, row.created_at
        )
        for row in rows
    ]


async def events_after(tx: Tx, run_id: UUID, *, after_id: int, limit: int) -> list[PipelineEvent]:
    found = await tx.execute(
        select(pipeline_events)
        .where(pipeline_events.c.run_id == run_id, pipeline_events.c.id > after_id)
        .order_by(pipeline_events.c.id)
        .limit(limit)
    )
    return _events(found)


async def untold(tx: Tx, *, limit: int) -> list[PipelineEvent]:
    found = await tx.execute(
        select(pipeline_events)
        .where(~pipeline_events.c.is_audited)
        .order_by(pipeline_events.c.id)
        .limit(limit)
    )
    return _events(found)


async def note_told(tx: Tx, ids: Sequence[int]) -> None:
    await tx.execute(
        update(pipeline_events)
        .where(is_one_of(tx, pipeline_events.c.id, ids))
        .values(is_audited=True)
    )


async def add_judgement(tx: Tx, row: Mapping[str, Any]) -> None:
    await tx.execute(insert(pipeline_judgements).values(dict(row)))


async def last_judgement(tx: Tx, candidate_id: UUID) -> Judgement | None:
    """Of those that were not undone."""
    found = await tx.execute(
        select(pipeline_judgements)
        .where(
            pipeline_judgements.c.candidate_id == candidate_id,
            pipeline_judgements.c.undone_at.is_(None),
        )
        .order_by(pipeline_judgements.c.id.desc())
        .limit(1)
    )
    row = found.first()
    return Judgement(row.id, Status(row.before), Status(row.after)) if row else None


async def undo_judgement(tx: Tx, judgement_id: int, *, now: datetime) -> None:
    await tx.execute(
        update(pipeline_judgements)
        .where(pipeline_judgements.c.id == judgement_id)
        .values(undone_at=now)
    )


async def add_vote(tx: Tx, row: Mapping[str, Any]) -> bool:
    """False: this vote was given before."""
    added = await tx.execute(
        insert_if_new(tx, pipeline_votes, [row]).returning(pipeline_votes.c.number)
    )
    return added.first() is not None


async def votes_of(tx: Tx, run_id: UUID) -> list[Vote]:
    """Those that count, in the order in which they were given."""
    found = await tx.execute(
        select(pipeline_votes)
        .where(pipeline_votes.c.run_id == run_id, pipeline_votes.c.undone_at.is_(None))
        .order_by(pipeline_votes.c.number)
    )
    return [Vote(row.id, row.winner_id, row.loser_id) for row in found]


async def vote(tx: Tx, run_id: UUID, vote_id: UUID) -> tuple[Vote, bool] | None:
    """With whether it still counts."""
    found = await tx.execute(
        select(pipeline_votes).where(
            pipeline_votes.c.run_id == run_id, pipeline_votes.c.id == vote_id
        )
    )
    row = found.first()
    return (Vote(row.id, row.winner_id, row.loser_id), row.undone_at is None) if row else None


async def undo_vote(tx: Tx, vote_id: UUID, *, now: datetime) -> None:
    await tx.execute(
        update(pipeline_votes).where(pipeline_votes.c.id == vote_id).values(undone_at=now)
    )
