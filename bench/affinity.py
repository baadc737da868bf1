"""What model affinity saves, and what fairness costs one who floods the queue.

    make bench        or        python bench/affinity.py [--quick]

A simulation on the real queue (SQLite) with a simulated clock: 4 workers, 500 jobs of 5 tenants in
7 variants of 2 heavy models. The same jobs arrive twice: once the workers hide which models they
have loaded (so that the queue goes by order alone), once they tell.
"""

import argparse
import asyncio
import heapq
import random
import statistics
import tempfile
import uuid
from collections import Counter
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
# Idle workers take what comes, so how much affinity saves depends on the load: three are shown.
# Four workers that never switch do 2 jobs a second; going by order alone, less than 1.
LOADS = (1.2, 1.6, 1.8)
LONGEST_WAIT_SECONDS = 60
FLOOD_JOBS = 100_000
SMALL_TENANTS = 200
FIRST_LEASES = 400

console = Console()


@dataclass
class Machine:
    name: str
    heavy: str | None = None
    variant: str | None = None


@dataclass
class Outcome:
    switches: int = 0
    variant_switches: int = 0
    waits: list[float] = field(default_factory=list)
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
        events: list[tuple[float, int, NewDispatch | Machine]] = [
            (at, number, job) for number, (at, job) in enumerate(arrivals)
        ]
        number = len(events)
        while events:
            at, _, event = heapq.heappop(events)
            self.now = START + timedelta(seconds=at)
            if isinstance(event, Machine):
                idle[event.name] = event
            else:
                async with self.database.begin() as tx:
                    await service.enqueue(tx, [event], now=self.now)
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
        for machine, lease in zip(idle, await asyncio.gather(*asked), strict=True):
            if lease is None:
                continue
            async with self.database.look() as tx:
                row = await service.get(tx, lease.dispatch_id)
            outcome.waits.append((self.now - row.queued_at).total_seconds())
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


def arriving(jobs: int, seed: int, *, a_second: float) -> list[tuple[float, NewDispatch]]:
    chance = random.Random(seed)
    tenants = [uuid.UUID(int=n) for n in range(5)]
    at = 0.0
    found = []
    for _ in range(jobs):
        at += chance.expovariate(a_second)
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


async def affinity(rounds: int, a_second: float) -> None:
    table = Table(
        f"{a_second} jobs a second",
        "heavy switches",
        "variant switches",
        "longest wait s",
        "makespan s",
    )
    told: dict[bool, list[Outcome]] = {False: [], True: []}
    for seed in range(rounds):
        jobs = arriving(500, seed, a_second=a_second)
        for tells_models in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                database = await ours.prepare(f"sqlite:///{folder}/a.sqlite3", 0)
                told[tells_models].append(await Simulation(database, tells_models).run(jobs))
                await database.close()
    for tells_models, name in ((False, "by order alone"), (True, "with affinity")):
        outcomes = told[tells_models]
        table.add_row(
            name,
            f"{statistics.median(each.switches for each in outcomes):.0f}",
            f"{statistics.median(each.variant_switches for each in outcomes):.0f}",
            f"{max(max(each.waits) for each in outcomes):.0f}",
            f"{statistics.median(each.makespan for each in outcomes):.0f}",
        )
    console.print(table)
    pairs = zip(told[True], told[False], strict=True)
    ratio = statistics.median(ours.switches / fifo.switches for ours, fifo in pairs)
    longest = max(max(each.waits) for each in told[True])
    console.print(f"Switches: {ratio:.2f} of those by order alone (target ≤ 0.25).")
    console.print(f"Longest wait: {longest:.0f} s (target ≤ {LONGEST_WAIT_SECONDS} s).")


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
    for a_second in LOADS:
        asyncio.run(affinity(1 if given.quick else given.rounds, a_second))
    asyncio.run(fairness())


if __name__ == "__main__":
    main()
