"""Runs a command, and ends everything that the command started, whatever ends the command or the guardian.

The guardian is the parent of the command and adopts each of its descendants that loses its parent, so that
no process group, session or environment of its own hides one from it. If the guardian itself is killed, the
kernel signals the command, which then cleans up by itself.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOOK_SECONDS, KILL_SECONDS_MAX = 0.05, 30.0
INTERRUPTED = 130


def run_guarded(command: Sequence[str], environ: dict[str, str]) -> int:
    """Returns the exit code of the command after all of its descendants have ended.

    The temporary files of the command and its descendants are in one folder, which is deleted.
    """
    _set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    folder = Path(tempfile.mkdtemp(prefix="comfyfleet-chaos-"))
    folder.chmod(0o711)  # PostgreSQL may run as another user
    try:
        process = subprocess.Popen(
            command,
            env={**environ, "TMPDIR": str(folder)},
            start_new_session=True,
            preexec_fn=_prepare_command,
        )
        for number in FORWARDED:
            signal.signal(number, lambda *_: process.send_signal(signal.SIGINT))
        code = process.wait()
        return code if code >= 0 else INTERRUPTED
    finally:
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        _end_descendants()
        _delete(folder)


def _prepare_command() -> None:
    """Lets the command die with the guardian, and end by SIGINT even if the guardian's parent ignored that.

    A shell without job control starts its background commands with SIGINT ignored, and children inherit this.
    """
    _set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _set_process_option(option: int, value: int) -> None:
    """Calls `prctl`, which only Linux has. Elsewhere, the driver's own cleanup must be enough."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while (processes := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(LOOK_SECONDS)


def _delete(folder: Path) -> None:
    for part in psutil.disk_partitions(all=True):
        if Path(part.mountpoint).is_relative_to(folder):
            subprocess.run(["umount", "-l", part.mountpoint], check=False)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(run_guarded(sys.argv[1:], dict(os.environ)))
