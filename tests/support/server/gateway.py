"""A control plane with engines and workers behind it, and ComfyUI's clients in front of it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
from tests.support.backends.engine_client import EngineClient, open_engine_client
from tests.support.databases.factory import Databases
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.command_process import CommandProcess, started
from tests.support.server.control_plane import ADMIN_KEY, client_of, plane_on
from tests.support.workers.workers import running_worker

from comfyfleet.engine import Served, serve_in_thread
from comfyfleet.engine.node import EngineNodeType
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.listener import serve
from comfyfleet.server.http.local_access import LocalAccess
from comfyfleet.server.maintenance.embedded_fleet import (
    FLEET,
    STAGE,
    embedded_fleet_secret,
    local_user_key,
    open_embedded_fleet,
)
from comfyfleet.server.sign_in_links import SignInLinks
from comfyfleet.server.tenants import service as tenants
from comfyfleet.server.tenants.model import ALL_SCOPES, NewApiKey, new_api_key
from comfyfleet.worker.settings import WorkerSettings

LONG_KEY = "a" * 64
READY_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.02
# 0.05 s of work, a picture, and a result that any ComfyUI would give.
PROMPT: Mapping[str, Any] = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "ComfyUI"}},
}  # fmt: skip


@dataclass(frozen=True)
class GatewayUser:
    """A user of a new tenant, or of the given one."""

    url: str
    tenant_id: UUID
    user_id: UUID
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    @property
    def url_with_key(self) -> str:
        """For clients that can only be given an address."""
        return f"{self.url}/k/{self.key}"

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=READY_SECONDS_MAX)

    def http_async(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=READY_SECONDS_MAX)

    @contextlib.contextmanager
    def open_engine_client(self) -> Iterator[EngineClient]:
        """HTTP and websockets; from a thread, if the control plane is in this process."""
        with open_engine_client(self.url, self.headers) as talk:
            yield talk


@dataclass(frozen=True)
class GatewayServer:
    """A gateway with one worker for each engine, in the fleet of `comfyfleet up`."""

    url: str
    admin_key: str
    engines: Sequence[Served]
    folder: Path

    def admin(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        response = httpx.post(f"{self.url}/api/admin{path}", json=body, headers=headers, timeout=30)
        assert response.status_code < 300, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def user(self, tenant_id: UUID | None = None, *, tokens: int = 0) -> GatewayUser:
        """A new one with a key."""
        if tenant_id is None:
            made = self.admin("/tenants", name="Ada")
        else:
            user = self.admin(f"/tenants/{tenant_id}/users", name="Grace")
            made = self.admin(f"/tenants/{tenant_id}/users/{user['id']}/keys", name="a key")
            made = {**made, "id": tenant_id, "user_id": user["id"]}
        if tokens:
            path = f"/tenants/{made['id']}/wallets/{made['user_id']}/credits"
            self.admin(path, amount=tokens, provider_transaction_id=f"pay-{made['user_id']}")
        return GatewayUser(self.url, UUID(str(made["id"])), UUID(made["user_id"]), made["key"])

    def wait_until_ready(self, user: GatewayUser, node_types: int = 1) -> None:
        """Until the workers have told what their backends can do."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        with user.http() as http:
            while len(http.get("/object_info").json()) < node_types:
                assert time.monotonic() < deadline, "no worker has told its node types"
                time.sleep(LOOK_SECONDS)


@dataclass(frozen=True)
class GatewayProcess(GatewayServer):
    running: CommandProcess


@contextlib.contextmanager
def serving_engines(
    count: int, folder: Path, nodes: Mapping[str, EngineNodeType] | None = None
) -> Iterator[list[Served]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(serve_in_thread(data=folder / f"engine-{number}", nodes=nodes))
            for number in range(count)
        ]


@contextlib.contextmanager
def up_with_engines(
    folder: Path,
    engines: Sequence[Served],
    *arguments: str,
    port: int = 0,
    **environ: str,
) -> Iterator[GatewayProcess]:
    """`comfyfleet up` as a process of its own, with these engines as its backends."""
    backends = [word for each in engines for word in ("--backend", each.url)]
    environ = {"COMFYFLEET_ADMIN_KEY": LONG_KEY, **environ}
    words = ("up", "--port", str(port), *backends, *arguments)
    with started(*words, folder=folder, **environ) as running:
        url = running.wait_for_line(r"Control plane at (\S+)")[1]
        server = GatewayProcess(url, LONG_KEY, engines, folder, running)
        running.wait_for_line("Any ComfyUI client can use")
        server.wait_until_ready(server.user())
        yield server


