"""The figures of fleets, told to CloudWatch where a namespace is set."""

from collections.abc import Iterator
from functools import partial

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.loops.scaling import CloudWatch, FleetFigures
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane
from comfyfleet.plane.figures import FleetFigures as Known
from comfyfleet.plane.figures import read_figures


def scaling_sweeps(plane: Plane) -> Iterator[Sweep]:
    if not plane.settings.cloudwatch_namespace:
        return
    watch = CloudWatch(plane.settings.cloudwatch_namespace)
    yield Sweep("cloudwatch", partial(publish, plane, watch), plane.settings.cloudwatch_seconds)


async def publish(plane: Plane, watch: CloudWatch) -> None:
    now = plane.clock()
    async with plane.central.look() as tx:
        figures = await read_figures(
            tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
        )
        told = [await _told(tx, plane, fleet) for fleet in figures.fleets]
    await watch.publish(told, now=now)


async def _told(tx: Tx, plane: Plane, fleet: Known) -> FleetFigures:
    """An idle fleet needs no look at how long its jobs take."""
    typical = []
    if fleet.queued:
        typical = [await dispatch.typical_seconds(tx, each) for each in fleet.workflow_ids]
    known = [seconds for seconds in typical if seconds is not None]
    return FleetFigures(
        slug=fleet.slug,
        stage=fleet.stage,
        depth=fleet.queued,
        leased=fleet.leased,
        oldest_age_seconds=fleet.oldest_seconds,
        typical_seconds=max(known, default=None),
        cap=fleet.max_workers or plane.settings.max_fleet_workers,
        slots=fleet.slots,
    )
