"""Counting the objects of a control plane must not hang it."""

import os
import signal
import subprocess
import sys

import pytest
from tests.chaos import memory


def test_a_copy_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FORK_SECONDS_MAX", 0.0)
    copy = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        memory._wait_for(copy.pid)
        with pytest.raises(ProcessLookupError):
            os.kill(copy.pid, signal.SIG_DFL)
    finally:
        copy.kill()
        copy.wait()
