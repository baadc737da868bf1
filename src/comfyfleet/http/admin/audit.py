"""Who did what."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.audit.model import Entry
from comfyfleet.http.admin.routing import PAGE_MAX, Answer, admin_router
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.streaming import undisturbed
from comfyfleet.http.values import in_utc
from comfyfleet.plane import Plane
from comfyfleet.wire.files import RowId

router = admin_router()
EXPORT_PAGE = 500


class EntryAnswer(Answer):
    id: int
    at: datetime
    actor: str
    action: str
    subject: str
    tenant_id: UUID | None
    details: dict[str, Any]


class Entries(Answer):
    entries: list[EntryAnswer] = Field(description="The newest first.")
    next: int | None = Field(description="Ask on with before=next; null: that was all.")


async def wanted_of(
    action: Annotated[
        str | None, Query(description="Such as submit, lease, complete, revoke.")
    ] = None,
    subject: Annotated[str | None, Query(description="Such as dispatch:12, worker:gpu-7.")] = None,
    actor: Annotated[
        str | None, Query(description="Such as operator:ada, admin, sweep, worker:gpu-7.")
    ] = None,
    tenant: Annotated[UUID | None, Query(description="Only what concerns this tenant.")] = None,
    since: Annotated[datetime | None, Query(description="Not before then.")] = None,
    until: Annotated[datetime | None, Query(description="Before then.")] = None,
) -> dict[str, Any]:
    return {
        "action": action,
        "subject": subject,
        "actor": actor,
        "tenant_id": tenant,
        "since": since and in_utc(since),
        "until": until and in_utc(until),
    }


Wanted = Annotated[dict[str, Any], Depends(wanted_of)]
Before = Annotated[RowId | None, Query(description="Only entries with a lower id.")]


@router.get("/audit")
async def find(
    plane: GivenPlane,
    wanted: Wanted,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> Entries:
    async with plane.central.look() as tx:
        found = await audit.find(tx, **wanted, before_id=before, limit=limit + 1)
    page = found[:limit]
    following = page[-1].id if len(found) > limit else None
    return Entries(entries=[_answer(entry) for entry in page], next=following)


@router.get(
    "/audit/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}, "description": "All that fit."}},
)
async def export(plane: GivenPlane, wanted: Wanted, before: Before = None) -> StreamingResponse:
    """All that fit, the newest first, one JSON object per line."""
    return StreamingResponse(_lines(plane, wanted, before), media_type="application/x-ndjson")


async def _lines(plane: Plane, wanted: dict[str, Any], before: int | None) -> AsyncIterator[str]:
    while True:
        page = await undisturbed(_page(plane, wanted, before))
        if not page:
            return
        yield "".join(f"{json.dumps(_answer(entry).model_dump(mode='json'))}\n" for entry in page)
        before = page[-1].id


async def _page(plane: Plane, wanted: dict[str, Any], before: int | None) -> list[Entry]:
    """A look for each page: whoever reads slowly holds no transaction open."""
    async with plane.central.look() as tx:
        return await audit.find(tx, **wanted, before_id=before, limit=EXPORT_PAGE)


def _answer(entry: Entry) -> EntryAnswer:
    return EntryAnswer(
        id=entry.id,
        at=entry.at,
        actor=entry.actor,
        action=entry.action,
        subject=entry.subject,
        tenant_id=entry.tenant_id,
        details=dict(entry.details),
    )
