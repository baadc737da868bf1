"""Who did what."""

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from fastapi import Query
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.audit import service as audit
from comfyfleet.audit.model import Entry
from comfyfleet.http.admin.routing import PAGE_MAX, Answer, admin_router
from comfyfleet.http.given import GivenPlane
from comfyfleet.http.streaming import undisturbed
from comfyfleet.plane import Plane
from comfyfleet.wire.files import RowId

router = admin_router()
EXPORT_PAGE = 500
Action = Annotated[str | None, Query(description="Such as submit, lease, complete, revoke.")]
Subject = Annotated[str | None, Query(description="Such as dispatch:12, worker:gpu-7.")]
Actor = Annotated[str | None, Query(description="Such as admin, sweep, worker:gpu-7.")]
Before = Annotated[RowId | None, Query(description="Only entries with a lower id.")]


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


@router.get("/audit")
async def find(
    plane: GivenPlane,
    action: Action = None,
    subject: Subject = None,
    actor: Actor = None,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> Entries:
    async with plane.central.look() as tx:
        found = await audit.find(
            tx, action=action, subject=subject, actor=actor, before_id=before, limit=limit + 1
        )
    page = found[:limit]
    following = page[-1].id if len(found) > limit else None
    return Entries(entries=[_answer(entry) for entry in page], next=following)


@router.get(
    "/audit/export",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}, "description": "All that fit."}},
)
async def export(
    plane: GivenPlane,
    action: Action = None,
    subject: Subject = None,
    actor: Actor = None,
    before: Before = None,
) -> StreamingResponse:
    """All that fit, the newest first, one JSON object per line."""
    wanted = {"action": action, "subject": subject, "actor": actor}
    return StreamingResponse(_lines(plane, wanted, before), media_type="application/x-ndjson")


async def _lines(
    plane: Plane, wanted: dict[str, str | None], before: int | None
) -> AsyncIterator[str]:
    while True:
        page = await undisturbed(_page(plane, wanted, before))
        if not page:
            return
        yield "".join(f"{json.dumps(_answer(entry).model_dump(mode='json'))}\n" for entry in page)
        before = page[-1].id


async def _page(plane: Plane, wanted: dict[str, str | None], before: int | None) -> list[Entry]:
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
