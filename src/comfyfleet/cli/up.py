"""`comfyfleet up`: runs everything on one machine with a single command and without services."""

import asyncio
import logging
import socket
import sys
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import httpx
from cyclopts import Parameter

from comfyfleet.cli.context import (
    FOLDER,
    CliContext,
    InjectedContext,
    base_url,
    comfyui_folder,
    explain_errors,
    url_without_password,
)
from comfyfleet.cli.control_plane import URL_DEFAULT
from comfyfleet.cli.engine import Port, require_engine, start_engine_process
from comfyfleet.cli.logs import LogLevel, set_up_logs
from comfyfleet.cli.serve import (
    DATA,
    Data,
    Host,
    check_environment,
    print_greeting,
    serve_plane,
    settings_for_listener,
)
from comfyfleet.clock import utc_now
from comfyfleet.comfy.backend import ComfyuiVariables, comfyui_variables
from comfyfleet.errors import InvalidInput, ServerUnavailable, WorkerRevoked
from comfyfleet.malloc import use_one_arena
from comfyfleet.server.app import ControlPlane, open_control_plane
from comfyfleet.server.http.listener import listen, listener_url, stop_on_signals
from comfyfleet.server.http.local_access import LocalAccess, tells_users
from comfyfleet.server.maintenance.embedded_fleet import (
    FLEET,
    STAGE,
    AutoAssign,
    allow_computing_nodes,
    embedded_fleet_secret,
    local_user_key,
    open_embedded_fleet,
    top_up_local_user,
)
from comfyfleet.server.maintenance.runner import Sweep, SweepRunner, run_sweeps
from comfyfleet.server.maintenance.sweeps import all_sweeps
from comfyfleet.server.sign_in_links import SignInLinks
from comfyfleet.worker import registration
from comfyfleet.worker.factory import open_platform, open_worker
from comfyfleet.worker.settings import (
    WorkerSettings,
    concurrency_from,
    default_worker_id,
    heartbeat_seconds_from,
)
from comfyfleet.worker.worker import Worker

BUILT_IN = "built-in"
ENGINE_FOLDER = "engine"
ASSIGN_SECONDS = 1.0
# On Ctrl-C, running jobs may finish within this time. Otherwise they wait for the next start.
GRACE_SECONDS = 10.0
ANSWER_SECONDS_MAX = 10.0
SHOW_BACKENDS = "COMFYFLEET_SHOW_BACKENDS"
LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class UpBackendOptions:
    """The backends to use: the specified ones, or the built-in engine."""

    backend: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="URL",
            help="Use this ComfyUI instead of the built-in engine. Repeatable. Default: `COMFYUI_BASE_URL`.",
        ),
    ] = ()
    comfyui_folder: Annotated[
        tuple[Path, ...],
        Parameter(
            metavar="DIR",
            help="The folder with the `input` and `output` of that ComfyUI, if it is on this machine. With it, "
            "nodes that depend on an unchanged upload are cached, and a job's files are deleted after delivery. "
            f"Specify one for each `--backend`, in the same order; default for a single one: `{FOLDER}`.",
        ),
    ] = ()
    no_worker: Annotated[
        bool, Parameter(help="Start only the control plane. Workers join from elsewhere.")
    ] = False


ENGINE_ONLY = UpBackendOptions()
# Path prefix for ComfyUI clients that can't send a key.
KEY_PATH = "/k/"


@dataclass(frozen=True)
class UpAccessOptions:
    """Options for access without a key, and for opening the web pages."""

    trust_local_users: Annotated[
        bool,
        Parameter(
            help="Allow all programs on this machine, of any user, to use ComfyUI's routes and the API without a "
            "key. By default, only your own programs can do this."
        ),
    ] = False
    no_open: Annotated[bool, Parameter(help="Don't open the web pages in a browser.")] = False


OWN_PROGRAMS = UpAccessOptions()


def up(
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    data: Data = DATA,
    backends: Annotated[UpBackendOptions, Parameter(name="*")] = ENGINE_ONLY,
    log_level: LogLevel = "warning",
    access: Annotated[UpAccessOptions, Parameter(name="*")] = OWN_PROGRAMS,
    context: InjectedContext,
) -> None:
    """See help_texts.UP."""
    if backends.no_worker and backends.backend:
        raise InvalidInput("--no-worker and --backend can't be combined")
    variables = comfyui_variables(context.environ)
    named = backends.backend or tuple(filter(None, [variables.base_url]))
    urls = () if backends.no_worker else _backend_urls(named, port)
    folders = _backend_folders(backends, urls, context.environ)
    with_engine = not urls and not backends.no_worker
    if with_engine:
        require_engine(
            ". Or specify a ComfyUI with --backend URL, or start without a backend: --no-worker"
        )
    check_environment(host, data, context)
    with listen(host, port) as listener:
        use_one_arena()
        set_up_logs(log_level, context.err)
        # This logger would warn that no workflow is assigned to the fleet. Here, workflows are
        # assigned a moment later.
        logging.getLogger(registration.__name__).setLevel(logging.ERROR)
        everything = _AllInOne(host, data, listener, urls, folders, context, access, variables)
        asyncio.run(everything.run(with_engine=with_engine))
    context.say("Stopped")


