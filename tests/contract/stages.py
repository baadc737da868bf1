"""The backends that the contract suite runs on, each with what a test needs around it."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from tests.comfykit.proxy import meddling

from comfyfleet.comfy import Backend, ComfyServer, Limits, ServerSettings
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.engine import serving

LIMITS = Limits(poll_seconds=0.5, stall_seconds=60, cancel_seconds=60)


@dataclass(frozen=True, slots=True)
class Stage:
    """A backend under test.

    `another` makes a second caller of the same backend, which knows nothing of the first.
    `drop` cuts the connection that events come on; None where there is none.
    """

    backend: Backend
    another: Callable[[], Backend]
    drop: Callable[[], object] | None


StageOf = Callable[[], contextlib.AbstractAsyncContextManager[Stage]]


@contextlib.asynccontextmanager
async def server_stage(url: str) -> AsyncIterator[Stage]:
    async with meddling(url) as proxy, contextlib.AsyncExitStack() as stack:

        def caller() -> ComfyServer:
            server = ComfyServer(ServerSettings(proxy.url, LIMITS), surroundings=Surroundings())
            stack.push_async_callback(server.aclose)
            return server

        yield Stage(caller(), caller, proxy.cut_sockets)


@contextlib.asynccontextmanager
async def engine_stage() -> AsyncIterator[Stage]:
    with serving() as served:
        async with server_stage(served.url) as stage:
            yield stage
