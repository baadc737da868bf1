"""The backends that the contract suite runs on, each with what a test needs around it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.prompts import Prompt, heavy, slow
from tests.support.backends.proxy import faulty_proxy
from tests.support.backends.tcp_relay import tcp_relay
from tests.support.backends.v2_server import comfy_api_proxy
from tests.support.server.gateway import GatewayServer

from comfyfleet.comfy import (
    Backend,
    BackendLimits,
    CloudSettings,
    ComfyCloud,
    ComfyServer,
    ServerSettings,
)
from comfyfleet.comfy.backend import BackendAbilities
from comfyfleet.comfy.events import Event, NodeStarted, Started
from comfyfleet.engine import serve_in_thread
from comfyfleet.transport.retry import RetryPolicy

KEY = "key-of-alice"
LIMITS = BackendLimits(poll_seconds=0.5, stall_seconds=60, cancel_seconds=60)


@dataclass(frozen=True, slots=True)
class Stage:
    """A backend under test.

    `another` makes a second caller of the same backend, which knows nothing of the first.
    `drop` cuts the connection that events come on; None where there is none.
    `slow` makes a prompt that takes seconds there.
    """

    backend: Backend
    another: Callable[[], Backend]
    drop: Callable[[], object] | None
    abilities: BackendAbilities = field(default_factory=BackendAbilities)
    slow: Callable[..., Prompt] = slow

    def is_under_way(self, event: Event) -> bool:
        """In the middle of a slow run, as far as the backend tells."""
        if not self.abilities.reports_nodes:
            return isinstance(event, Started)
        return isinstance(event, NodeStarted) and event.node_id == "2"


StageOf = Callable[[], contextlib.AbstractAsyncContextManager[Stage]]


@contextlib.asynccontextmanager
async def server_stage(url: str, slow: Callable[..., Prompt] = heavy) -> AsyncIterator[Stage]:
    async with faulty_proxy(url) as proxy, contextlib.AsyncExitStack() as stack:

        def caller() -> ComfyServer:
            server = ComfyServer(ServerSettings(proxy.url, LIMITS), retry=RetryPolicy())
            stack.push_async_callback(server.aclose)
            return server

        yield Stage(caller(), caller, proxy.cut_sockets, slow=slow)


@contextlib.asynccontextmanager
async def engine_stage() -> AsyncIterator[Stage]:
    with serve_in_thread() as served:
        async with server_stage(served.url, slow) as stage:
            yield stage


@contextlib.asynccontextmanager
async def cloud_stage(
    url: str, drop: Callable[[], object] | None, key: str = KEY
) -> AsyncIterator[Stage]:
    async with contextlib.AsyncExitStack() as stack:

        def caller() -> ComfyCloud:
            cloud = ComfyCloud(CloudSettings(key, url, LIMITS))
            stack.push_async_callback(cloud.aclose)
            return cloud

        cloud = caller()
        yield Stage(cloud, caller, drop, await cloud.abilities())


@contextlib.asynccontextmanager
async def cloud_v1_stage() -> AsyncIterator[Stage]:
    with serving_cloud({KEY: CloudAccount("alice")}) as served:
        async with (
            faulty_proxy(served.url) as proxy,
            cloud_stage(proxy.url, proxy.cut_sockets) as stage,
        ):
            yield stage


@contextlib.asynccontextmanager
async def cloud_v2_stage() -> AsyncIterator[Stage]:
    with serve_in_thread() as served:
        async with comfy_api_proxy(served.url, KEY) as (url, cut), cloud_stage(url, cut) as stage:
            yield stage


@contextlib.asynccontextmanager
async def gateway_v2_stage(server: GatewayServer) -> AsyncIterator[Stage]:
    """A control plane with one engine behind it, as a server of Comfy API v2."""
    user = await asyncio.to_thread(server.user)
    async with (
        tcp_relay(server.url) as (url, cut),
        cloud_stage(url, cut, user.key) as stage,
    ):
        yield stage


@contextlib.asynccontextmanager
async def gateway_stage(server: GatewayServer) -> AsyncIterator[Stage]:
    """A control plane with one engine behind it, as if it were a ComfyUI."""
    user = await asyncio.to_thread(server.user)
    async with server_stage(user.url_with_key, slow) as stage:
        yield stage
