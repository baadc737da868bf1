"""Graph runs whose time is up: that they were, what they cost and how they ended is all that stays."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from uuid import UUID

from comfyfleet.db import Database, Tx
from comfyfleet.graphs import store

RUNS_PER_PASS_MAX = 100


async def expire_runs(pool: Database, tenant_id: UUID, *, before: datetime) -> int:
    """Those that ended before; one that goes on, or waits for an answer, keeps all that it has."""
    expired = 0
    while True:
        async with pool.begin() as tx:
            some = await store.expire_runs(
                tx, tenant_id, ended_before=before, limit=RUNS_PER_PASS_MAX
            )
        expired += len(some)
        if len(some) < RUNS_PER_PASS_MAX:
            return expired


async def files_given(tx: Tx, tenant_id: UUID) -> set[UUID]:
    """To runs that go on: a node may need them yet."""
    found = await store.inputs_of_open_runs(tx, tenant_id)
    return {UUID(each) for inputs in found for each in _file_ids(inputs)}


def _file_ids(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("file_id"), str):
            yield value["file_id"]
        value = list(value.values())
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _file_ids(inner)
