"""The operators' API in this process, on either kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import client_of, plane_on

from comfyfleet.server.app import ControlPlane


@pytest.fixture
async def plane(databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with plane_on(databases, tmp_path) as plane:
        yield plane


@pytest.fixture
async def client(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(plane) as client:
        yield client
