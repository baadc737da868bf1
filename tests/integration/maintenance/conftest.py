"""A control plane with a customer, on either database and either store."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.control_plane import plane_on
from tests.support.server.fleet import FleetSetup, fleet_setup_on
from tests.support.server.tenants import AdjustableClock, TenantData, customer_of


@pytest.fixture(scope="package")
def s3() -> Iterator[RunningS3]:
    with running_s3() as running:
        yield running


@pytest.fixture
def ahead() -> AdjustableClock:
    return AdjustableClock()


@pytest.fixture(params=["local", "s3"])
def storage_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    if request.param == "local":
        return (tmp_path / "objects").as_uri()
    running: RunningS3 = request.getfixturevalue("s3")
    for name, value in running.env.items():
        monkeypatch.setenv(name, value)
    return running.url_of(tmp_path.name)


@pytest.fixture
async def house(
    databases: Databases, tmp_path: Path, ahead: AdjustableClock, storage_url: str
) -> AsyncIterator[FleetSetup]:
    opening = plane_on(databases, tmp_path, clock=ahead, storage_url=storage_url)
    async with opening as plane, fleet_setup_on(plane) as fleet_setup:
        yield fleet_setup


@pytest.fixture
async def ada(house: FleetSetup) -> TenantData:
    return await customer_of(house.plane, house.admin)
