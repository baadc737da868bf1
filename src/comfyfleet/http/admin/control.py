"""The control plane as a whole: maintenance, reconcile."""

from fastapi import APIRouter, Depends
from pydantic import BaseModel

from comfyfleet.audit import service as audit
from comfyfleet.http.auth import ADMIN, admin
from comfyfleet.http.given import GivenPlane
from comfyfleet.jobs import shared
from comfyfleet.jobs.reconciling import reconcile as repair

router = APIRouter(prefix="/api/admin", tags=["admin"], dependencies=[Depends(admin)])


class Maintenance(BaseModel):
    on: bool


class Repaired(BaseModel):
    dispatches_ended: int
    dispatches_made: int
    pools_skipped: int


@router.get("/maintenance")
async def maintenance(plane: GivenPlane) -> Maintenance:
    async with plane.central.look() as tx:
        return Maintenance(on=await shared.in_maintenance(tx))


@router.post("/maintenance")
async def set_maintenance(plane: GivenPlane, wanted: Maintenance) -> Maintenance:
    """On: no new leases, running jobs end. Off: work goes on."""
    async with plane.central.begin() as tx:
        await shared.set_maintenance(tx, is_on=wanted.on)
        await audit.record(
            tx,
            actor=ADMIN,
            action="maintenance",
            subject="control",
            now=plane.clock(),
            details={"on": wanted.on},
        )
    plane.sides.queue.dismiss()
    return wanted


@router.post("/reconcile")
async def reconcile(plane: GivenPlane) -> Repaired:
    """Looks for what no sweep has put right, and repairs it; each repair is in the audit."""
    repairs = await repair(plane.sides)
    return Repaired(
        dispatches_ended=repairs.dispatches_ended,
        dispatches_made=repairs.dispatches_made,
        pools_skipped=repairs.pools_skipped,
    )
