"""Helpers for all benchmarks: child processes that end with them, a control plane on a free port,
and calls to it."""

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
COMFYFLEET = Path(sys.executable).parent / "comfyfleet"
ADMIN_KEY = "a" * 64
HISTORY_MAX = 10_000
END_SECONDS_MAX = 300


def is_quick() -> bool:
    """Checks whether the smallest load was requested, which only tests that the benchmark runs.

    Its results are meaningless, so no limit is checked.
    """
    return "--quick" in sys.argv


def exit_status(*, is_met: bool) -> int:
    """Returns the exit status of a benchmark: 1 if a limit was missed and `--check` is set.

    Without `--check`, `make bench` always runs to its end, whatever the results are. The results of
    `--quick` are never checked.
    """
    if is_met or is_quick():
        return 0
    print("A limit was missed.")
    return 1 if "--check" in sys.argv else 0


def exit_on_sigterm() -> None:
    """Makes SIGTERM exit like Ctrl-C, so that each `finally` stops servers and removes folders.

    By default SIGTERM ends a process immediately, and its children keep running.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    sys.exit(128 + number)


def raise_file_limit() -> int:
    """Lets this process open as many files as the system allows, and returns their number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@contextmanager
def process(*command: str | Path, **environ: str) -> Iterator["subprocess.Popen[str]"]:
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield child
    finally:
        child.terminate()
        child.communicate()


def first_url(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    match = re.search(r"http://\S+:\d+", child.stdout.readline())
    assert match
    return match[0]


@contextmanager
def control_plane(folder: Path, **environ: str) -> Iterator[tuple[str, httpx.Client]]:
    """Runs a control plane with its default SQLite databases and local files. Yields its URL and an
    operator's client."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serve = (COMFYFLEET, "serve", "--port", str(port), "--data", folder, "--log-level", "error")
    with (
        process(*serve, COMFYFLEET_ADMIN_KEY=ADMIN_KEY, **environ),
        httpx.Client(base_url=url, headers=bearer(ADMIN_KEY)) as admin,
    ):
        wait_for(lambda: answers(admin))
        yield url, admin


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def call_json(admin: httpx.Client, method: str, path: str, **body: Any) -> Any:
    answer = admin.request(method, f"/api/admin{path}", json=body)
    assert answer.is_success, answer.text
    return answer.json() if answer.content else None


def answers(admin: httpx.Client) -> bool:
    try:
        return admin.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(is_so: Callable[[], bool], seconds: float = END_SECONDS_MAX) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.5)
