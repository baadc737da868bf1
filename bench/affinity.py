"""Measures how many switches model affinity saves, and how the queue treats a flooding tenant.

    make bench        or        python bench/affinity.py [--quick] [--seed N]

This is a simulation on the real queue (SQLite) with a simulated clock: 4 workers, and 500 jobs of 5
tenants in 7 variants of 2 heavy models. The same jobs arrive twice. The first time, the workers
hide which models they have loaded, so the queue only considers the order of arrival. The second
time, the workers report their models, and the queue has learned the cost of a switch from 500
earlier jobs. Every run takes a little longer or shorter than usual, by the same amount each time. A
switch is a run of a heavy model after a run of another one (or after none).

If a switch costs time, each scenario has two limits. There may be at most a quarter of the switches
that the order of arrival causes, and no job may wait more than a minute longer. If a switch is
free, no job may wait longer at all. All results are determined by the seed.
"""

import argparse
import asyncio
import heapq
import random
import statistics
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from comfyfleet.server.db import Database
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.queue import service
from comfyfleet.server.queue.model import DispatchLease, NewDispatch, QueueLane, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.queue.switch_costs import ModelChange, RunKind, TimedRun
from comfyfleet.settings import Settings
from queue_load import comfyfleet_queue
from support import exit_status, is_quick

START = datetime(2026, 1, 1, tzinfo=UTC)
HEAVY = ("sdxl", "flux")
VARIANTS = 7
WORKERS = 4
JOBS, LEARNING_JOBS = (60, 60) if is_quick() else (500, 500)
LEARNING_LOAD = 0.8
LEARN_SECONDS = 10.0
POLL_SECONDS = 0.25  # how often idle workers poll while jobs wait
NOISE = 0.05
LONGER_SECONDS_MAX = 60
RATIO_MAX = 0.25
FLOOD_JOBS = 100_000
SMALL_TENANTS = 200
FIRST_LEASES = 400

# Nothing is timed here, so writes don't need to wait for the disk.
MEMORY_DISK = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108

console = Console()


class Scenario(NamedTuple):
    """The load of the workers, and the durations of a run and of a switch.

    `load` is a share of the runs that the workers could do without any switch. None means that all
    jobs arrive at once.
    """

    name: str
    load: float | None
    run_seconds: float
    switch_seconds: float
    is_free: bool = False


# The scenarios: a slow disk, a large GPU with ComfyUI's default cache (measured), and the same GPU
# with --cache-lru.
SLOW, DEFAULT, LRU = (2.0, 6.0), (1.2, 1.0), (1.41, 0.04, True)
SCENES = (
    Scenario("slow disk, backlog", None, *SLOW),
    *(Scenario(f"slow disk, {load:.0%}", load, *SLOW) for load in (0.6, 0.8, 0.9)),
    Scenario("default cache, backlog", None, *DEFAULT),
    *(Scenario(f"default cache, {load:.0%}", load, *DEFAULT) for load in (0.6, 0.8, 0.9)),
    Scenario("free, backlog", None, *LRU),
    *(Scenario(f"free, {load:.0%}", load, *LRU) for load in (0.6, 0.8, 0.9)),
)


@dataclass
class SimulatedWorker:
    """A worker, and the models of its runs, most recent first."""

    name: str
    heavy: tuple[str, ...] = ()
    variant: str | None = None
    run: TimedRun | None = None  # the run that ends when the worker becomes free

    def take(self, lease: DispatchLease) -> ModelChange:
        key = lease.model_key or ""
        other_change = ModelChange.FIRST if key not in self.heavy else ModelChange.SWITCHED
        change = ModelChange.SAME if self.heavy[:1] == (key,) else other_change
        self.heavy = (key, *(model for model in self.heavy if model != key))
        self.variant = lease.model_set
        return change


POLL = "look"
Event = tuple[float, int, NewDispatch | SimulatedWorker | str]


@dataclass
class Outcome:
    switches: int = 0
    waits: dict[uuid.UUID, float] = field(default_factory=dict)
    makespan: float = 0.0


