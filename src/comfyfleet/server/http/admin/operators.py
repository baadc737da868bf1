"""Operators' routes for managing operators, reading the audit log, switching maintenance mode, and
repairing differences between jobs and the queue."""

import csv
import io
import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID, uuid4

from fastapi import Depends, Query, Request, status
from fastapi.responses import StreamingResponse
from pydantic import Field

from comfyfleet.api.admin import (
    Entries,
    EntryAnswer,
    MadeOperator,
    OperatorAnswer,
    Operators,
    Repaired,
)
from comfyfleet.api.values import RowId
from comfyfleet.errors import FleetError
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.admin.auth import (
    PAGE_MAX,
    Body,
    OperatorDep,
    OwnerDep,
    admin_router,
    authenticate_operator,
)
from comfyfleet.server.http.deps import NowDep, PlaneDep
from comfyfleet.server.http.request_body import in_utc
from comfyfleet.server.http.streams import run_shielded
from comfyfleet.server.jobs import context
from comfyfleet.server.jobs.reconcile import reconcile as repair
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.notifications.model import AuditEntry
from comfyfleet.server.notifications.service import record_audit
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import NewOperator, Operator, Role, new_operator_key

router = admin_router()
EXPORT_PAGE = 500
EXPORT_TYPES = {"jsonl": "application/x-ndjson", "csv": "text/csv"}


async def audit_filter(
    action: Annotated[
        str | None, Query(description="Only entries with this action, such as submit or revoke.")
    ] = None,
    subject: Annotated[
        str | None,
        Query(description="Only entries about this subject, such as dispatch:12 or worker:gpu-7."),
    ] = None,
    actor: Annotated[
        str | None,
        Query(description="Only entries by this actor, such as operator:ada, admin or sweep."),
    ] = None,
    tenant: Annotated[UUID | None, Query(description="Only entries about this tenant.")] = None,
    since: Annotated[
        datetime | None, Query(description="Only entries at or after this time.")
    ] = None,
    until: Annotated[datetime | None, Query(description="Only entries before this time.")] = None,
) -> dict[str, Any]:
    return {
        "action": action,
        "subject": subject,
        "actor": actor,
        "tenant_id": tenant,
        "since": since and in_utc(since),
        "until": until and in_utc(until),
    }


Wanted = Annotated[dict[str, Any], Depends(audit_filter)]
Before = Annotated[RowId | None, Query(description="Only entries with a lower id.")]


@router.get("/audit")
async def find(
    plane: PlaneDep,
    wanted: Wanted,
    before: Before = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
) -> Entries:
    async with plane.central.read() as tx:
        entries = await notifications.find_audit_entries(
            tx, **wanted, before_id=before, limit=limit + 1
        )
    page = entries[:limit]
    following = page[-1].id if len(entries) > limit else None
    return Entries(entries=[entry_view(entry) for entry in page], next=following)


@router.get(
    "/audit/export",
    response_class=StreamingResponse,
    responses={
        200: {
            "content": {media_type: {} for media_type in EXPORT_TYPES.values()},
            "description": "All matching entries.",
        }
    },
)
async def export(
    plane: PlaneDep,
    wanted: Wanted,
    before: Before = None,
    form: Annotated[
        Literal["jsonl", "csv"],
        Query(alias="format", description="The file format. jsonl has one JSON object per line."),
    ] = "jsonl",
) -> StreamingResponse:
    """Exports all matching audit entries as a file, newest first."""
    return StreamingResponse(
        _exported(plane, wanted, before, form),
        media_type=EXPORT_TYPES[form],
        headers={"Content-Disposition": f'attachment; filename="audit.{form}"'},
    )


async def _exported(
    plane: ControlPlane, wanted: dict[str, Any], before: int | None, form: str
) -> AsyncIterator[str]:
    if form == "csv":
        yield _csv_lines([list(EntryAnswer.model_fields)])
    while True:
        page = await run_shielded(_page(plane, wanted, before))
        if not page:
            return
        entries = [entry_view(entry).model_dump(mode="json") for entry in page]
        if form == "csv":
            yield _csv_lines([list(map(_csv_cell, entry.values())) for entry in entries])
        else:
            yield "".join(f"{json.dumps(entry)}\n" for entry in entries)
        before = page[-1].id