def _make_folder(data: Path) -> None:
    """Creates the data folder. It holds secrets even if databases and files are elsewhere."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"{data} can't be used: {error.strerror or error}") from error


def _backend_urls(addresses: Sequence[str], own_port: int) -> tuple[str, ...]:
    """Returns the addresses of the ComfyUI servers without duplicates. Raises InvalidInput for
    invalid addresses."""
    urls = dict.fromkeys(
        base_url(address).replace("://localhost", "://127.0.0.1") for address in addresses
    )
    for url in urls:
        address = urlsplit(url)
        shown = url_without_password(url)
        if address.scheme not in ("http", "https"):
            raise InvalidInput(f"--backend {shown}: use an http:// or https:// address")
        if address.hostname in LOOPBACK and own_port and address.port == own_port:
            raise InvalidInput(
                f"--backend {shown} is the address of comfyfleet itself",
                hint="Specify ComfyUI's own address, or change comfyfleet's port with --port.",
            )
    return tuple(urls)


def _backend_folders(
    options: UpBackendOptions, urls: Sequence[str], environ: Mapping[str, str]
) -> dict[str, Path]:
    """Returns the folders of the ComfyUI servers on this machine, by address."""
    folders = tuple(comfyui_folder(folder) for folder in options.comfyui_folder)
    if not folders and environ.get(FOLDER) and len(urls) == 1:
        folders = (comfyui_folder(environ[FOLDER]),)
    if folders and len(folders) != len(urls):
        raise InvalidInput(
            f"there are {len(folders)} --comfyui-folder options, but {len(urls)} backends",
            hint="Specify one for each --backend, in the same order.",
        )
    return dict(zip(urls, folders, strict=False))


@dataclass(frozen=True)
class _AllInOne:
    host: str
    data: Path
    listener: socket.socket
    backends: Sequence[str]
    folders: Mapping[str, Path]
    context: CliContext
    access: UpAccessOptions
    variables: ComfyuiVariables

    async def run(self, *, with_engine: bool) -> None:
        settings = settings_for_listener(self.listener, self.host, self.context)
        if SHOW_BACKENDS not in self.context.environ:
            # Show the machines, because they belong to the user.
            settings = replace(settings, show_backends=True)
        async with AsyncExitStack() as stack:
            stop = stack.enter_context(stop_on_signals())
            _make_folder(self.data)
            plane = await stack.enter_async_context(
                open_control_plane(settings, self.data, utc_now)
            )
            # Must come first: a new key is shown only once, even if something fails later.
            print_greeting(plane, listener_url(self.listener), self.data, self.context)
            secret = await embedded_fleet_secret(plane, self.data)
            await open_embedded_fleet(plane)
            links = SignInLinks(self.data)
            key = await local_user_key(plane, self.data)
            await allow_computing_nodes(plane)
            await top_up_local_user(plane)
            local = LocalAccess(key, links, trusts_local_users=self.access.trust_local_users)
            backends = [
                (default_worker_id(socket.gethostname(), url), url) for url in self.backends
            ]
            if with_engine:
                engine = start_engine_process(self.context.environ, self.data / ENGINE_FOLDER)
                backends.append((BUILT_IN, stack.enter_context(engine)))
            workers = [await self._open_worker(name, url, secret, stack) for name, url in backends]
            await stack.enter_async_context(run_sweeps(_sweeps(plane)))
            pages = links.start(listener_url(self.listener))
            self._tell_next(backends, pages, local)
            reached = {name: url for name, url in backends if name != BUILT_IN}
            await self._work(plane, workers, stop, local, pages, reached)

    async def _open_worker(self, name: str, url: str, secret: str, stack: AsyncExitStack) -> Worker:
        environ = self.context.environ
        folder = self.data / ENGINE_FOLDER if name == BUILT_IN else self.folders.get(url)
        settings = WorkerSettings(
            control_url=listener_url(self.listener),
            fleet_slug=FLEET,
            stage=STAGE,
            worker_id=name,
            is_default_id=True,
            state=(self.data / "workers" / name).resolve(),
            backend_url=url,
            backend_folder=folder.resolve() if folder else None,
            secret=secret,
            max_concurrency=concurrency_from(environ),
            heartbeat_seconds=heartbeat_seconds_from(environ),
            grace_seconds=GRACE_SECONDS,
        ).with_variables(self.variables)
        platform = await stack.enter_async_context(open_platform(settings, environ))
        return await stack.enter_async_context(open_worker(settings, environ, platform))

    async def _work(
        self,
        plane: ControlPlane,
        workers: Sequence[Worker],
        stop: asyncio.Event,
        local: LocalAccess,
        pages: str,
        reached: Mapping[str, str],
    ) -> None:
        """Runs the server and its workers. The workers stop while the control plane still accepts
        their requests."""
        closing = asyncio.Event()
        serving = asyncio.create_task(
            serve_plane(plane, self.listener, closing, local=local, backends=reached)
        )
        working = [asyncio.create_task(self._run_worker(worker, stop)) for worker in workers]
        stopping = asyncio.create_task(stop.wait())
        if not self.access.no_open and has_display(self.context.environ):
            # Some programs that open a browser return only when it is closed.
            threading.Thread(target=webbrowser.open, args=(pages,), daemon=True).start()
        try:
            await asyncio.wait({stopping, serving, *working}, return_when=asyncio.FIRST_COMPLETED)
            for worker in workers:
                worker.stop.ask("shutdown", GRACE_SECONDS)
            ended = await asyncio.gather(*working, return_exceptions=True)
        finally:
            stopping.cancel()
            closing.set()
            await serving
        for problem in (result for result in ended if isinstance(result, BaseException)):
            raise problem

    async def _run_worker(self, worker: Worker, stop: asyncio.Event) -> None:
        """Runs a worker. If an operator revokes it, the other workers and the control plane
        continue."""
        try:
            await worker.work()
        except WorkerRevoked as error:
            self.context.warn(error.message)
            await stop.wait()

    def _tell_next(
        self, backends: Sequence[tuple[str, str]], pages: str, local: LocalAccess
    ) -> None:
        for name, url in backends:
            kind = "the built-in engine" if name == BUILT_IN else "ComfyUI"
            self.context.say(
                f"Worker {name} in fleet {FLEET}/{STAGE} on {kind} at {url_without_password(url)}"
            )
        self.context.say(f"Web pages at {pages}")
        self.context.say(
            f"      This address signs in once. Get a new one with: comfyfleet open --data {self.data}"
        )
        self.context.say(f"All data is stored in {self.data.resolve()}. Press Ctrl-C to stop.")
        url = self._url_without_key(local)
        self.context.say(f"Any ComfyUI client can use {url} as its server, for example:")
        self.context.say(f"      COMFY_LOCAL_URL={url} comfy run --workflow FILE --wait")
        if find_spec("comfyui_frontend_package"):
            self.context.say(f"      {url}/editor/ in a browser")
        self.context.say(
            "Next, run a pipeline of workflow files, without a key and free of charge:"
        )
        self.context.say(f"      {_prefix(url)}comfyfleet pipeline run PIPELINE --follow DIR")
        self.context.say("      Or, as the operator, with the admin key:")
        self.context.say("      comfyfleet admin workflows register NAME FILE")
        self.context.say("      comfyfleet admin submit NAME --wait")

    def _url_without_key(self, local: LocalAccess) -> str:
        """Returns the address for local programs without a key."""
        url = listener_url(self.listener)
        if local.trusts_local_users or tells_users():
            return url
        self.context.say(
            "This system can't identify the user of a local program, so programs without a key use an address "
            "with a secret. Don't show it to others."
        )
        return f"{url}{KEY_PATH}{local.key}"


def _prefix(url: str) -> str:
    """Returns the variable to put before a command that connects to this address, if it isn't the
    default."""
    return "" if url == URL_DEFAULT else f"COMFYFLEET_URL={url} "


def open_pages(
    *,
    data: Data = DATA,
    no_open: Annotated[bool, Parameter(help="Only print the address.")] = False,
    context: InjectedContext,
) -> None:
    """See help_texts.OPEN."""
    links = SignInLinks(data)
    with explain_errors(data):
        url = links.address()
        if url is None:
            raise InvalidInput(
                f"{data} isn't the folder of `comfyfleet up`", hint="Specify the folder: --data DIR"
            )
        _require_running(url)
        link = links.new_link(url)
    context.print_line(link)
    if not no_open and has_display(context.environ):
        webbrowser.open(link)


def _require_running(url: str) -> None:
    try:
        httpx.get(f"{url}/healthz", timeout=ANSWER_SECONDS_MAX).raise_for_status()
    except httpx.HTTPError as error:
        raise ServerUnavailable(
            f"no control plane is running at {url}", hint="Start it with: comfyfleet up"
        ) from error


def has_display(environ: Mapping[str, str]) -> bool:
    """Checks whether there is a user at this terminal who can see a browser."""
    if not sys.stderr.isatty() or environ.get("SSH_CONNECTION"):
        return False
    is_desktop = sys.platform in ("darwin", "win32")
    return is_desktop or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))


def _sweeps(plane: ControlPlane) -> SweepRunner:
    own = Sweep("assign", AutoAssign(plane, FLEET, STAGE), ASSIGN_SECONDS)
    return SweepRunner([*all_sweeps(plane), own], plane.turns, plane.meters, plane.clock)
