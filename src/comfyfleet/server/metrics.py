"""Metrics of fleets, lanes, graph runs and pipeline runs: current values, counters and rollups.

Counters add the jobs that finished since the last read. Rollups are sums per minute, per quarter of
an hour and per two hours. They are stored in the central database, so that operators can see the
last week without another service. A rollup pass adds the minutes since the previous pass of any
control plane. It locks the row with the end of the previous pass and compares it with the value
that it started from, so that no minute is added twice.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from comfyfleet.server.db import Database, Pools, Tx, for_each_pool, metrics_queries
from comfyfleet.server.db.coordination import lock_state, read_state, write_state
from comfyfleet.server.db.metrics_queries import (
    MINUTE,
    MODEL_RUNS,
    QUARTER,
    ROLLUP_STEPS,
    TWO_HOURS,
    EndedCountRow,
    EndedJobsRow,
    FleetRow,
    WorkersRow,
    step_start,
)
from comfyfleet.server.queue import service as dispatch
from comfyfleet.server.queue.model import LaneDepth, QueueLane

# Jobs that finish now may be committed a little later, so each read leaves the last few seconds to
# the next read.
SETTLE = timedelta(seconds=5)
# Upper bounds of the histogram buckets for run times, in seconds.
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
    held: int = 0  # leased jobs that have not started

    @property
    def running(self) -> int:
        return self.leased - self.held


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The current values of a fleet. A workflow that several fleets run counts for each fleet."""

    slug: str
    stage: str
    queued: int
    leased: int
    oldest_seconds: float
    workers: Mapping[str, int]  # number of workers by state
    slots: int  # number of jobs that its online workers can run in parallel
    max_workers: int | None
    workflow_ids: frozenset[int]
    fleet_id: int = 0


@dataclass(frozen=True, slots=True)
class SystemFigures:
    lanes: Sequence[LaneFigures]
    fleets: Sequence[FleetFigures]