@dataclass
class Simulation:
    """Handles events in the order of simulated time: a job arrives, a worker becomes free, or idle
    workers poll again."""

    database: Database
    fleet_id: int
    scenario: Scenario
    tells_models: bool
    now: datetime = START
    learned: datetime = START
    number: int = 0
    events: list[Event] = field(default_factory=list)

    async def run(self, arrivals: list[tuple[float, NewDispatch]]) -> Outcome:
        queue = DispatchQueue(
            self.database,
            settings=Settings(affinity_max_wait_seconds=60),
            clock=lambda: self.now,
            new_token=uuid.uuid4,
        )
        await queue.learn()
        outcome = Outcome()
        idle = {name: SimulatedWorker(name) for name in (f"gpu-{n}" for n in range(WORKERS))}
        begin, waiting = self.now, 0
        for at, job in arrivals:
            self._at(at, job)
        while self.events:
            at, _, event = heapq.heappop(self.events)
            self.now = begin + timedelta(seconds=at)
            if isinstance(event, SimulatedWorker):
                idle[event.name] = event
                await self._ended(queue, event)
            elif isinstance(event, NewDispatch):
                jobs = [event, *self._others_at_once(at)]
                waiting += len(jobs)
                await queue.enqueue(jobs)
            for simulated_worker, seconds in await self._leases(
                queue, list(idle.values()), outcome
            ):
                del idle[simulated_worker.name]
                waiting -= 1
                self._at(at + seconds, simulated_worker)
            if waiting and idle and all(item[2] != POLL for item in self.events):
                self._at(at + POLL_SECONDS, POLL)
            outcome.makespan = at
        await queue.learn()
        await queue.close()
        return outcome

    def _at(self, seconds: float, event: NewDispatch | SimulatedWorker | str) -> None:
        self.number += 1
        heapq.heappush(self.events, (seconds, self.number, event))

    def _others_at_once(self, at: float) -> Iterator[NewDispatch]:
        while self.events and self.events[0][0] == at:
            if not isinstance(job := self.events[0][2], NewDispatch):
                return
            heapq.heappop(self.events)
            yield job

    async def _ended(self, queue: DispatchQueue, simulated_worker: SimulatedWorker) -> None:
        if not self.tells_models or simulated_worker.run is None:
            return
        queue.switch_costs.note(simulated_worker.run)
        if (self.now - self.learned).total_seconds() >= LEARN_SECONDS:
            self.learned = self.now
            await queue.learn()

    async def _leases(
        self, queue: DispatchQueue, idle: list[SimulatedWorker], outcome: Outcome
    ) -> list[tuple[SimulatedWorker, float]]:
        leases = (queue.lease(self._waiter(worker), wait_seconds=0) for worker in idle)
        busy = []
        for simulated_worker, lease in zip(idle, await asyncio.gather(*leases), strict=True):
            if lease is None:
                continue
            async with self.database.read() as tx:
                row = await service.get(tx, lease.dispatch_id)
            outcome.waits[row.job_id] = (self.now - row.queued_at).total_seconds()
            await queue.complete(lease.dispatch_id, lease.token)
            change = simulated_worker.take(lease)
            outcome.switches += change is not ModelChange.SAME
            seconds = self._seconds(lease, change)
            kind = RunKind(self.fleet_id, lease.model_key or "", lease.lane.workflow_id)
            simulated_worker.run = TimedRun(kind, change, seconds)
            busy.append((simulated_worker, seconds))
        return busy

    def _seconds(self, lease: DispatchLease, change: ModelChange) -> float:
        """Returns the duration of a job. It is the same both times the job runs, except for the
        time for a switch."""
        factor = random.Random(lease.job_id.int >> 1).uniform(1 - NOISE, 1 + NOISE)
        switch = 0.0 if change is ModelChange.SAME else self.scenario.switch_seconds
        return self.scenario.run_seconds * factor + switch

    def _waiter(self, simulated_worker: SimulatedWorker) -> Waiter:
        lanes = frozenset(QueueLane(n, "production", "self_hosted") for n in range(1, VARIANTS + 1))
        if not self.tells_models:
            return Waiter(simulated_worker.name, lanes)
        return Waiter(
            simulated_worker.name,
            lanes,
            models_loaded=simulated_worker.heavy,
            model_set=simulated_worker.variant,
            fleet_id=self.fleet_id,
        )


def arrivals_of(jobs: int, seed: int, scenario: Scenario) -> list[tuple[float, NewDispatch]]:
    chance = random.Random(seed)
    tenants = [uuid.UUID(int=n) for n in range(5)]
    a_second = scenario.load and scenario.load * WORKERS / scenario.run_seconds
    at = 0.0
    arrivals = []
    for _ in range(jobs):
        at += chance.expovariate(a_second) if a_second else 0.0
        variant = chance.randrange(VARIANTS)
        job = NewDispatch(
            chance.choice(tenants),
            uuid.UUID(int=2 * chance.getrandbits(127)),
            QueueLane(variant + 1, "production", "self_hosted"),
            model_key=HEAVY[variant % 2],
            model_set=f"variant-{variant}",
        )
        arrivals.append((at, job))
    return arrivals


class Pair(NamedTuple):
    """The results of the same jobs, in the order of arrival and with affinity."""

    by_order: Outcome
    ours: Outcome

    @property
    def longer(self) -> float:
        """Returns the maximum number of seconds by which a job waits longer with affinity."""
        return max(self.ours.waits[job] - wait for job, wait in self.by_order.waits.items())

    @property
    def switches(self) -> float:
        return self.ours.switches / self.by_order.switches

    @property
    def longest(self) -> float:
        return max(self.ours.waits.values()) / max(self.by_order.waits.values())

    @property
    def mean(self) -> float:
        ours, theirs = (
            statistics.fmean(outcome.waits.values()) for outcome in (self.ours, self.by_order)
        )
        return ours / theirs

    @property
    def time(self) -> float:
        return self.ours.makespan / self.by_order.makespan


