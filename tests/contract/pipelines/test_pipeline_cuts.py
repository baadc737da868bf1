"""The loop cut off after each of its steps, and run twice at once: the tree comes out the same."""

import asyncio
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.pipelines import TOKENS, PipelineSetup, pipeline_setup_on

from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.maintenance.sweeps import advance_pipelines, maintain_pipelines
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.pipelines import actions
from comfyfleet.server.pipelines.actions import CandidateRef
from comfyfleet.server.pipelines.model import CandidateStatus
from comfyfleet.server.tenants import wallet as ledger

STEPS_MAX = 60


async def repaired(pipeline_setup: PipelineSetup) -> None:
    """What comes after a restart."""
    await flush_due(pipeline_setup.context, pipeline_setup.pool, limit=100)
    await maintain_pipelines(pipeline_setup.context, pipeline_setup.pool)


async def require_right(pipeline_setup: PipelineSetup, run: object) -> None:
    assert await pipeline_setup.made(run) == [1, 2, 2]  # type: ignore[arg-type]
    state = await pipeline_setup.state(run)  # type: ignore[arg-type]
    assert state.run.tokens == 3 + 4 + 2
    async with pipeline_setup.pool.read() as tx:
        assert await ledger.balance(tx, *pipeline_setup.whose) == TOKENS - state.run.tokens
        assert await ledger.verify(tx) == []


async def test_a_loop_that_dies_anywhere_makes_the_same_tree(
    databases: Databases, tmp_path: Path
) -> None:
    """It is killed after one more step each time, from the first to the last job."""
    async with pipeline_setup_on(databases, tmp_path) as pipeline_setup:
        run = await pipeline_setup.start(base=1)
        fuse, burns = Fuse(), 0
        cut = fused(pipeline_setup.context, fuse)
        for length in range(STEPS_MAX):
            fuse.left = length % 19
            try:
                await pipeline_setup.sweep(cut)
            except ProcessDied:
                burns += 1
            fuse.left = None
            await repaired(pipeline_setup)
            handed = await pipeline_setup.lease()
            if handed:
                await pipeline_setup.finish(handed)
        assert burns > 20
        await pipeline_setup.work_off()
        await require_right(pipeline_setup, run)


async def test_two_loops_at_once_make_what_one_would(pipeline_setup: PipelineSetup) -> None:
    run = await pipeline_setup.start(base=1)
    for _ in range(20):
        await asyncio.gather(
            *(advance_pipelines(pipeline_setup.context, pipeline_setup.pool) for _ in range(4))
        )
        pipeline_setup.clock.advance(seconds=20)
        handed = await pipeline_setup.lease()
        if handed is None:
            break
        assert await pipeline_setup.lease() is None
        await pipeline_setup.finish(handed)
    await require_right(pipeline_setup, run)


@pytest.mark.parametrize("length", range(8))
async def test_a_rejection_that_is_cut_off_has_happened_or_not(
    pipeline_setup: PipelineSetup, length: int
) -> None:
    run = await pipeline_setup.start(base=1, limits={"concurrent_jobs": 2})
    await pipeline_setup.sweep()
    await pipeline_setup.finish(await pipeline_setup.leased())
    await pipeline_setup.sweep()
    (base,) = await pipeline_setup.candidates(run)
    fuse = Fuse()
    fuse.left = length
    whose = CandidateRef(*pipeline_setup.whose, run.id, base.id)
    try:
        await actions.judge_candidate(
            fused(pipeline_setup.context, fuse), whose, CandidateStatus.REJECTED
        )
    except ProcessDied:
        await repaired(pipeline_setup)
    (now,) = await pipeline_setup.candidates(run)
    handed = await pipeline_setup.lease()
    assert (handed is None) == (now.status == CandidateStatus.REJECTED)
    async with pipeline_setup.context.central.read() as tx:
        told = await notifications.find_audit_entries(tx, action="pipeline_rejected", limit=5)
    assert bool(told) == (now.status == CandidateStatus.REJECTED)
