"""Attacks on the whole of a control plane, on either kind of database."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.gateway import (
    GatewayProcess,
    GatewayUser,
    serving_engines,
    up_with_engines,
)


@pytest.fixture
async def effect_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[EffectSetup]:
    async with plane_on(databases, tmp_path) as plane, effect_setup_on(plane) as effect_setup:
        yield effect_setup


@pytest.fixture
async def ada(effect_setup: EffectSetup) -> Customer:
    return await effect_setup.customer()


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """`comfyfleet up` with one engine, which tests share, each with users of its own."""
    folder = tmp_path_factory.mktemp("gateway")
    with (
        serving_engines(1, folder) as engines,
        up_with_engines(folder, engines, "--log-level", "debug") as server,
    ):
        yield server


@pytest.fixture
def user(gateway: GatewayProcess) -> GatewayUser:
    return gateway.user()
