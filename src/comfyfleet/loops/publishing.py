"""A sweep that tells CloudWatch how each fleet stands, and how many workers it wants."""

from collections.abc import Mapping

from comfyfleet.db import Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Depth, Lane
from comfyfleet.loops.scaling import ASSUMED_SECONDS, CloudWatch, FleetFigures
from comfyfleet.plane import Plane, figures


class Publishing:
    """On PostgreSQL one control plane at a time does it, so that figures are told once."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._cloudwatch = CloudWatch(
            plane.settings.cloudwatch_namespace,
            target_seconds=plane.settings.scale_target_seconds,
        )

    async def __call__(self) -> None:
        now = self._plane.clock()
        async with self._plane.central.look() as tx:
            fleets = await self._fleets(tx)
        await self._cloudwatch.publish(fleets, now=now)

    async def _fleets(self, tx: Tx) -> list[FleetFigures]:
        settings = self._plane.settings
        found = await figures.read_figures(
            tx,
            now=self._plane.clock(),
            offline_after_seconds=settings.offline_after_seconds,
        )
        depths = await dispatch.depths(tx)
        typical = {
            workflow_id: await dispatch.typical_seconds(tx, workflow_id) or ASSUMED_SECONDS
            for workflow_id in {lane.workflow_id for lane in depths}
        }
        return [
            _figures(each, typical_of(each, depths, typical), settings.max_fleet_workers)
            for each in found.fleets
        ]


def typical_of(
    fleet: figures.FleetFigures, depths: Mapping[Lane, Depth], typical: Mapping[int, float]
) -> float | None:
    """Of the jobs that wait for it: a slow workflow that nobody uses at the moment doesn't count."""
    waiting = [
        (depth.queued, typical[lane.workflow_id])
        for lane, depth in depths.items()
        if lane.stage == fleet.stage and lane.workflow_id in fleet.workflow_ids and depth.queued
    ]
    jobs = sum(queued for queued, _ in waiting)
    return sum(queued * seconds for queued, seconds in waiting) / jobs if jobs else None


def _figures(fleet: figures.FleetFigures, typical: float | None, cap: int) -> FleetFigures:
    live = fleet.workers.get(figures.IDLE, 0) + fleet.workers.get(figures.BUSY, 0)
    return FleetFigures(
        slug=fleet.slug,
        stage=fleet.stage,
        depth=fleet.queued,
        leased=fleet.leased,
        oldest_age_seconds=fleet.oldest_seconds,
        typical_seconds=typical,
        cap=cap if fleet.max_workers is None else fleet.max_workers,
        # Without any worker alive, what is leased is about to come back.
        slots=fleet.slots,
        jobs_per_worker=max(1, fleet.slots // live) if live else 1,
    )
