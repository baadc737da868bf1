"""A studio on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.pipelines import Studio, studio_on


@pytest.fixture
async def studio(databases: Databases, tmp_path: Path) -> AsyncIterator[Studio]:
    async with studio_on(databases, tmp_path) as made:
        yield made
