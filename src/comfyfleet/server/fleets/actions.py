"""Changes fleets for operators. Each change and its audit entry are written in one transaction."""

from datetime import datetime

from comfyfleet.server.db import Database
from comfyfleet.server.fleets import service
from comfyfleet.server.fleets.model import Fleet
from comfyfleet.server.notifications.service import record_audit


async def set_starts_within(
    central: Database, slug: str, stage: str, *, seconds: int | None, operator: str, now: datetime
) -> Fleet:
    async with central.transaction() as tx:
        fleet = await service.get_fleet(tx, slug, stage)
        fleet = await service.set_starts_within(tx, fleet, seconds=seconds)
        await record_audit(tx, operator, "set_starts_within", fleet.subject, now, seconds=seconds)
    return fleet
