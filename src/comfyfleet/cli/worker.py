"""`comfyfleet worker`: connects a backend to a fleet, or several backends that it starts itself."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import pynvml
from cyclopts import Group, Parameter
from pydantic import TypeAdapter, ValidationError

from comfyfleet.api.route_calls import RoutePrefixes
from comfyfleet.cli.context import (
    FOLDER,
    CliContext,
    InjectedContext,
    base_url,
    comfyui_folder,
    url_without_password,
)
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.comfy.backend import BASE_URL, ComfyuiVariables, comfyui_variables
from comfyfleet.errors import InvalidInput
from comfyfleet.settings import misspelt
from comfyfleet.worker.machine import UUID_STARTS, unknown_gpus, visible_gpus
from comfyfleet.worker.pack import WorkerPack, plan_gpus, serve_metrics
from comfyfleet.worker.pack_plan import PackSettings
from comfyfleet.worker.settings import (
    CACHE_BYTES,
    FREE_MEMORY_MIN,
    GRACE_SECONDS,
    STALL_SECONDS,
    WorkerSettings,
    concurrency_from,
    default_worker_id,
    heartbeat_seconds_from,
)
from comfyfleet.worker.shutdown import stop_on_signals

PLACE = Group("Fleet", sort_key=1)
WORK = Group("Backend", sort_key=2)
GPUS = Group("Several ComfyUI servers per GPU", sort_key=3)
OWN_BACKEND = "http://127.0.0.1:8188"
PER_GPU_MAX = 16
SECRET = "COMFYFLEET_FLEET_SECRET"  # noqa: S105  the name of a variable
CLOUD_KEY = "COMFY_CLOUD_API_KEY"
_PREFIXES: TypeAdapter[tuple[str, ...]] = TypeAdapter(RoutePrefixes)


@Parameter(name="*")
@dataclass(frozen=True)
class FleetOptions:
    control: Annotated[
        tuple[str, ...],
        Parameter(
            group=PLACE,
            metavar="URL",
            help="The control plane's address. Repeatable: the next address is used when one "
            "doesn't answer for two heartbeats.",
        ),
    ]
    fleet: Annotated[str, Parameter(group=PLACE, metavar="SLUG", help="The fleet to join.")]
    stage: Annotated[str, Parameter(group=PLACE, help="The fleet's stage.")] = "production"
    worker_id: Annotated[
        str | None,
        Parameter(
            group=PLACE,
            help="The worker's name in the fleet. Default: `COMFYFLEET_WORKER_ID`, or a name derived from the host name.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class BackendOptions:
    backend: Annotated[
        str | None,
        Parameter(
            group=WORK,
            metavar="URL",
            help="The ComfyUI to use. Default: `COMFYUI_BASE_URL`. With `--comfyui-command`, the address after the start, by default "
            "http://127.0.0.1:8188. With `--per-gpu`, the first address.",
        ),
    ] = None
    cloud: Annotated[
        bool,
        Parameter(group=WORK, help=f"Use Comfy Cloud instead, with the key in `{CLOUD_KEY}`."),
    ] = False
    workflow: Annotated[
        tuple[str, ...],
        Parameter(
            group=WORK,
            metavar="SLUG",
            help="Run only this workflow of the fleet. Repeatable.",
        ),
    ] = ()
    capability: Annotated[
        tuple[str, ...],
        Parameter(
            group=WORK,
            metavar="NAME",
            help="A capability that workflows may require. Repeatable.",
        ),
    ] = ()
    comfyui_command: Annotated[
        str | None,
        Parameter(
            group=WORK,
            metavar="COMMAND",
            help="Start ComfyUI with this command, and restart it if it fails. `{port}`, `{gpu}` and "
            "`{folder}` (its own folder, with `input`, `output`, `temp`, `user`) are replaced.",
        ),
    ] = None
    comfyui_folder: Annotated[
        Path | None,
        Parameter(
            group=WORK,
            metavar="DIR",
            help="The folder with ComfyUI's `input` and `output`, if it is on this machine. Files of a "
            f"job are deleted there after delivery. Default: `{FOLDER}`.",
        ),
    ] = None
    passthrough: Annotated[
        tuple[str, ...],
        Parameter(
            group=WORK,
            metavar="PREFIX",
            help="Routes of custom nodes, such as /api/etn, that users of the fleet may call on this "
            "ComfyUI, if the fleet also allows them. Repeatable.",
        ),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True)
class PackOptions:
    per_gpu: Annotated[
        str,
        Parameter(
            group=GPUS,
            metavar="N|auto",
            help="Number of ComfyUI servers per GPU, each with its own worker in the fleet. `auto` starts "
            "with one, and adds or removes servers depending on the throughput.",
        ),
    ] = "1"
    gpus: Annotated[
        str | None,
        Parameter(
            group=GPUS,
            metavar="0,1|all",
            help="The GPUs to use. Default: the GPU selected by the environment.",
        ),
    ] = None
    gpu_memory_command: Annotated[
        str | None,
        Parameter(
            group=GPUS,
            metavar="COMMAND",
            help="For `auto` without NVIDIA's driver: a command that prints the used and total memory in bytes "
            "of GPU `{gpu}`.",
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class ProcessOptions:
    state: Annotated[
        Path | None,
        Parameter(
            metavar="DIR",
            help="Folder for the worker's key, leases and cached files. Don't share it. Default: under "
            "`~/.local/state/comfyfleet` (Windows: `%LOCALAPPDATA%\\\\comfyfleet`).",
        ),
    ] = None
    cache_gb: Annotated[float, Parameter(help="Size of the input file cache, in gigabytes.")] = (
        CACHE_BYTES / 1024**3
    )
    grace_seconds: Annotated[
        float,
        Parameter(
            help="Time to finish jobs after SIGTERM. A second signal stops the worker immediately."
        ),
    ] = GRACE_SECONDS
    stall_seconds: Annotated[
        float, Parameter(help="A run without progress for this long counts as stuck.")
    ] = STALL_SECONDS
    min_free_memory: Annotated[
        float,
        Parameter(
            help="Percentage of memory that a ComfyUI started by this worker must leave free. Below that, "
            "ComfyUI must free memory between jobs, and is restarted if that doesn't help. 0 means never."
        ),
    ] = 100 * FREE_MEMORY_MIN
    metrics: Annotated[
        str | None,
        Parameter(metavar="HOST:PORT", help="Address for Prometheus metrics of this worker."),
    ] = None


def worker(
    *,
    place: FleetOptions,
    work: BackendOptions = BackendOptions(),  # noqa: B008  frozen
    packed: PackOptions = PackOptions(),  # noqa: B008  frozen
    process: ProcessOptions = ProcessOptions(),  # noqa: B008  frozen
    log_level: LogLevel = "info",
    context: InjectedContext,
) -> None:
    """See help_texts.WORKER."""
    for name, suggestion in misspelt(context.environ).items():
        context.warn(f"{name} is not a known setting; did you mean {suggestion}?")
    settings = _tuned(_settings(place, work, process.state, context.environ), process)
    pack, address = _pack(packed, work, context.environ), _address(process.metrics)
    set_up_logs(log_level, context.err)
    if log_level == "info":
        # Log lines for each call to the backend are only useful for debugging.
        logging.getLogger("comfyfleet.comfy").setLevel(logging.WARNING)
    asyncio.run(_work(settings, pack, address, context))


async def _work(
    settings: WorkerSettings,
    packed: PackSettings,
    metrics: tuple[str, int] | None,
    context: CliContext,
) -> None:
    gpus = await plan_gpus(settings, packed, context.environ)
    pack = WorkerPack(gpus, context.environ, settings.state)
    with contextlib.ExitStack() as stack:
        if metrics is not None:
            try:
                stack.enter_context(serve_metrics(pack, *metrics))
            except OSError as error:
                raise InvalidInput(
                    f"--metrics: can't listen on {metrics[0]}:{metrics[1]}: {error.strerror}",
                    hint="Another process or worker may be using the port. Use a different port.",
                ) from error
        stack.enter_context(stop_on_signals(pack.stop, settings.grace_seconds))
        await pack.work()


def _pack(packed: PackOptions, work: BackendOptions, environ: Mapping[str, str]) -> PackSettings:
    text, most = packed.per_gpu.strip(), PER_GPU_MAX
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise InvalidInput(
            f"--per-gpu must be a whole number from 1 to {most}, or auto, not {text!r}"
        )
    pack = PackSettings(
        per_gpu=None if text == "auto" else int(text),
        gpus=_gpus(packed.gpus, environ),
        memory_command=packed.gpu_memory_command,
    )
    if work.comfyui_command is None and (pack.gpus or pack.per_gpu != 1):
        raise InvalidInput(
            "--per-gpu and --gpus require --comfyui-command",
            hint='For example: "python /opt/ComfyUI/main.py --port {port} --temp-directory {folder}".',
        )
    return pack


def _gpus(text: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    gpus = visible_gpus(environ, pynvml) if names == ("all",) else names
    if not gpus:
        raise InvalidInput(
            "--gpus all: NVIDIA's driver reports no GPU", hint="Specify them: --gpus 0,1"
        )
    if len(set(gpus)) != len(gpus):
        raise InvalidInput(f"--gpus contains a GPU twice: {text}")
    for gpu in gpus:
        if not (gpu.isascii() and gpu.isdigit()) and not gpu.startswith(UUID_STARTS):
            raise InvalidInput(
                f"--gpus must be indexes or UUIDs, such as 0,1 or GPU-…, not {gpu!r}"
            )
    if unknown := unknown_gpus(gpus, pynvml):
        raise InvalidInput(
            f"--gpus: NVIDIA's driver doesn't report the GPU {', '.join(unknown)}",
            hint="List the GPUs, counted from 0, with `nvidia-smi -L`, or use all of them with `--gpus all`.",
        )
    return gpus


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise InvalidInput(f"--metrics must be HOST:PORT, such as 127.0.0.1:9100, not {text!r}")
    return host.strip("[]"), int(port)


def _settings(
    place: FleetOptions, work: BackendOptions, state: Path | None, environ: Mapping[str, str]
) -> WorkerSettings:
    variables = comfyui_variables(environ)
    backend_url = _backend_url(work, environ, variables)
    secret = environ.get(SECRET) or ""
    own_id = place.worker_id or environ.get("COMFYFLEET_WORKER_ID") or ""
    worker_id = own_id or default_worker_id(socket.gethostname(), backend_url)
    return WorkerSettings(
        control_url=_control_url(place.control[0]),
        more_control_urls=tuple(map(_control_url, place.control[1:])),
        fleet_slug=place.fleet,
        stage=place.stage,
        worker_id=worker_id,
        state=(state or _default_state(environ) / worker_id).expanduser().resolve(),
        backend_url=backend_url,
        is_default_id=not own_id,
        secret=secret,
        max_concurrency=concurrency_from(environ),
        heartbeat_seconds=heartbeat_seconds_from(environ),
        capabilities=work.capability,
        workflow_slugs=work.workflow,
        comfyui_command=work.comfyui_command,
        backend_folder=_folder(work, environ),
        passthrough=_passthrough(work),
    ).with_variables(variables)


def _tuned(settings: WorkerSettings, process: ProcessOptions) -> WorkerSettings:
    if not 0 <= process.min_free_memory <= 90:
        raise InvalidInput("--min-free-memory must be a percentage from 0 to 90")
    limits = (process.cache_gb, process.grace_seconds, process.stall_seconds)
    if min(limits) < 0 or process.stall_seconds == 0:
        raise InvalidInput("--cache-gb, --grace-seconds and --stall-seconds can't be negative")
    return replace(
        settings,
        cache_bytes=int(process.cache_gb * 1024**3),
        grace_seconds=process.grace_seconds,
        stall_seconds=process.stall_seconds,
        free_memory_min=process.min_free_memory / 100,
    )


def _backend_url(
    work: BackendOptions, environ: Mapping[str, str], variables: ComfyuiVariables
) -> str | None:
    backend = work.backend
    if backend is None and not work.cloud:
        backend = variables.base_url
    if backend is None and work.comfyui_command and not work.cloud:
        backend = OWN_BACKEND
    if work.cloud == (backend is not None):
        raise InvalidInput(
            "specify exactly one backend: --backend URL, --comfyui-command, or --cloud",
            hint="For a ComfyUI on this machine, use --backend http://127.0.0.1:8188, "
            f"or {BASE_URL}=http://127.0.0.1:8188 in the environment.",
        )
    if work.cloud and not environ.get(CLOUD_KEY):
        raise InvalidInput(f"--cloud requires a key in {CLOUD_KEY}")
    if work.cloud and work.comfyui_command:
        raise InvalidInput("--comfyui-command and --cloud can't be combined")
    return None if backend is None else base_url(backend)


def _folder(work: BackendOptions, environ: Mapping[str, str]) -> Path | None:
    folder = work.comfyui_folder or environ.get(FOLDER)
    return comfyui_folder(folder) if folder else None


def _passthrough(work: BackendOptions) -> tuple[str, ...]:
    if work.cloud and work.passthrough:
        raise InvalidInput("--passthrough and --cloud can't be combined")
    try:
        return _PREFIXES.validate_python(work.passthrough)
    except ValidationError as error:
        wrong = error.errors()[0]["input"]
        raise InvalidInput(
            f"--passthrough must be the start of a path, such as /api/etn, not {wrong!r}"
        ) from None


def _control_url(text: str) -> str:
    url = text.strip().rstrip("/")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise InvalidInput(
            f"{url_without_password(text)} is not the URL of a control plane",
            hint="Use the form http://HOST:PORT, as printed by `comfyfleet serve`",
        )
    return url


def _default_state(environ: Mapping[str, str]) -> Path:
    # LOCALAPPDATA is only set on Windows.
    usual = environ.get("LOCALAPPDATA") or "~/.local/state"
    base = environ.get("XDG_STATE_HOME") or usual
    return Path(base) / "comfyfleet"
