"""Candidates: what was made, how it was judged, and where it is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, func, insert, literal, select, tuple_, update

from comfyfleet.db import Tx
from comfyfleet.db.pipelines import pipeline_candidates as candidates
from comfyfleet.db.types import Moment
from comfyfleet.pipelines.model import Candidate, Status

# What decisions are made with. Properties may be long, and no decision asks for them.
_DECIDING = (
    "id",
    "step",
    "parent_id",
    "status",
    "score",
    "child_count",
    "job_id",
    "output_index",
    "created_at",
)


@dataclass(frozen=True, slots=True)
class Filter:
    step: int | None = None
    status: Status | None = None
    parent: UUID | None = None
    is_base: bool = False  # only those without a parent


def _light(row: RowMapping) -> Candidate:
    return Candidate(
        id=row["id"],
        step=row["step"],
        created_at=row["created_at"],
        parent=row["parent_id"],
        status=Status(row["status"]),
        score=row["score"],
        child_count=row["child_count"],
        job_id=row["job_id"],
        output_index=row["output_index"],
    )


def _whole(row: RowMapping) -> Candidate:
    file = {
        "file_id": str(row["file_id"]) if row["file_id"] else None,
        "path": row["path"],
        "mime_type": row["mime_type"],
        "size": row["size"],
    }
    return Candidate(
        id=row["id"],
        step=row["step"],
        created_at=row["created_at"],
        parent=row["parent_id"],
        status=Status(row["status"]),
        score=row["score"],
        child_count=row["child_count"],
        file=file,
        text=row["text"],
        seed=None if row["seed"] is None else int(row["seed"]),
        properties=row["properties"],
        job_id=row["job_id"],
        output_index=row["output_index"],
    )


async def add(tx: Tx, tenant_id: UUID, run_id: UUID, rows: Sequence[Candidate]) -> None:
    await tx.execute(insert(candidates), [_row(tenant_id, run_id, each) for each in rows])


def _row(tenant_id: UUID, run_id: UUID, each: Candidate) -> dict[str, Any]:
    file = each.file or {}
    return {
        "id": each.id,
        "tenant_id": tenant_id,
        "run_id": run_id,
        "step": each.step,
        "parent_id": each.parent,
        "job_id": each.job_id,
        "output_index": each.output_index,
        "file_id": UUID(file["file_id"]) if file.get("file_id") else None,
        "path": file["path"],
        "mime_type": file["mime_type"],
        "size": file["size"],
        "seed": None if each.seed is None else str(each.seed),
        "properties": dict(each.properties),
        "score": each.score,
        "status": each.status,
        "child_count": 0,
        "created_at": each.created_at,
        "text": each.text,
    }


async def count_children(tx: Tx, parent: UUID, more: int) -> None:
    await tx.execute(
        update(candidates)
        .where(candidates.c.id == parent)
        .values(child_count=candidates.c.child_count + more)
    )


async def tree_of(tx: Tx, run_id: UUID) -> dict[UUID, Candidate]:
    columns = [candidates.c[name] for name in _DECIDING]
    found = await tx.execute(select(*columns).where(candidates.c.run_id == run_id))
    return {row["id"]: _light(row) for row in found.mappings()}


async def get(tx: Tx, run_id: UUID, candidate_id: UUID) -> Candidate | None:
    found = await tx.execute(
        select(candidates).where(candidates.c.run_id == run_id, candidates.c.id == candidate_id)
    )
    row = found.mappings().one_or_none()
    return _whole(row) if row else None


async def run_of(tx: Tx, tenant_id: UUID, candidate_id: UUID) -> UUID | None:
    found: UUID | None = await tx.scalar(
        select(candidates.c.run_id).where(
            candidates.c.tenant_id == tenant_id, candidates.c.id == candidate_id
        )
    )
    return found


async def page(
    tx: Tx, run_id: UUID, wanted: Filter, *, after: Candidate | None, limit: int
) -> list[Candidate]:
    """The oldest first."""
    query = select(candidates).where(candidates.c.run_id == run_id)
    if wanted.step is not None:
        query = query.where(candidates.c.step == wanted.step)
    if wanted.status:
        query = query.where(candidates.c.status == wanted.status)
    if wanted.parent:
        query = query.where(candidates.c.parent_id == wanted.parent)
    if wanted.is_base:
        query = query.where(candidates.c.parent_id.is_(None))
    place = tuple_(candidates.c.created_at, candidates.c.id)
    if after:
        query = query.where(place > tuple_(literal(after.created_at, Moment()), after.id))
    oldest = (candidates.c.created_at, candidates.c.id)
    found = await tx.execute(query.order_by(*oldest).limit(limit))
    return [_whole(row) for row in found.mappings()]


async def set_status(tx: Tx, candidate_id: UUID, *, before: Status, after: Status) -> bool:
    done = await tx.execute(
        update(candidates)
        .where(candidates.c.id == candidate_id, candidates.c.status == before)
        .values(status=after)
    )
    return bool(done.rowcount)


async def set_scores(tx: Tx, scores: Mapping[UUID, float]) -> None:
    for candidate_id, score in scores.items():
        await tx.execute(
            update(candidates).where(candidates.c.id == candidate_id).values(score=score)
        )


async def reset_scores(tx: Tx, run_id: UUID, score: float) -> None:
    await tx.execute(update(candidates).where(candidates.c.run_id == run_id).values(score=score))


async def bytes_of(tx: Tx, run_id: UUID) -> int:
    """Of the files that are still there."""
    total = await tx.scalar(
        select(func.coalesce(func.sum(candidates.c.size), 0)).where(
            candidates.c.run_id == run_id, candidates.c.file_id.is_not(None)
        )
    )
    return int(total or 0)


async def files_of(tx: Tx, run_id: UUID, *, limit: int) -> dict[UUID, UUID]:
    """Candidates that still have their file, with its id."""
    found = await tx.execute(
        select(candidates.c.id, candidates.c.file_id)
        .where(candidates.c.run_id == run_id, candidates.c.file_id.is_not(None))
        .limit(limit)
    )
    return {row.id: row.file_id for row in found}


async def forget_file(tx: Tx, candidate_id: UUID) -> None:
    await tx.execute(update(candidates).where(candidates.c.id == candidate_id).values(file_id=None))


async def newest_at(tx: Tx, run_id: UUID) -> datetime | None:
    found: datetime | None = await tx.scalar(
        select(func.max(candidates.c.created_at, type_=Moment())).where(
            candidates.c.run_id == run_id
        )
    )
    return found
