"""The figures of fleets, told to CloudWatch where a namespace is set."""

from collections.abc import Iterator, Mapping
from functools import partial

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Depth, Lane
from comfyfleet.loops.scaling import ASSUMED_SECONDS, CloudWatch, FleetFigures, require_aws
from comfyfleet.loops.sweeping import Sweep
from comfyfleet.plane import Plane
from comfyfleet.plane.figures import BUSY, IDLE, read_figures
from comfyfleet.plane.figures import FleetFigures as Known


def scaling_sweeps(plane: Plane) -> Iterator[Sweep]:
    settings = plane.settings
    if not settings.cloudwatch_namespace:
        return
    require_aws()
    watch = CloudWatch(settings.cloudwatch_namespace, target_seconds=settings.scale_target_seconds)
    yield Sweep("cloudwatch", partial(publish, plane, watch), settings.cloudwatch_seconds)


async def publish(plane: Plane, watch: CloudWatch) -> None:
    now = plane.clock()
    async with plane.central.look() as tx:
        figures = await read_figures(
            tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
        )
        depths = await dispatch.depths(tx)
        typical = await _typical_seconds(tx, depths)
    cap = plane.settings.max_fleet_workers
    told = [_told(fleet, typical_of(fleet, depths, typical), cap) for fleet in figures.fleets]
    await watch.publish(told, now=now)


async def _typical_seconds(tx: Tx, depths: Mapping[Lane, Depth]) -> dict[int, float]:
    """By workflow, of those for which a job waits."""
    waiting = {lane.workflow_id for lane, depth in depths.items() if depth.queued}
    return {each: await dispatch.typical_seconds(tx, each) or ASSUMED_SECONDS for each in waiting}


def typical_of(
    fleet: Known, depths: Mapping[Lane, Depth], typical: Mapping[int, float]
) -> float | None:
    """Of the jobs that wait for it: a slow workflow that nobody uses at the moment doesn't count."""
    waiting = [
        (depth.queued, typical[lane.workflow_id])
        for lane, depth in depths.items()
        if lane.stage == fleet.stage and lane.workflow_id in fleet.workflow_ids and depth.queued
    ]
    jobs = sum(queued for queued, _ in waiting)
    return sum(queued * seconds for queued, seconds in waiting) / jobs if jobs else None


def _told(fleet: Known, typical: float | None, cap: int) -> FleetFigures:
    live = fleet.workers.get(IDLE, 0) + fleet.workers.get(BUSY, 0)
    return FleetFigures(
        slug=fleet.slug,
        stage=fleet.stage,
        depth=fleet.queued,
        leased=fleet.leased,
        oldest_age_seconds=fleet.oldest_seconds,
        typical_seconds=typical,
        cap=cap if fleet.max_workers is None else fleet.max_workers,
        slots=fleet.slots,
        jobs_per_worker=max(1, fleet.slots // live) if live else 1,
    )
