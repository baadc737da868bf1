"""A run whose process dies between any two steps goes on from where it was: nothing twice."""

from pathlib import Path

import pytest
from tests.contract.graphs.test_graph_runs import DIAMOND, FAN_OUT
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Burnt, Fuse, fused
from tests.support.jobs.graphs import PRICE, Play, play_on

from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun
from comfyfleet.server.graphs.run import GraphRunStatus
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.jobs.outbox import flush_due

STEPS_MAX = 60


async def restarted(play: Play) -> None:
    """What comes after: nothing is remembered, and the sweeps pass."""
    play.plane.__dict__["graphs"] = GraphContext(play.plane.context)
    await flush_due(play.plane.context, play.plane.pools["main"], limit=100)
    await play.judge()
    await play.sweep()


async def require_done(play: Play, run: LoadedRun, jobs: int) -> None:
    await restarted(play)
    await play.work()
    await restarted(play)
    kept = await play.now(run)
    assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
    assert await play.count_jobs(run_id=run.head.id, status="completed") == jobs
    assert await play.count_jobs(run_id=run.head.id) == jobs
    await play.require_sound_ledger()


async def test_an_advance_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with play_on(databases, tmp_path, tokens=10_000) as play:
        fuse, count = Fuse(), 0
        for steps in range(STEPS_MAX):
            run = await play.started(DIAMOND)
            await play.deliver(await play.workers["w1"].job())
            cut = GraphContext(fused(play.plane.context, fuse))
            fuse.left = steps
            try:
                await read_outbox(cut, cut.context.pools["main"])
            except Burnt:
                fuse.left = None
                await require_done(play, run, 4)
                count += 1
                continue
            fuse.left = None
            await require_done(play, run, 4)
            break
        else:
            pytest.fail("the advance has no end")
        assert count > 3
        assert await play.balance() == 10_000 - (count + 1) * 4 * PRICE


async def test_a_start_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with play_on(databases, tmp_path, tokens=10_000) as play:
        made = await actions.create_graph(play.graphs, play.owner, FAN_OUT)
        fuse = Fuse()
        for steps in range(STEPS_MAX):
            wanted = NewGraphRun({"widths": [64, 65]}, idempotency_key=f"cut-{steps}")
            cut = GraphContext(fused(play.plane.context, fuse))
            fuse.left = steps
            try:
                run, _ = await actions.start_run(cut, play.owner, made.id, wanted)
                is_whole = True
            except Burnt:
                is_whole = False
            fuse.left = None
            run, _ = await actions.start_run(play.graphs, play.owner, made.id, wanted)
            await require_done(play, run, 2)
            if is_whole:
                break
        else:
            pytest.fail("the start has no end")
        assert await play.balance() == 10_000 - (steps + 1) * 2 * PRICE


async def test_two_that_hear_the_same_word_advance_once(
    databases: Databases, tmp_path: Path
) -> None:
    async with play_on(databases, tmp_path) as play:
        run = await play.started(DIAMOND)
        await play.deliver(await play.workers["w1"].job())
        fuse = Fuse()
        for steps in range(STEPS_MAX):
            fuse.left, fuse.meanwhile = steps, play.sweep
            slow = GraphContext(fused(play.plane.context, fuse))
            await read_outbox(slow, slow.context.pools["main"])
            if fuse.left is not None:
                break
        await require_done(play, run, 4)
        assert await play.balance() == 100 - 4 * PRICE
