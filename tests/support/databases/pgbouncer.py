"""A real PgBouncer in front of a PostgreSQL of the tests."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url
from tests.support.server.ports import free_port

START_SECONDS_MAX = 10.0
# Debian installs it where only root's PATH looks.
BINARY = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
CONFIG = """
[databases]
* = host={host} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = {pool_size}
max_client_conn = 500
logfile = {folder}/log
"""


@contextmanager
def pgbouncer(server_url: str, *, pool_mode: str, pool_size: int = 20) -> Iterator[str]:
    """Yields a URL of the same server through PgBouncer. Skips the test where it isn't installed."""
    if BINARY is None:
        if os.environ.get("CI"):
            pytest.fail("PgBouncer isn't installed: make pgbouncer")
        pytest.skip("PgBouncer isn't installed; `make pgbouncer` does so")
    host = str(make_url(server_url).query["host"])
    folder = Path(tempfile.mkdtemp(prefix="comfyfleet-pgbouncer-"))
    try:
        port = free_port()
        path = folder / "pgbouncer.ini"
        path.write_text(
            CONFIG.format(
                host=host, port=port, pool_mode=pool_mode, pool_size=pool_size, folder=folder
            )
        )
        with _running(path, host, port):
            # It has one user for all, as its clients aren't asked for a password.
            yield f"postgresql://postgres@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _running(config: Path, socket_folder: str, port: int) -> Iterator[None]:
    # It refuses to run as root, and only the server's own user may use the socket.
    owner = Path(socket_folder).stat().st_uid if os.getuid() == 0 else None
    if owner is not None:
        for path in (config.parent, config):
            os.chown(path, owner, -1)
    process = subprocess.Popen(
        [str(BINARY), "-q", str(config)],
        user=owner,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not _listens(port):
            assert process.poll() is None, (config.parent / "log").read_text()
            assert time.monotonic() < deadline, "PgBouncer doesn't listen"
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def through(pooler_url: str, url: str) -> str:
    """The same database by way of the pooler."""
    pooler = make_url(pooler_url)
    return pooler.set(database=make_url(url).database).render_as_string(hide_password=False)
