"""The control plane as a whole: maintenance, reconcile."""

from pydantic import BaseModel, Field

from comfyfleet.audit import service as audit
from comfyfleet.http.admin.routing import Body, Operator, admin_router
from comfyfleet.http.given import GivenPlane
from comfyfleet.jobs import shared
from comfyfleet.jobs.reconciling import reconcile as repair

router = admin_router()
ROWS_PER_CALL_MAX = 100_000


class Maintenance(Body):
    on: bool


class GoOn(Body):
    after: str | None = Field(default=None, description="`next` of an earlier answer.")


class Repaired(BaseModel):
    dispatches_ended: int
    dispatches_made: int
    pools_skipped: int
    rows_read: int
    next: str | None = Field(description="Ask on with after=next; null: all was read.")


@router.get("/maintenance")
async def maintenance(plane: GivenPlane) -> Maintenance:
    async with plane.central.look() as tx:
        return Maintenance(on=await shared.in_maintenance(tx))


@router.post("/maintenance")
async def set_maintenance(
    plane: GivenPlane, wanted: Maintenance, operator: Operator
) -> Maintenance:
    """On: no new leases, running jobs end. Off: work goes on."""
    async with plane.central.begin() as tx:
        await shared.set_maintenance(tx, is_on=wanted.on)
        await audit.record(
            tx,
            actor=operator,
            action="maintenance",
            subject="control",
            now=plane.clock(),
            details={"on": wanted.on},
        )
    plane.sides.queue.order()
    return wanted


@router.post("/reconcile")
async def reconcile(plane: GivenPlane, wanted: GoOn | None = None) -> Repaired:
    """Looks for what no sweep has put right, and repairs it; each repair is in the audit.

    One call reads some 100,000 rows and then answers with `next`: ask on with it until it is null.
    """
    repairs = await repair(
        plane.sides, after=wanted.after if wanted else None, rows_max=ROWS_PER_CALL_MAX
    )
    return Repaired.model_validate({name: getattr(repairs, name) for name in Repaired.model_fields})
