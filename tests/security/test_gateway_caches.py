"""What the gateway keeps of calls is as large as it counts, whatever is in a call."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.gateway import GatewayClients, clients_of

from comfyfleet.server.gateway.history import OVERHEAD_BYTES, BoundedCache

CALLS = 50
PATH_CHARACTERS = 20_000


@pytest.fixture
async def clients(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[GatewayClients]:
    async with AsyncExitStack() as stack:
        plane = await stack.enter_async_context(plane_on(sqlite_databases, tmp_path))
        yield await stack.enter_async_context(clients_of(plane))


async def test_answers_to_long_paths_and_queries_are_kept_by_short_names(
    clients: GatewayClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of answers of two bytes each would be kept by gigabytes of paths."""
    names: list[str] = []
    keep = BoundedCache.keep

    def noted(cache: BoundedCache, key: object, value: object, size: int) -> None:
        names.append(repr(key))
        keep(cache, key, value, size)

    monkeypatch.setattr(BoundedCache, "keep", noted)
    client = await clients.new_client()
    for number in range(CALLS):
        long = f"{number}{'x' * PATH_CHARACTERS}"
        assert (await client.get(f"/history/{long}")).json() == {}
        assert (await client.get(f"/api/queue?{long}")).status_code == 200
    assert len(names) >= 2 * CALLS
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < OVERHEAD_BYTES
