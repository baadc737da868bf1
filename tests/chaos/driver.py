"""One chaos run: starts the world, loads it, injects the scheduled faults, and audits what is left."""

import asyncio
import os
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import httpx
from tests.chaos import faults, memory, mutations, operators, streams
from tests.chaos.audit import LONG_SECONDS, MIDDLE_SECONDS, Audit
from tests.chaos.load import (
    CUSTOMERS,
    Customer,
    GatewayCustomer,
    Tally,
    new_customers,
    prepare,
    stock,
)
from tests.chaos.network import jitter
from tests.chaos.probes import Probes, ProbeUser
from tests.chaos.report import Injected, Moment, Report
from tests.chaos.world import FLEET, POOLS, RUN_MARK, World, running_world, until_ready

LOADED = "the load starts"
READY_SECONDS_MAX = 300
GRACE_SECONDS = 45
RECOVERY_SECONDS_MAX = 40
LOOK_SECONDS = 0.2
GAP_SECONDS = 5.0
WARM_SECONDS = 5 * 60
# After this time, a long run replaces no process of a control plane, so that their memory is comparable.
REPLACE_SECONDS_MAX = 10 * 60
REPLACING = frozenset({"plane kill", "plane TERM", "plane HUP", "child kill"})
KINDS = {
    **CUSTOMERS,
    "stream": streams.StreamCustomer,
    "socket": streams.SocketCustomer,
    "upload": streams.UploadCustomer,
}


@dataclass(frozen=True)
class Plan:
    seed: int
    minutes: float
    mutation: str = ""
    has_faults: bool = True
    only: tuple[str, ...] = ()


class Run:
    """The state of one run."""

    def __init__(self, plan: Plan, world: World, folder: Path) -> None:
        self._world = world
        self._folder = folder
        self._people = [person for person in world.customers if not isinstance(person, ProbeUser)]
        probe_users = [person for person in world.customers if isinstance(person, ProbeUser)]
        self._probes = Probes([] if plan.mutation else probe_users)
        self._schedule = faults.schedule(plan.seed, _kinds(plan)) if plan.has_faults else None
        self._is_long = plan.minutes * 60 >= LONG_SECONDS
        self._start = time.monotonic()
        self._end = self._start + plan.minutes * 60
        self.report = Report(plan.seed, plan.minutes, plan.mutation)

    @property
    def _now(self) -> float:
        return time.monotonic() - self._start

    async def load(self) -> None:
        """Runs the load and the faults until the time is up, then lets the customers finish."""
        tasks = [asyncio.create_task(customer.run()) for customer in self._people]
        measuring = asyncio.create_task(self._measure())
        try:
            async with self._probes.running():
                await asyncio.sleep(min(10.0, (self._end - time.monotonic()) / 3))
                await self._inject()
                await asyncio.sleep(max(0.0, self._end - time.monotonic()))
            await self._remember("end")
            for customer in self._people:
                customer.is_over = True
            _, pending = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
            if pending:
                self.report.problems.append(f"{len(pending)} customers did not stop")
        finally:
            for task in (*tasks, measuring):
                task.cancel()
            ended = await asyncio.gather(*tasks, measuring, return_exceptions=True)
        errors = [error for error in ended if isinstance(error, Exception)]
        self.report.problems += [f"a customer broke off: {error!r}"[:500] for error in errors]

    async def _measure(self) -> None:
        for name, at in (("start", 0), ("5 minutes", WARM_SECONDS), ("20 minutes", MIDDLE_SECONDS)):
            await asyncio.sleep(max(0.0, at - self._now))
            await self._remember(name)

    async def _remember(self, name: str) -> None:
        samples = await memory.sample(self._world.serving_pids(), self._folder)
        self.report.memory.append(Moment(name, self._now, samples))

    async def _inject(self) -> None:
        while self._schedule and time.monotonic() < self._end - GAP_SECONDS:
            kind, seed = next(self._schedule)
            if self._is_long and self._now > REPLACE_SECONDS_MAX and kind in REPLACING:
                continue
            chance = random.Random(seed)
            injected = Injected(kind, self._now)
            self.report.faults.append(injected)
            await self._one(injected, faults.FAULTS[kind], chance)
            sys.stderr.write(f"{injected.line()}\n")
            await asyncio.sleep(jitter(chance, GAP_SECONDS))

    async def _one(self, injected: Injected, fault: faults.Fault, chance: random.Random) -> None:
        """Injects one fault, and waits for the first successful probe after it."""
        started = time.monotonic()
        try:
            await fault(self._world, chance)
        except faults.Skipped as error:
            injected.problem = str(error)
        except (AssertionError, LookupError, OSError, RuntimeError, asyncpg.PostgresError) as error:
            self.report.problems.append(f"{injected.kind}: {error!r}"[:500])
        ended = time.monotonic()
        injected.ended = ended - self._start
        if self.report.mutation:
            return  # a deployment without a guard need not recover
        while (recovered := self._probes.recovered_at(ended)) is None:
            if time.monotonic() > ended + RECOVERY_SECONDS_MAX:
                injected.is_noticed = True
                injected.problem = f"no recovery in {RECOVERY_SECONDS_MAX} s"
                return
            await asyncio.sleep(LOOK_SECONDS)
        injected.recovery_seconds = recovered - ended
        injected.longest_gap = self._probes.longest_gap(started, recovered)
        injected.is_noticed = self._probes.has_failed(started, recovered)

    async def audit(self) -> None:
        report = self.report
        tally = self._people[0].tally
        audit = Audit(self._world, tally, report.memory)
        await audit.run()
        report.violations, report.facts = audit.violations, audit.facts
        report.answers = dict(tally.answers)
        times = [seen.ended - seen.started for seen in self._probes.rounds if seen.is_fine]
        if len(times) > 1:
            report.probe_seconds = [statistics.median(times), statistics.quantiles(times, n=20)[-1]]


