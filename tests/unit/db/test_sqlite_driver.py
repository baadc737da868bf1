"""What `server/db/database.py` uses inside of aiosqlite, and the bounds that promise it."""

import inspect
import threading
import tomllib
from importlib.metadata import version
from pathlib import Path

import aiosqlite
from packaging.requirements import Requirement

from comfyfleet.server.db import database

ROOT = Path(__file__).parents[3]


def bounds() -> Requirement:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = [Requirement(each) for each in project["optional-dependencies"]["server"]]
    return next(each for each in named if each.name == "aiosqlite")


def test_the_names_that_are_used_inside_of_the_driver_are_there() -> None:
    made = inspect.signature(aiosqlite.Connection.__init__).parameters
    assert {"connector", "iter_chunk_size"} <= made.keys()
    assert isinstance(inspect.getattr_static(aiosqlite.Connection, "_conn"), property)
    assert inspect.iscoroutinefunction(aiosqlite.Connection._execute)


async def test_a_connection_has_a_thread_that_does_not_keep_the_process(tmp_path: Path) -> None:
    connection = await database.connect(str(tmp_path / "some.db"))
    try:
        assert isinstance(connection._thread, threading.Thread)
        assert connection._thread.daemon
    finally:
        await connection.close()


def test_the_bounds_leave_out_versions_without_those_names() -> None:
    """Up to 0.21 a connection was itself a thread; a later one may change as much again."""
    allowed = bounds().specifier
    assert version("aiosqlite") in allowed
    assert "0.22.0" in allowed
    assert "0.21.0" not in allowed
    assert "0.23.0" not in allowed
