"""A pass over the runs of a pool: one that is broken holds up no other."""

import asyncio
import logging
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import update
from tests.dbkit.databases import Databases
from tests.graphskit.playing import Play, graph, node, output, play_on, statuses

from comfyfleet.db.tenant import graph_runs
from comfyfleet.graphs import going
from comfyfleet.graphs.keeping import Kept
from comfyfleet.graphs.runs import RunStatus
from comfyfleet.loops.graphs import over_pools

TWO = graph(
    [node("first"), node("second"), output()],
    "first.output > second.like",
    "second.output > result.value",
)


async def broken(play: Play, kept: Kept) -> None:
    """As no program of ours would leave it: to read it raises what nobody expects."""
    async with play.plane.pools["main"].begin() as tx:
        mine = graph_runs.c.id == kept.head.id
        await tx.execute(update(graph_runs).where(mine).values(snapshot={"nodes": 7}))
    play.graphs.runs.drop(kept.head.id)


async def test_words_of_other_runs_are_heard(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with play_on(databases, tmp_path) as play:
        bad, good = await play.started(TWO), await play.started(TWO)
        for _ in range(2):
            job = (await play.workers["w1"].poll(wait_seconds=0))["job"]
            await play.deliver(job)
        await broken(play, bad)
        with caplog.at_level(logging.ERROR):
            await over_pools(play.plane, going.hear)
        assert f"graph run {bad.head.id} can't go on" in caplog.text
        assert len(await play.work()) == 1
        assert (await play.now(good)).run.status == RunStatus.COMPLETED


async def test_a_mistake_is_not_made_anew_every_second(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with play_on(databases, tmp_path) as play:
        bad = await play.started(TWO)
        await play.deliver((await play.workers["w1"].poll(wait_seconds=0))["job"])
        await broken(play, bad)
        for _ in range(3):
            await play.sweep()
        assert caplog.text.count("can't go on") == 1


async def test_other_runs_are_judged(
    databases: Databases, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with play_on(databases, tmp_path, workers=("w1", "w2")) as play:
        bound = graph(
            [node("first", backend_affinity="worker:w2"), output()], "first.output > result.value"
        )
        runs = [await play.started(bound) for _ in range(3)]
        await broken(play, sorted(runs, key=lambda kept: kept.head.id)[0])
        await play.lose("w2")
        with caplog.at_level(logging.ERROR):
            await over_pools(play.plane, going.judge_all)
        assert "can't be judged" in caplog.text
        await play.sweep()  # their jobs are cancelled for certain
        for kept in sorted(runs, key=lambda kept: kept.head.id)[1:]:
            assert (await play.now(kept)).run.status == RunStatus.FAILED


async def test_words_that_stay_keep_none_from_being_heard(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(going, "WORDS_PER_PAGE", 1)
    async with play_on(databases, tmp_path, max_queued_total=2) as play:
        runs = [await play.started(TWO) for _ in range(2)]
        for _ in runs:
            await play.deliver((await play.workers["w1"].poll(wait_seconds=0))["job"])
        await play.sweep()
        assert len(await play.work()) == 2
        for kept in runs:
            assert (await play.now(kept)).run.status == RunStatus.COMPLETED


async def test_who_just_started_gives_workers_time_to_come_back(
    databases: Databases, tmp_path: Path
) -> None:
    async with play_on(databases, tmp_path, workers=("w1", "w2")) as play:
        bound = graph(
            [node("first", backend_affinity="worker:w2"), output()], "first.output > result.value"
        )
        kept = await play.started(bound)
        unseen = play.plane.clock() - timedelta(seconds=200)
        await play.lose("w2", since=unseen)
        await play.judge()
        await play.sweep()
        assert (await play.now(kept)).run.status == RunStatus.RUNNING
        play.graphs.world._began = unseen
        await play.judge()
        await play.sweep()
        assert (await play.now(kept)).run.status == RunStatus.FAILED


PAIR = graph(
    [node("one"), node("two"), {"id": "both", "type": "merge"}, output()],
    "one.output > both.input_0",
    "two.output > both.input_1",
    "both.output > result.value",
)


async def test_jobs_that_end_together_are_heard_of_in_one_step(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(going, "TOGETHER_SECONDS", 60)
    async with play_on(databases, tmp_path, workers=("w1", "w2")) as play:
        run = await play.started(PAIR)
        news, waits = play.plane.sides.news, asyncio.Event()
        waited = news.ended

        async def ended(job_ids: Iterable[UUID], seconds: float) -> None:
            waits.set()
            await waited(job_ids, seconds)

        monkeypatch.setattr(news, "ended", ended)
        first, second = [await each.job() for each in play.workers.values()]
        await play.deliver(first)
        with news.ending(UUID(second["job_id"])):
            hearing = asyncio.create_task(play.sweep())
            async with asyncio.timeout(10):
                await waits.wait()
            await play.deliver(second, "w2")
        await hearing
        kept = await play.now(run)
        assert kept.run.status == RunStatus.COMPLETED
        assert kept.revision == run.revision + 1


async def test_a_job_whose_end_takes_long_holds_up_no_step(
    databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(going, "TOGETHER_SECONDS", 0)
    async with play_on(databases, tmp_path, workers=("w1", "w2")) as play:
        run = await play.started(PAIR)
        first, second = [await each.job() for each in play.workers.values()]
        await play.deliver(first)
        with play.plane.sides.news.ending(UUID(second["job_id"])):
            await play.sweep()
            kept = await play.now(run)
            assert sorted(statuses(kept).values()).count("done") == 1
        await play.deliver(second, "w2")
        await play.sweep()
        assert (await play.now(run)).run.status == RunStatus.COMPLETED
