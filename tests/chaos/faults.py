"""Faults of processes, databases, networks, disks and clocks, and the schedule in which they come."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tests.chaos.world import Plane, Worker, World, until_ready
from tests.support.server.polling_load import children_of

STOP_SECONDS_MAX = 120.0
RELOADS_MAX = (
    3  # on a busy machine, a process may not be ready in time, and the restart is given up
)
HOLD_SECONDS = (3.0, 12.0)  # how long something stays away or silent
STOP_SECONDS = (5.0, 30.0)  # a worker that is silent for 15 seconds loses its leases
SKEW_SECONDS = (-600.0, 600.0)
DELAY_SECONDS = 0.3
LATE_SECONDS = 2.0
BALLAST_BYTES = 1024**2

Fault = Callable[[World, random.Random], Coroutine[Any, Any, None]]
FAULTS: dict[str, Fault] = {}


class Skipped(Exception):
    """This machine does not allow the fault."""


def fault(kind: str) -> Callable[[Fault], Fault]:
    def add(inject: Fault) -> Fault:
        FAULTS[kind] = inject
        return inject

    return add


def schedule(seed: int, only: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Yields kinds of faults with a seed for each. Every kind comes once before one comes again."""
    chance = random.Random(f"faults {seed}")
    while True:
        kinds = sorted(only or FAULTS)
        chance.shuffle(kinds)
        for kind in kinds:
            yield kind, chance.getrandbits(32)


async def hold(chance: random.Random) -> None:
    await asyncio.sleep(chance.uniform(*HOLD_SECONDS))


async def restart_worker(world: World, worker: Worker, **environ: str) -> None:
    await asyncio.to_thread(world.start_worker, worker, **environ)


async def restart_plane(world: World, plane: Plane) -> None:
    await asyncio.to_thread(world.start_plane, plane)
    await until_ready(world)


@fault("worker kill")
async def kill_worker(world: World, chance: random.Random) -> None:
    worker = chance.choice(world.workers)
    await asyncio.to_thread(worker.running.kill)
    await restart_worker(world, worker)


@fault("worker away")
async def keep_worker_away(world: World, chance: random.Random) -> None:
    worker = chance.choice(world.workers)
    await asyncio.to_thread(worker.running.kill)
    await hold(chance)
    await restart_worker(world, worker)


@fault("worker stop")
async def stop_worker(world: World, chance: random.Random) -> None:
    worker = chance.choice(world.workers)
    worker.running.freeze()
    await asyncio.sleep(chance.uniform(*STOP_SECONDS))
    worker.running.thaw()


@fault("worker TERM")
async def terminate_worker(world: World, chance: random.Random) -> None:
    worker = chance.choice(world.workers)
    worker.running.terminate()
    await asyncio.to_thread(worker.running.wait, STOP_SECONDS_MAX)
    await restart_worker(world, worker)


@fault("worker clock")
async def skew_worker(world: World, chance: random.Random) -> None:
    """The worker's clock is up to ten minutes fast or slow until its next restart."""
    worker = chance.choice(world.workers)
    await asyncio.to_thread(worker.running.kill)
    skew = chance.uniform(*SKEW_SECONDS)
    await restart_worker(world, worker, CHAOS_CLOCK_SECONDS=str(skew))
    await hold(chance)


@fault("engine kill")
async def kill_engine(world: World, chance: random.Random) -> None:
    worker = chance.choice([worker for worker in world.workers if worker.engine])
    assert worker.engine is not None
    await asyncio.to_thread(worker.engine.kill)
    await asyncio.to_thread(world.start_engine, worker)


@fault("engine away")
async def keep_engine_away(world: World, chance: random.Random) -> None:
    worker = chance.choice([worker for worker in world.workers if worker.engine])
    assert worker.engine is not None
    await asyncio.to_thread(worker.engine.kill)
    await asyncio.sleep(chance.uniform(*STOP_SECONDS))
    await asyncio.to_thread(world.start_engine, worker)


@fault("own engine kill")
async def kill_own_engine(world: World, chance: random.Random) -> None:
    """Kills an engine that its worker started, and starts again."""
    worker = chance.choice([worker for worker in world.workers if worker.engine_name is None])
    _signal(children_of(worker.running.pid), signal.SIGKILL)


@fault("engine stop")
async def stop_engine(world: World, chance: random.Random) -> None:
    worker = chance.choice([worker for worker in world.workers if worker.engine])
    assert worker.engine is not None
    worker.engine.freeze()
    await hold(chance)
    worker.engine.thaw()


@fault("plane kill")
async def kill_plane(world: World, chance: random.Random) -> None:
    plane = chance.choice(world.planes)
    await asyncio.to_thread(plane.running.kill)
    await restart_plane(world, plane)


@fault("plane stop")
async def stop_plane(world: World, chance: random.Random) -> None:
    plane = chance.choice(world.planes)
    pids = plane.pids()
    _signal(pids, signal.SIGSTOP)
    await hold(chance)
    _signal(pids, signal.SIGCONT)
    await until_ready(world)


