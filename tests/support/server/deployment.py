"""A whole deployment on one machine, whose processes a test starts, kills and inspects."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from tests.support.databases.restartable_postgres import PostgresProcess, restartable_postgres
from tests.support.server.admin_client import Admin, until
from tests.support.server.ports import free_port
from tests.support.server.processes import Process, finish
from tests.support.workers.metadata_server import MetadataServer, serving_metadata

ADMIN_KEY = "a" * 64
READY_SECONDS_MAX = 60
LOG_TAIL_CHARACTERS = 4000


@dataclass(frozen=True)
class EngineProcess:
    process: Process
    url: str

    def history(self) -> dict[str, Any]:
        """Every prompt that it started and that has ended."""
        found: dict[str, Any] = httpx.get(f"{self.url}/history").json()
        return found

    def running(self) -> list[dict[str, Any]]:
        """The prompts that it executes now."""
        return [row[2] for row in httpx.get(f"{self.url}/queue").json()["queue_running"]]

    def is_idle(self) -> bool:
        queue = httpx.get(f"{self.url}/queue").json()
        return not queue["queue_running"] and not queue["queue_pending"]


@dataclass(frozen=True)
class WorkerProcess:
    """A worker process. `metadata` is its instance metadata service, which announces
    interruptions."""

    worker_id: str
    process: Process
    engine: EngineProcess
    metadata: MetadataServer


class Deployment:
    """A deployment with PostgreSQL and a migrated schema. The test starts everything else."""

    def __init__(
        self, folder: Path, environ: Mapping[str, str] | None = None, **settings: str
    ) -> None:
        self._folder = folder
        self._more = dict(environ or {})
        # Set by a test between `async with` and the first start.
        self.database_environ: dict[str, str] = {}
        self._settings = settings
        self._port = free_port()
        self._stack = ExitStack()
        self._processes: list[Process] = []
        self.url = f"http://127.0.0.1:{self._port}"
        self.admin = Admin(self.url, ADMIN_KEY)
        self.postgres: PostgresProcess
        self.control: Process

    async def __aenter__(self) -> "Deployment":
        self._stack.callback(self.admin.close)
        self.postgres = self._stack.enter_context(restartable_postgres())
        await self.postgres.create("central", "tenants")
        finish("db", "upgrade", folder=self._folder, environ=self._environ())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()
        self._stack.close()
        if error is not None:
            self._print_logs()

    def at_end(self, act: Callable[[], object]) -> None:
        self._stack.callback(act)

    def _print_logs(self) -> None:
        """Prints the end of every process's log beside the failed test."""
        for log in sorted({process.log for process in self._processes}):
            text = log.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]
            sys.stdout.write(f"\n--- {log.name}\n{text}")

    def _environ(self) -> dict[str, str]:
        return {
            "COMFYFLEET_ADMIN_KEY": ADMIN_KEY,
            "COMFYFLEET_CENTRAL_DATABASE_URL": self.postgres.url("central"),
            "COMFYFLEET_TENANT_DATABASE_URLS": f"main={self.postgres.url('tenants')}",
            "COMFYFLEET_STORAGE_URL": (self._folder / "files").as_uri(),
            "COMFYFLEET_PUBLIC_URL": self.url,
            **{f"COMFYFLEET_{name.upper()}": value for name, value in self._settings.items()},
            **self._more,
            **self.database_environ,
        }

    def _start(self, name: str, *arguments: str, environ: dict[str, str]) -> Process:
        process = Process(name, *arguments, folder=self._folder, environ=environ)
        self._processes.append(process)
        return process

    def start_control(self, *arguments: str) -> None:
        """On the same port each time; returns when it is ready."""
        self.control = self._start(
            "control", "serve", "--port", str(self._port), *arguments, environ=self._environ()
        )

        def is_ready() -> bool:
            assert self.control.exit_code is None, self.control.said()
            return self.admin.is_ready()

        until(is_ready, seconds=READY_SECONDS_MAX, what=self.control.said)

    def start_engines(self, *names: str) -> list[EngineProcess]:
        """All at once, because each takes seconds to start."""
        started = [
            self._start(
                name, "engine", "--port", "0", "--data", str(self._folder / name), environ={}
            )
            for name in names
        ]
        return [EngineProcess(each, each.wait_for_line(r"http://\S+:\d+")[0]) for each in started]

    def start_worker(
        self, worker_id: str, engine: EngineProcess, *, fleet: str, secret: str
    ) -> WorkerProcess:
        """A worker of that name whose state is kept: a restarted one continues."""
        metadata = self._stack.enter_context(serving_metadata())
        environ = {
            "COMFYFLEET_FLEET_SECRET": secret,
            "COMFYFLEET_HEARTBEAT_SECONDS": self._settings.get("heartbeat_seconds", "30"),
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
        }
        arguments = (
            *("worker", "--control", self.url, "--fleet", fleet, "--stage", "production"),
            *("--backend", engine.url, "--worker-id", worker_id),
            *("--state", str(self._folder / f"state-{worker_id}")),
        )
        process = self._start(worker_id, *arguments, environ=environ)
        return WorkerProcess(worker_id, process, engine, metadata)

    def restart_postgres(self) -> None:
        self.postgres.stop_at_once()
        self.postgres.start()

    def restart_control(self) -> None:
        """Kills it, without a shutdown."""
        self.control.kill()
        self.start_control()
