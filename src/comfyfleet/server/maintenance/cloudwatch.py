"""Publishes the number of workers that each fleet needs to CloudWatch, where auto-scaling groups
read it."""

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from typing import Any

from comfyfleet.errors import missing_extra
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.db import Tx
from comfyfleet.server.maintenance.runner import Sweep
from comfyfleet.server.metrics import BUSY, IDLE, SystemFigures, read_figures
from comfyfleet.server.metrics import FleetFigures as Known
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import LaneDepth, QueueLane

logger = logging.getLogger(__name__)

TARGET_SECONDS = 300.0
ASSUMED_SECONDS = 60.0  # duration of a job if its workflow has never run
OVERDUE_MAX = 4
METRICS_PER_CALL_MAX = 1000  # CloudWatch's limit per call
METRICS_PER_FLEET = 4
CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX = 3, 10


@dataclass(frozen=True, slots=True)
class ScalingFigures:
    """A fleet's metrics at a single point in time. A workflow that belongs to several fleets counts
    in each of them.

    `slots` is the number of jobs that its live workers can run concurrently. Leases beyond that are
    prefetched."""

    slug: str
    stage: str
    depth: int
    leased: int
    oldest_age_seconds: float = 0.0
    typical_seconds: float | None = None
    cap: int = 50
    slots: int | None = None
    jobs_per_worker: int = 1


