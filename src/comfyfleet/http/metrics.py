"""`/metrics` for Prometheus: counters of this process, and figures read when they are asked for.

What the database knows (queue, workers, outcomes) is the same on every control plane, so take
`max` over them, not `sum`. What is counted here (API calls, sweeps) is each one's own.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from comfyfleet.kernel.errors import FleetError
from comfyfleet.plane import Plane
from comfyfleet.plane.figures import JOB_SECONDS, STATES, Ended, Figures, Outcomes, read_figures

logger = logging.getLogger(__name__)
# Several that ask at once, or one that asks too often, cost the database nothing.
FRESH_SECONDS = 2.0
PREFIX = "comfyfleet"


def metrics_router(plane: Plane) -> APIRouter:
    router = APIRouter(tags=["health"])
    reading = _Reading(plane)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """In Prometheus's text format. Without the database, what this process itself has counted."""
        try:
            registry = CollectorRegistry()
            registry.register(await reading.collector())
            plane.meters.readable.set(1)
            figures = generate_latest(registry)
        except FleetError as error:
            logger.warning("figures can't be read: %s", error.message)
            plane.meters.readable.set(0)
            figures = b""
        text = generate_latest(plane.meters.registry) + figures
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


class _Reading:
    """One reading for all who ask within a moment."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._outcomes = Outcomes(plane.clock())
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[float, _Snapshot] | None = None

    async def collector(self) -> "_Snapshot":
        async with self._one_at_a_time:
            now = asyncio.get_running_loop().time()
            if self._last is None or now - self._last[0] > FRESH_SECONDS:
                self._last = (now, await self._read())
            return self._last[1]

    async def _read(self) -> "_Snapshot":
        plane, now = self._plane, self._plane.clock()
        async with plane.central.look() as tx:
            figures = await read_figures(
                tx, now=now, offline_after_seconds=plane.settings.offline_after_seconds
            )
        await self._outcomes.look(plane.central, now)
        return _Snapshot(figures, dict(self._outcomes.sums), plane.queue.waiting())


@dataclass(frozen=True, eq=False)
class _Snapshot(Collector):
    figures: Figures
    ended: dict[tuple[str, str, str], Ended]
    waiting: int

    def collect(self) -> Iterable[Metric]:
        yield from self._lanes()
        yield from self._fleets()
        yield from self._outcomes()
        yield _gauge("waiting_polls", "Long polls of this process", (), [((), self.waiting)])

    def _lanes(self) -> Iterator[Metric]:
        names = ("workflow", "stage", "provider")
        lanes = [((each.workflow, each.stage, each.provider), each) for each in self.figures.lanes]
        for name, text, field in (
            ("queue_depth", "Jobs that wait", "queued"),
            ("leases", "Jobs that a worker holds", "leased"),
            ("queue_oldest_seconds", "Age of the oldest job that waits", "oldest_seconds"),
        ):
            yield _gauge(name, text, names, [(key, getattr(each, field)) for key, each in lanes])

    def _fleets(self) -> Iterator[Metric]:
        names = ("fleet", "stage")
        fleets = [((each.slug, each.stage), each) for each in self.figures.fleets]
        for name, text, field in (
            ("fleet_queue_depth", "Jobs that wait and that the fleet may run", "queued"),
            ("fleet_leases", "Leased jobs of the fleet's workflows", "leased"),
            ("fleet_queue_oldest_seconds", "Age of the oldest of them", "oldest_seconds"),
            ("fleet_slots", "Jobs that its live workers run at once", "slots"),
        ):
            yield _gauge(name, text, names, [(key, getattr(each, field)) for key, each in fleets])
        states = [
            ((*key, state), each.workers.get(state, 0)) for key, each in fleets for state in STATES
        ]
        yield _gauge("workers", "Workers by what they do", (*names, "state"), states)

    def _outcomes(self) -> Iterator[Metric]:
        ended = CounterMetricFamily(
            f"{PREFIX}_jobs_ended",
            "Jobs that ended since this process began",
            labels=("workflow", "stage", "outcome"),
        )
        durations = HistogramMetricFamily(
            f"{PREFIX}_job_seconds",
            "How long their prompts ran",
            labels=("workflow", "stage", "outcome"),
        )
        for key, sums in self.ended.items():
            ended.add_metric(key, sums.jobs)
            limits = [str(float(most)) for most in JOB_SECONDS]
            buckets = [*zip(limits, map(float, sums.at_most), strict=True), ("+Inf", sums.timed)]
            durations.add_metric(key, buckets, sum_value=sums.seconds)
        yield ended
        yield durations


def _gauge(
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family
