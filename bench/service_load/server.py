"""Runs a server as a separate process, and reads the CPU time that it has used."""

import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support import ADMIN_KEY

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 30
# Limits that protect a server from a single customer. Here one customer sends everything.
UNLIMITED = {
    "COMFYFLEET_ADMIN_KEY": ADMIN_KEY,
    "COMFYFLEET_MAX_FLEET_WORKERS": "100000",
    "COMFYFLEET_MAX_QUEUED_PER_TENANT": "10000000",
    "COMFYFLEET_MAX_QUEUED_TOTAL": "10000000",
    "COMFYFLEET_MAX_ACTIVE_JOBS_PER_USER": "1000000",
    "COMFYFLEET_MAX_ACTIVE_JOBS_PER_TENANT": "1000000",
    "COMFYFLEET_CALLS_PER_SECOND": "1000000",
    "COMFYFLEET_CALLS_AT_ONCE": "1000000",
    "COMFYFLEET_TENANT_CALLS_PER_SECOND": "1000000",
    "COMFYFLEET_TENANT_CALLS_AT_ONCE": "1000000",
}


@dataclass(frozen=True)
class ServerProcess:
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Returns the CPU time of all its threads, including ended ones, and of its children."""
        return sum(map(_process_clock, (self.pid, *_children(self.pid))))

    def memory_bytes(self) -> int:
        """Returns the resident memory of the process and its children. Shared memory counts in each
        of them."""
        return sum(map(_resident, (self.pid, *_children(self.pid))))


def _process_clock(pid: int) -> float:
    """Returns a process's CPU time. On Linux every process has a clock whose number follows from
    the pid (clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def running(command: Sequence[str | Path], environ: Mapping[str, str]) -> Iterator[ServerProcess]:
    """Runs a server until the `with` block ends. The command must print its URL."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("COMFYFLEET_")}
    child = subprocess.Popen(
        command,
        env={**inherited, "PYTHONUNBUFFERED": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield ServerProcess(_printed_url(child), child.pid)
    finally:
        child.terminate()
        try:
            child.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _printed_url(child: "subprocess.Popen[str]") -> str:
    """Returns the URL in the output. Later output is read and discarded, so that the process never
    blocks on its pipe."""
    assert child.stdout
    lines: deque[str] = deque(maxlen=50)
    deadline = time.monotonic() + START_SECONDS_MAX
    for line in child.stdout:
        lines.append(line)
        if match := re.search(r"at (http://[\d.]+:\d+)", line):
            threading.Thread(target=deque, args=(child.stdout, 0), daemon=True).start()
            return match[1]
        if time.monotonic() > deadline:
            break
    raise SystemExit("The server did not start:\n" + "".join(lines))


def control_plane(
    root: Path, data: Path, urls: Sequence[str], *more: str
) -> tuple[list[str | Path], dict[str, str]]:
    """Returns the command and environment of a tree's control plane, on PostgreSQL if there are
    URLs."""
    program = root / ".venv/bin/comfyfleet"
    command: list[str | Path] = [program, "serve", "--port", "0", "--data", data, *more]
    environ = dict(UNLIMITED)
    if urls:
        environ["COMFYFLEET_CENTRAL_DATABASE_URL"] = urls[0]
        environ["COMFYFLEET_TENANT_DATABASE_URLS"] = f"main={urls[1]}"
        subprocess.run(
            [program, "db", "upgrade"],
            env={**os.environ, **environ},
            check=True,
            capture_output=True,
        )
    return command, environ


def floor_server(data: Path, url: str, profile: str) -> list[str | Path]:
    data.mkdir()
    return [sys.executable, Path(__file__).with_name("bare_server.py"), data, url, profile]
