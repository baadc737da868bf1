"""The processes of a chaos run: two control planes, two database servers, S3, engines and workers."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

import psutil
from tests.chaos.network import Balancer, Relay, ReportRelay
from tests.chaos.receiver import Receiver
from tests.support.databases.restartable_postgres import PostgresProcess, restartable_postgres
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.admin_client import Admin
from tests.support.server.deployment import ADMIN_KEY
from tests.support.server.polling_load import children_of
from tests.support.server.ports import free_port
from tests.support.server.processes import COMFYFLEET, Process, finish

if TYPE_CHECKING:
    from tests.chaos.load import Customer

AnyRelay = TypeVar("AnyRelay", bound=Relay)
FLEET = "gpus"
POOLS = ("a", "b")
READY_SECONDS_MAX = 300
LOOK_SECONDS = 0.2
OWN_ENGINES, OWNED_ENGINES = 3, 2
# The environment of everything that a run starts has its id, and below `comfyfleet` a second one.
RUN_MARK, PROCESS_MARK = "CHAOS_RUN", "CHAOS_PROCESS"
DISK_BYTES = 48 * 1024**2
SETTINGS = {
    "lease_seconds": "60",
    "heartbeat_seconds": "5",
    "sweep_seconds": "3",
    "max_attempts": "9",
    "offline_after_seconds": "40",
    "calls_per_second": "1000",
    "calls_at_once": "1000",
    "tenant_calls_per_second": "1000",
    "max_active_jobs_per_user": "50",
}


@dataclass
class Plane:
    """A control plane at a fixed port; `--processes 2` makes it a parent with two children."""

    name: str
    port: int
    arguments: tuple[str, ...]
    process: Process | None = None

    @property
    def running(self) -> Process:
        assert self.process is not None
        return self.process

    def pids(self) -> list[int]:
        return [self.running.pid, *children_of(self.running.pid)]


@dataclass
class Worker:
    """A worker behind its own relay. Without an engine it starts one itself."""

    name: str
    relay: ReportRelay
    state: Path
    engine_name: str | None
    engine_port: int
    process: Process | None = None
    engine: Process | None = None

    @property
    def running(self) -> Process:
        assert self.process is not None
        return self.process

    def processes(self) -> list[Process | None]:
        return [self.process, self.engine]


@dataclass
class World:
    folder: Path
    run_id: str
    databases: dict[str, PostgresProcess] = field(default_factory=dict)  # by pool
    planes: list[Plane] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    customers: list["Customer"] = field(default_factory=list)
    receiver: Receiver = field(default_factory=Receiver)
    operator_errors: list[str] = field(default_factory=list)
    s3: RunningS3 = field(init=False)
    s3_relay: Relay = field(init=False)
    balancer: Balancer = field(init=False)
    fleet_secret: str = ""
    disk: Path | None = None  # a small file system under the state of the last worker

    @property
    def url(self) -> str:
        return self.balancer.url

    def central_url(self) -> str:
        return self.databases["a"].url("central")

    def pool_url(self, pool: str) -> str:
        return self.databases[pool].url(f"pool_{pool}")

    def admin(self) -> Admin:
        return Admin(self.url, ADMIN_KEY)

    def logs(self) -> dict[str, Path]:
        """The logs of control planes and workers by the name of the process."""
        return {
            path.stem: path
            for path in sorted(self.folder.glob("*.log"))
            if not path.stem.startswith("engine")
        }

    def _marked(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {PROCESS_MARK: self.run_id, **environ}

    def _plane_environ(self) -> dict[str, str]:
        storage = self.s3.url.replace(self.s3.endpoint, self.s3_relay.url)
        pools = ",".join(f"{pool}={self.pool_url(pool)}" for pool in POOLS)
        return self._marked(
            {
                "COMFYFLEET_ADMIN_KEY": ADMIN_KEY,
                "COMFYFLEET_CENTRAL_DATABASE_URL": self.central_url(),
                "COMFYFLEET_TENANT_DATABASE_URLS": pools,
                "COMFYFLEET_STORAGE_URL": storage,
                "COMFYFLEET_PUBLIC_URL": self.url,
                "COMFYFLEET_WEBHOOK_PRIVATE_HOSTS": self.receiver.host,
                **self.s3.env,
                **{f"COMFYFLEET_{name.upper()}": value for name, value in SETTINGS.items()},
            }
        )

    def upgrade(self) -> None:
        finish("db", "upgrade", folder=self.folder, environ=self._plane_environ())

    def start_plane(self, plane: Plane) -> None:
        plane.process = Process(
            plane.name,
            *("serve", "--port", str(plane.port), *plane.arguments),
            folder=self.folder,
            environ=self._plane_environ(),
        )

    def start_engine(self, worker: Worker) -> None:
        if worker.engine_name is None:
            return
        data = str(self.folder / worker.engine_name)
        arguments = ("engine", "--port", str(worker.engine_port), "--data", data)
        worker.engine = Process(
            worker.engine_name, *arguments, folder=self.folder, environ=self._marked({})
        )

    def start_worker(self, worker: Worker, **environ: str) -> None:
        command = f"{COMFYFLEET} engine --port {{port}} --data {{folder}}"
        own = () if worker.engine_name else ("--comfyui-command", command)
        worker.process = Process(
            worker.name,
            *("worker", "--control", worker.relay.url, "--fleet", FLEET),
            *("--stage", "production", "--worker-id", worker.name),
            *("--backend", f"http://127.0.0.1:{worker.engine_port}"),
            *("--state", str(worker.state), "--grace-seconds", "5", *own),
            folder=self.folder,
            environ=self._marked(
                {
                    "COMFYFLEET_FLEET_SECRET": self.fleet_secret,
                    "COMFYFLEET_HEARTBEAT_SECONDS": SETTINGS["heartbeat_seconds"],
                    "AWS_EC2_METADATA_DISABLED": "true",
                    **environ,
                }
            ),
        )

    def serving_pids(self) -> dict[str, int]:
        """The processes of the control planes by name. Their child processes for pictures are left out."""
        pids = {}
        for plane in self.planes:
            pids[plane.name] = plane.running.pid
            if plane.arguments:
                children = plane.pids()[1:]
                pids |= {f"{plane.name}/{number}": pid for number, pid in enumerate(children, 1)}
        return pids

    def kill_all(self) -> None:
        """Kills every process of this run, also engines in process groups of their own."""
        processes = [plane.process for plane in self.planes]
        processes += [process for worker in self.workers for process in worker.processes()]
        for process in filter(None, processes):
            process.kill()
        for pid in processes_with(PROCESS_MARK, self.run_id):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def processes_with(mark: str, run_id: str) -> list[int]:
    """The other processes that were executed with this mark in their environment."""
    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_alive = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if is_alive and process.environ().get(mark) == run_id:
                pids.append(process.pid)
    return pids


@contextlib.asynccontextmanager
async def running_world(folder: Path, run_id: str) -> AsyncIterator[World]:
    """Starts everything but the workers, which need the fleet's secret."""
    world = World(folder, run_id)
    async with AsyncExitStack() as stack:
        for pool in POOLS:
            world.databases[pool] = stack.enter_context(restartable_postgres())
        await world.databases["a"].create("central", "pool_a")
        await world.databases["b"].create("pool_b")
        world.s3 = stack.enter_context(running_s3())
        await stack.enter_async_context(world.receiver.serving())
        s3_port = urlsplit(world.s3.endpoint).port
        world.s3_relay = await _started(Relay(lambda: s3_port), stack)
        names = (("plane-a", ()), ("plane-b", ("--processes", "2")))
        world.planes = [Plane(name, free_port(), arguments) for name, arguments in names]
        world.balancer = Balancer([plane.port for plane in world.planes])
        await _started(world.balancer, stack)
        stack.callback(world.kill_all)
        await asyncio.to_thread(world.upgrade)
        for plane in world.planes:
            await asyncio.to_thread(world.start_plane, plane)
        await stack.enter_async_context(world.balancer.checking())
        world.disk = _small_disk(folder, stack)
        await _add_workers(world, stack)
        await until_ready(world)
        yield world


