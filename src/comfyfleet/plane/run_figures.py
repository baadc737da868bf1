"""How graph and pipeline runs stand, pool by pool. One that can't be read now is left out."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from comfyfleet.db import Database, Pools
from comfyfleet.db.outages import level_of
from comfyfleet.kernel.errors import FleetError
from comfyfleet.plane import store

log = logging.getLogger(__name__)
GRAPH_RUNS = ("pending", "running", "waiting_for_user")
PIPELINE_RUNS = ("active", "paused")
KINDS = ("graph", "pipeline")
JOBS = ("queued", "processing")


@dataclass(frozen=True, slots=True)
class RunFigures:
    graph_runs: Mapping[str, int]  # that go on, by status
    pipeline_runs: Mapping[str, int]
    jobs: Mapping[tuple[str, str], int]  # in flight, by kind of run and status


async def read_run_figures(pools: Pools) -> dict[str, RunFigures]:
    """By pool."""
    found: dict[str, RunFigures] = {}
    for name, pool in pools.items():
        try:
            found[name] = await _read(pool)
        except FleetError as error:
            log.log(level_of(error), "runs of pool %s can't be counted: %s", name, error.message)
    return found


async def _read(pool: Database) -> RunFigures:
    async with pool.look() as tx:
        return RunFigures(
            graph_runs=await store.graph_runs_going_on(tx),
            pipeline_runs=await store.pipeline_runs_by_status(tx),
            jobs=await store.jobs_of_runs(tx),
        )
