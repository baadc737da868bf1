"""An engine with small nodes, really served, and a client that talks to it."""

import shutil
import time
from collections.abc import Iterator

import pytest
from tests.support.backends.engine_client import WAIT_SECONDS_MAX, EngineClient, open_engine_client
from tests.support.backends.nodes import NODES

from comfyfleet.engine import Engine, Served, serve_in_thread


@pytest.fixture(scope="module")
def module_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_in_thread(data=tmp_path_factory.mktemp("engine"), nodes=NODES) as engine:
        yield engine


@pytest.fixture
def served(module_engine: Served) -> Served:
    """As if just started: starting one for each test would take longer than the tests."""
    reset(module_engine.engine)
    return module_engine


@pytest.fixture
def talk(served: Served) -> Iterator[EngineClient]:
    with open_engine_client(served.url) as client:
        yield client


def reset(engine: Engine) -> None:
    engine.queue.clear()
    engine.queue.interrupt()
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while engine.queue.remaining():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.history.clear()
    engine.free()
    for folder in (engine.folders.input, engine.folders.output, engine.folders.temp):
        shutil.rmtree(folder)
        folder.mkdir()
    shutil.rmtree(engine.data.user, ignore_errors=True)
