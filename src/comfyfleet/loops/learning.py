"""What a fleet's backends can do, as one of its workers has put it into the store."""

import logging

from comfyfleet.fleets import objectinfo
from comfyfleet.fleets import service as fleets
from comfyfleet.fleets.model import Fleet
from comfyfleet.kernel.errors import FleetError
from comfyfleet.plane import Plane

log = logging.getLogger(__name__)


async def learn_object_infos(plane: Plane) -> None:
    """For each fleet whose newest worker reports another one than is known."""
    async with plane.central.look() as tx:
        reported = await fleets.reported_object_infos(tx)
        known = {fleet.id: fleet for fleet in await fleets.all_of(tx)}
    for fleet_id, content_hash in reported.items():
        fleet = known.get(fleet_id)
        if fleet is None or fleet.object_info_hash == content_hash:
            continue
        try:
            await _learn(plane, fleet, content_hash)
        except FleetError as error:
            log.warning("fleet %s: object_info was left out: %s", fleet.name, error.message)


async def _learn(plane: Plane, fleet: Fleet, content_hash: str) -> None:
    key = await objectinfo.take_in(plane.store, fleet, content_hash)
    if key is None:
        return
    async with plane.central.begin() as tx:
        await fleets.set_object_info(tx, fleet, key=key, content_hash=content_hash)