@dataclass(frozen=True)
class GatewayInProcess(GatewayServer):
    """A gateway in this process. Calls of `admin` and `user` block, so use a thread for them."""

    plane: ControlPlane
    stop: asyncio.Event  # ends the server

    async def new_user(self, tenant_id: UUID | None = None, *, tokens: int = 0) -> GatewayUser:
        return await asyncio.to_thread(lambda: self.user(tenant_id, tokens=tokens))


async def until(is_so: Callable[[], Awaitable[object]]) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not await is_so():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(LOOK_SECONDS)


async def history_entry(http: httpx.AsyncClient, prompt_id: str) -> Any:
    """None until the prompt has ended."""
    return (await http.get(f"/history/{prompt_id}")).json().get(prompt_id)


@contextlib.asynccontextmanager
async def gateway_on(
    databases: Databases,
    folder: Path,
    *,
    engines: int = 1,
    nodes: Mapping[str, EngineNodeType] | None = None,
    reached: Mapping[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[GatewayInProcess]:
    """In this process: its statements can be counted, and its parts looked at. `reached`: the backends
    that the control plane reaches itself, by their workers' ids."""
    listener = free_listener()
    url = url_of(listener)
    stop = asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        backends = stack.enter_context(serving_engines(engines, folder, nodes))
        plane = await stack.enter_async_context(
            plane_on(databases, folder, public_url=url, **settings)
        )
        secret = await embedded_fleet_secret(plane, folder)
        await open_embedded_fleet(plane)
        local = LocalAccess(await local_user_key(plane, folder), SignInLinks(folder))
        app = create_app(plane, local, reached)
        serving = asyncio.create_task(serve(app, listener, stop, at_stop=plane.end_waits))
        try:
            async with contextlib.AsyncExitStack() as workers:
                for number, backend in enumerate(backends):
                    worker = worker_settings(url, secret, backend.url, folder, f"worker-{number}")
                    await workers.enter_async_context(running_worker(worker))
                server = GatewayInProcess(url, ADMIN_KEY, backends, folder, plane, stop)
                user = await server.new_user()
                if backends:
                    await asyncio.to_thread(server.wait_until_ready, user)
                yield server
        finally:
            stop.set()
            await serving


def worker_settings(
    url: str, secret: str, backend_url: str, folder: Path, worker_id: str
) -> WorkerSettings:
    return WorkerSettings(
        control_url=url,
        fleet_slug=FLEET,
        stage=STAGE,
        worker_id=worker_id,
        state=folder / worker_id,
        backend_url=backend_url,
        secret=secret,
        heartbeat_seconds=1.0,
        grace_seconds=5.0,
    )


@dataclass(frozen=True)
class GatewayClients:
    """Users of a control plane without workers. Each user has a client in this process."""

    plane: ControlPlane
    stack: contextlib.AsyncExitStack
    users: dict[httpx.AsyncClient, tuple[UUID, UUID]] = field(default_factory=dict)

    async def new_client(
        self, *, of_tenant_of: httpx.AsyncClient | None = None
    ) -> httpx.AsyncClient:
        """Of a new user, and of a new tenant unless another's client is named."""
        now, user_id = self.plane.clock(), uuid4()
        if of_tenant_of is None:
            tenant_id = uuid4()
            async with self.plane.central.transaction() as tx:
                await tenants.create_tenant(
                    tx, tenant_id=tenant_id, name="Ada & Co", pool="main", now=now
                )
        else:
            tenant_id, _ = self.users[of_tenant_of]
        async with self.plane.context.tenant_transaction(tenant_id) as tx:
            await tenants.create_user(tx, user_id=user_id, tenant_id=tenant_id, now=now)
        key = new_api_key()
        new = NewApiKey(uuid4(), key, tenant_id, user_id, "test", ALL_SCOPES, None)
        async with self.plane.central.transaction() as tx:
            await tenants.create_key(tx, new, now=now)
        client = await self.stack.enter_async_context(client_of(self.plane, key))
        self.users[client] = tenant_id, user_id
        return client


@contextlib.asynccontextmanager
async def clients_of(plane: ControlPlane) -> AsyncIterator[GatewayClients]:
    async with contextlib.AsyncExitStack() as stack:
        yield GatewayClients(plane, stack)