def is_within(scenario: Scenario, pairs: Sequence[Pair]) -> bool:
    if scenario.is_free:
        return all(pair.longer <= 0 for pair in pairs)
    return all(pair.switches <= RATIO_MAX and pair.longer <= LONGER_SECONDS_MAX for pair in pairs)


async def compared(scenario: Scenario, seed: int) -> Pair:
    jobs = arrivals_of(JOBS, seed, scenario)
    before = arrivals_of(LEARNING_JOBS, seed + 1_000, scenario._replace(load=LEARNING_LOAD))
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        database = await comfyfleet_queue.prepare(f"sqlite:///{folder}/a.sqlite3", 0)
        async with database.transaction() as tx:
            fleet = await fleets.create_fleet(
                tx, slug="a", stage="production", secret_hash="", max_workers=None, now=START
            )
        later = START + timedelta(days=1)
        by_order = await Simulation(database, fleet.id, scenario, tells_models=False).run(jobs)
        await Simulation(database, fleet.id, scenario, tells_models=True).run(before)
        again = [(at, _copy_with_new_id(job)) for at, job in jobs]
        simulation = Simulation(database, fleet.id, scenario, tells_models=True, now=later)
        outcome = await simulation.run(again)
        await database.close()
    waits = {uuid.UUID(int=job.int ^ 1): wait for job, wait in outcome.waits.items()}
    return Pair(by_order, Outcome(outcome.switches, waits, outcome.makespan))


def _copy_with_new_id(job: NewDispatch) -> NewDispatch:
    """Returns a copy of the job with another id, because a job has one dispatch and these jobs
    arrive twice."""
    return NewDispatch(
        job.tenant_id,
        uuid.UUID(int=job.job_id.int ^ 1),
        job.lane,
        model_key=job.model_key,
        model_set=job.model_set,
    )


def affinity(rounds: int, seed: int, only: str = "") -> bool:
    """Returns whether all limits are met."""
    columns = ("switches", "longest longer by s", "longest wait", "mean wait", "time", "limits")
    table = Table(f"{JOBS} jobs", *columns, title="Ratios to the order of arrival, medians")
    is_all_met = True
    for scenario in (scene for scene in SCENES if only in scene.name):
        pairs = [asyncio.run(compared(scenario, seed + n)) for n in range(rounds)]
        is_met = is_within(scenario, pairs)
        is_all_met &= is_met
        ratios = (
            f"{statistics.median(getattr(pair, name) for pair in pairs):.2f}"
            for name in ("longest", "mean", "time")
        )
        switches = statistics.median(pair.switches for pair in pairs)
        longer = f"{max(pair.longer for pair in pairs):.1f}"
        verdict = "met" if is_met else "missed"
        table.add_row(scenario.name, f"{switches:.2f}", longer, *ratios, verdict)
    console.print(table)
    console.print(
        f"Limits where a switch costs: {RATIO_MAX} of the switches, no job waits "
        f"{LONGER_SECONDS_MAX} s longer. Where a switch is free, no job may wait longer."
    )
    return is_all_met


async def fairness() -> None:
    flood = uuid.UUID(int=0xF100D)
    lane = QueueLane(1, "production", "self_hosted")
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder:
        database = await comfyfleet_queue.prepare(f"sqlite:///{folder}/f.sqlite3", 0)
        for _ in range(FLOOD_JOBS // 10_000):
            async with database.transaction() as tx:
                jobs = [NewDispatch(flood, uuid.uuid4(), lane) for _ in range(10_000)]
                await service.enqueue(tx, jobs, now=START)
        async with database.transaction() as tx:
            small = [uuid.UUID(int=1 + n) for n in range(SMALL_TENANTS)]
            jobs = [
                NewDispatch(tenant_id, uuid.uuid4(), lane) for tenant_id in small for _ in range(3)
            ]
            await service.enqueue(tx, jobs, now=START)
        leases_by_tenant: Counter[uuid.UUID] = Counter()
        async with comfyfleet_queue.opened(database) as queue:
            for _ in range(FIRST_LEASES):
                lease = await queue.lease(comfyfleet_queue.worker(0), wait_seconds=0)
                assert lease
                leases_by_tenant[lease.tenant_id] += 1
        await database.close()
    share = leases_by_tenant[flood] / FIRST_LEASES
    console.print(
        f"Fairness: with {FLOOD_JOBS:,} jobs queued, one tenant got {share:.1%} of the first "
        f"{FIRST_LEASES} leases among {SMALL_TENANTS} small ones (target ≤ 2%)."
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", default="", help="only scenes whose names contain this text")
    options.add_argument("--quick", action="store_true", help="one round, no flood")
    options.add_argument("--check", action="store_true", help="fail if a limit is missed")
    arguments = options.parse_args()
    is_met = affinity(1 if arguments.quick else arguments.rounds, arguments.seed, arguments.only)
    if not arguments.quick and not arguments.only:
        asyncio.run(fairness())
    return exit_status(is_met=is_met)


if __name__ == "__main__":
    sys.exit(main())
