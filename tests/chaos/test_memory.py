"""Counting the objects of a control plane must not hang it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos import memory

SIGNALLED_IN_SUBMIT = """
import asyncio, os, signal
from concurrent.futures.thread import _global_shutdown_lock
from tests.chaos import memory

async def main():
    memory._fork_and_count = lambda: (os.fork() or os._exit(0), counted.set())
    counted = asyncio.Event()
    with _global_shutdown_lock:
        signal.raise_signal(memory.SIGNAL)
    await counted.wait()

memory.install()
asyncio.run(main())
"""


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


def test_a_signal_during_the_start_of_a_thread_does_not_hang_the_process(tmp_path: Path) -> None:
    environment = {**os.environ, memory.FOLDER: str(tmp_path), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", SIGNALLED_IN_SUBMIT]
    subprocess.run(command, env=environment, check=True, timeout=60)
