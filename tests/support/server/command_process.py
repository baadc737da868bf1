"""Runs `comfyfleet` as a separate process and collects its lines on stderr."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.server.forked import Forked

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")


class CommandProcess:
    def __init__(self, process: "Forked | subprocess.Popen[bytes]", stderr: int) -> None:
        self.process = process
        self._stderr = stderr
        self.said: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with open(self._stderr, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self._changed:
                    self.said.append(line.rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait_for_line(self, pattern: str) -> "re.Match[str]":
        """Waits for a line that matches."""

        def found() -> "re.Match[str] | None":
            return next(filter(None, (re.search(pattern, line) for line in self.said)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._is_over, START_SECONDS_MAX)
            match = found()
        assert match, f"{pattern!r} was not said:\n" + "\n".join(self.said)
        return match

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS_MAX)
        self._reader.join(STOP_SECONDS_MAX)
        return code


@contextmanager
def started(*arguments: str, folder: Path, **environ: str) -> Iterator[CommandProcess]:
    with _log_pipe() as (heard, stderr):
        process = Forked(arguments, folder=folder, environ=_clean_environ(environ), stderr=stderr)
    with _ended(CommandProcess(process, heard)) as running:
        yield running


@contextmanager
def executed(*arguments: str, folder: Path, **environ: str) -> Iterator[CommandProcess]:
    """Starts a fresh process, as people do: that takes two seconds more."""
    with _log_pipe() as (heard, stderr):
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            cwd=folder,
            env=_clean_environ(environ),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    with _ended(CommandProcess(process, heard)) as running:
        yield running


def _clean_environ(environ: dict[str, str]) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("COMFYFLEET_")
    }
    return {**inherited, **environ}


@contextmanager
def _log_pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose writing end is passed to the process."""
    heard, stderr = os.pipe()
    try:
        yield heard, stderr
    finally:
        os.close(stderr)


@contextmanager
def _ended(running: CommandProcess) -> Iterator[CommandProcess]:
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait(STOP_SECONDS_MAX)
        running._reader.join(STOP_SECONDS_MAX)
