"""A worker process whose state folder is on a small disk that fills up."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.server.command_process import executed
from tests.support.workers.memory_plane import SECRET, Plane, eventually
from tests.support.workers.prompts import picture

from comfyfleet.engine.serve import Served as Engine

DISK_BYTES = 6 * 1024 * 1024
ANSWER_SECONDS_MAX = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which only root may mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={DISK_BYTES}".encode()
    if not hasattr(libc, "mount") or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, options):
        pytest.skip(f"no disk can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(bytes(folder), 2)  # detached, whoever still uses it


def fill(disk: Path) -> Path:
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(64 * 1024)):
            pass
    with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"0"):
            pass
    return path


async def test_a_full_disk_pauses_the_worker_and_its_job_goes_elsewhere(
    plane: Plane, engine: Engine, disk: Path, tmp_path: Path
) -> None:
    plane.requeues_again = False
    arguments = ("worker", "--control", plane.url, "--fleet", "gpus", "--backend", engine.url)
    with executed(
        *arguments,
        *("--worker-id", "gpu-1", "--state", str(disk / "state")),
        folder=tmp_path,
        COMFYFLEET_FLEET_SECRET=SECRET,
        COMFYFLEET_HEARTBEAT_SECONDS="1",
    ) as worker:
        await eventually(lambda: plane.waiting, ANSWER_SECONDS_MAX)
        filler = fill(disk)
        first = plane.add(picture())
        await eventually(lambda: first.word, ANSWER_SECONDS_MAX)
        assert first.requeue.reason == "disk_full"
        await eventually(lambda: "disk_full" in plane.problems, ANSWER_SECONDS_MAX)
        second = plane.add(picture())
        await eventually(lambda: len(plane.calls) > 0 and not plane.waiting, ANSWER_SECONDS_MAX)
        assert second.leases == 0
        filler.unlink()
        await eventually(lambda: second.word, ANSWER_SECONDS_MAX)
        assert second.result.outputs
        assert worker.stop() == 0
    assert not any("Traceback" in line for line in worker.said)
