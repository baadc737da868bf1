"""What model affinity saves, and what fairness costs one who floods the queue.

    make bench        or        python bench/affinity.py [--quick]

A simulation on the real queue (SQLite) with a simulated clock: 4 workers, 500 jobs of 5 tenants in
7 variants of 2 heavy models. The same jobs arrive twice: once the workers hide which models they
have loaded (so that the queue goes by order alone), once they tell.

A switch is a heavy model loaded in place of another (or of none). Every scene is held against the same
two limits: a quarter of the switches by order alone, and a longest wait of the configured maximum.
With all 500 jobs there at once most must wait longer than that, whatever the rule; so it is also shown
for how long others went before a job because of their model, which is what the rule bounds.
"""

import argparse
import asyncio
import heapq
import random
import statistics
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rich.console import Console
from rich.table import Table

from comfyfleet.db import Database
from comfyfleet.dispatch import service
from comfyfleet.dispatch.model import Lane, NewDispatch, Waiter
from comfyfleet.dispatch.queue import Queue
from comfyfleet.kernel.settings import Settings
from queueing import ours

START = datetime(2026, 1, 1, tzinfo=UTC)
HEAVY = ("sdxl", "flux")
VARIANTS = 7
WORKERS = 4
RUN_SECONDS = 2.0
SWITCH_SECONDS = 6.0  # reading a heavy model from disk
# Jobs a second, or none: all at once. Four workers that never switch do 2 a second; going by order
# alone, less than 1.
SCENES = {
    "all at once": None,
    "80% of what they can do": 1.6,
    "60%": 1.2,
    "90%": 1.8,
}
LONGEST_WAIT_SECONDS = 60
RATIO_MAX = 0.25
FLOOD_JOBS = 100_000
SMALL_TENANTS = 200
FIRST_LEASES = 400

console = Console()


@dataclass
class Machine:
    name: str
    heavy: str | None = None
    variant: str | None = None


Event = tuple[float, int, NewDispatch | Machine]


@dataclass
class Outcome:
    switches: int = 0
    variant_switches: int = 0
    waits: list[float] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)  # for how long others went before it
    makespan: float = 0.0


@dataclass
class Simulation:
    """Events in order of simulated time: a job arrives, or a worker is free."""

    database: Database
    tells_models: bool
    now: datetime = START

    async def run(self, arrivals: list[tuple[float, NewDispatch]]) -> Outcome:
        queue = Queue(
            self.database,
            settings=Settings(affinity_max_wait_seconds=LONGEST_WAIT_SECONDS),
            clock=lambda: self.now,
            new_token=uuid.uuid4,
        )
        outcome = Outcome()
        idle = {name: Machine(name) for name in (f"gpu-{n}" for n in range(WORKERS))}
        events: list[Event] = [(at, number, job) for number, (at, job) in enumerate(arrivals)]
        number = len(events)
        while events:
            at, _, event = heapq.heappop(events)
            self.now = START + timedelta(seconds=at)
            if isinstance(event, Machine):
                idle[event.name] = event
            else:
                await queue.enqueue([event, *_others_at_once(events, at)])
            for machine, seconds in await self._leases(queue, list(idle.values()), outcome):
                del idle[machine.name]
                number += 1
                heapq.heappush(events, (at + seconds, number, machine))
            outcome.makespan = at
        await queue.close()
        return outcome

    async def _leases(
        self, queue: Queue, idle: list[Machine], outcome: Outcome
    ) -> list[tuple[Machine, float]]:
        asked = (queue.lease(self._waiter(each), wait_seconds=0) for each in idle)
        busy = []
        passed_since = dict(queue._giving._passed_since)
        for machine, lease in zip(idle, await asyncio.gather(*asked), strict=True):
            if lease is None:
                continue
            async with self.database.look() as tx:
                row = await service.get(tx, lease.dispatch_id)
            outcome.waits.append((self.now - row.queued_at).total_seconds())
            since = passed_since.get(row.id, self.now)
            outcome.passed.append((self.now - since).total_seconds())
            await queue.complete(lease.dispatch_id, lease.token)
            is_switch = machine.heavy != lease.model_key
            outcome.switches += is_switch
            outcome.variant_switches += machine.variant != lease.model_set
            machine.heavy, machine.variant = lease.model_key, lease.model_set
            busy.append((machine, RUN_SECONDS + SWITCH_SECONDS * is_switch))
        return busy

    def _waiter(self, machine: Machine) -> Waiter:
        lanes = frozenset(Lane(n, "production", "self_hosted") for n in range(1, VARIANTS + 1))
        if not self.tells_models or machine.heavy is None:
            return Waiter(machine.name, lanes)
        loaded = (machine.heavy,)
        return Waiter(machine.name, lanes, models_loaded=loaded, model_set=machine.variant)


