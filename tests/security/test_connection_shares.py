"""No client, with or without a key, takes all connections or files: each has a share, and keyless connections
make room for others."""

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.control_plane import ADMIN_KEY, plane_on

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.connections import with_limits
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.strangers import AddressLimiter
from comfyfleet.server.http.tallies import (
    CallerLimits,
    Holder,
    Tally,
    TransferLimit,
    limit_transfers,
    shares_of,
)

PATIENCE_SECONDS = 20
CONNECTIONS = 40
SHARES = shares_of(CONNECTIONS)
USER_SHARE = SHARES["user"]
DOWNLOADS = 8
HALF_A_LOG_IN = b"POST /editor/login HTTP/1.1\r\nHost: control.test\r\nContent-Length: 9\r\n\r\n"


class Server:
    def __init__(self, plane: ControlPlane, address: tuple[str, int], url: str) -> None:
        self.plane, self.url = plane, url
        self._address = address
        self._clients: list[socket.socket] = []

    async def new_key(self) -> str:
        async with self.client(ADMIN_KEY) as admin:
            name = f"tenant-{len(self._clients)}-{os.urandom(4).hex()}"
            made = await admin.post("/api/admin/tenants", json={"name": name})
            return str(made.json()["key"])

    async def new_keys_of_one_tenant(self, users: int) -> list[str]:
        async with self.client(ADMIN_KEY) as admin:
            made = (await admin.post("/api/admin/tenants", json={"name": "many"})).json()
            path, keys = f"/api/admin/tenants/{made['id']}/users", [str(made["key"])]
            for number in range(1, users):
                user = await admin.post(path, json={"email": f"{number}@example.com"})
                key = await admin.post(f"{path}/{user.json()['id']}/keys", json={"name": "k"})
                keys.append(str(key.json()["key"]))
        return keys

    async def new_worker_key(self, fleet: str) -> str:
        async with self.client(ADMIN_KEY) as admin:
            made = await admin.post("/api/admin/fleets", json={"slug": fleet})
        body = {"worker_id": f"{fleet}-1", "fleet_slug": fleet, "stage": "production"}
        headers = {"X-Fleet-Secret": made.json()["secret"]}
        async with self.client() as worker:
            joined = await worker.post("/api/worker/register", json=body, headers=headers)
        assert joined.status_code == 200, joined.text
        return str(joined.json()["token"])

    def client(self, key: str = "") -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=PATIENCE_SECONDS)

    async def connect(self, request: bytes) -> socket.socket:
        """Sends a request whose response is not read."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        self._clients.append(client)
        await asyncio.get_running_loop().sock_connect(client, self._address)
        await self.send(client, request)
        return client

    async def send(self, client: socket.socket, request: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(client, request)

    async def status(self, client: socket.socket) -> int:
        """Returns the status of a small response; 0 if the connection was closed."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            try:
                data = await asyncio.get_running_loop().sock_recv(client, 64 * 1024)
            except ConnectionResetError:
                return 0
        return int(data.split()[1]) if data else 0

    def close(self) -> None:
        for client in self._clients:
            client.close()


@asynccontextmanager
async def serving(
    plane: ControlPlane, limits: AddressLimiter | None = None
) -> AsyncIterator[Server]:
    app = create_app(plane)
    limit_transfers(app, downloads=DOWNLOADS, uploads=4)
    listener, stop = free_listener(), asyncio.Event()
    server = Server(plane, listener.getsockname(), url_of(listener))
    running = asyncio.create_task(
        serve(
            app,
            listener,
            stop,
            at_stop=plane.end_waits,
            connection=with_limits(connections_max=CONNECTIONS),
            strangers=limits,
        )
    )
    try:
        yield server
    finally:
        server.close()
        stop.set()
        await running


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path / "plane") as plane:
        yield plane


