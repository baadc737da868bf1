"""One chaos run: starts the world, loads it, injects the scheduled faults, and audits what is left."""

import asyncio
import os
import random
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
from tests.chaos import faults, mutations
from tests.chaos.audit import Audit
from tests.chaos.load import (
    Customer,
    EffectCustomer,
    GatewayCustomer,
    Probes,
    new_customers,
    prepare,
    stock,
)
from tests.chaos.network import jitter
from tests.chaos.report import Injected, Report
from tests.chaos.world import FLEET, POOLS, RUN_MARK, World, running_world, until_ready

LOADED = "the load starts"
READY_SECONDS_MAX = 120
GRACE_SECONDS = 45
RECOVERY_SECONDS_MAX = 120
LOOK_SECONDS = 0.5
GAP_SECONDS = 5.0
MEMORY_SECONDS = 20.0


@dataclass(frozen=True)
class Plan:
    seed: int
    minutes: float
    mutation: str = ""
    has_faults: bool = True
    only: tuple[str, ...] = ()


class Run:
    """The state of one run."""

    def __init__(self, plan: Plan, world: World, people: list[Customer]) -> None:
        self._world = world
        self._people = people
        self._schedule = faults.schedule(plan.seed, _kinds(plan)) if plan.has_faults else None
        self._end = time.monotonic() + plan.minutes * 60
        self._start = time.monotonic()
        self.report = Report(plan.seed, plan.minutes, plan.mutation)
        self._memory: list[tuple[float, dict[str, int]]] = []

    async def load(self) -> None:
        """Runs the load and the faults until the time is up, then lets the customers finish."""
        tasks = [asyncio.create_task(customer.run()) for customer in self._people]
        measuring = asyncio.create_task(self._measure())
        try:
            await asyncio.sleep(min(10.0, (self._end - time.monotonic()) / 3))
            await self._inject()
            await asyncio.sleep(max(0.0, self._end - time.monotonic()))
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
        while True:
            self._memory.append((time.monotonic() - self._start, self._world.memory()))
            await asyncio.sleep(MEMORY_SECONDS)

    async def _inject(self) -> None:
        effects = [person for person in self._people if isinstance(person, EffectCustomer)]
        probes = Probes(effects)
        while self._schedule and time.monotonic() < self._end - GAP_SECONDS:
            kind, seed = next(self._schedule)
            chance = random.Random(seed)
            injected = Injected(kind, time.monotonic() - self._start)
            self.report.faults.append(injected)
            await self._one(injected, faults.FAULTS[kind], chance, probes)
            await asyncio.sleep(jitter(chance, GAP_SECONDS))

    async def _one(
        self, injected: Injected, fault: faults.Fault, chance: random.Random, probes: Probes
    ) -> None:
        """Injects one fault and watches the probes until it is over and they are fine."""
        begun = time.monotonic()
        task = asyncio.create_task(fault(self._world, chance))
        while time.monotonic() < begun + RECOVERY_SECONDS_MAX:
            is_fine = await probes.are_fine()
            if not is_fine:
                injected.recovery_seconds = -1.0
            if task.done() and is_fine:
                break
            await asyncio.sleep(LOOK_SECONDS)
        else:
            self.report.problems.append(f"{injected.kind}: no recovery in {RECOVERY_SECONDS_MAX} s")
        if injected.recovery_seconds is not None:
            injected.recovery_seconds = time.monotonic() - begun
        try:
            await task
        except faults.Skipped as error:
            injected.problem = str(error)

    async def audit(self) -> None:
        tally = self._people[0].tally
        self._memory.append((time.monotonic() - self._start, self._world.memory()))
        audit = Audit(self._world, tally, self._memory)
        await audit.run()
        report = self.report
        report.violations, report.facts = audit.violations, audit.facts
        report.answers = dict(tally.answers)
        report.memory_start, report.memory_end = self._memory[0][1], self._memory[-1][1]


def _kinds(plan: Plan) -> tuple[str, ...]:
    """The kinds of faults to inject; a mutation has those that need the missing guard."""
    return plan.only or (tuple(mutations.MUTATIONS[plan.mutation].faults) if plan.mutation else ())


async def drive(plan: Plan, folder: Path) -> Report:
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(running_world(folder, os.environ[RUN_MARK]))
        people = await asyncio.to_thread(_open, world, random.Random(plan.seed))
        world.senders = [person.name for person in people]
        await _until_prompts_are_taken(people)
        if plan.mutation:
            await mutations.remove_guard(world, plan.mutation)
        run = Run(plan, world, people)
        sys.stderr.write(f"{LOADED}: {len(people)} customers, {plan.minutes:g} minutes\n")
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
        people = new_customers(admin, world.url, POOLS, effect_id, chance)
    finally:
        admin.close()
    for person in people:
        prepare(person)
    return people


async def _until_prompts_are_taken(people: list[Customer]) -> None:
    """Waits until a worker has reported its node types."""
    user = next(person for person in people if isinstance(person, GatewayCustomer))
    headers = {"Authorization": f"Bearer {user.key}"}
    async with httpx.AsyncClient(base_url=user.url, headers=headers, timeout=10) as http:
        async with asyncio.timeout(READY_SECONDS_MAX):
            while not (await http.get("/object_info")).json():  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)
