"""Figures of fleets, lanes, graph runs and pipeline runs at one moment, and what ended since the last reading."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from comfyfleet.server.db import Database, Pools, Tx, for_each_pool, metrics_queries
from comfyfleet.server.db.metrics_queries import EndedCountRow, FleetRow, WorkersRow
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import LaneDepth, QueueLane

# Rows that end now may be committed a little later: the last moments are left for the next look.
SETTLE = timedelta(seconds=5)
JOB_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)
GONE = "gone"
REVOKED, OFFLINE, DRAINING, BUSY, IDLE = "revoked", "offline", "draining", "busy", "idle"
STATES = (IDLE, BUSY, DRAINING, OFFLINE, REVOKED)


@dataclass(frozen=True, slots=True)
class LaneFigures:
    workflow: str
    stage: str
    provider: str
    queued: int
    leased: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """A workflow of several fleets counts in each."""

    slug: str
    stage: str
    queued: int
    leased: int
    oldest_seconds: float
    workers: Mapping[str, int]  # by state
    slots: int  # how many jobs its live workers run at once
    max_workers: int | None
    workflow_ids: frozenset[int]
    fleet_id: int = 0


@dataclass(frozen=True, slots=True)
class SystemFigures:
    lanes: Sequence[LaneFigures]
    fleets: Sequence[FleetFigures]


async def read_figures(tx: Tx, *, now: datetime, offline_after_seconds: int) -> SystemFigures:
    depths = await dispatch.depths(tx)
    slugs = await metrics_queries.workflow_slugs(tx)
    assigned = defaultdict(set)
    for fleet_id, workflow_id in await metrics_queries.assignments(tx):
        assigned[fleet_id].add(workflow_id)
    workers = defaultdict(list)
    offline_before = now - timedelta(seconds=offline_after_seconds)
    for alike in await metrics_queries.workers_by_state(tx, offline_before=offline_before):
        workers[alike.fleet_id].append(alike)
    return SystemFigures(
        lanes=[_lane(slugs, lane, depth, now) for lane, depth in depths.items()],
        fleets=[
            _fleet(
                fleet,
                frozenset(assigned[fleet.id]),
                workers[fleet.id],
                depths,
                now,
            )
            for fleet in await metrics_queries.all_fleets(tx)
        ],
    )


def state_of(alike: WorkersRow) -> str:
    if not alike.is_approved:
        return REVOKED
    if alike.is_offline:
        return OFFLINE
    if alike.is_draining:
        return DRAINING
    return BUSY if alike.is_busy else IDLE


def _lane(
    slugs: Mapping[int, str], lane: QueueLane, depth: LaneDepth, now: datetime
) -> LaneFigures:
    slug = slugs.get(lane.workflow_id, GONE)
    return LaneFigures(
        slug, lane.stage, lane.provider, depth.queued, depth.leased, _age(depth, now)
    )


def _fleet(
    fleet: FleetRow,
    workflow_ids: frozenset[int],
    workers: Sequence[WorkersRow],
    depths: Mapping[QueueLane, LaneDepth],
    now: datetime,
) -> FleetFigures:
    mine = [
        depth
        for lane, depth in depths.items()
        if lane.stage == fleet.stage and lane.workflow_id in workflow_ids
    ]
    by_state: Counter[str] = Counter()
    for alike in workers:
        by_state[state_of(alike)] += alike.workers
    return FleetFigures(
        slug=fleet.slug,
        stage=fleet.stage,
        queued=sum(depth.queued for depth in mine),
        leased=sum(depth.leased for depth in mine),
        oldest_seconds=max((_age(depth, now) for depth in mine), default=0.0),
        workers=by_state,
        slots=sum(each.slots for each in workers if state_of(each) in (IDLE, BUSY)),
        max_workers=fleet.max_workers,
        workflow_ids=workflow_ids,
        fleet_id=fleet.id,
    )


def _age(depth: LaneDepth, now: datetime) -> float:
    if depth.oldest_queued_at is None:
        return 0.0
    return max(0.0, (now - depth.oldest_queued_at).total_seconds())


@dataclass(slots=True)
class EndedCounts:
    """Sums since the process began: of all control planes, as the database has them."""

    jobs: int = 0
    timed: int = 0
    seconds: float = 0.0
    at_most: list[int] = field(default_factory=lambda: [0] * len(JOB_SECONDS))

    def add(self, row: EndedCountRow) -> None:
        self.jobs += row.jobs
        self.timed += row.timed
        self.seconds += row.seconds
        self.at_most = [mine + more for mine, more in zip(self.at_most, row.at_most, strict=True)]


class OutcomeCounters:
    """Counters that the database feeds: each look adds what ended since the one before."""

    def __init__(self, since: datetime) -> None:
        self._until = since
        self.sums: dict[tuple[str, str, str], EndedCounts] = {}  # workflow, stage, outcome

    async def look(self, central: Database, now: datetime) -> None:
        until = now - SETTLE
        if until <= self._until:
            return
        after, self._until = self._until, until
        try:
            async with central.read() as tx:
                slugs = await metrics_queries.workflow_slugs(tx)
                rows = await metrics_queries.ended_counts(
                    tx, after=after, until=until, buckets=JOB_SECONDS
                )
        except BaseException:
            self._until = after  # nothing was counted; the next look starts there again
            raise
        for row in rows:
            key = (slugs.get(row.workflow_id, GONE), row.stage, row.status)
            self.sums.setdefault(key, EndedCounts()).add(row)


GRAPH_RUNS = ("pending", "running", "waiting_for_user")
PIPELINE_RUNS = ("active", "paused")
KINDS = ("graph", "pipeline")
JOBS = ("queued", "processing")


@dataclass(frozen=True, slots=True)
class RunFigures:
    graph_runs: Mapping[str, int]  # that go on, by status
    pipeline_runs: Mapping[str, int]
    jobs: Mapping[tuple[str, str], int]  # in flight, by kind of run and status


async def read_run_figures(pools: Pools) -> dict[str, RunFigures]:
    """By pool."""
    return await for_each_pool(pools, _read, "its runs are not counted")


async def _read(pool: Database) -> RunFigures:
    async with pool.read() as tx:
        return RunFigures(
            graph_runs=await metrics_queries.active_graph_runs(tx),
            pipeline_runs=await metrics_queries.pipeline_runs_by_status(tx),
            jobs=await metrics_queries.jobs_of_runs(tx),
        )
