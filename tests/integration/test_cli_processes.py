"""The parent of `serve --processes`: its children have numbers of their own, and are kept."""

import asyncio
import logging
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
SECONDS_MAX = 60
# Says that it is ready, and who it is; ends when it is told to, or when its parent is gone.
CHILD = """#!{python} -IS
import json, os, signal, sys
# A parent may ignore SIGHUP, for example under nohup, and children inherit that.
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
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


def replace_in(program: Path, code: str, other: str) -> None:
    program.write_text(program.read_text().replace(code, other))


def before_ready(program: Path, code: str) -> None:
    replace_in(program, "os.write(", f"{code}\nos.write(")


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
        await until(lambda: "a process could not be started" in caplog.text)
        again.set()  # nothing comes of it, and those that serve go on
        await until(lambda: not again.is_set())
        assert len(told(folder)) == COUNT - 1
        allow(program, may_run=True)
        await until(lambda: is_whole(folder))


async def test_no_process_gets_a_connection_before_all_are_ready(
    folder: Path, program: Path
) -> None:
    may_go_on = folder / "may-go-on"
    waiting = f"while child['number'] and not os.path.exists({str(may_go_on)!r}): time.sleep(0.01)"
    before_ready(program, f"import time\n{waiting}")
    replace_in(program, 'os.read(child["line"], 1)', "signal.pause()")
    stop = asyncio.Event()
    with listen("127.0.0.1", 0) as listener:
        supervisor = ProcessSupervisor(COUNT, [], listener, folder)
        parent = asyncio.create_task(supervisor.run(stop, asyncio.Event()))

        def connections() -> int:
            return sum(each.line.connections for each in supervisor._living.values())

        await until(lambda: len(told(folder)) == COUNT)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        for _ in range(10):  # turns of the event loop; a connection is accepted in the first
            await asyncio.sleep(0)
        assert connections() == 0
        may_go_on.touch()
        await until(lambda: connections() == 1)
        writer.close()
        stop.set()
        await parent


async def test_a_stop_does_not_wait_for_a_process_that_is_still_starting(
    folder: Path, program: Path
) -> None:
    before_ready(program, "signal.pause()")
    stop = asyncio.Event()
    with listen("127.0.0.1", 0) as listener:
        supervisor = ProcessSupervisor(COUNT, [], listener, folder)
        parent = asyncio.create_task(supervisor.run(stop, asyncio.Event()))
        await until(lambda: len(told(folder)) == 1)
        stop.set()
        async with asyncio.timeout(SECONDS_MAX):
            await parent
    assert told(folder) == {}


async def test_a_start_that_takes_long_is_logged_and_goes_on(
    folder: Path, program: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "SLOW_START_SECONDS", 0.02)
    may_go_on = folder / "may-go-on"
    before_ready(
        program, f"import time\nwhile not os.path.exists({str(may_go_on)!r}): time.sleep(0.01)"
    )
    async with running(folder):
        await until(lambda: caplog.text.count("is not ready after") > 2)
        may_go_on.touch()
        await until(lambda: is_whole(folder))


@pytest.mark.usefixtures("program")
async def test_a_reload_is_logged_from_its_signal_to_its_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=processes.__name__)

    def messages() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == processes.__name__]

    async with running(folder) as again:
        await until(lambda: is_whole(folder))
        await until(lambda: f"{COUNT} processes are serving" in messages())
        before = told(folder)
        again.set()
        await until(lambda: "all processes were replaced" in messages())
    lines = messages()
    lines = lines[lines.index(f"SIGHUP received: replacing {COUNT} processes one by one") :]
    replaced = [line for line in lines if " replaces process " in line]
    assert len(replaced) == COUNT
    pids = [int(line.rpartition("(pid ")[2].rstrip(")")) for line in replaced]
    assert sorted(pids) == sorted(before)
