"""The loop cut off after each of its steps, and run twice at once: the tree comes out the same."""

import asyncio
from pathlib import Path

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Burnt, Fuse, fused
from tests.support.jobs.pipelines import TOKENS, Studio, studio_on

from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.maintenance.sweeps import advance_pipelines, maintain_pipelines
from comfyfleet.server.notifications import service as notifications
from comfyfleet.server.pipelines import actions
from comfyfleet.server.pipelines.actions import CandidateRef
from comfyfleet.server.pipelines.model import CandidateStatus
from comfyfleet.server.tenants import wallet as ledger

STEPS_MAX = 60


async def repaired(studio: Studio) -> None:
    """What comes after a restart."""
    await flush_due(studio.context, studio.pool, limit=100)
    await maintain_pipelines(studio.context, studio.pool)


async def require_right(studio: Studio, run: object) -> None:
    assert await studio.made(run) == [1, 2, 2]  # type: ignore[arg-type]
    state = await studio.state(run)  # type: ignore[arg-type]
    assert state.run.tokens == 3 + 4 + 2
    async with studio.pool.read() as tx:
        assert await ledger.balance(tx, *studio.whose) == TOKENS - state.run.tokens
        assert await ledger.verify(tx) == []


async def test_a_loop_that_dies_anywhere_makes_the_same_tree(
    databases: Databases, tmp_path: Path
) -> None:
    """It is killed after one more step each time, from the first to the last job."""
    async with studio_on(databases, tmp_path) as studio:
        run = await studio.start(base=1)
        fuse, burns = Fuse(), 0
        cut = fused(studio.context, fuse)
        for length in range(STEPS_MAX):
            fuse.left = length % 19
            try:
                await studio.sweep(cut)
            except Burnt:
                burns += 1
            fuse.left = None
            await repaired(studio)
            handed = await studio.lease()
            if handed:
                await studio.finish(handed)
        assert burns > 20
        await studio.work_off()
        await require_right(studio, run)


async def test_two_loops_at_once_make_what_one_would(studio: Studio) -> None:
    run = await studio.start(base=1)
    for _ in range(20):
        await asyncio.gather(*(advance_pipelines(studio.context, studio.pool) for _ in range(4)))
        studio.clock.go_on(seconds=20)
        handed = await studio.lease()
        if handed is None:
            break
        assert await studio.lease() is None
        await studio.finish(handed)
    await require_right(studio, run)


@pytest.mark.parametrize("length", range(8))
async def test_a_rejection_that_is_cut_off_has_happened_or_not(studio: Studio, length: int) -> None:
    run = await studio.start(base=1, limits={"concurrent_jobs": 2})
    await studio.sweep()
    await studio.finish(await studio.leased())
    await studio.sweep()
    (base,) = await studio.candidates(run)
    fuse = Fuse()
    fuse.left = length
    whose = CandidateRef(*studio.whose, run.id, base.id)
    try:
        await actions.judge_candidate(fused(studio.context, fuse), whose, CandidateStatus.REJECTED)
    except Burnt:
        await repaired(studio)
    (now,) = await studio.candidates(run)
    handed = await studio.lease()
    assert (handed is None) == (now.status == CandidateStatus.REJECTED)
    async with studio.context.central.read() as tx:
        told = await notifications.find_audit_entries(tx, action="pipeline_rejected", limit=5)
    assert bool(told) == (now.status == CandidateStatus.REJECTED)
