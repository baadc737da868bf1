"""A pipeline setup on SQLite and on PostgreSQL."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.pipelines import PipelineSetup, pipeline_setup_on


@pytest.fixture
async def pipeline_setup(databases: Databases, tmp_path: Path) -> AsyncIterator[PipelineSetup]:
    async with pipeline_setup_on(databases, tmp_path) as made:
        yield made
