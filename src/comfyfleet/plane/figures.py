"""How the system stands at one moment, and what ended since it was last asked."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from comfyfleet.db import Database, Tx
from comfyfleet.dispatch import service as dispatch
from comfyfleet.dispatch.model import Depth, Lane
from comfyfleet.plane import store
from comfyfleet.plane.store import EndedRow, FleetRow, WorkersRow

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
class Figures:
    lanes: Sequence[LaneFigures]
    fleets: Sequence[FleetFigures]


async def read_figures(tx: Tx, *, now: datetime, offline_after_seconds: int) -> Figures:
    depths = await dispatch.depths(tx)
    slugs = await store.slugs(tx)
    assigned = defaultdict(set)
    for fleet_id, workflow_id in await store.assignments(tx):
        assigned[fleet_id].add(workflow_id)
    workers = defaultdict(list)
    offline_before = now - timedelta(seconds=offline_after_seconds)
    for alike in await store.workers_by_state(tx, offline_before=offline_before):
        workers[alike.fleet_id].append(alike)
    return Figures(
        lanes=[_lane(slugs, lane, depth, now) for lane, depth in depths.items()],
        fleets=[
            _fleet(
                fleet,
                frozenset(assigned[fleet.id]),
                workers[fleet.id],
                depths,
                now,
            )
            for fleet in await store.all_fleets(tx)
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


def _lane(slugs: Mapping[int, str], lane: Lane, depth: Depth, now: datetime) -> LaneFigures:
    slug = slugs.get(lane.workflow_id, GONE)
    return LaneFigures(
        slug, lane.stage, lane.provider, depth.queued, depth.leased, _age(depth, now)
    )


def _fleet(
    fleet: FleetRow,
    workflow_ids: frozenset[int],
    workers: Sequence[WorkersRow],
    depths: Mapping[Lane, Depth],
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


def _age(depth: Depth, now: datetime) -> float:
    if depth.oldest_queued_at is None:
        return 0.0
    return max(0.0, (now - depth.oldest_queued_at).total_seconds())


@dataclass(slots=True)
class Ended:
    """Sums since the process began: of all control planes, as the database has them."""

    jobs: int = 0
    timed: int = 0
    seconds: float = 0.0
    at_most: list[int] = field(default_factory=lambda: [0] * len(JOB_SECONDS))

    def add(self, row: EndedRow) -> None:
        self.jobs += row.jobs
        self.timed += row.timed
        self.seconds += row.seconds
        self.at_most = [mine + more for mine, more in zip(self.at_most, row.at_most, strict=True)]


class Outcomes:
    """Counters that the database feeds: each look adds what ended since the one before."""

    def __init__(self, since: datetime) -> None:
        self._until = since
        self.sums: dict[tuple[str, str, str], Ended] = {}  # workflow, stage, outcome

    async def look(self, central: Database, now: datetime) -> None:
        until = now - SETTLE
        if until <= self._until:
            return
        after, self._until = self._until, until
        try:
            async with central.look() as tx:
                slugs = await store.slugs(tx)
                rows = await store.ended(tx, after=after, until=until, buckets=JOB_SECONDS)
        except BaseException:
            self._until = after  # nothing was counted; the next look starts there again
            raise
        for row in rows:
            key = (slugs.get(row.workflow_id, GONE), row.stage, row.status)
            self.sums.setdefault(key, Ended()).add(row)