async def read_figures(tx: Tx, *, now: datetime, offline_after_seconds: int) -> SystemFigures:
    depths = await dispatch.depths(tx)
    held = await dispatch.count_held(tx)
    slugs = await metrics_queries.workflow_slugs(tx)
    assigned = defaultdict(set)
    for fleet_id, workflow_id in await metrics_queries.assignments(tx):
        assigned[fleet_id].add(workflow_id)
    workers = defaultdict(list)
    offline_before = now - timedelta(seconds=offline_after_seconds)
    for group in await metrics_queries.workers_by_state(tx, offline_before=offline_before):
        workers[group.fleet_id].append(group)
    return SystemFigures(
        lanes=[_lane(slugs, lane, depth, held.get(lane, 0), now) for lane, depth in depths.items()],
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


def state_of(group: WorkersRow) -> str:
    if not group.is_approved:
        return REVOKED
    if group.is_offline:
        return OFFLINE
    if group.is_draining:
        return DRAINING
    return BUSY if group.is_busy else IDLE


def _lane(
    slugs: Mapping[int, str], lane: QueueLane, depth: LaneDepth, held: int, now: datetime
) -> LaneFigures:
    return LaneFigures(
        workflow=slugs.get(lane.workflow_id, GONE),
        stage=lane.stage,
        provider=lane.provider,
        queued=depth.queued,
        leased=depth.leased,
        oldest_seconds=_age(depth, now),
        held=min(held, depth.leased),  # `held` was counted a moment later and may be larger
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
    for group in workers:
        by_state[state_of(group)] += group.workers
    return FleetFigures(
        slug=fleet.slug,
        stage=fleet.stage,
        queued=sum(depth.queued for depth in mine),
        leased=sum(depth.leased for depth in mine),
        oldest_seconds=max((_age(depth, now) for depth in mine), default=0.0),
        workers=by_state,
        slots=sum(group.slots for group in workers if state_of(group) in (IDLE, BUSY)),
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
    """Sums of all jobs that finished since this process started, on any control plane."""

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
    """Counters of finished jobs. Each read of the database adds the jobs since the last read."""

    def __init__(self, since: datetime) -> None:
        self._until = since
        self.sums: dict[tuple[str, str, str], EndedCounts] = {}  # by (workflow, stage, outcome)

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
            self._until = after  # nothing was counted, so the next read starts at the same time
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
    graph_runs: Mapping[str, int]  # active runs by status
    pipeline_runs: Mapping[str, int]
    jobs: Mapping[tuple[str, str], int]  # unfinished jobs by kind of run and status


async def read_run_figures(pools: Pools) -> dict[str, RunFigures]:
    """Returns the numbers of runs in each pool by name. Unavailable pools aren't included."""
    return await for_each_pool(pools, _read, "its runs can't be counted")


async def _read(pool: Database) -> RunFigures:
    async with pool.read() as tx:
        return RunFigures(
            graph_runs=await metrics_queries.active_graph_runs(tx),
            pipeline_runs=await metrics_queries.pipeline_runs_by_status(tx),
            jobs=await metrics_queries.jobs_of_runs(tx),
        )


STATE = "rollups"
# Jobs that finish now may be committed a little later by a control plane with a different clock.
ROLLUP_SETTLE = timedelta(seconds=10)
ONE_MINUTE = timedelta(seconds=MINUTE)
# Limit for one pass. After a longer outage of all control planes, earlier minutes are skipped.
MINUTES_PER_PASS_MAX = 60
# Queued and running jobs are sampled once per pass, which usually covers one minute. The sample is
# used for all minutes within this time.
SAMPLED_FOR = timedelta(minutes=2)
WORKFLOWS_PER_MINUTE_MAX = 20
# How long the sums of each step are stored.
RETENTION = {MINUTE: timedelta(hours=2), QUARTER: timedelta(hours=26), TWO_HOURS: timedelta(days=8)}
# Upper bounds of histogram buckets in seconds, from 50 ms to about a day. Each is 1.5 times the
# previous one.
BUCKETS = tuple(round(0.05 * 1.5**number, 4) for number in range(36))
WAIT, RUN, OF_WORKFLOW = "wait:", "run:", "workflow:"


class RollupRange(NamedTuple):
    """The length of a chart's time range, and the length of its steps."""

    seconds: int
    step_seconds: int


RANGES: Mapping[str, RollupRange] = {
    "1h": RollupRange(3_600, MINUTE),
    "24h": RollupRange(86_400, QUARTER),
    "7d": RollupRange(7 * 86_400, TWO_HOURS),
}


class RollupMark(NamedTuple):
    """The times up to which rollups have been added, for the central database and each pool."""

    until: datetime
    pools: Mapping[str, datetime]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RollupMark":
        pools = {name: datetime.fromisoformat(at) for name, at in state["pools"].items()}
        return cls(datetime.fromisoformat(state["until"]), pools)

    def as_state(self) -> dict[str, Any]:
        pools = {name: at.isoformat() for name, at in self.pools.items()}
        return {"until": self.until.isoformat(), "pools": pools}


@dataclass
class RollupPass:
    """Updates the rollups of an installation."""

    central: Database
    pools: Pools
    offline_after_seconds: int
    _idle_until: datetime | None = field(default=None, init=False)

    async def is_due(self, now: datetime) -> bool:
        """Checks whether any complete minute with activity is missing from the rollups. Needs at
        most three small reads."""
        until = step_start(now - ROLLUP_SETTLE, MINUTE)
        if self._idle_until is not None and self._idle_until >= until:
            return False
        async with self.central.read() as tx:
            mark = await _read_mark(tx, until)
            is_due = mark.until < until and await _is_anything_there(tx, mark, until)
        self._idle_until = None if is_due else until
        return is_due

    async def run(self, now: datetime) -> None:
        until = step_start(now - ROLLUP_SETTLE, MINUTE)
        async with self.central.read() as tx:
            mark = await _read_mark(tx, until)
        if mark.until >= until:
            return
        tokens = await self._read_tokens(mark, until)
        async with self.central.transaction() as tx:
            locked = await lock_state(tx, STATE, mark.as_state())
            if RollupMark.from_state(locked) != mark:
                return  # another control plane has already added these minutes
            await self._add_minutes(tx, mark, until, sum(tokens.values()))
            waiting = {name: mark.pools.get(name, mark.until) for name in self.pools}
            pools = {**waiting, **dict.fromkeys(tokens, until)}
            await write_state(tx, STATE, RollupMark(until, pools).as_state())
            for step in ROLLUP_STEPS:
                await metrics_queries.delete_sums(tx, step, before=until - RETENTION[step])

    async def _add_minutes(self, tx: Tx, mark: RollupMark, until: datetime, tokens: int) -> None:
        figures = await read_figures(
            tx, now=until, offline_after_seconds=self.offline_after_seconds
        )
        minute = await _first_minute(tx, mark, until)
        while minute < until:
            end = minute + ONE_MINUTE
            rows = await metrics_queries.ended_jobs(tx, after=minute, until=end, buckets=BUCKETS)
            sums = sums_of_jobs(rows)
            if until - minute <= SAMPLED_FOR:
                gpu = await metrics_queries.mean_gpu_percent(tx, after=minute, until=end)
                sums |= sums_of_sample(figures, gpu)
            if end == until:
                sums["tokens"] = tokens
            await metrics_queries.add_sums(tx, minute, sums, steps=ROLLUP_STEPS)
            minute = end

    async def _read_tokens(self, mark: RollupMark, until: datetime) -> dict[str, int]:
        """Returns the tokens used in each pool since its mark. Pools that are down are read in a
        later pass."""

        async def read(pool: Database, *, after: datetime) -> int:
            async with pool.read() as tx:
                return await metrics_queries.tokens_used(tx, after=after, until=until)

        tokens: dict[str, int] = {}
        for name in self.pools:
            after = mark.pools.get(name, mark.until)
            pool = Pools({name: self.pools[name]})
            tokens |= await for_each_pool(
                pool, partial(read, after=after), "its tokens are counted later"
            )
        return tokens


async def _read_mark(tx: Tx, until: datetime) -> RollupMark:
    """Reads the mark. If it doesn't exist yet, rollups start as far back as one pass can go."""
    state = await read_state(tx, STATE)
    first = until - MINUTES_PER_PASS_MAX * ONE_MINUTE
    return RollupMark.from_state(state) if state else RollupMark(first, {})


async def _is_anything_there(tx: Tx, mark: RollupMark, until: datetime) -> bool:
    if await metrics_queries.first_ended(tx, after=mark.until, until=until):
        return True
    return await metrics_queries.is_any_active(tx)


async def _first_minute(tx: Tx, mark: RollupMark, until: datetime) -> datetime:
    """Returns the first minute to add.

    This is the first minute in which a job finished or the first minute to which the sample
    applies, whichever is earlier. Earlier minutes are skipped, because there is nothing to add.
    """
    least = max(mark.until, until - MINUTES_PER_PASS_MAX * ONE_MINUTE)
    first = await metrics_queries.first_ended(tx, after=least, until=until)
    recent = max(least, until - SAMPLED_FOR)
    if first is None:
        return recent
    # A minute doesn't include its first instant, so a job that finished at exactly that time
    # belongs to the previous minute.
    return min(recent, step_start(first - timedelta(microseconds=1), MINUTE))


def sums_of_jobs(rows: Iterable[EndedJobsRow]) -> dict[str, float]:
    """Returns the sums of finished jobs, and separate sums for the workflows with the most jobs."""
    sums: defaultdict[str, float] = defaultdict(float)
    of_workflows: defaultdict[int, defaultdict[str, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    jobs: Counter[int] = Counter()
    for row in rows:
        jobs[row.workflow_id] += row.jobs
        mine = of_workflows[row.workflow_id]
        mine[row.status] += row.jobs
        mine["run_seconds"] += row.run_seconds
        sums[row.status] += row.jobs
        for into in (sums, mine):
            if row.wait_bucket >= 0:
                into[f"{WAIT}{row.wait_bucket}"] += row.jobs
            if row.run_bucket >= 0:
                into[f"{RUN}{row.run_bucket}"] += row.jobs
    for workflow_id, _ in jobs.most_common(WORKFLOWS_PER_MINUTE_MAX):
        for name, value in of_workflows[workflow_id].items():
            sums[f"{OF_WORKFLOW}{workflow_id}:{name}"] += value
    return sums


def sums_of_sample(figures: SystemFigures, gpu_percent: float | None) -> dict[str, float]:
    """Returns the numbers of queued and running jobs, multiplied by the number of seconds in a
    minute.

    The mean over a period is then the sum divided by the length of the period.
    """
    online = [fleet for fleet in figures.fleets if fleet.slots]
    sums = {
        "queued_seconds": float(sum(lane.queued for lane in figures.lanes)) * MINUTE,
        "leased_seconds": float(sum(lane.leased for lane in figures.lanes)) * MINUTE,
        "slot_seconds": float(sum(fleet.slots for fleet in online)) * MINUTE,
    }
    if gpu_percent is not None:
        sums |= {"gpu_percent_seconds": gpu_percent * MINUTE, "gpu_seconds": float(MINUTE)}
    return sums


@dataclass(frozen=True, slots=True)
class RollupPoint:
    """The sums of a single step or a complete range. Without data, properties return None."""

    at: datetime
    seconds: float
    sums: Mapping[str, float]

    def count(self, name: str) -> int:
        return round(self.sums.get(name, 0))

    def mean(self, name: str) -> float:
        """Returns the mean of a value that was sampled over time."""
        return self.sums.get(name, 0.0) / self.seconds if self.seconds > 0 else 0.0

    @property
    def success_rate(self) -> float | None:
        ended = self.count("completed") + self.count("failed")
        return self.count("completed") / ended if ended else None

    @property
    def busy_percent(self) -> float | None:
        """The percentage of the workers' slots that was in use."""
        slots = self.sums.get("slot_seconds", 0.0)
        busy = min(self.sums.get("leased_seconds", 0.0), slots)
        return 100 * busy / slots if slots else None

    @property
    def gpu_percent(self) -> float | None:
        seconds = self.sums.get("gpu_seconds", 0.0)
        return self.sums.get("gpu_percent_seconds", 0.0) / seconds if seconds else None

    @property
    def stayed(self) -> int:
        """The number of runs whose model was already loaded."""
        return self.count(f"{MODEL_RUNS}same")

    @property
    def switched(self) -> int:
        return self.count(f"{MODEL_RUNS}switched")

    def percentile(self, kind: str, share: float) -> float | None:
        """Returns the number of seconds within which this share of jobs had finished waiting
        (`WAIT`) or running (`RUN`)."""
        return percentile_of(self.sums, kind, share)

    def workflows(self) -> dict[int, dict[str, float]]:
        """Returns the sums of each workflow by its id."""
        sums_by_id: dict[int, dict[str, float]] = {}
        for name, value in self.sums.items():
            if name.startswith(OF_WORKFLOW):
                _, workflow_id, what = name.split(":", 2)
                sums_by_id.setdefault(int(workflow_id), {})[what] = value
        return sums_by_id


def percentile_of(sums: Mapping[str, float], kind: str, share: float) -> float | None:
    """Estimates a percentile in seconds from the sums of all jobs or a single workflow."""
    return percentile(
        [sums.get(f"{kind}{number}", 0.0) for number in range(len(BUCKETS) + 1)], share
    )


def percentile(counts: Sequence[float], share: float) -> float | None:
    """Estimates a percentile in seconds by linear interpolation within its bucket."""
    total = sum(counts)
    if total <= 0:
        return None
    target, passed = share * total, 0.0
    for number, count in enumerate(counts):
        if count and passed + count >= target:
            low = BUCKETS[number - 1] if number else 0.0
            high = BUCKETS[min(number, len(BUCKETS) - 1)]
            return low + (high - low) * (target - passed) / count
        passed += count
    return BUCKETS[-1]


class Rollup(NamedTuple):
    points: Sequence[RollupPoint]  # one point for each step, without gaps
    total: RollupPoint


async def read_rollup(tx: Tx, span: RollupRange, *, now: datetime) -> Rollup:
    """Reads the steps of a range. The last step is the current one and therefore incomplete."""
    last = step_start(now, span.step_seconds)
    first = last - timedelta(seconds=span.seconds - span.step_seconds)
    sums_by_start = await metrics_queries.read_sums(tx, span.step_seconds, since=first)
    steps = [
        first + timedelta(seconds=number * span.step_seconds)
        for number in range(math.ceil(span.seconds / span.step_seconds))
    ]
    points = [
        RollupPoint(
            at, min(span.step_seconds, (now - at).total_seconds()), sums_by_start.get(at, {})
        )
        for at in steps
    ]
    total: defaultdict[str, float] = defaultdict(float)
    for point in points:
        for name, value in point.sums.items():
            total[name] += value
    return Rollup(points, RollupPoint(first, (now - first).total_seconds(), dict(total)))
