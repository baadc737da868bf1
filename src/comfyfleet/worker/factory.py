"""Builds a worker and its platform (machine readings, notices, scale-in protection) from
settings."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from comfyfleet.comfy import BackendLimits, ComfyCloud, ComfyServer, cloud_settings
from comfyfleet.worker.aws import InstanceMetadata, ScaleInProtection, SpotWatch, metadata_endpoint
from comfyfleet.worker.control_client import ControlClient
from comfyfleet.worker.files import AssetCache, AssetDownloads, store_client
from comfyfleet.worker.input_cache import InputCache
from comfyfleet.worker.job_files import ROOT, BackendFiles
from comfyfleet.worker.journal import Journal
from comfyfleet.worker.lease_runner import LeaseDeps
from comfyfleet.worker.machine import MachineMonitor
from comfyfleet.worker.managed_process import ManagedProcess
from comfyfleet.worker.platform import NO_PLATFORM, NoNotices, NoProtection, Platform
from comfyfleet.worker.settings import WorkerSettings
from comfyfleet.worker.worker import JobCounts, Worker

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@contextlib.asynccontextmanager
async def open_platform(
    settings: WorkerSettings, environ: Mapping[str, str]
) -> AsyncIterator[Platform]:
    async with contextlib.AsyncExitStack() as stack:
        machine = await stack.enter_async_context(_open_machine(settings, environ))
        endpoint = metadata_endpoint(environ)
        if endpoint is None:
            yield Platform(machine, NoNotices(), NoProtection())
            return
        metadata = InstanceMetadata(endpoint)
        stack.push_async_callback(metadata.aclose)
        protection = await stack.enter_async_context(_open_protection(metadata, environ))
        yield Platform(machine, SpotWatch(metadata), protection)


@contextlib.asynccontextmanager
async def _open_machine(
    settings: WorkerSettings, environ: Mapping[str, str]
) -> AsyncIterator[MachineMonitor]:
    """Opens the machine monitor. For a backend on another machine, the GPU's metrics come from the
    backend, because it doesn't use this machine's GPU."""
    url = settings.backend_url
    if url is None:
        yield MachineMonitor(settings.state, environ, nvml=None)
    elif urlsplit(url).hostname in LOOPBACK:
        async with ComfyServer(settings.server(settings.probe_limits)) as server:
            yield MachineMonitor(settings.state, environ, devices=server.devices)
    else:
        async with ComfyServer(settings.server(settings.probe_limits)) as server:
            yield MachineMonitor(settings.state, environ, devices=server.devices, nvml=None)


@contextlib.asynccontextmanager
async def _open_protection(
    metadata: InstanceMetadata, environ: Mapping[str, str]
) -> AsyncIterator[ScaleInProtection]:
    protection = ScaleInProtection(metadata, environ)
    running = asyncio.create_task(protection.run())
    try:
        yield protection
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await protection.close()


# Name of the file in the state folder that identifies the ComfyUI process.
PROCESS_FILE = "comfyui.json"
# Name of the ComfyUI process's log file in the state folder.
LOG_FILE = "comfyui.log"


@contextlib.asynccontextmanager
async def open_worker(
    settings: WorkerSettings,
    environ: Mapping[str, str],
    platform: Platform = NO_PLATFORM,
    counts: JobCounts | None = None,
) -> AsyncIterator[Worker]:
    async with contextlib.AsyncExitStack() as stack:
        backend = connect_backend(settings, environ, settings.limits)
        probe = connect_backend(settings, environ, settings.probe_limits)
        control = ControlClient(
            settings.control_url,
            *settings.more_control_urls,
            heartbeat_seconds=settings.heartbeat_seconds,
        )
        store = store_client()
        for client in (backend, probe, control, store):
            stack.push_async_callback(client.aclose)
        journal = Journal(settings.state)
        assets = AssetCache(
            settings.state / "cache",
            settings.cache_bytes,
            source=AssetDownloads(store, journal.scratch),
            endpoint=settings.backend_url or "cloud",
        )
        files = None if settings.is_cloud else BackendFiles(backend, settings.backend_folder)
        deps = LeaseDeps(
            backend,
            assets,
            store,
            journal,
            files,
            input_cache(settings),
            job_seconds=settings.job_seconds,
        )
        owned = open_managed_process(settings)
        yield Worker(settings, control, deps, platform, probe=probe, owned=owned, counts=counts)


def input_cache(settings: WorkerSettings) -> InputCache | None:
    if settings.is_cloud or settings.backend_folder is None:
        return None
    return InputCache(settings.backend_folder, settings.state, ROOT)


def open_managed_process(settings: WorkerSettings) -> ManagedProcess | None:
    if settings.comfyui_command is None:
        return None
    return ManagedProcess(
        settings.comfyui_command,
        settings.state / PROCESS_FILE,
        settings.comfyui_environ,
        log=settings.state / LOG_FILE,
    )


def connect_backend(
    settings: WorkerSettings, environ: Mapping[str, str], limits: BackendLimits
) -> ComfyServer | ComfyCloud:
    if settings.backend_url is None:
        return ComfyCloud(replace(cloud_settings(environ), limits=limits))
    return ComfyServer(settings.server(limits))