def wanted_workers(
    *,
    depth: int,
    leased: int,
    oldest_age: float,
    typical_seconds: float | None,
    cap: int,
    slots: int | None = None,
    jobs_per_worker: int = 1,
    target_seconds: float = TARGET_SECONDS,
) -> int:
    """Returns how many workers are needed to continue all running jobs and to start all waiting
    jobs within the target time. Returns zero if there are no jobs.

    If the oldest job has waited for the target time, twice as many are needed, and so on up to a
    limit. In that case, the typical duration was wrong, or workers start too slowly. There are
    never more workers than jobs."""
    if depth + leased == 0 or cap <= 0:
        return 0
    running = leased if slots is None else min(leased, slots)
    waiting = depth + leased - running
    overdue = min(OVERDUE_MAX, int(max(0.0, oldest_age) // target_seconds))
    seconds = waiting * (typical_seconds or ASSUMED_SECONDS) * (1 + overdue)
    at_once = running + math.ceil(min(waiting, seconds / target_seconds))
    return min(cap, max(1, math.ceil(at_once / max(1, jobs_per_worker))))


def wanted_by(figures: ScalingFigures, *, target_seconds: float = TARGET_SECONDS) -> int:
    return wanted_workers(
        depth=figures.depth,
        leased=figures.leased,
        oldest_age=figures.oldest_age_seconds,
        typical_seconds=figures.typical_seconds,
        cap=figures.cap,
        slots=figures.slots,
        jobs_per_worker=figures.jobs_per_worker,
        target_seconds=target_seconds,
    )


def to_metric_data(
    figures: ScalingFigures, *, now: datetime, target_seconds: float = TARGET_SECONDS
) -> list[dict[str, Any]]:
    """Converts the metrics to CloudWatch's format."""
    workers = wanted_by(figures, target_seconds=target_seconds)
    values = (
        ("QueueDepth", figures.depth, "Count"),
        ("OldestAgeSeconds", max(0.0, figures.oldest_age_seconds), "Seconds"),
        ("Leased", figures.leased, "Count"),
        ("WantedWorkers", workers, "Count"),
    )
    dimensions = [
        {"Name": "Fleet", "Value": figures.slug},
        {"Name": "Stage", "Value": figures.stage},
    ]
    return [
        {
            "MetricName": name,
            "Dimensions": dimensions,
            "Timestamp": now,
            "Value": float(value),
            "Unit": unit,
        }
        for name, value, unit in values
    ]


class CloudWatch:
    """Publishes metrics of fleets. An error is logged, and the next pass publishes newer
    metrics."""

    def __init__(self, namespace: str, *, target_seconds: float = TARGET_SECONDS) -> None:
        self._namespace = namespace
        self._target_seconds = target_seconds
        self._client: Any = None

    async def publish(self, fleets: Sequence[ScalingFigures], *, now: datetime) -> bool:
        """Publishes the metrics. Returns whether all of them were accepted."""
        if not fleets:
            return True
        return await asyncio.to_thread(self._publish, fleets, now)

    def _publish(self, fleets: Sequence[ScalingFigures], now: datetime) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            client = self._client = self._client or _open_client()
            for metrics in self._calls(fleets, now):
                client.put_metric_data(Namespace=self._namespace, MetricData=metrics)
        except (BotoCoreError, ClientError) as error:
            logger.warning("CloudWatch did not accept the metrics of the fleets: %s", error)
            return False
        return True

    def _calls(self, fleets: Sequence[ScalingFigures], now: datetime) -> Iterator[list[Any]]:
        """Splits the metrics into calls. The metrics of a fleet are never split, because they
        belong to the same time."""
        fleets_per_call = METRICS_PER_CALL_MAX // METRICS_PER_FLEET
        for start in range(0, len(fleets), fleets_per_call):
            yield [
                metric
                for fleet_figures in fleets[start : start + fleets_per_call]
                for metric in to_metric_data(
                    fleet_figures, now=now, target_seconds=self._target_seconds
                )
            ]


def require_aws() -> None:
    """Raises an error at startup if AWS can't be used. Otherwise, the problem would only appear in
    the log of each pass."""
    if find_spec("boto3") is None:
        raise missing_extra("COMFYFLEET_CLOUDWATCH_NAMESPACE", "boto3", "aws")


def _open_client() -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        connect_timeout=CONNECT_SECONDS_MAX,
        read_timeout=ANSWER_SECONDS_MAX,
        retries={"total_max_attempts": 2},
    )
    return boto3.session.Session().client("cloudwatch", config=config)


def scaling_sweeps(plane: ControlPlane) -> Iterator[Sweep]:
    settings = plane.settings
    if not settings.cloudwatch_namespace:
        return
    require_aws()
    watch = CloudWatch(settings.cloudwatch_namespace, target_seconds=settings.scale_target_seconds)
    yield Sweep("cloudwatch", partial(publish_fleets, plane, watch), settings.cloudwatch_seconds)


async def publish_fleets(plane: ControlPlane, watch: CloudWatch) -> None:
    now = plane.clock()
    async with plane.central.read() as tx:
        figures = await read_figures(
            tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
        )
        metrics = await scaling_figures(tx, figures, cap=plane.settings.max_fleet_workers)
    await watch.publish(metrics, now=now)


async def scaling_figures(tx: Tx, figures: SystemFigures, *, cap: int) -> list[ScalingFigures]:
    """Returns the metrics of each fleet. `cap` applies to fleets without a limit of their own."""
    depths = await dispatch.depths(tx)
    typical = await _typical_seconds(tx, depths)
    return [
        _scaling_figures(fleet, typical_of(fleet, depths, typical), cap) for fleet in figures.fleets
    ]


async def _typical_seconds(tx: Tx, depths: Mapping[QueueLane, LaneDepth]) -> dict[int, float]:
    """Returns the typical durations of the workflows with queued jobs."""
    waiting = {lane.workflow_id for lane, depth in depths.items() if depth.queued}
    return {
        workflow_id: await dispatch.typical_seconds(tx, workflow_id) or ASSUMED_SECONDS
        for workflow_id in waiting
    }


def typical_of(
    fleet: Known, depths: Mapping[QueueLane, LaneDepth], typical: Mapping[int, float]
) -> float | None:
    """Returns the mean duration of the queued jobs. A slow workflow without queued jobs doesn't
    count."""
    waiting = [
        (depth.queued, typical[lane.workflow_id])
        for lane, depth in depths.items()
        if lane.stage == fleet.stage and lane.workflow_id in fleet.workflow_ids and depth.queued
    ]
    jobs = sum(queued for queued, _ in waiting)
    return sum(queued * seconds for queued, seconds in waiting) / jobs if jobs else None


def _scaling_figures(fleet: Known, typical: float | None, cap: int) -> ScalingFigures:
    live = fleet.workers.get(IDLE, 0) + fleet.workers.get(BUSY, 0)
    return ScalingFigures(
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
