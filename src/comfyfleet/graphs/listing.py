"""Graphs of a tenant and runs of a user, page by page."""

from uuid import UUID

from comfyfleet.graphs import store
from comfyfleet.graphs.advancing import Graphs
from comfyfleet.graphs.runs import RunStatus
from comfyfleet.graphs.service import Owner
from comfyfleet.graphs.stored import GraphEntry, RunEntry
from comfyfleet.kernel.errors import NotFound

PAGE_MAX = 200


async def graphs_of(
    graphs: Graphs, owner: Owner, *, before: UUID | None = None, limit: int
) -> list[GraphEntry]:
    """The newest first; go on with `before` = the last one's id."""
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        last = await store.graph_entry(tx, owner.tenant_id, before) if before else None
        if before and last is None:
            raise NotFound(f"there is no graph {before}")
        return await store.graphs_of(tx, owner.tenant_id, before=last, limit=min(limit, PAGE_MAX))


async def runs_of(
    graphs: Graphs,
    owner: Owner,
    *,
    graph_id: UUID | None = None,
    status: RunStatus | None = None,
    before: UUID | None = None,
    limit: int,
) -> list[RunEntry]:
    """The newest first; go on with `before` = the last one's id."""
    whose = (owner.tenant_id, owner.user_id)
    pool = await graphs.sides.pool_of(owner.tenant_id)
    async with pool.look() as tx:
        last = await store.run_entry(tx, *whose, before) if before else None
        if before and last is None:
            raise NotFound(f"there is no graph run {before}")
        return await store.runs_of(
            tx, *whose, graph_id=graph_id, status=status, before=last, limit=min(limit, PAGE_MAX)
        )
