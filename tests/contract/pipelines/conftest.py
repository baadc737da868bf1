"""A studio on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.dbkit.databases import Databases
from tests.pipelinekit.studio import Studio, studio_on


@pytest.fixture
async def studio(databases: Databases, tmp_path: Path) -> AsyncIterator[Studio]:
    async with studio_on(databases, tmp_path) as made:
        yield made