def get(path: str, key: str = "") -> bytes:
    lines = [f"GET {path} HTTP/1.1", "Host: control.test"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    return "\r\n".join([*lines, "", ""]).encode()


async def signed_path(plane: ControlPlane, folder: Path, key: str, size: int) -> str:
    source = folder / "source.png"
    source.write_bytes(bytes(size))
    await plane.store.put_file(key, source, "image/png")
    url = await plane.store.url_to_get(key, seconds=600)
    return "/" + url.split("/", 3)[3]


async def test_unread_downloads_of_one_signed_url_leave_room_for_all_others(
    plane: ControlPlane, tmp_path: Path
) -> None:
    path = await signed_path(plane, tmp_path, "tenants/a/large.png", 32 * 1024**2)
    small = await signed_path(plane, tmp_path, "tenants/b/small.png", 100)
    async with serving(plane) as server:
        key = await server.new_key()
        for _ in range(2 * CONNECTIONS):
            await server.connect(get(path))
        for client_key, wanted in (
            ("", "/readyz"),
            ("", small),
            (key, "/api/wallet"),
            (key, "/queue"),
        ):
            async with server.client(client_key) as client:
                assert (await client.get(wanted)).status_code == 200, wanted
        put = await plane.store.url_to_put(
            "tenants/b/new.png", content_type="image/png", seconds=60
        )
        async with server.client() as client:
            url = server.url + "/" + put.url.split("/", 3)[3]
            stored = await client.put(url, content=b"1", headers=put.headers)
            assert stored.status_code == 200


async def test_unread_downloads_of_one_object_hold_a_quarter_of_the_files(
    plane: ControlPlane, tmp_path: Path
) -> None:
    path = await signed_path(plane, tmp_path, "tenants/a/large.png", 32 * 1024**2)
    other = await signed_path(plane, tmp_path, "tenants/a/other.png", 100)
    async with serving(plane) as server:
        for _ in range(DOWNLOADS // 4):
            assert await server.status(await server.connect(get(path))) == 200
        assert await server.status(await server.connect(get(path))) == 429
        assert await server.status(await server.connect(get(other))) == 200


def test_downloads_are_limited_in_total_by_tenant_and_by_object() -> None:
    limit = TransferLimit("downloads", 8)
    first = [limit.begin("tenants/a/1") for _ in range(2)]
    with pytest.raises(TooManyCalls):
        limit.begin("tenants/a/1")
    held = [limit.begin("tenants/a/2") for _ in range(2)]
    with pytest.raises(TooManyCalls):
        limit.begin("tenants/a/3")
    held += [limit.begin(f"tenants/{tenant}/1") for tenant in "bcde"]
    with pytest.raises(TooManyCalls):
        limit.begin("tenants/f/1")
    first[0].release()
    first[0].release()
    held.append(limit.begin("tenants/f/1"))
    with pytest.raises(TooManyCalls):
        limit.begin("tenants/f/1")
    first.clear()  # responses that were never sent
    limit.begin("tenants/f/1")


async def test_keyless_connections_make_room_for_new_ones(plane: ControlPlane) -> None:
    """Those of this machine aren't limited by address."""
    async with serving(plane) as server:
        key = await server.new_key()
        half = HALF_A_LOG_IN.replace(b"Content", b"Origin: http://control.test\r\nContent")
        clients = [await server.connect(half) for _ in range(3 * CONNECTIONS)]
        for client in clients[: 2 * CONNECTIONS]:
            assert await server.status(client) == 0, "the oldest are closed"
        async with server.client(key) as http:
            assert (await http.get("/api/wallet")).status_code == 200
            for _ in range(2 * CONNECTIONS):
                await server.connect(get("/healthz"))
            assert (await http.get("/api/wallet")).status_code == 200
            async with server.client() as other:
                assert (await other.get("/readyz")).status_code == 200


async def test_connections_with_a_valid_key_count_for_their_user(plane: ControlPlane) -> None:
    async with serving(plane) as server:
        key, other = await server.new_key(), await server.new_key()
        clients = [await server.connect(get("/queue", key)) for _ in range(USER_SHARE)]
        assert Counter([await server.status(client) for client in clients]) == {200: USER_SHARE}
        refused = await server.connect(get("/api/wallet", key))
        assert await server.status(refused) == 429
        assert await server.status(refused) == 0, "it is closed"
        assert await server.status(await server.connect(get("/queue", other))) == 200
        await server.send(clients[0], get("/queue", key))
        assert await server.status(clients[0]) == 200, "an open connection serves further requests"
        clients[0].close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await server.status(await server.connect(get("/queue", key))) != 200:
                pass


async def test_connections_of_all_users_of_a_tenant_have_a_limit(plane: ControlPlane) -> None:
    async with serving(plane) as server:
        other, most = await server.new_key(), SHARES["tenant"]
        keys = await server.new_keys_of_one_tenant(most // USER_SHARE + 1)
        for number in range(most):
            client = await server.connect(get("/queue", keys[number // USER_SHARE]))
            assert await server.status(client) == 200
        assert await server.status(await server.connect(get("/queue", keys[-1]))) == 429
        assert await server.status(await server.connect(get("/queue", other))) == 200


async def test_connections_of_all_workers_of_a_fleet_have_a_limit(plane: ControlPlane) -> None:
    path = "/api/worker/nothing"  # the key is checked, and then there is no such route
    async with serving(plane) as server:
        key, other = [await server.new_worker_key(fleet) for fleet in ("one", "other")]
        for _ in range(SHARES["fleet"]):
            assert await server.status(await server.connect(get(path, key))) == 404
        assert await server.status(await server.connect(get(path, key))) == 429
        assert await server.status(await server.connect(get(path, other))) == 404


async def test_a_connection_counts_again_when_its_requests_have_no_valid_key(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "192.0.2.1")
    limit = 5
    async with serving(plane, AddressLimiter(limit, is_exempt=lambda _: False)) as server:
        key = await server.new_key()
        clients = [await server.connect(get("/queue", key)) for _ in range(USER_SHARE)]
        assert Counter([await server.status(client) for client in clients]) == {200: USER_SHARE}
        half = HALF_A_LOG_IN.replace(b"Content", b"Origin: http://control.test\r\nContent")
        for client in clients[:limit]:
            await server.send(client, half)
        refused = clients[limit]
        for _ in range(100):
            await server.send(refused, get("/queue", key))
            assert await server.status(refused) == 200, "a valid key is never refused"
            probe = await server.connect(get("/healthz"))
            if await server.status(probe) == 429:
                break
            probe.close()
        else:
            pytest.fail("the address has more connections without a valid key than its limit")
        await server.send(refused, half)
        assert await server.status(refused) == 429
        assert await server.status(refused) == 0, "it is closed"


def test_a_caller_keeps_its_count_until_another_caller_uses_the_connection() -> None:
    limits = CallerLimits(8)
    one, other = Holder("user", 1), Holder("user", 2)
    tallies = [Tally(limits=limits) for _ in range(3)]
    tallies[0].count_for((one,))
    tallies[1].count_for((one,))
    tallies[1].count_for_address()
    with pytest.raises(TooManyCalls):
        tallies[2].count_for((one,))
    tallies[1].count_for((other,))
    tallies[2].count_for((one,))
    tallies[2].close()
    tallies[2].count_for((one,))  # a late request of a closed connection
    tallies[1].count_for((one,))


def test_no_kind_of_caller_has_a_share_of_all_connections() -> None:
    for connections in (16, 480, 20_000):
        assert all(0 < share < connections for share in shares_of(connections).values())
    assert shares_of(20_000)["user"] == 500
