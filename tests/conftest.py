"""Databases for every test that asks: SQLite and PostgreSQL, the same tests on both; and AWS."""

import gc
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.databases.compiled import share_compiled
from tests.support.databases.factory import Databases
from tests.support.workers.aws_fixtures import aws, aws_url

from comfyfleet.server.db import Database, open_database
from comfyfleet.server.db.schema import History

__all__ = ["aws", "aws_url"]


# Each run draws other examples; `make test-all` draws more of them.
settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


MEMORY_DISK = Path("/dev/shm")  # noqa: S108  (a folder of our own in it)
MEMORY_DISK_BYTES_MIN = 6 * 1024**3
# Objects until the youngest are looked over, and how often that is until older ones are.
GARBAGE_THRESHOLDS = (20_000, 10, 10)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the others inherit what it sets
        _keep_bytecode(config)
        _use_memory_disk(config)
        _trust_by_folder()
    share_compiled()


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected lives to the end. Looked over again and again for garbage, it would take a
    fifth of the time."""
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    gc.enable()


def _keep_bytecode(config: pytest.Config) -> None:
    """Tests start hundreds of processes. Where Python may write nothing beside the sources, each
    would compile them anew."""
    cache: pytest.Cache | None = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if sys.dont_write_bytecode and cache:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        folder = str(cache.mkdir("bytecode"))
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = folder
        sys.dont_write_bytecode = False


def _use_memory_disk(config: pytest.Config) -> None:
    """Temporary files go to memory where there is enough of it: tests kill processes, never the
    machine, so waiting for a disk would show nothing."""
    if "TMPDIR" in os.environ or not MEMORY_DISK.is_dir():
        return
    if shutil.disk_usage(MEMORY_DISK).free >= MEMORY_DISK_BYTES_MIN:
        folder = tempfile.mkdtemp(prefix="comfyfleet-tests-", dir=MEMORY_DISK)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def _trust_by_folder() -> None:
    """A file of certificates is read whole by every HTTP client that is made, which takes longer than
    a request; in a folder only what is needed is looked up."""
    folder = os.environ.get("SSL_CERT_DIR") or ssl.get_default_verify_paths().capath
    if folder and Path(folder).is_dir():
        os.environ["SSL_CERT_DIR"] = folder
        os.environ.pop("SSL_CERT_FILE", None)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    from tests.support.databases.postgres import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def sqlite_databases(tmp_path_factory: pytest.TempPathFactory) -> Databases:
    return Databases(tmp_path_factory.mktemp("databases"))


@pytest.fixture(scope="session")
def postgres_databases(postgres_url: str, tmp_path_factory: pytest.TempPathFactory) -> Databases:
    folder: Path = tmp_path_factory.mktemp("databases")
    return Databases(folder, postgres_url)


@pytest.fixture(params=["sqlite", "postgres"])
def databases(request: pytest.FixtureRequest) -> Databases:
    found: Databases = request.getfixturevalue(f"{request.param}_databases")
    return found


@pytest.fixture
async def central(databases: Databases) -> AsyncIterator[Database]:
    async for database in _opened(databases, "central"):
        yield database


@pytest.fixture
async def pool(databases: Databases) -> AsyncIterator[Database]:
    async for database in _opened(databases, "tenant"):
        yield database


async def _opened(databases: Databases, history: History) -> AsyncIterator[Database]:
    url = await databases.url(history)
    database = open_database(url)
    yield database
    await database.close()
    await databases.give_back(url)
