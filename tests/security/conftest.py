"""Attacks on the whole of a control plane, on either kind of database."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on


@pytest.fixture
async def effect_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


@pytest.fixture
async def ada(effect_setup: EffectSetup) -> Customer:
    return await effect_setup.customer()
