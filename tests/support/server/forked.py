"""A forked `comfyfleet` process with the interface of `subprocess.Popen`.

Importing a control plane's modules takes longer than the rest of its start, and tests start
hundreds of control planes.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
FORK_SECONDS_MAX = 60.0
END_SECONDS_MAX = 10.0
_lock = threading.Lock()


class Forked:
    """A `comfyfleet` process with these arguments. It only inherits the given environment and
    files."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environ: Mapping[str, str],
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        leads_group: bool = False,
    ) -> None:
        self.returncode: int | None = None
        asked = {
            "arguments": arguments,
            "folder": str(folder),
            "environ": dict(environ),
            "leads_group": leads_group,
        }
        with contextlib.ExitStack() as stack:
            request = stack.enter_context(tempfile.TemporaryFile())
            request.write(json.dumps(asked).encode())
            request.seek(0)
            nothing = os.open(os.devnull, os.O_RDWR)
            stack.callback(os.close, nothing)
            self._told, tell = os.pipe()
            stack.callback(os.close, tell)
            out, err = (
                nothing if each == subprocess.DEVNULL else each for each in (stdout, stderr)
            )
            descriptors = [request.fileno(), tell, nothing, out, err]
            with _lock:
                socket.send_fds(_parent(os.getpid()), [b"1"], descriptors)
        self.pid = self._number(FORK_SECONDS_MAX)

    def _number(self, seconds: float | None) -> int:
        """The next number from the parent: first the pid, finally the exit code."""
        if not select.select([self._told], [], [], seconds)[0]:
            raise subprocess.TimeoutExpired("comfyfleet", seconds or 0)
        told = os.read(self._told, 16)
        assert told, "the process that forks is gone"
        return int(told)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._number(timeout)
            os.close(self._told)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # Its parent may know that it is gone before it has said so.
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent(pid: int) -> socket.socket:
    """The parent of all processes that this one requests. It ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        # numpy would start threads, which a fork leaves behind.
        environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.server.fork_parent", str(number)],
            cwd=ROOT,
            env=environ,
            pass_fds=[number],
            start_new_session=True,
        )
    atexit.register(process.wait, END_SECONDS_MAX)
    atexit.register(ours.close)
    return ours