async def _started(relay: AnyRelay, stack: AsyncExitStack) -> AnyRelay:
    await relay.start()
    stack.push_async_callback(relay.stop)
    return relay


async def _add_workers(world: World, stack: AsyncExitStack) -> None:
    for number in range(1, OWN_ENGINES + OWNED_ENGINES + 1):
        relay = await _started(ReportRelay(world.balancer.next_port), stack)
        state = world.folder / f"state-{number}"
        if number == OWN_ENGINES + OWNED_ENGINES and world.disk:
            state = world.disk / "state"
        engine = f"engine-{number}" if number <= OWN_ENGINES else None
        world.workers.append(Worker(f"worker-{number}", relay, state, engine, free_port()))


def _small_disk(folder: Path, stack: AsyncExitStack) -> Path | None:
    """Mounts a small file system, where that is allowed."""
    disk = folder / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError:
        return None
    if done.returncode:
        return None
    stack.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
    return disk


async def until_ready(world: World, seconds: float = READY_SECONDS_MAX) -> None:
    """Waits until every control plane is ready."""
    async with asyncio.timeout(seconds):
        while len(world.balancer.ready) < len(world.planes):
            for plane in world.planes:
                assert plane.running.exit_code is None, plane.running.said()[-2000:]
            await asyncio.sleep(LOOK_SECONDS)
