"""A control plane that was closed is gone, though its process goes on."""

import gc
import weakref
from pathlib import Path

from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.server.app import ControlPlane


async def called(databases: Databases, folder: Path) -> "weakref.ref[ControlPlane]":
    async with plane_on(databases, folder) as plane, client_of(plane) as client:
        assert (await client.get("/metrics")).status_code == 200
        return weakref.ref(plane)


async def test_nothing_holds_a_control_plane_that_was_closed(
    sqlite_databases: Databases, tmp_path: Path
) -> None:
    closed = await called(sqlite_databases, tmp_path)
    gc.collect()
    assert closed() is None
