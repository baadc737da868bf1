"""Who may use `comfyfleet up` without a key, and what makes a browser its owner."""

import asyncio
import io
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from rich.console import Console
from tests.security.test_sessions import FOREIGN
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.command_process import started
from tests.support.server.control_plane import plane_on
from tests.support.server.sessions import browser_at
from websockets.sync.client import connect

from comfyfleet.cli import up as up_command
from comfyfleet.cli.context import CliContext
from comfyfleet.cli.up import OWN_PROGRAMS, UpAccessOptions
from comfyfleet.clock import utc_now
from comfyfleet.comfy.backend import comfyui_variables
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http import local_access
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.local_access import LocalAccess, find_user, tells_users
from comfyfleet.server.maintenance.embedded_fleet import local_user_key
from comfyfleet.server.sign_in_links import SignInLinks

LOCAL = "/api/session/local"
NOBODY = 65534
only_linux = pytest.mark.skipif(not tells_users(), reason="only Linux tells whose connection it is")
only_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can run programs as others"
)


@dataclass(frozen=True)
class Up:
    """A control plane as `comfyfleet up` serves it, on a real socket."""

    url: str
    links: SignInLinks
    key: str

    def secret(self) -> str:
        return self.links.new_link(self.url).partition("#secret=")[2]


@pytest.fixture(params=[False, True], ids=["own programs", "all local users"])
def is_trusting(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
async def sqlite_plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(sqlite_databases, tmp_path) as plane:
        yield plane


@pytest.fixture
async def up(sqlite_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Up]:
    async for each in _up(sqlite_plane, tmp_path, trusts=False):
        yield each


async def _up(plane: ControlPlane, folder: Path, *, trusts: bool) -> AsyncIterator[Up]:
    listener = free_listener()
    links, key = SignInLinks(folder), await local_user_key(plane, folder)
    local = LocalAccess(key, links, trusts_local_users=trusts)
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(create_app(plane, local), listener, stop))
    try:
        yield Up(url_of(listener), links, key)
    finally:
        stop.set()
        await serving
        listener.close()


async def test_a_browser_becomes_the_owner_with_the_secret_of_the_printed_address(up: Up) -> None:
    async with httpx.AsyncClient(base_url=up.url) as browser:
        assert (await browser.get("/api/session")).json()["ways"]["one_click"] is True
        found = await browser.post(LOCAL, json={"secret": up.secret()}, headers={"Origin": up.url})
        assert found.json()["kinds"] == ["operator", "customer"]
        assert (found.json()["role"], found.json()["tenant"]["name"]) == ("owner", "local")
        for path in ("/api/admin/fleets", "/api/wallet", "/queue"):
            assert (await browser.get(path)).status_code == 200, path
        audit = (await browser.get("/api/admin/audit?action=sign_in")).json()["entries"]
        assert {entry["details"]["way"] for entry in audit} == {"local"}


async def test_nobody_becomes_the_owner_without_the_secret(
    sqlite_plane: ControlPlane, tmp_path: Path, is_trusting: bool
) -> None:
    async for up in _up(sqlite_plane, tmp_path, trusts=is_trusting):
        async with httpx.AsyncClient(base_url=up.url) as browser:
            for body in (None, {}, {"secret": ""}, {"secret": "0" * 64}, {"secret": "../address"}):
                refused = await browser.post(LOCAL, json=body)
                assert refused.status_code in (403, 422), body
                assert "set-cookie" not in refused.headers
            for path in ("/api/admin/fleets", "/api/admin/tenants"):
                assert (await browser.get(path)).status_code == 401


async def test_a_secret_works_once_and_not_after_a_restart(up: Up) -> None:
    secret, unused = up.secret(), up.secret()
    async with httpx.AsyncClient(base_url=up.url) as browser:
        assert (await browser.post(LOCAL, json={"secret": secret})).status_code == 200
        again = await browser.post(LOCAL, json={"secret": secret})
        assert again.status_code == 403
        assert "comfyfleet open" in again.json()["error"]["message"]
        fresh = up.links.start(up.url)
        assert (await browser.post(LOCAL, json={"secret": unused})).status_code == 403
        new = fresh.partition("#secret=")[2]
        assert (await browser.post(LOCAL, json={"secret": new})).status_code == 200


