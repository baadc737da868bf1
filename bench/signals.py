"""What a bench does when it is told to end."""

import signal
import sys
from types import FrameType


def exit_on_sigterm() -> None:
    """As Ctrl-C does: each `finally` runs, so servers are stopped and folders removed.

    By default SIGTERM ends a process on the spot, and whatever it started runs on.
    """
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning up short
    sys.exit(128 + number)
