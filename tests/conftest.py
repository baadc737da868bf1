"""Databases for every test that asks: SQLite and PostgreSQL, the same tests on both; and AWS."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.awskit.fixtures import aws, aws_url
from tests.dbkit.databases import Databases

from comfyfleet.db import Database

__all__ = ["aws", "aws_url"]


# Each run draws other examples; `make test-all` draws more of them.
settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=200, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    from tests.dbkit.postgres import running_postgres

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
    database = await databases.open("central")
    yield database
    await database.close()


@pytest.fixture
async def pool(databases: Databases) -> AsyncIterator[Database]:
    database = await databases.open("tenant")
    yield database
    await database.close()