def _csv_lines(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    """Formats a value for CSV, so that spreadsheets don't interpret it as a formula."""
    if value is None:
        return ""
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


async def _page(
    plane: ControlPlane, wanted: dict[str, Any], before: int | None
) -> list[AuditEntry]:
    """Reads one page of entries. Each page has its own transaction, so that a slow client doesn't
    keep one open."""
    async with plane.central.read() as tx:
        return await notifications.find_audit_entries(
            tx, **wanted, before_id=before, limit=EXPORT_PAGE
        )


def entry_view(entry: AuditEntry) -> EntryAnswer:
    return EntryAnswer(
        id=entry.id,
        at=entry.at,
        actor=entry.actor,
        action=entry.action,
        subject=entry.subject,
        tenant_id=entry.tenant_id,
        details=dict(entry.details),
    )


operators_router = admin_router("/operators")


class NewPerson(Body):
    name: str = Field(description="The operator's name in the audit log.", examples=["ada"])
    role: Role = Role.OPERATOR


@operators_router.post("", status_code=status.HTTP_201_CREATED)
async def add(
    body: NewPerson, plane: PlaneDep, now: NowDep, owner: OwnerDep, request: Request
) -> MadeOperator:
    """Creates an operator with a key, which is shown only once. Requires an owner."""
    key = new_operator_key()
    async with plane.central.transaction() as tx:
        created = await tenants.create_operator(
            tx, NewOperator(uuid4(), body.name, body.role, key, created_by=owner), now=now
        )
        await record_audit(tx, owner, "add_operator", created.subject, now, role=created.role)
    try:
        # The owner may have been revoked in the meantime. In that case, the new operator is
        # removed.
        (await authenticate_operator(request)).require(Role.OWNER)
    except FleetError:
        async with plane.central.transaction() as tx:
            await tenants.revoke_operator(tx, created.name, now=now)
            await record_audit(tx, owner, "revoke_operator", created.subject, now)
        raise
    return MadeOperator(**_operator_fields(created), key=key)


@operators_router.get("")
async def list_operators(plane: PlaneDep) -> Operators:
    """Lists all operators, including revoked ones. The admin key from the settings isn't listed."""
    async with plane.central.read() as tx:
        return Operators(
            operators=[
                OperatorAnswer(**_operator_fields(operator))
                for operator in await tenants.list_operators(tx)
            ]
        )


@operators_router.post("/{name}/revoke")
async def revoke(name: str, plane: PlaneDep, now: NowDep, owner: OwnerDep) -> OperatorAnswer:
    """Revokes an operator's key immediately on every control plane. Requires an owner."""
    async with plane.central.transaction() as tx:
        revoked = await tenants.revoke_operator(tx, name, now=now)
        await record_audit(tx, owner, "revoke_operator", revoked.subject, now)
    return OperatorAnswer(**_operator_fields(revoked))


def _operator_fields(operator: Operator) -> dict[str, Any]:
    return {name: getattr(operator, name) for name in OperatorAnswer.model_fields}


ROWS_PER_CALL_MAX = 100_000


class Maintenance(Body):
    on: bool


class GoOn(Body):
    after: str | None = Field(default=None, description="`next` of the previous response.")


@router.get("/maintenance")
async def maintenance(plane: PlaneDep) -> Maintenance:
    async with plane.central.read() as tx:
        return Maintenance(on=await context.in_maintenance(tx))


@router.post("/maintenance")
async def set_maintenance(
    plane: PlaneDep, wanted: Maintenance, operator: OperatorDep
) -> Maintenance:
    """Turns maintenance mode on or off. In maintenance mode, running jobs finish and no new jobs
    are started."""
    async with plane.central.transaction() as tx:
        await context.set_maintenance(tx, is_on=wanted.on)
        await record_audit(tx, operator, "maintenance", "control", plane.clock(), on=wanted.on)
    plane.context.queue.order()
    return wanted


@router.post("/reconcile")
async def reconcile(plane: PlaneDep, wanted: GoOn | None = None) -> Repaired:
    """Repairs differences between jobs and dispatches that sweeps haven't repaired. Each repair is
    recorded in the audit log.

    One call checks about 100,000 rows. If there are more, the response contains `next`. Repeat the
    call with this value as `after` until `next` is null.
    """
    repairs = await repair(
        plane.context, after=wanted.after if wanted else None, rows_max=ROWS_PER_CALL_MAX
    )
    return Repaired.model_validate({name: getattr(repairs, name) for name in Repaired.model_fields})
