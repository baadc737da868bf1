"""The guardian ends descendants that hide in sessions and environments of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SECONDS_MAX, LOOK_SECONDS = 60.0, 0.05
# Starts a process in a session of its own without any environment, whose parent ends, and reports its id. The pipe
# keeps the command from returning before that, because the guardian would kill the process too early.
HIDE = """
import os, subprocess, sys, time
code = (
    "import os, sys, time; print(os.getpid(), flush=True);"
    "os.close(1); os.close(int(sys.argv[1])); time.sleep(600)"
)
middle = (
    "import subprocess, sys; pipe = sys.argv[2];"
    "subprocess.Popen([sys.executable, '-c', sys.argv[1], pipe], env={}, start_new_session=True,"
    " pass_fds=[int(pipe)])"
)
reading, writing = os.pipe()
hide = [sys.executable, "-c", middle, code, str(writing)]
subprocess.run(hide, env={}, check=True, pass_fds=[writing])
os.close(writing)
os.read(reading, 1)
print(os.getpid(), os.environ["TMPDIR"], flush=True)
if sys.argv[1] == "return":
    sys.exit(3)

time.sleep(600)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")


def _ignore_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Guarded:
    """A guardian with its command, and a process that the command hid."""

    def __init__(self, guardian: "subprocess.Popen[str]") -> None:
        self.guardian = guardian
        assert guardian.stdout is not None
        hidden = guardian.stdout.readline()
        command_pid, folder = guardian.stdout.readline().split()
        self.hidden = psutil.Process(int(hidden)) if psutil.pid_exists(int(hidden)) else None
        self.command_pid, self.folder = int(command_pid), Path(folder)

    def ends(self) -> bool:
        """Returns whether the hidden process and the folder no longer exist."""
        is_alive = self.hidden is not None and self.hidden.is_running()
        return not is_alive and not self.folder.exists()


@contextlib.contextmanager
def guarded(action: str, *, is_in_background: bool = False) -> Iterator[Guarded]:
    command = [sys.executable, "-m", "tests.chaos.guardian", sys.executable, "-c", HIDE, action]
    guardian = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_ignore_sigint if is_in_background else None,
    )
    run: Guarded | None = None
    try:
        run = Guarded(guardian)
        yield run
    finally:
        guardian.kill()
        guardian.communicate()
        if run is not None and run.hidden is not None:
            with contextlib.suppress(psutil.Error):
                run.hidden.kill()


def test_a_command_that_returns_leaves_nothing() -> None:
    with guarded("return") as run:
        assert run.guardian.wait(SECONDS_MAX) == 3
        assert run.ends()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_interrupted_guardian_leaves_nothing(number: signal.Signals) -> None:
    with guarded("wait") as run:
        run.guardian.send_signal(number)
        run.guardian.wait(SECONDS_MAX)
        assert run.ends()


def test_a_guardian_started_in_the_background_of_a_script_is_interrupted() -> None:
    with guarded("wait", is_in_background=True) as run:
        run.guardian.send_signal(signal.SIGTERM)
        run.guardian.wait(SECONDS_MAX)
        assert run.ends()


def test_a_killed_command_leaves_nothing() -> None:
    with guarded("wait") as run:
        os.kill(run.command_pid, signal.SIGKILL)
        assert run.guardian.wait(SECONDS_MAX) == 130
        assert run.ends()


def test_a_killed_guardian_has_its_command_signalled() -> None:
    """The command itself then has to end its descendants."""
    with guarded("wait") as run:
        command = psutil.Process(run.command_pid)
        run.guardian.kill()
        run.guardian.wait()
        deadline = time.monotonic() + SECONDS_MAX
        while command.is_running() and command.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(LOOK_SECONDS)