def _others_at_once(events: list[Event], at: float) -> Iterator[NewDispatch]:
    while events and events[0][0] == at and isinstance(job := events[0][2], NewDispatch):
        heapq.heappop(events)
        yield job


def arriving(jobs: int, seed: int, *, a_second: float | None) -> list[tuple[float, NewDispatch]]:
    chance = random.Random(seed)
    tenants = [uuid.UUID(int=n) for n in range(5)]
    at = 0.0
    found = []
    for _ in range(jobs):
        at += chance.expovariate(a_second) if a_second else 0.0
        variant = chance.randrange(VARIANTS)
        job = NewDispatch(
            chance.choice(tenants),
            uuid.uuid4(),
            Lane(variant + 1, "production", "self_hosted"),
            model_key=HEAVY[variant % 2],
            model_set=f"variant-{variant}",
        )
        found.append((at, job))
    return found


async def affinity(rounds: int, scene: str) -> None:
    told: dict[bool, list[Outcome]] = {False: [], True: []}
    for seed in range(rounds):
        jobs = arriving(500, seed, a_second=SCENES[scene])
        for tells_models in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                database = await ours.prepare(f"sqlite:///{folder}/a.sqlite3", 0)
                told[tells_models].append(await Simulation(database, tells_models).run(jobs))
                await database.close()
    columns = ("heavy switches", "variant switches", "longest wait s", "longest passed s", "all s")
    table = Table(f"500 jobs, {scene}", *columns)
    for tells_models, name in ((False, "by order alone"), (True, "with affinity")):
        table.add_row(name, *_row(told[tells_models]))
    console.print(table)
    pairs = zip(told[True], told[False], strict=True)
    ratio = statistics.median(ours.switches / fifo.switches for ours, fifo in pairs)
    longest = max(max(each.waits) for each in told[True])
    console.print(f"Switches: {ratio:.2f} of those by order alone ({_verdict(ratio, RATIO_MAX)}).")
    console.print(f"Longest wait: {longest:.0f} s ({_verdict(longest, LONGEST_WAIT_SECONDS)}).")


def _row(outcomes: list[Outcome]) -> list[str]:
    return [
        f"{statistics.median(each.switches for each in outcomes):.0f}",
        f"{statistics.median(each.variant_switches for each in outcomes):.0f}",
        f"{max(max(each.waits) for each in outcomes):.0f}",
        f"{max(max(each.passed) for each in outcomes):.0f}",
        f"{statistics.median(each.makespan for each in outcomes):.0f}",
    ]


def _verdict(found: float, most: float) -> str:
    return f"target ≤ {most}: {'met' if found <= most else 'missed'}"


async def fairness() -> None:
    flood = uuid.UUID(int=0xF100D)
    lane = Lane(1, "production", "self_hosted")
    with tempfile.TemporaryDirectory() as folder:
        database = await ours.prepare(f"sqlite:///{folder}/f.sqlite3", 0)
        for _ in range(FLOOD_JOBS // 10_000):
            async with database.begin() as tx:
                jobs = [NewDispatch(flood, uuid.uuid4(), lane) for _ in range(10_000)]
                await service.enqueue(tx, jobs, now=START)
        async with database.begin() as tx:
            small = [uuid.UUID(int=1 + n) for n in range(SMALL_TENANTS)]
            jobs = [NewDispatch(each, uuid.uuid4(), lane) for each in small for _ in range(3)]
            await service.enqueue(tx, jobs, now=START)
        got: Counter[uuid.UUID] = Counter()
        async with ours.opened(database) as queue:
            for _ in range(FIRST_LEASES):
                lease = await queue.lease(ours.worker(0), wait_seconds=0)
                assert lease
                got[lease.tenant_id] += 1
        await database.close()
    share = got[flood] / FIRST_LEASES
    console.print(
        f"Fairness: with {FLOOD_JOBS:,} jobs queued, one tenant got {share:.1%} of the first "
        f"{FIRST_LEASES} leases among {SMALL_TENANTS} small ones (target ≤ 2%)."
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--quick", action="store_true", help="one round")
    given = options.parse_args()
    for scene in SCENES:
        asyncio.run(affinity(1 if given.quick else given.rounds, scene))
    asyncio.run(fairness())


if __name__ == "__main__":
    main()
