"""Every test of the queue has three workflows to submit to."""

import pytest
from tests.support.jobs.dispatches import add_workflows

from comfyfleet.server.db import Database


@pytest.fixture(autouse=True)
async def _workflows(central: Database) -> None:
    await add_workflows(central, 1, 2, 3)
