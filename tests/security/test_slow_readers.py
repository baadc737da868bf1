"""Clients that don't read their responses are ended by the rule of uploads, whatever they were sent."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener
from tests.support.server.control_plane import plane_on

from comfyfleet.server.http import body_times
from comfyfleet.server.http import listener as http_listener
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.body_times import CHECK_SECONDS, UNREAD_SECONDS_MAX, SlowReaders
from comfyfleet.server.http.listener import serve

PATIENCE_SECONDS = 20


class Connection:
    """A socket and its transport; the test says what the client takes."""

    def __init__(self, waiting: int = 10**6) -> None:
        self.sent_bytes = 0
        self.waiting = waiting
        self.is_aborted = False

    def fileno(self) -> int:
        return -1

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.is_aborted = True


def seconds_until_end(connection: Connection, bytes_per_second: float) -> float | None:
    """Returns when the connection is ended, or None if it isn't within ten minutes."""
    readers, now = SlowReaders(unsent=lambda _: 0), 0.0
    readers.add(connection, connection)  # type: ignore[arg-type]
    while now < 600:
        now += CHECK_SECONDS
        connection.sent_bytes = int(now * bytes_per_second)
        readers.check(now)
        if connection.is_aborted:
            return now
    return None


def test_a_client_that_takes_no_byte_for_a_minute_is_ended() -> None:
    assert seconds_until_end(Connection(), 0) == UNREAD_SECONDS_MAX + CHECK_SECONDS


def test_a_client_must_read_1_kib_per_second() -> None:
    assert seconds_until_end(Connection(), 1024) is None
    assert seconds_until_end(Connection(), 1000) == UNREAD_SECONDS_MAX + CHECK_SECONDS


def test_a_connection_with_nothing_to_read_stays() -> None:
    assert seconds_until_end(Connection(waiting=0), 0) is None


def test_only_what_the_client_has_acknowledged_counts() -> None:
    connection, held = Connection(), 0
    readers = SlowReaders(unsent=lambda _: held)
    readers.add(connection, connection)  # type: ignore[arg-type]
    for step in range(1, 14):
        # The system takes bytes for a client that doesn't.
        connection.sent_bytes = held = step * 10**6
        readers.check(step * CHECK_SECONDS)
    assert connection.is_aborted


def open_objects(folder: Path) -> int:
    files = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            files.append(os.readlink(entry))
        except OSError:
            continue
    return sum(str(folder) in file and "/objects/" in file for file in files)


@pytest.mark.skipif(sys.platform != "linux", reason="open files are listed in /proc")
async def test_an_unread_download_ends_and_its_file_is_closed(
    sqlite_databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_times, "UNREAD_SECONDS_MAX", 0.1)
    monkeypatch.setattr(body_times, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(http_listener, "DATE_SECONDS", 0.02)
    large = tmp_path / "large.png"
    large.write_bytes(bytes(32 * 1024**2))
    async with plane_on(sqlite_databases, tmp_path / "plane") as plane:
        await plane.store.put_file("tenants/a/large.png", large, "image/png")
        url = await plane.store.url_to_get("tenants/a/large.png", seconds=60)
        listener, stop = free_listener(), asyncio.Event()
        address = listener.getsockname()
        serving = asyncio.create_task(
            serve(create_app(plane), listener, stop, at_stop=plane.end_waits)
        )
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, address)
        path = "/" + url.split("/", 3)[3]
        await loop.sock_sendall(client, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not open_objects(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while open_objects(tmp_path):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        client.close()
        stop.set()
        await serving