def _kinds(plan: Plan) -> tuple[str, ...]:
    """Returns the kinds of faults to inject. A mutation has its own."""
    assert operators.REVOKED_EXIT  # the module adds its faults
    return plan.only or (tuple(mutations.MUTATIONS[plan.mutation].faults) if plan.mutation else ())


async def drive(plan: Plan, folder: Path) -> Report:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(running_world(folder, os.environ[RUN_MARK]))
        world.customers = await asyncio.to_thread(_open, world, random.Random(plan.seed))
        await _until_prompts_are_taken(world.customers)
        if plan.mutation:
            await mutations.remove_guard(world, plan.mutation)
        run = Run(plan, world, folder)
        sys.stderr.write(f"{LOADED}: {len(world.customers)} customers, {plan.minutes:g} minutes\n")
        await run.load()
        await until_ready(world)
        await run.audit()
        return run.report


def _open(world: World, chance: random.Random) -> list[Customer]:
    """Sets up the catalog, the customers and their triggers, and starts the workers."""
    admin = world.admin()
    try:
        world.fleet_secret, effect_id = stock(admin, FLEET)
        for worker in world.workers:
            world.start_engine(worker)
            world.start_worker(worker)
        tally = Tally()
        people = new_customers(admin, KINDS, world.url, POOLS, effect_id, tally, chance)
        # Tenants take turns, so probes in tenants of their own don't wait for the customers' jobs.
        probes = {"probe": ProbeUser}
        people += new_customers(admin, probes, world.url, POOLS, effect_id, tally, chance)
    finally:
        admin.close()
    for person in people:
        prepare(person, world.receiver)
    return people


async def _until_prompts_are_taken(people: list[Customer]) -> None:
    """Waits until a worker has reported its node types."""
    user = next(person for person in people if isinstance(person, GatewayCustomer))
    headers = {"Authorization": f"Bearer {user.key}"}
    async with httpx.AsyncClient(base_url=user.url, headers=headers, timeout=10) as http:
        async with asyncio.timeout(READY_SECONDS_MAX):
            while not (await http.get("/object_info")).json():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
