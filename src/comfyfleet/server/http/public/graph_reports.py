"""Routes for the timeline of a graph run and for comparing two graph runs."""

from typing import Annotated
from uuid import UUID

from fastapi import Query

from comfyfleet.api.graph_reports import RunComparison, RunTimeline
from comfyfleet.server.graphs import reports
from comfyfleet.server.http.deps import PlaneDep, problems
from comfyfleet.server.http.public.auth import Reader, public_router
from comfyfleet.server.http.public.graphs import owner_of

router = public_router("graphs")


@router.get("/graph-runs/compare", responses=problems(404))
async def compare(
    a: Annotated[UUID, Query(description="One of your runs.")],
    b: Annotated[
        UUID, Query(description="The run to compare it with, of the same or another graph.")
    ],
    plane: PlaneDep,
    caller: Reader,
    all: Annotated[bool, Query(description="Whether to list equal values as well.")] = False,
) -> RunComparison:
    """Compares the inputs, graph, versions, states, prices, times and outputs of two runs. Times
    that differ by less than a tenth count as equal."""
    return await reports.compare_own_runs(plane.graphs, owner_of(caller), a, b, with_same=all)


@router.get("/graph-runs/{run_id}/timeline", responses=problems(404))
async def timeline(run_id: UUID, plane: PlaneDep, caller: Reader) -> RunTimeline:
    """Returns the times at which each node of a run waited, ran and finished, and the critical
    path. All executions of a node share one row."""
    return await reports.read_timeline(plane.graphs, owner_of(caller), run_id)
