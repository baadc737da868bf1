"""Attacks on the whole of a control plane, on either kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, Shop, shop_on


@pytest.fixture
async def shop(databases: Databases, tmp_path: Path) -> AsyncIterator[Shop]:
    async with plane_on(databases, tmp_path) as plane, shop_on(plane) as shop:
        yield shop


@pytest.fixture
async def ada(shop: Shop) -> Customer:
    return await shop.customer()
