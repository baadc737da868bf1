"""A control plane in memory and the built-in engine, for each test its own."""

from collections.abc import Iterator

import pytest
from tests.support.workers.memory_plane import Plane
from tests.support.workers.plane_server import Served, serving_plane

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.serve import Served as ServedEngine


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_plane() as served:
        yield served


@pytest.fixture
def plane(served: Served) -> Plane:
    return served.plane


@pytest.fixture
def engine() -> Iterator[ServedEngine]:
    with serve_in_thread() as engine:
        yield engine
