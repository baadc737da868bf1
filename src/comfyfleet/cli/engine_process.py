"""The built-in engine in a process of its own: what a prompt takes of memory, or breaks, is the engine's."""

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
from pathlib import Path

log = logging.getLogger(__name__)

MODULE, KEY, USER = "comfyfleet.engine.child", "COMFYFLEET_ENGINE_KEY", "engine"
STOP_SECONDS_MAX = 10.0
LISTEN_BACKLOG = 128
# It decodes strangers' files: the control plane's keys, databases and stores are no business of it.
OURS = ("COMFYFLEET_", "COMFY_", "AWS_")
THE_ENGINES = ("COMFYFLEET_ENGINE_", "COMFYFLEET_MAX_PICTURE_PIXELS")
# One that ends this soon after its start will do so again: starts are spaced out.
SHORT_LIFE_SECONDS = 10.0
PAUSE_SECONDS_MAX = 30.0


@contextlib.contextmanager
def engine_process(environ: Mapping[str, str], data: Path | None = None) -> Iterator[str]:
    """Its URL, with its key; without `data` its files are gone afterwards.

    We hold the socket that it serves on: while it starts, or starts again, calls wait.
    """
    with contextlib.ExitStack() as stack:
        kept = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-")))
        kept.mkdir(parents=True, exist_ok=True)
        listener = stack.enter_context(_listener())
        key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", MODULE, str(listener.fileno()), str(kept.resolve())]
        keeper = _Keeper(command, listener.fileno(), {**_told(environ), KEY: key})
        stack.callback(keeper.stop)
        keeper.start()
        yield f"http://{USER}:{key}@127.0.0.1:{listener.getsockname()[1]}"


def _told(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(THE_ENGINES) or not name.startswith(OURS)
    }


def _listener() -> socket.socket:
    # asyncio turns Nagle's delay off only for sockets that say they are TCP: 40 ms a request.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(LISTEN_BACKLOG)
    return listener


class _Keeper(threading.Thread):
    """Starts the process, and starts it again whenever it has ended."""

    def __init__(self, command: list[str], descriptor: int, environ: Mapping[str, str]) -> None:
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
            log.warning("the built-in engine ended with code %s, and is started again", code)
            pause = min(2.0**short_lives, PAUSE_SECONDS_MAX) if short_lives > 1 else 0.0
            if self._stopping.wait(pause):
                return
            self._end()
            self._process = self._spawned()

    def stop(self) -> None:
        self._stopping.set()
        self._end()
        self.join(STOP_SECONDS_MAX)
        self._end()  # one that was started at this very moment

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._process.stdin:
            self._process.stdin.close()

    def _spawned(self) -> subprocess.Popen[bytes]:
        # Its input ends when we do. Ctrl-C is ours alone: a session of its own does not hear it.
        return subprocess.Popen(  # noqa: S603
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=[self._descriptor],
            start_new_session=True,
            env=self._environ,
        )