def test_only_the_hash_of_a_secret_is_stored(tmp_path: Path) -> None:
    secret = SignInLinks(tmp_path).start("http://127.0.0.1:1").partition("#secret=")[2]
    assert len(secret) == 64
    for file in filter(Path.is_file, tmp_path.rglob("*")):
        assert secret not in file.name
        assert secret.encode() not in file.read_bytes()


NOT_FROM_HERE: list[dict[str, str]] = [
    *FOREIGN,
    {"Host": "evil.example"},
    {"Host": "127.0.0.1.evil.example"},
    {"X-Forwarded-For": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"},
    {"Via": "1.1 proxy"},
]


async def test_a_secret_is_refused_from_elsewhere_and_stays_unused(
    up: Up, sqlite_plane: ControlPlane
) -> None:
    secret = up.secret()
    async with httpx.AsyncClient(base_url=up.url) as browser:
        for headers in NOT_FROM_HERE:
            refused = await browser.post(LOCAL, json={"secret": secret}, headers=headers)
            assert refused.status_code == 403, headers
            assert "set-cookie" not in refused.headers
        strange = await browser.get("/api/session", headers={"Host": "evil.example"})
        assert strange.json()["ways"]["one_click"] is False
        assert strange.json()["public_catalogue"] is False
        refused = await browser.get("/api/catalogue", headers={"Host": "evil.example"})
        assert refused.status_code == 401
        assert (await browser.post(LOCAL, json={"secret": secret})).status_code == 200
    async with browser_at(sqlite_plane) as browser_of_serve:
        refused = await browser_of_serve.call("POST", LOCAL, json={"secret": up.secret()})
        assert refused.status_code == 404


KEYLESS = (
    "/queue",
    "/view?filename=x.png",
    "/userdata?dir=workflows",
    "/api/wallet",
    "/api/catalogue",
)
# All modules are imported before the change of the user, who may not read them.
ASK = """
import encodings.idna, http.client, os, sys
address, user, *paths = sys.argv[1:]
os.setuid(int(user))
for path in paths:
    connection = http.client.HTTPConnection(address)
    connection.request("GET", path)
    print(connection.getresponse().status)
"""


def statuses_as(user: int, url: str, *paths: str) -> list[int]:
    """What a program of another user of this machine gets, without a key."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", ASK, url.removeprefix("http://"), str(user), *paths],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(line) for line in done.stdout.split()]


@only_linux
@only_root
async def test_programs_of_other_users_of_the_machine_need_a_key(
    sqlite_plane: ControlPlane, tmp_path: Path, is_trusting: bool
) -> None:
    async for up in _up(sqlite_plane, tmp_path, trusts=is_trusting):
        found = await asyncio.to_thread(statuses_as, NOBODY, up.url, *KEYLESS)
        own = await asyncio.to_thread(statuses_as, os.getuid(), up.url, *KEYLESS)
        assert own == [200, 404, 404, 200, 200]
        assert found == (own if is_trusting else [401] * len(KEYLESS))


@only_linux
@only_root
@pytest.mark.parametrize(("options", "status"), [((), 401), (("--trust-local-users",), 200)])
def test_up_trusts_other_users_only_if_told_to(
    tmp_path: Path, options: tuple[str, ...], status: int
) -> None:
    start = ("up", "--port", "0", "--no-open", "--no-worker", *options)
    with started(*start, folder=tmp_path) as running:
        url = running.wait_for_line(r"can use (\S+) as its server")[1]
        assert statuses_as(NOBODY, url, "/queue") == [status]
        assert statuses_as(os.getuid(), url, "/queue") == [200]


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("access", [OWN_PROGRAMS, UpAccessOptions(trust_local_users=True)])
def test_up_prints_the_address_that_works_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: UpAccessOptions, tells: bool
) -> None:
    monkeypatch.setattr(up_command, "tells_users", lambda: tells)
    said = io.StringIO()
    context = CliContext(
        stdin=io.BytesIO(),
        stdout=io.BytesIO(),
        out=Console(file=io.StringIO()),
        err=Console(file=said),
        environ={},
        now=utc_now,
    )
    with free_listener() as listener:
        up = up_command._AllInOne(
            "127.0.0.1", tmp_path, listener, (), {}, context, access, comfyui_variables({})
        )
        local = LocalAccess(
            "secret", SignInLinks(tmp_path), trusts_local_users=access.trust_local_users
        )
        up._tell_next([], "http://pages", local)
        url = url_of(listener)
    has_secret = not tells and not access.trust_local_users
    shown = f"{url}/k/secret" if has_secret else url
    assert f"can use {shown} as its server" in " ".join(said.getvalue().split())


@only_linux
async def test_root_is_another_user_unless_it_started_up(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.getuid() + 1
    monkeypatch.setattr(local_access, "own_user", lambda: owner)
    async with httpx.AsyncClient(base_url=up.url) as program:
        for path in KEYLESS:
            assert (await program.get(path)).status_code == 401, path
        assert (await program.get("/api/session")).json()["public_catalogue"] is False
        keyed = {"Authorization": f"Bearer {up.key}"}
        assert (await program.get("/queue", headers=keyed)).status_code == 200


async def test_without_users_of_connections_only_the_address_with_the_secret_works(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_access, "TCP_TABLES", (Path("/nowhere/tcp"),))
    monkeypatch.delattr(os, "getuid", raising=False)
    assert not tells_users()
    async with httpx.AsyncClient(base_url=up.url) as program:
        for path in KEYLESS:
            assert (await program.get(path)).status_code == 401, path
        for path in ("/queue", "/api/wallet"):
            assert (await program.get(f"/k/{up.key}{path}")).status_code == 200, path
            assert (await program.get(f"/k/{'0' * 64}{path}")).status_code == 401, path
        secret = {"secret": up.secret()}
        assert (await program.post(LOCAL, json=secret)).status_code == 200


async def test_a_page_of_another_site_has_no_access_to_the_api(up: Up) -> None:
    async with httpx.AsyncClient(base_url=up.url) as browser:
        for headers in (
            {"Origin": up.url},
            {"Sec-Fetch-Site": "none"},
            {"Cookie": "a=b"},
            *FOREIGN,
        ):
            refused = await browser.get("/api/wallet", headers=headers)
            assert refused.status_code in (401, 403), headers
        assert (await browser.get("/api/wallet")).status_code == 200


@only_linux
async def test_the_user_is_read_once_for_each_connection(
    up: Up, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []

    def counted(client: tuple[str, int], server: tuple[str, int]) -> int:
        read.append(client)
        return find_user(client, server)

    monkeypatch.setattr(local_access, "find_user", counted)
    async with httpx.AsyncClient(base_url=up.url) as program:
        for _ in range(5):
            assert (await program.get("/queue")).status_code == 200
    assert len(read) == 1
    async with httpx.AsyncClient(base_url=up.url) as program:
        assert (await program.get("/queue")).status_code == 200
    assert len(read) == 2


@only_linux
async def test_websockets_ask_for_the_user_too(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    address = up.url.replace("http", "ws") + "/ws"

    def first_message() -> str:
        with connect(address) as socket:
            return str(socket.recv(timeout=20))

    assert "status" in await asyncio.to_thread(first_message)
    monkeypatch.setattr(local_access, "own_user", lambda: os.getuid() + 1)
    with pytest.raises(Exception, match=r"401|403"):
        await asyncio.to_thread(first_message)


@only_linux
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_connection_over_either_protocol_has_its_user(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener, socket.socket(family) as program:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listener.listen()
        address = listener.getsockname()[:2]
        program.connect(address)
        peers = [program.getsockname()[:2]]
        assert find_user(peers[0], address) == os.getuid()
        mapped = [
            (f"::ffff:{ip}", port) if "." in ip else (ip, port) for ip, port in (peers[0], address)
        ]
        assert find_user(*mapped) == os.getuid()
        assert find_user(("127.0.0.1", 1), address) == local_access.UNKNOWN_USER


def test_links_of_different_secrets_are_independent(tmp_path: Path) -> None:
    links = SignInLinks(tmp_path)
    links.start("http://127.0.0.1:1")
    one, other = (links.new_link("http://x").partition("#secret=")[2] for _ in range(2))
    assert links.use(one)
    assert not links.use(one)
    assert links.use(other)
    assert not links.use("")
