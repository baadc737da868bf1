"""`comfyfleet worker`: puts one backend to work for a fleet."""

import asyncio
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from comfyfleet.agent.assembling import open_worker
from comfyfleet.agent.naming import default_worker_id
from comfyfleet.agent.settings import (
    CACHE_BYTES,
    GRACE_SECONDS,
    STALL_SECONDS,
    WorkerSettings,
    concurrency_of,
    heartbeat_seconds_of,
)
from comfyfleet.agent.stopping import heed_signals
from comfyfleet.agent.surveying import surveying
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.servers import base_url, shown
from comfyfleet.cli.world import InWorld, World
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.settings import misspelt

PLACE = Group("Where it belongs", sort_key=1)
WORK = Group("What it works on", sort_key=2)
SECRET = "COMFYFLEET_FLEET_SECRET"  # noqa: S105  the name of a variable
CLOUD_KEY = "COMFY_CLOUD_API_KEY"
FOLDER = "COMFYFLEET_COMFYUI_FOLDER"


@Parameter(name="*")
@dataclass(frozen=True)
class Place:
    control: Annotated[str, Parameter(group=PLACE, metavar="URL", help="The control plane.")]
    fleet: Annotated[str, Parameter(group=PLACE, metavar="SLUG", help="The fleet to join.")]
    stage: Annotated[str, Parameter(group=PLACE, help="The fleet's stage.")] = "production"
    worker_id: Annotated[
        str | None,
        Parameter(
            group=PLACE,
            help="Its name in the fleet. Else `COMFYFLEET_WORKER_ID`, else made of the host's name.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class Work:
    backend: Annotated[
        str | None, Parameter(group=WORK, metavar="URL", help="The ComfyUI to put to work.")
    ] = None
    cloud: Annotated[
        bool,
        Parameter(group=WORK, help=f"Comfy Cloud instead, with the key in `{CLOUD_KEY}`."),
    ] = False
    workflow: Annotated[
        tuple[str, ...],
        Parameter(
            group=WORK,
            metavar="SLUG",
            help="Serve this workflow of the fleet only. Repeatable.",
        ),
    ] = ()
    capability: Annotated[
        tuple[str, ...],
        Parameter(
            group=WORK,
            metavar="NAME",
            help="Something that workflows may require of a worker. Repeatable.",
        ),
    ] = ()
    comfyui_command: Annotated[
        str | None,
        Parameter(
            group=WORK,
            metavar="COMMAND",
            help="Start ComfyUI with this command, and again when it breaks down.",
        ),
    ] = None
    comfyui_folder: Annotated[
        Path | None,
        Parameter(
            group=WORK,
            metavar="DIR",
            help="The folder with ComfyUI's `input` and `output`, if this machine has it: files of a "
            f"job are removed there after delivery. Else `{FOLDER}`.",
        ),
    ] = None


def worker(
    *,
    place: Place,
    work: Work = Work(),  # noqa: B008  frozen
    state: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="Folder for its key, its leases and cached files. By default under "
            "`~/.local/state/comfyfleet`, one for each worker.",
        ),
    ] = None,
    cache_gb: Annotated[float, Parameter(help="Gigabytes of input files to keep.")] = CACHE_BYTES
    / 1024**3,
    grace_seconds: Annotated[
        float, Parameter(help="Time to finish after SIGTERM; a second signal means now.")
    ] = GRACE_SECONDS,
    stall_seconds: Annotated[
        float, Parameter(help="A run without any sign of progress for so long is stuck.")
    ] = STALL_SECONDS,
    log_level: LogLevel = "info",
    world: InWorld,
) -> None:
    """See helps.WORKER."""
    for name, meant in misspelt(world.environ).items():
        world.warn(f"{name} is read by nobody; did you mean {meant}?")
    chosen = _settings(place, work, state, world.environ)
    settings = _tuned(chosen, cache_gb, grace_seconds, stall_seconds)
    set_up_logs(log_level, world.err)
    if log_level == "info":
        # Each call to the backend is worth a line only to those who look for something.
        logging.getLogger("comfyfleet.comfy").setLevel(logging.WARNING)
    asyncio.run(_work(settings, world))


async def _work(settings: WorkerSettings, world: World) -> None:
    async with (
        surveying(settings, world.environ) as surveys,
        open_worker(settings, world.environ, surveys) as worker,
    ):
        heed_signals(worker.stop, settings.grace_seconds)
        await worker.work()


def _settings(
    place: Place, work: Work, state: Path | None, environ: Mapping[str, str]
) -> WorkerSettings:
    backend_url = _backend_url(work, environ)
    secret = environ.get(SECRET) or ""
    given = place.worker_id or environ.get("COMFYFLEET_WORKER_ID") or ""
    worker_id = given or default_worker_id(socket.gethostname(), backend_url)
    return WorkerSettings(
        control_url=_control_url(place.control),
        fleet_slug=place.fleet,
        stage=place.stage,
        worker_id=worker_id,
        state=(state or _default_state(environ) / worker_id).expanduser().resolve(),
        backend_url=backend_url,
        is_default_id=not given,
        secret=secret,
        max_concurrency=concurrency_of(environ),
        heartbeat_seconds=heartbeat_seconds_of(environ),
        capabilities=work.capability,
        workflow_slugs=work.workflow,
        comfyui_command=work.comfyui_command,
        backend_folder=_folder(work, environ),
    )


def _tuned(
    settings: WorkerSettings, cache_gb: float, grace_seconds: float, stall_seconds: float
) -> WorkerSettings:
    if min(cache_gb, grace_seconds, stall_seconds) < 0 or stall_seconds == 0:
        raise InvalidInput("--cache-gb, --grace-seconds and --stall-seconds can't be negative")
    return replace(
        settings,
        cache_bytes=int(cache_gb * 1024**3),
        grace_seconds=grace_seconds,
        stall_seconds=stall_seconds,
    )


def _backend_url(work: Work, environ: Mapping[str, str]) -> str | None:
    if work.cloud == (work.backend is not None):
        raise InvalidInput(
            "a worker has one backend: give --backend URL, or --cloud",
            hint="A ComfyUI on this machine is --backend http://127.0.0.1:8188",
        )
    if work.cloud and not environ.get(CLOUD_KEY):
        raise InvalidInput(f"--cloud needs a key in {CLOUD_KEY}")
    if work.cloud and work.comfyui_command:
        raise InvalidInput("--comfyui-command starts a ComfyUI here; it goes with --backend")
    return None if work.backend is None else base_url(work.backend)


def _folder(work: Work, environ: Mapping[str, str]) -> Path | None:
    given = work.comfyui_folder or environ.get(FOLDER)
    if not given:
        return None
    folder = Path(given).expanduser().resolve()
    if not (folder / "output").is_dir():
        raise InvalidInput(f"{folder} has no folder `output`: it is not ComfyUI's folder")
    return folder


def _control_url(text: str) -> str:
    url = text.strip().rstrip("/")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InvalidInput(
            f"{shown(text)} is not the URL of a control plane",
            hint="Write it as http://HOST:PORT, as `comfyfleet serve` prints it",
        )
    return url


def _default_state(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base) / "comfyfleet"
