"""A worker, put together from its settings."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from comfyfleet.agent.backendfiles import BackendFiles
from comfyfleet.agent.cache import AssetCache
from comfyfleet.agent.control import Control
from comfyfleet.agent.deliveries import store_client
from comfyfleet.agent.downloads import Downloads
from comfyfleet.agent.journal import Journal
from comfyfleet.agent.lease import Workshop
from comfyfleet.agent.owning import OwnedProcess
from comfyfleet.agent.ports import NOTHING_SURVEYED, Surveys
from comfyfleet.agent.settings import WorkerSettings
from comfyfleet.agent.worker import Counts, Worker
from comfyfleet.comfy import (
    ComfyCloud,
    ComfyServer,
    Limits,
    cloud_settings,
)

# Of the state folder: which process its ComfyUI is.
NOTE = "comfyui.json"


@contextlib.asynccontextmanager
async def open_worker(
    settings: WorkerSettings,
    environ: Mapping[str, str],
    surveys: Surveys = NOTHING_SURVEYED,
    counts: Counts | None = None,
) -> AsyncIterator[Worker]:
    async with contextlib.AsyncExitStack() as stack:
        backend = connect(settings, environ, settings.limits)
        probe = connect(settings, environ, settings.impatient_limits)
        control = Control(settings.control_url)
        store = store_client()
        for each in (backend, probe, control, store):
            stack.push_async_callback(each.aclose)
        journal = Journal(settings.state)
        assets = AssetCache(
            settings.state / "cache",
            settings.cache_bytes,
            source=Downloads(store, journal.scratch),
            endpoint=settings.backend_url or "cloud",
        )
        files = None if settings.is_cloud else BackendFiles(backend, settings.backend_folder)
        workshop = Workshop(backend, assets, store, journal, files)
        owned = owned_process(settings)
        yield Worker(settings, control, workshop, surveys, probe=probe, owned=owned, counts=counts)


def owned_process(settings: WorkerSettings) -> OwnedProcess | None:
    if settings.comfyui_command is None:
        return None
    return OwnedProcess(settings.comfyui_command, settings.state / NOTE, settings.comfyui_environ)


def connect(
    settings: WorkerSettings, environ: Mapping[str, str], limits: Limits
) -> ComfyServer | ComfyCloud:
    if settings.backend_url is None:
        return ComfyCloud(replace(cloud_settings(environ), limits=limits))
    return ComfyServer(settings.server(limits))
