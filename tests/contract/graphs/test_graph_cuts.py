"""A run whose process dies between any two steps goes on from where it was: nothing twice."""

from pathlib import Path

import pytest
from tests.contract.graphs.test_graph_runs import DIAMOND, FAN_OUT
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.graphs import PRICE, GraphSetup, graph_setup_on

from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun
from comfyfleet.server.graphs.run import GraphRunStatus
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.jobs.outbox import flush_due

STEPS_MAX = 60


async def restarted(graph_setup: GraphSetup) -> None:
    """What comes after: nothing is remembered, and the sweeps pass."""
    graph_setup.plane.__dict__["graphs"] = GraphContext(graph_setup.plane.context)
    await flush_due(graph_setup.plane.context, graph_setup.plane.pools["main"], limit=100)
    await graph_setup.judge()
    await graph_setup.sweep()


async def require_done(graph_setup: GraphSetup, run: LoadedRun, jobs: int) -> None:
    await restarted(graph_setup)
    await graph_setup.work()
    await restarted(graph_setup)
    kept = await graph_setup.now(run)
    assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
    assert await graph_setup.count_jobs(run_id=run.head.id, status="completed") == jobs
    assert await graph_setup.count_jobs(run_id=run.head.id) == jobs
    await graph_setup.require_sound_ledger()


async def test_an_advance_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path, tokens=10_000) as graph_setup:
        fuse, count = Fuse(), 0
        for steps in range(STEPS_MAX):
            run = await graph_setup.started(DIAMOND)
            await graph_setup.deliver(await graph_setup.workers["w1"].job())
            cut = GraphContext(fused(graph_setup.plane.context, fuse))
            fuse.left = steps
            try:
                await read_outbox(cut, cut.context.pools["main"])
            except ProcessDied:
                fuse.left = None
                await require_done(graph_setup, run, 4)
                count += 1
                continue
            fuse.left = None
            await require_done(graph_setup, run, 4)
            break
        else:
            pytest.fail("the advance has no end")
        assert count > 3
        assert await graph_setup.balance() == 10_000 - (count + 1) * 4 * PRICE


async def test_a_start_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path, tokens=10_000) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, FAN_OUT)
        fuse = Fuse()
        for steps in range(STEPS_MAX):
            wanted = NewGraphRun({"widths": [64, 65]}, idempotency_key=f"cut-{steps}")
            cut = GraphContext(fused(graph_setup.plane.context, fuse))
            fuse.left = steps
            try:
                run, _ = await actions.start_run(cut, graph_setup.owner, made.id, wanted)
                is_whole = True
            except ProcessDied:
                is_whole = False
            fuse.left = None
            run, _ = await actions.start_run(graph_setup.graphs, graph_setup.owner, made.id, wanted)
            await require_done(graph_setup, run, 2)
            if is_whole:
                break
        else:
            pytest.fail("the start has no end")
        assert await graph_setup.balance() == 10_000 - (steps + 1) * 2 * PRICE


async def test_two_that_hear_the_same_word_advance_once(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        run = await graph_setup.started(DIAMOND)
        await graph_setup.deliver(await graph_setup.workers["w1"].job())
        fuse = Fuse()
        for steps in range(STEPS_MAX):
            fuse.left, fuse.meanwhile = steps, graph_setup.sweep
            slow = GraphContext(fused(graph_setup.plane.context, fuse))
            await read_outbox(slow, slow.context.pools["main"])
            if fuse.left is not None:
                break
        await require_done(graph_setup, run, 4)
        assert await graph_setup.balance() == 100 - 4 * PRICE
