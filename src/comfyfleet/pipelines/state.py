"""A run as decisions need it: its pipeline, its tree, and what is in flight."""

from typing import NamedTuple
from uuid import UUID

from comfyfleet.db import Tx
from comfyfleet.kernel.errors import NotFound
from comfyfleet.pipelines.model import JobInFlight, Pipeline, PipelineRun, StoredRun, Tree
from comfyfleet.pipelines.store import candidates, jobs, runs


class State(NamedTuple):
    stored: StoredRun
    pipeline: Pipeline
    tree: Tree
    in_flight: list[JobInFlight]

    @property
    def run(self) -> PipelineRun:
        return self.stored.run


async def read_state(tx: Tx, tenant_id: UUID, run_id: UUID, *, is_locked: bool = False) -> State:
    stored = await runs.run(tx, tenant_id, run_id, is_locked=is_locked)
    if stored is None:
        raise NotFound(f"there is no pipeline run {run_id}")
    made_with = await runs.pipeline(tx, tenant_id, stored.pipeline_id)
    if made_with is None:
        raise NotFound(f"there is no pipeline {stored.pipeline_id}")
    tree = Tree(await candidates.tree_of(tx, run_id), await jobs.failed(tx, run_id))
    return State(stored, made_with.pipeline, tree, await jobs.in_flight(tx, run_id))
