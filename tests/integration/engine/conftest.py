"""An engine with small nodes, really served, and a client that talks to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.enginekit.nodes import NODES
from tests.enginekit.talking import Talk, talking

from comfyfleet.engine import Served, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(data=tmp_path, nodes=NODES) as engine:
        yield engine


@pytest.fixture
def talk(served: Served) -> Iterator[Talk]:
    with talking(served.url) as client:
        yield client
