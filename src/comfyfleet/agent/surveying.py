"""The machine around a worker: its figures, notices that it will be taken away, its protection."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from urllib.parse import urlsplit

from comfyfleet.agent.machine import Machine
from comfyfleet.agent.metadata import Metadata, endpoint_of
from comfyfleet.agent.ports import NoNotices, NoProtection, Surveys
from comfyfleet.agent.protection import Protection
from comfyfleet.agent.settings import WorkerSettings
from comfyfleet.agent.spot import SpotWatch
from comfyfleet.comfy import ComfyServer

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextlib.asynccontextmanager
async def surveying(settings: WorkerSettings, environ: Mapping[str, str]) -> AsyncIterator[Surveys]:
    async with contextlib.AsyncExitStack() as stack:
        machine = await stack.enter_async_context(_machine(settings, environ))
        endpoint = endpoint_of(environ)
        if endpoint is None:
            yield Surveys(machine, NoNotices(), NoProtection())
            return
        metadata = Metadata(endpoint)
        stack.push_async_callback(metadata.aclose)
        protection = await stack.enter_async_context(_protecting(metadata, environ))
        yield Surveys(machine, SpotWatch(metadata), protection)


@contextlib.asynccontextmanager
async def _machine(settings: WorkerSettings, environ: Mapping[str, str]) -> AsyncIterator[Machine]:
    """A backend on another machine tells its own figures; ours has another GPU, or none."""
    url = settings.backend_url
    if url is None:
        yield Machine(settings.state, environ, nvml=None)
    elif urlsplit(url).hostname in LOOPBACK:
        async with ComfyServer(settings.server(settings.impatient_limits)) as server:
            yield Machine(settings.state, environ, devices=server.devices)
    else:
        async with ComfyServer(settings.server(settings.impatient_limits)) as server:
            yield Machine(settings.state, environ, devices=server.devices, nvml=None)


@contextlib.asynccontextmanager
async def _protecting(metadata: Metadata, environ: Mapping[str, str]) -> AsyncIterator[Protection]:
    protection = Protection(metadata, environ)
    running = asyncio.create_task(protection.run())
    try:
        yield protection
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await protection.close()
