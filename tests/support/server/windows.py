"""Runs `comfyfleet` in a simulated Windows: `python -m tests.support.server.windows …`.

Features that only POSIX has are removed before the first import of comfyfleet: modules, functions,
signals, Unix domain sockets, signal handlers and readers of event loops, and sockets that child
processes inherit.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import types
from functools import partial
from typing import Any

# Libraries look at the platform when they are imported, and are imported as they are here.
import cyclopts
import httptools
import httpx
import psutil
import rich.console
import rich.live
import rich.progress
import sqlalchemy.ext.asyncio
import uvicorn
import uvicorn.protocols.http.httptools_impl
import uvicorn.protocols.websockets.websockets_sansio_impl
import websockets.asyncio.client

LIBRARIES = (cyclopts, httptools, httpx, psutil, rich, sqlalchemy, uvicorn, websockets)
NO_MODULES = ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog")
NO_FUNCTIONS = (
    *("getuid", "geteuid", "getgid", "getegid", "setsid", "getpgid", "getpgrp", "killpg", "fork"),
    *("fchmod", "fchown", "chown", "mkfifo", "sysconf", "statvfs", "getloadavg", "uname"),
)
NO_SIGNALS = ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGPIPE", "SIGQUIT", "SIGCHLD")


def become_windows() -> None:
    for name in NO_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in NO_FUNCTIONS:
        if hasattr(os, name):
            delattr(os, name)
    for name in NO_SIGNALS:
        if hasattr(signal, name):
            delattr(signal, name)
    # Event loops wake themselves up by a pair of sockets, which Windows makes of TCP.
    socket.socketpair = partial(socket.socketpair, socket.AF_UNIX)
    for name in ("AF_UNIX", "SO_REUSEPORT"):
        if hasattr(socket, name):
            delattr(socket, name)
    locking = types.ModuleType("msvcrt")
    locking.LK_NBLCK = 2  # type: ignore[attr-defined]
    locking.locking = lambda _descriptor, _mode, _count: None  # type: ignore[attr-defined]
    sys.modules["msvcrt"] = locking
    for name in ("add_signal_handler", "remove_signal_handler", "add_reader", "remove_reader"):
        setattr(asyncio.SelectorEventLoop, name, _not_implemented)
    # A selector loop needs its own reader; only ours are refused.
    subprocess.Popen = _Popen  # type: ignore[misc,assignment]
    sys.platform = "win32"


def _not_implemented(*_: Any, **__: Any) -> None:
    raise NotImplementedError


class _Popen(subprocess.Popen[bytes]):
    def __init__(self, *arguments: Any, pass_fds: tuple[int, ...] = (), **given: Any) -> None:
        if pass_fds:
            raise ValueError("pass_fds not supported on Windows.")
        super().__init__(*arguments, **given)


def main() -> None:
    become_windows()
    from comfyfleet.cli import main as command

    command()


if __name__ == "__main__":
    main()
