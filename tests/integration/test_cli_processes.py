"""The parent of `serve --processes`: its children have numbers of their own, and are kept."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from comfyfleet.cli import processes
from comfyfleet.cli.processes import ProcessSupervisor
from comfyfleet.server.http.listener import listen

COUNT = 4
SECONDS_MAX = 20
# Says that it is ready, and who it is; ends when it is told to, or when its parent is gone.
CHILD = """#!{python} -IS
import json, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
child = json.loads(sys.argv[-1])
open(os.path.join(child["folder"], str(os.getpid())), "w").write(str(child["number"]))
os.write(child["line"], b"r" + bytes(4))
os.read(child["line"], 1)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the interpreter that children are started with."""
    path = tmp_path / "child"
    path.write_text(CHILD.format(python=sys.executable))
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(processes, "BACK_OFF_SECONDS_MAX", 0.05)
    return path


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[asyncio.Event]:
    """Yields what has all of them replaced."""
    stop, again = asyncio.Event(), asyncio.Event()
    with listen("127.0.0.1", 0) as listener:
        parent = asyncio.create_task(
            ProcessSupervisor(COUNT, [], listener, folder).run(stop, again)
        )
        try:
            yield again
        finally:
            stop.set()
            await parent


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def allow(program: Path, *, may_run: bool) -> None:
    program.chmod(0o700 if may_run else 0o600)


def told(folder: Path) -> dict[int, str]:
    """The number of each that lives, by its id."""
    found = {int(each.name): each.read_text() for each in folder.iterdir() if each.name.isdigit()}
    return {pid: number for pid, number in found.items() if number and is_alive(pid)}


def is_whole(folder: Path) -> bool:
    return sorted(told(folder).values()) == [str(each) for each in range(COUNT)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.mark.usefixtures("program")
async def test_each_has_a_number_of_its_own_and_all_end_with_their_parent(folder: Path) -> None:
    async with running(folder):
        await until(lambda: len(told(folder)) == COUNT)
        assert is_whole(folder)
    assert told(folder) == {}


async def test_one_that_can_not_be_started_again_is_tried_until_it_can(
    folder: Path, program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as again:
        await until(lambda: is_whole(folder))
        allow(program, may_run=False)
        first = min(told(folder))
        os.kill(first, signal.SIGKILL)
        await until(lambda: "no process can be started" in caplog.text)
        again.set()  # nothing comes of it, and those that serve go on
        await until(lambda: not again.is_set())
        assert len(told(folder)) == COUNT - 1
        allow(program, may_run=True)
        await until(lambda: is_whole(folder))
