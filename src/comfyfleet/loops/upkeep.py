"""The sweeps that keep the house: retention, leftovers, erasing, webhooks, events, the books."""

import logging
from collections.abc import Iterator
from functools import partial

from comfyfleet.db.outages import level_of
from comfyfleet.files import service as files
from comfyfleet.kernel.errors import FleetError
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.loops.webhooks import deliver_due
from comfyfleet.plane import Plane
from comfyfleet.upkeep.checking import PAGE, check_files
from comfyfleet.upkeep.erasing import erase_pending
from comfyfleet.upkeep.expired_rows import ROWS_PER_STEP, STEPS_PER_PASS_MAX, thin
from comfyfleet.upkeep.leftovers import remove_leftovers
from comfyfleet.upkeep.retaining import expire_old
from comfyfleet.upkeep.verifying import record, verify

log = logging.getLogger(__name__)
ERASING_SECONDS = 5.0
WEBHOOK_SECONDS = 2.0
HOUR_SECONDS = 3600.0


def upkeep_sweeps(plane: Plane) -> Iterator[Sweep]:
    often = plane.settings.sweep_seconds
    yield Sweep("webhooks", partial(deliver_due, plane), min(often, WEBHOOK_SECONDS))
    yield Sweep("files", partial(check, plane), often)
    yield Sweep("erasing", partial(erase_pending, plane.sides), ERASING_SECONDS)
    yield Sweep("retention", partial(retain, plane), HOUR_SECONDS)
    yield Sweep("leftovers", partial(clear_leftovers, plane), HOUR_SECONDS)
    yield Sweep("prune", partial(prune, plane), HOUR_SECONDS)
    yield Sweep("storage", partial(recount, plane), HOUR_SECONDS)
    yield Sweep("ledger", partial(check_ledger, plane), HOUR_SECONDS)


async def check(plane: Plane) -> bool:
    """True: there is more. A pool that is down holds up no other."""
    has_more = False
    for name, pool in plane.pools.items():
        try:
            has_more |= await check_files(plane.sides, pool) == PAGE
        except FleetError as error:
            log.log(level_of(error), "files of pool %s were not checked: %s", name, error.message)
    return has_more


async def retain(plane: Plane) -> None:
    for tenant_id, count in (await expire_old(plane.sides)).items():
        plane.meters.removed.labels("retention").inc(count)
        log.info("%s files of tenant %s went: their time was up", count, tenant_id)


async def clear_leftovers(plane: Plane) -> None:
    count = await remove_leftovers(plane.sides)
    plane.meters.removed.labels("leftover").inc(count)
    if count:
        log.info("%s objects that no row named were removed", count)


async def prune(plane: Plane) -> bool:
    """True: there is more."""
    gone = await thin(plane.sides)
    for what, count in gone.items():
        plane.meters.removed.labels(what).inc(count)
    told = ", ".join(f"{count} {what}" for what, count in gone.items() if count)
    if told:
        log.info("removed, as they were old: %s", told)
    return any(count >= ROWS_PER_STEP * STEPS_PER_PASS_MAX for count in gone.values())


async def recount(plane: Plane) -> None:
    for name, pool in plane.pools.items():
        try:
            missing = await files.recount(pool)
        except FleetError as error:
            log.log(level_of(error), "storage of pool %s was not counted: %s", name, error.message)
            continue
        for tenant_id, size in missing.items():
            log.info("storage of tenant %s was counted %s bytes too low", tenant_id, size)


async def check_ledger(plane: Plane) -> None:
    drifts, left_out = await verify(plane.sides)
    for name, error in left_out.items():
        log.log(level_of(error), "the ledger of pool %s was not verified: %s", name, error.message)
    if drifts or not left_out:
        plane.meters.drifts.set(len(drifts))
    for drift in drifts:
        log.error(
            "the ledger of tenant %s does not add up (%s, user %s, job %s): %s",
            drift.tenant_id,
            drift.fault,
            drift.user_id,
            drift.job_id,
            drift.message,
        )
    if drifts:
        await record(plane.sides, drifts, now=plane.clock())
