"""Calls of custom nodes' routes that go to all backends take neither all places nor all memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on

from comfyfleet.api.route_calls import RouteAnswer
from comfyfleet.errors import Unavailable
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.fleets.route_calls import (
    AT_ONCE_MAX,
    LARGE_AT_ONCE_MAX,
    LARGE_BODY_BYTES,
    LARGE_PER_TENANT_MAX,
    NewRouteCall,
    RouteCalls,
)

LONG_SECONDS = 3600.0
WAIT_SECONDS_MAX = 60.0


def new_call(tenant_id: UUID, body: bytes = b"", *, is_copy: bool = False) -> NewRouteCall:
    return NewRouteCall(
        id=uuid4(),
        tenant_id=tenant_id,
        fleet_ids=[1],
        method="PUT",
        path="/api/etn/a",
        target="/api/etn/a",
        headers={},
        body=body,
        is_copy=is_copy,
        pickup_seconds=LONG_SECONDS,
    )


@pytest.fixture
async def plane(sqlite_databases: Databases, tmp_path: Path) -> AsyncIterator[ControlPlane]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(plane_on(sqlite_databases, tmp_path))


async def test_copies_of_one_tenant_leave_room_for_calls_of_another(plane: ControlPlane) -> None:
    """No worker takes them, as if a backend answered late."""
    copies = [new_call(uuid4(), is_copy=True) for _ in range(2 * AT_ONCE_MAX)]
    waiting = [asyncio.create_task(plane.routes.send(call)) for call in copies]
    await asyncio.sleep(0)
    try:
        with pytest.raises(Unavailable, match="no worker"):
            await plane.routes.send(replace(new_call(uuid4()), pickup_seconds=0.0))
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_few_large_bodies_are_on_their_way_at_once(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once: Counter[UUID] = Counter()
    most: Counter[UUID] = Counter()
    together = [0]
    moved, is_full = asyncio.Event(), asyncio.Event()

    async def send(calls: RouteCalls, call: NewRouteCall, seconds: float) -> RouteAnswer:
        at_once[call.tenant_id] += 1
        most[call.tenant_id] = max(most[call.tenant_id], at_once[call.tenant_id])
        together.append(sum(at_once.values()))
        if together[-1] == LARGE_AT_ONCE_MAX:
            is_full.set()
        await moved.wait()
        at_once[call.tenant_id] -= 1
        return RouteAnswer(worker_id="w", call_id=call.id, status=200)

    monkeypatch.setattr(RouteCalls, "_send", send)
    large, tenants = bytes(LARGE_BODY_BYTES + 1), [uuid4() for _ in range(6)]
    calls = [new_call(tenants[0], large, is_copy=True) for _ in range(64)]
    calls += [new_call(tenant, large, is_copy=True) for tenant in tenants[1:] for _ in range(8)]
    sending = [asyncio.create_task(plane.routes.send(call)) for call in calls]
    await asyncio.wait_for(is_full.wait(), WAIT_SECONDS_MAX)
    small = asyncio.create_task(plane.routes.send(new_call(tenants[0], b"small")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(together) == LARGE_AT_ONCE_MAX + 2, "a small one waits for large ones"
    moved.set()
    await asyncio.gather(small, *sending)
    assert max(most.values()) == LARGE_PER_TENANT_MAX + 1  # with the small one
    assert not plane.routes._large._of_tenants
