"""One gateway that tests share, each with users of its own."""

from collections.abc import Iterator

import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.server.gateway import (
    GatewayProcess,
    GatewayUser,
    serving_engines,
    up_with_engines,
)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """A process of its own, with two engines behind it."""
    folder = tmp_path_factory.mktemp("gateway")
    with serving_engines(2, folder) as engines, up_with_engines(folder, engines) as server:
        yield server


@pytest.fixture
def user(gateway: GatewayProcess) -> GatewayUser:
    return gateway.user()


@pytest.fixture
def talk(user: GatewayUser) -> Iterator[EngineClient]:
    with user.open_engine_client() as talk:
        yield talk
