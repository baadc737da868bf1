"""Finds free ports, and waits until a server responds."""

import contextlib
import random
import socket
import subprocess
import time
from typing import Any

import httpx

ANSWER_SECONDS_MAX = 30
TRIES_MAX = 100


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def wait_until_answering(url: str, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended with {process.returncode}"
        try:
            if httpx.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} did not answer")


def first_of_free_ports(count: int) -> int:
    """This many consecutive free ports, below the ephemeral range, so that no connection takes one."""
    for _ in range(TRIES_MAX):
        first = random.randrange(10_000, 32_000 - count)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("there are no free ports")
