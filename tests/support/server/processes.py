"""A process with a log file. Tests can query and kill it, and it ends with the test."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.server.forked import Forked

COMFYFLEET = Path(sys.executable).parent / "comfyfleet"
LOG_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.02
LEFT_OUT = ("COMFYFLEET_", "AWS_", "COMFYUI_", "COMFY_")


def clean_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Our environment without variables that affect the product, plus the given ones."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    return {**inherited, "PYTHONUNBUFFERED": "1", **environ}


class Process:
    """A `comfyfleet` process with these arguments. Its output is written to the file `log`."""

    def __init__(
        self, name: str, *arguments: str, folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._offset = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self._process = Forked(
                arguments,
                folder=folder,
                environ=clean_environ(environ),
                stdout=log.fileno(),
                stderr=log.fileno(),
                # So that what it started can be ended with it.
                leads_group=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        """The log since this process was started: a restarted one appends to the same file."""
        with self.log.open("rb") as log:
            log.seek(self._offset)
            return log.read().decode(errors="replace")

    def wait_for_line(self, pattern: str) -> "re.Match[str]":
        """Waits until the log matches."""
        deadline = time.monotonic() + LOG_SECONDS_MAX
        while time.monotonic() < deadline:
            is_over = self.exit_code is not None
            if match := re.search(pattern, self.said()):
                return match
            if is_over:
                break
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"{self.name} did not say {pattern!r}:\n{self.said()[-3000:]}")

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """kill -9, for it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS_MAX)

    def freeze(self) -> None:
        """Stops it without ending it, like a machine that lost its network."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self, seconds: float = STOP_SECONDS_MAX) -> int:
        """Returns its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.name} did not end in {seconds} s:\n{self.said()[-3000:]}"
            ) from None


def finish(*arguments: str, folder: Path, environ: Mapping[str, str]) -> str:
    """Runs a command to its successful end; returns its output."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = Forked(
            arguments,
            folder=folder,
            environ=clean_environ(environ),
            stdout=out.fileno(),
            stderr=err.fileno(),
        )
        code = process.wait(STOP_SECONDS_MAX)
        out.seek(0)
        err.seek(0)
        said, told = out.read().decode(), err.read().decode()
    assert code == 0, f"comfyfleet {' '.join(arguments)}: {said}{told}"
    return said
