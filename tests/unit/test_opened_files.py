"""A file that a thread opens for a task that was cancelled is closed."""

import asyncio
import threading
from io import BytesIO
from pathlib import Path

import pytest

from comfyfleet.transport.files import open_file, open_with


async def test_a_file_is_opened_in_a_thread(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with await open_file(path, "wb") as file:
        file.write(b"here")
    with await open_file(path) as file:
        assert file.read() == b"here"
    with pytest.raises(FileNotFoundError):
        await open_file(tmp_path / "none")


async def test_what_is_opened_for_a_task_that_was_cancelled_is_closed() -> None:
    begun, advance, closed = threading.Event(), threading.Event(), asyncio.Event()

    def make() -> BytesIO:
        begun.set()
        advance.wait(10)
        return BytesIO()

    def close(file: BytesIO) -> None:
        file.close()
        closed.set()

    task = asyncio.create_task(open_with(make, close))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    advance.set()
    await asyncio.wait_for(closed.wait(), 10)
