"""Imports the modules of `comfyfleet`, and forks a child for each requested process."""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from comfyfleet.cli.main import main

COMMANDS = ("admin", "engine", "graph", "pipeline", "serve", "up", "worker")
# What they import when they are at it.
LATER = (
    "comfyfleet.server.queue.store.postgres",
    "comfyfleet.server.queue.store.sqlite",
    "comfyfleet.engine.serve",
    "anyio._backends._asyncio",
    "asyncpg",
    "httpcore",
    "uvicorn.lifespan.on",
    "uvicorn.loops.asyncio",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
)
DESCRIPTORS = 5
NUMBER_BYTES = 16


def imported() -> None:
    for name in (*(f"comfyfleet.cli.{command}" for command in COMMANDS), *LATER):
        importlib.import_module(name)
    # Freezes the objects that exist: the garbage collector would touch, and so copy, their pages.
    gc.collect()
    gc.freeze()


class Children:
    def __init__(self, asked: socket.socket) -> None:
        self._asked = asked
        self._told: dict[int, int] = {}  # where to report its exit, by pid

    def next_request(self) -> tuple[dict[str, Any], list[int]] | None:
        """Returns in each child with its request, and in the parent when there are no more requests."""
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        while True:
            ready, _, _ = select.select([self._asked.fileno(), woken], [], [])
            if woken in ready:
                os.read(woken, 512)
                self._report_exits()
            if self._asked.fileno() in ready:
                word, descriptors, _, _ = socket.recv_fds(self._asked, 1, DESCRIPTORS)
                if not word:
                    self._kill_all()
                    return None
                if not self._fork(descriptors[1]):
                    return _request(descriptors)
                os.close(descriptors[0])
                for each in descriptors[2:]:
                    os.close(each)

    def _fork(self, tell: int) -> int:
        pid = os.fork()
        if pid:
            self._told[pid] = tell
            os.write(tell, f"{pid:<{NUMBER_BYTES}}".encode())
        return pid

    def _kill_all(self) -> None:
        """Whoever requested them has ended: if it was killed, nobody else would end them."""
        for pid in self._told:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _report_exits(self) -> None:
        while self._told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            tell = self._told.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(BrokenPipeError):  # its owner has gone
                os.write(tell, f"{code:<{NUMBER_BYTES}}".encode())
            os.close(tell)


def _request(descriptors: list[int]) -> tuple[dict[str, Any], list[int]]:
    with open(descriptors[0], "rb") as file:
        return json.load(file), descriptors[2:]


def become(asked: dict[str, Any], standard: list[int]) -> None:
    """Becomes the requested process, as if it had been started directly."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if asked["leads_group"]:
        os.setsid()
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["folder"])
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")
    sys.argv = ["comfyfleet", *asked["arguments"]]


if __name__ == "__main__":
    imported()
    if request := Children(socket.socket(fileno=int(sys.argv[1]))).next_request():
        become(*request)
        main()
