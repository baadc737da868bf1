"""`comfyfleet engine`: a ComfyUI-compatible server without ComfyUI. For other commands, the engine
runs in a separate process, so that a prompt's memory use and crashes don't affect them."""

import contextlib
import logging
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from comfyfleet.cli.context import CliContext, InjectedContext, explain_errors
from comfyfleet.errors import InvalidInput, ServerUnavailable, missing_extra

if TYPE_CHECKING:
    from comfyfleet.engine import Engine
    from comfyfleet.engine.node import EngineNodeType


log = logging.getLogger(__name__)

MODULE, KEY, USER = "comfyfleet.engine.child", "COMFYFLEET_ENGINE_KEY", "engine"
STOP_SECONDS_MAX = 10.0
START_SECONDS_MAX = 60.0
START_LOOK_SECONDS = 0.05
LISTEN_BACKLOG = 128
# Without a separate process group, Ctrl-C would also reach the engine on Windows.
SET_APART = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
# The engine decodes files from other people, so it must not get the control plane's keys and
# credentials.
SECRET_PREFIXES = ("COMFYFLEET_", "COMFY_", "AWS_")
ENGINE_PREFIXES = ("COMFYFLEET_ENGINE_", "COMFYFLEET_MAX_PICTURE_PIXELS")
# A process that ends within this time will probably do so again, so its restarts are delayed.
SHORT_LIFE_SECONDS = 10.0
PAUSE_SECONDS_MAX = 30.0


@contextlib.contextmanager
def start_engine_process(environ: Mapping[str, str], data: Path | None = None) -> Iterator[str]:
    """Starts the engine and yields its URL, which contains its key. Without `data`, its files are
    deleted afterwards.

    This process holds the listening socket, so that calls wait while the engine starts or
    restarts."""
    with contextlib.ExitStack() as stack:
        folder = data or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        listener = stack.enter_context(_listener())
        key, port = secrets.token_urlsafe(24), listener.getsockname()[1]
        descriptor = listener.fileno() if can_inherit_sockets() else None
        if descriptor is None:
            listener.close()
        where = f"127.0.0.1:{port}" if descriptor is None else str(descriptor)
        # -P prevents imports from the current folder, which may belong to someone else.
        command = [sys.executable, "-P", "-m", MODULE, where, str(folder.resolve())]
        keeper = _Supervisor(command, descriptor, {**_told(environ), KEY: key})
        stack.callback(keeper.stop)
        keeper.start()
        if descriptor is None:
            _wait_until_it_listens(port)
        yield f"http://{USER}:{key}@127.0.0.1:{port}"


def _wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), START_SECONDS_MAX).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ServerUnavailable("the built-in engine didn't start in time") from error
            time.sleep(START_LOOK_SECONDS)
        else:
            return


def can_inherit_sockets() -> bool:
    """Checks whether a child process can inherit this process's socket. On Windows it can't, so the
    child listens on the same port instead, and calls fail until it has started."""
    return sys.platform != "win32"


def _told(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(ENGINE_PREFIXES) or not name.startswith(SECRET_PREFIXES)
    }


def _listener() -> socket.socket:
    # asyncio only disables Nagle's algorithm for sockets with an explicit TCP protocol. Otherwise,
    # it delays each request by 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(LISTEN_BACKLOG)
    return listener


class _Supervisor(threading.Thread):
    """Starts the process, and restarts it whenever it ends."""

    def __init__(
        self, command: list[str], descriptor: int | None, environ: Mapping[str, str]
    ) -> None:
        super().__init__(name="engine-keeper", daemon=True)
        self._command = command
        self._descriptor = descriptor
        self._environ = dict(environ)
        self._stopping = threading.Event()
        self._process = self._spawned()

    def run(self) -> None:
        short_lives = 0
        while True:
            began = time.monotonic()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            is_short = time.monotonic() - began < SHORT_LIFE_SECONDS
            short_lives = short_lives + 1 if is_short else 0
            log.warning("the built-in engine ended with code %s and is being restarted", code)
            pause = min(2.0**short_lives, PAUSE_SECONDS_MAX) if short_lives > 1 else 0.0
            if self._stopping.wait(pause):
                return
            self._end()
            self._process = self._spawned()

    def stop(self) -> None:
        self._stopping.set()
        self._end()
        self.join(STOP_SECONDS_MAX)
        self._end()  # ends a process that was started in the meantime

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._process.stdin:
            self._process.stdin.close()

    def _spawned(self) -> subprocess.Popen[bytes]:
        # The child's stdin closes when this process ends. A separate session keeps Ctrl-C from
        # reaching the child.
        return subprocess.Popen(  # noqa: S603
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=() if self._descriptor is None else (self._descriptor,),
            start_new_session=True,
            creationflags=SET_APART,
            env=self._environ,
        )


PACKAGES = ("av", "numpy", "PIL", "python_multipart", "starlette", "uvicorn")
Port = Annotated[
    int,
    Parameter(
        help="Port to listen on. 0 means any free port.",
        validator=validators.Number(gte=0, lte=65535),
    ),
]


def require_engine(hint: str = "") -> None:
    """Raises an error with installation instructions if the built-in engine can't be imported."""
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        error = missing_extra("the built-in engine", missing, "engine")
        raise InvalidInput(error.message, hint=f"{error.details['hint']}{hint}")


def engine(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8188,
    data: Annotated[
        Path | None,
        Parameter(
            help="Folder for input, output and temp files. Without it, the files are deleted on exit."
        ),
    ] = None,
    no_pace: Annotated[
        bool,
        Parameter(
            help="Run at full speed. Otherwise, a large blur takes up to 2 s, as on ComfyUI without a "
            "GPU, which is useful for trying out clients."
        ),
    ] = False,
    context: InjectedContext,
) -> None:
    """See help_texts.ENGINE."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    require_engine()
    _serve(host, port, data, context, pace=not no_pace)


def _serve(host: str, port: int, data: Path | None, context: CliContext, *, pace: bool) -> None:
    # Imported here, so that help and other commands don't need numpy and the other packages.
    from comfyfleet.engine.node import limit_memory, limits_of
    from comfyfleet.engine.nodes import registry
    from comfyfleet.engine.nodes.diagnostics import with_cpu_pace
    from comfyfleet.engine.serve import listen, serve, url_of
    from comfyfleet.protocol.server_info import COMFYUI_VERSION

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, port))
        root = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-")))
        nodes = with_cpu_pace(registry()) if pace else registry()
        engine = _engine_in(root, nodes)
        limit_memory(limits_of(context.environ))
        note = "" if data else " (until it stops)"
        context.print_line(
            f"Engine at {url_of(listener)}, as ComfyUI {COMFYUI_VERSION} with "
            f"{len(engine.nodes)} node types\nFiles in {engine.data.root}{note}"
        )
        serve(engine, listener)
    context.print_line("Stopped")


def _engine_in(folder: Path, nodes: "Mapping[str, EngineNodeType]") -> "Engine":
    from comfyfleet.engine import DataFolder, Engine

    with explain_errors(folder):
        return Engine(DataFolder(folder.resolve()), nodes)
