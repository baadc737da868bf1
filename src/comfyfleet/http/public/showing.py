"""Jobs and media as customers see them: how far, how long yet, and where the files are."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from pydantic import Field

from comfyfleet.effects.catalogue import service as catalogue
from comfyfleet.files import service as files
from comfyfleet.files.model import File
from comfyfleet.http.public.routing import Answer
from comfyfleet.jobs.model import Job, JobStatus
from comfyfleet.plane import Plane

DONE_PERCENT = 100.0


class Value(Answer):
    node_id: str = Field(examples=["7"])
    name: str = Field(description="The node's word for it.", examples=["text"])
    value: Any = Field(description="A text, number, boolean or JSON.", examples=["a cat"])


VALUES = Field(description="What nodes showed: texts, numbers, booleans, JSON.")
TEXT = Field(description="The texts of the first node that showed any; null: none did.")


class Output(Answer):
    name: str
    filename: str = Field(examples=["made_00001_.png"])
    content_type: str = Field(examples=["image/png"])
    size: int | None = Field(description="In bytes.", examples=[512_000])
    url: str = Field(description="Lives for 15 minutes; ask again for a new one.")


def percent_of(plane: Plane, job: Job) -> float | None:
    """As its worker last told this control plane."""
    if job.status == JobStatus.COMPLETED:
        return DONE_PERCENT
    if not job.status.is_active:
        return None
    told = plane.sides.progresses.of(job.lease_token)
    return told.percent if told else None


async def seconds_left(plane: Plane, job: Job, now: datetime) -> float | None:
    """From the effect's history; the wait in the queue is not in it (see …/why)."""
    if not job.status.is_active or job.asked.effect_id is None:
        return None
    async with plane.central.look() as tx:
        typical = await catalogue.typical_seconds(tx, job.asked.effect_id)
    return left_of(job, typical, now)


def left_of(job: Job, typical_seconds: float | None, now: datetime) -> float | None:
    if typical_seconds is None or not job.status.is_active:
        return None
    gone = (now - job.started_at).total_seconds() if job.started_at else 0.0
    return round(max(0.0, typical_seconds - gone), 1)


async def files_of(plane: Plane, job: Job) -> list[tuple[str, File]]:
    """Its outputs by name; those that have expired are no longer there."""
    kept = (job.result_metadata or {}).get("outputs", [])
    if not kept:
        return []
    named = [(each["name"], UUID(each["file_id"])) for each in kept]
    pool = await plane.sides.pool_of(job.tenant_id)
    async with pool.look() as tx:
        found = await files.those_of(tx, job.tenant_id, {file_id for _, file_id in named})
    return [(name, found[file_id]) for name, file_id in named if file_id in found]


async def outputs_of(plane: Plane, found: Sequence[tuple[str, File]]) -> list[Output]:
    return [
        Output(
            name=name,
            filename=file.filename,
            content_type=file.mime_type,
            size=file.size,
            url=await url_of(plane, file),
        )
        for name, file in found
    ]


def values_of(job: Job) -> list[Value]:
    return [Value(**each.model_dump()) for each in job.values]


async def url_of(plane: Plane, file: File) -> str:
    return await plane.store.url_to_get(
        file.path, seconds=plane.settings.url_seconds, filename=file.filename
    )
