"""`comfyfleet` as a process of its own, and what it says on stderr."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")


class Running:
    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._changed:
                self.said.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def hears(self, pattern: str) -> "re.Match[str]":
        """Waits for a line that has it."""

        def found() -> "re.Match[str] | None":
            return next(filter(None, (re.search(pattern, line) for line in self.said)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self._is_over, START_SECONDS_MAX)
            match = found()
        assert match, f"{pattern!r} was not said:\n" + "\n".join(self.said)
        return match

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS_MAX)
        self._reader.join(STOP_SECONDS_MAX)
        return code


@contextmanager
def started(*arguments: str, folder: Path, **environ: str) -> Iterator[Running]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("COMFYFLEET_")
    }
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**inherited, **environ},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = Running(process)
    try:
        yield running
    finally:
        process.kill()
        process.wait(STOP_SECONDS_MAX)
        running._reader.join(STOP_SECONDS_MAX)
        assert process.stderr
        process.stderr.close()