@fault("plane TERM")
async def terminate_plane(world: World, chance: random.Random) -> None:
    plane = chance.choice(world.planes)
    plane.running.terminate()
    await asyncio.to_thread(plane.running.wait, STOP_SECONDS_MAX)
    await restart_plane(world, plane)


@fault("plane HUP")
async def reload_plane(world: World, chance: random.Random) -> None:
    plane = world.planes[-1]
    old = set(plane.pids()[1:])
    for _ in range(RELOADS_MAX):
        os.kill(plane.running.pid, signal.SIGHUP)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS_MAX):
                while old & set(plane.pids()):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                return
    raise Skipped(f"no process was ready in time for {RELOADS_MAX} restarts")


@fault("child kill")
async def kill_child(world: World, chance: random.Random) -> None:
    plane = world.planes[-1]
    children = plane.pids()[1:]
    _signal([chance.choice(children)], signal.SIGKILL)
    async with asyncio.timeout(STOP_SECONDS_MAX):
        while len(plane.pids()) <= len(children) or set(children) == set(plane.pids()[1:]):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    await until_ready(world)


@fault("child stop")
async def stop_child(world: World, chance: random.Random) -> None:
    pids = [chance.choice(world.planes[-1].pids()[1:])]
    _signal(pids, signal.SIGSTOP)
    await hold(chance)
    _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _add_database_faults(pool: str, name: str) -> None:
    """Adds the faults of one server; `a` has the central database, too."""

    @fault(f"{name} immediate")
    async def stop(world: World, chance: random.Random) -> None:
        await asyncio.to_thread(world.databases[pool].stop_at_once)
        await asyncio.to_thread(world.databases[pool].start)

    @fault(f"{name} down")
    async def keep_down(world: World, chance: random.Random) -> None:
        await asyncio.to_thread(world.databases[pool].stop_at_once)
        await hold(chance)
        await asyncio.to_thread(world.databases[pool].start)

    @fault(f"{name} stop")
    async def freeze(world: World, chance: random.Random) -> None:
        world.databases[pool].freeze()
        await hold(chance)
        world.databases[pool].thaw()

    @fault(f"{name} terminate")
    async def terminate(world: World, chance: random.Random) -> None:
        await world.databases[pool].terminate_connections()


_add_database_faults("a", "central")
_add_database_faults("b", "pool")


@fault("network cut")
async def cut_network(world: World, chance: random.Random) -> None:
    for worker in world.workers:
        worker.relay.cut()
    world.balancer.cut()


@fault("network down")
async def take_network_down(world: World, chance: random.Random) -> None:
    relay = chance.choice(world.workers).relay
    relay.is_down = True
    relay.cut()
    await hold(chance)
    relay.heal()


@fault("network delay")
async def delay_network(world: World, chance: random.Random) -> None:
    relay = chance.choice(world.workers).relay
    relay.delay_seconds = DELAY_SECONDS
    await hold(chance)
    relay.heal()


@fault("network silent")
async def silence_network(world: World, chance: random.Random) -> None:
    """Connections stay open, and nothing arrives; afterwards they are dead and get cut."""
    relay = chance.choice(world.workers).relay
    relay.is_silent = True
    await hold(chance)
    relay.heal()
    relay.cut()


@fault("reports replayed")
async def replay_reports(world: World, chance: random.Random) -> None:
    for worker in world.workers:
        for report in [*worker.relay.reports]:
            await worker.relay.repeat(report)


@fault("reports doubled")
async def double_reports(world: World, chance: random.Random) -> None:
    for worker in world.workers:
        worker.relay.is_doubling = True
    await hold(chance)
    for worker in world.workers:
        worker.relay.heal()


@fault("reports late")
async def delay_reports(world: World, chance: random.Random) -> None:
    for worker in world.workers:
        worker.relay.late_seconds = LATE_SECONDS
    await hold(chance)
    for worker in world.workers:
        worker.relay.heal()


@fault("store down")
async def take_store_down(world: World, chance: random.Random) -> None:
    world.s3_relay.is_down = True
    world.s3_relay.cut()
    await hold(chance)
    world.s3_relay.heal()


@fault("store slow")
async def slow_store(world: World, chance: random.Random) -> None:
    world.s3_relay.delay_seconds = DELAY_SECONDS
    await hold(chance)
    world.s3_relay.heal()


@fault("store silent")
async def silence_store(world: World, chance: random.Random) -> None:
    world.s3_relay.is_silent = True
    await hold(chance)
    world.s3_relay.heal()
    world.s3_relay.cut()


@fault("disk full")
async def fill_disk(world: World, chance: random.Random) -> None:
    if world.disk is None:
        raise Skipped("no small file system can be mounted here")
    ballast = world.disk / "ballast"
    await asyncio.to_thread(_fill, str(ballast))
    await hold(chance)
    ballast.unlink()


def _fill(path: str) -> None:
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(BALLAST_BYTES))
        except OSError:
            return
