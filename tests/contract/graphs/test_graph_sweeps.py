"""A pass over the runs of a pool: one that is broken holds up no other."""

import logging
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.support.databases.factory import Databases
from tests.support.jobs.context import ManualClock
from tests.support.jobs.graphs import PRICE, GraphSetup, graph, graph_setup_on, node, output

from comfyfleet.server.db.tenant_tables import graph_runs
from comfyfleet.server.graphs import actions, runner
from comfyfleet.server.graphs.apply import LoadedRun
from comfyfleet.server.graphs.run import ExecutionKey, GraphRunStatus
from comfyfleet.server.maintenance.sweeps import expire_leases, in_all_pools

TWO = graph(
    [node("first"), node("second"), output()],
    "first.output > second.like",
    "second.output > result.value",
)


async def broken(graph_setup: GraphSetup, kept: LoadedRun) -> None:
    """As no program of ours would leave it: to read it raises what nobody expects."""
    async with graph_setup.plane.pools["main"].transaction() as tx:
        mine = graph_runs.c.id == kept.head.id
        await tx.execute(update(graph_runs).where(mine).values(snapshot={"nodes": 7}))
    graph_setup.graphs.runs.drop(kept.head.id)


async def test_words_of_other_runs_are_heard(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        bad, good = await graph_setup.started(TWO), await graph_setup.started(TWO)
        for _ in range(2):
            job = (await graph_setup.workers["w1"].poll(wait_seconds=0))["job"]
            await graph_setup.deliver(job)
        await broken(graph_setup, bad)
        with caplog.at_level(logging.ERROR):
            await in_all_pools(graph_setup.plane, runner.read_outbox)
        assert f"graph run {bad.head.id} can't continue" in caplog.text
        assert len(await graph_setup.work()) == 1
        assert (await graph_setup.now(good)).run.status == GraphRunStatus.COMPLETED


async def test_a_mistake_is_not_made_anew_every_second(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        bad = await graph_setup.started(TWO)
        await graph_setup.deliver((await graph_setup.workers["w1"].poll(wait_seconds=0))["job"])
        await broken(graph_setup, bad)
        for _ in range(3):
            await graph_setup.sweep()
        assert caplog.text.count("can't continue") == 1


async def test_other_runs_are_judged(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        bound = graph(
            [node("first", backend_affinity="worker:w2"), output()], "first.output > result.value"
        )
        runs = [await graph_setup.started(bound) for _ in range(3)]
        await broken(graph_setup, sorted(runs, key=lambda kept: kept.head.id)[0])
        await graph_setup.lose("w2")
        with caplog.at_level(logging.ERROR):
            await in_all_pools(graph_setup.plane, runner.sweep_runs)
        assert "could not be checked" in caplog.text
        await graph_setup.sweep()  # their jobs are cancelled for certain
        for kept in sorted(runs, key=lambda kept: kept.head.id)[1:]:
            assert (await graph_setup.now(kept)).run.status == GraphRunStatus.FAILED


async def test_words_that_stay_keep_none_from_being_heard(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "OUTBOX_PER_PAGE", 1)
    async with graph_setup_on(databases, tmp_path, max_queued_total=2) as graph_setup:
        runs = [await graph_setup.started(TWO) for _ in range(2)]
        for _ in runs:
            await graph_setup.deliver((await graph_setup.workers["w1"].poll(wait_seconds=0))["job"])
        await graph_setup.sweep()
        assert len(await graph_setup.work()) == 2
        for kept in runs:
            assert (await graph_setup.now(kept)).run.status == GraphRunStatus.COMPLETED


async def test_workers_have_time_to_come_back_after_an_outage(
    databases: Databases, tmp_path: Path
) -> None:
    clock = ManualClock()
    async with graph_setup_on(
        databases, tmp_path, workers=("w1", "w2"), clock=clock
    ) as graph_setup:
        bound = graph(
            [node("first", backend_affinity="worker:w2"), output()], "first.output > result.value"
        )
        kept = await graph_setup.started(bound)
        await graph_setup.lose("w2", since=clock())
        await expire_leases(graph_setup.plane)
        clock.advance(seconds=200)
        await graph_setup.judge()  # before the outage is noted
        await expire_leases(graph_setup.plane)
        clock.advance(seconds=30)
        await expire_leases(graph_setup.plane)
        await graph_setup.judge()
        await graph_setup.sweep()
        assert (await graph_setup.now(kept)).run.status == GraphRunStatus.RUNNING
        clock.advance(seconds=61)
        await graph_setup.judge()
        await graph_setup.sweep()
        assert (await graph_setup.now(kept)).run.status == GraphRunStatus.FAILED


@pytest.mark.parametrize("has_been_out", [False, True])
@pytest.mark.parametrize("fallback", ["none", "ask_user", "auto_select"])
async def test_the_first_run_of_a_control_plane_knows_which_workers_are_offline(
    databases: Databases, tmp_path: Path, fallback: str, has_been_out: bool
) -> None:
    clock = ManualClock()
    async with graph_setup_on(databases, tmp_path, workers=("w2",), clock=clock) as graph_setup:
        await graph_setup.lose("w2", since=clock())
        clock.advance(seconds=100)
        await expire_leases(graph_setup.plane)
        if has_been_out:
            clock.advance(seconds=200)
        first = node("first", backend_affinity="worker:w2", fallback_strategy=fallback)
        kept = await graph_setup.started(graph([first, output()], "first.output > result.value"))
        if fallback == "ask_user":
            assert kept.run.status == GraphRunStatus.WAITING_FOR_USER
            question = kept.run.record(ExecutionKey("first")).question
            assert question is not None
            assert question.message == "Backend worker:w2 is offline"
        else:
            messages = {
                "none": "Backend worker:w2 is offline",
                "auto_select": "No online backend has these capabilities: draw",
            }
            assert kept.run.status == GraphRunStatus.FAILED
            assert kept.run.error is not None
            assert kept.run.error.message == f"Node first failed: {messages[fallback]}"


async def test_a_run_fails_at_its_deadline_whoever_looks_and_a_retry_has_a_new_one(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        started = await graph_setup.started({**TWO, "deadline": 3600, "at_once": 1})
        await graph_setup.judge()
        assert (await graph_setup.now(started)).run.status == GraphRunStatus.RUNNING
        assert await graph_setup.balance() == 100 - PRICE
        async with graph_setup.plane.pools["main"].transaction() as tx:
            mine = graph_runs.c.id == started.head.id
            past = graph_setup.plane.clock() - timedelta(seconds=1)
            await tx.execute(update(graph_runs).where(mine).values(deadline_at=past))
        graph_setup.graphs.runs.drop(started.head.id)  # as another process would read it
        await graph_setup.judge()
        ended = await graph_setup.now(started)
        assert ended.run.status == GraphRunStatus.FAILED
        assert ended.run.error is not None
        assert ended.run.error.message == "the run exceeded its deadline of 3600 s"
        assert await graph_setup.balance() == 100
        await actions.retry_graph_run(graph_setup.graphs, graph_setup.owner, started.head.id)
        assert len(await graph_setup.work()) == 2
        assert (await graph_setup.now(started)).run.status == GraphRunStatus.COMPLETED
        await graph_setup.require_sound_ledger()
