"""Webhooks hear of each end and each question of a graph run, once."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select
from tests.contract.graphs.test_graph_cuts import restarted
from tests.contract.graphs.test_graph_runs import DIAMOND, bound
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.graphs import GraphSetup, graph, graph_setup_on, node, output

from comfyfleet.server.db.tenant_tables import webhook_deliveries
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.apply import GraphContext
from comfyfleet.server.graphs.run import Choice, GraphRunStatus
from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.notifications import webhooks

EVENTS = ["graph_run.ended", "graph_run.failed", "graph_run.asks"]
ONE = graph([node("first", retries=0), output()], "first.output > result.value")
STEPS_MAX = 60


async def listen(graph_setup: GraphSetup, events: list[str] = EVENTS) -> None:
    async with graph_setup.plane.pools["main"].transaction() as tx:
        await webhooks.create_webhook(
            tx,
            webhook_id=uuid4(),
            tenant_id=graph_setup.owner.tenant_id,
            user_id=graph_setup.owner.user_id,
            url="https://example.com/hook",
            events=events,
            now=graph_setup.plane.clock(),
        )


async def told(graph_setup: GraphSetup) -> list[tuple[str, dict[str, Any]]]:
    """All that is to be delivered, in the order of time."""
    query = select(webhook_deliveries).order_by(webhook_deliveries.c.created_at)
    async with graph_setup.plane.pools["main"].read() as tx:
        return [(row.event, row.payload) for row in await tx.execute(query)]


async def test_an_end_is_told_with_what_it_cost(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        await listen(graph_setup)
        kept = await graph_setup.started(DIAMOND)
        assert await told(graph_setup) == []
        await graph_setup.work()
        await restarted(graph_setup)
        [(event, payload)] = await told(graph_setup)
        assert event == "graph_run.ended"
        assert payload.pop("ended_at") is not None
        assert payload == {
            "run_id": str(kept.head.id),
            "graph_id": str(kept.head.graph_id),
            "version": 1,
            "status": "completed",
            "tokens": 12,
            "error": None,
        }


async def test_each_failure_of_a_retried_run_is_told(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        await listen(graph_setup)
        kept = await graph_setup.started(ONE)
        wanted = {"code": "bad", "message": "no", "retryable": False}
        for times in (1, 2):
            await graph_setup.work(wanted=lambda job: wanted)
            kept = await graph_setup.now(kept)
            assert kept.run.status == GraphRunStatus.FAILED
            found = await told(graph_setup)
            assert [event for event, _ in found] == ["graph_run.failed"] * times
            assert found[-1][1]["error"]["node"] == "first"
            await actions.retry_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
        await actions.cancel_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
        await actions.cancel_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
        event, payload = (await told(graph_setup))[-1]
        assert (event, payload["status"]) == ("graph_run.ended", "cancelled")
        assert len(await told(graph_setup)) == 3


async def test_a_question_is_told_each_time_that_it_is_asked(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        await listen(graph_setup)
        await graph_setup.lose("w2")
        kept = await graph_setup.started(bound("ask_user"))
        [(event, payload)] = await told(graph_setup)
        assert event == "graph_run.asks"
        assert (payload["node"], payload["index"]) == ("first", [])
        assert "w2" in payload["message"]
        assert "retry" in payload["choices"]
        await graph_setup.judge()
        await restarted(graph_setup)
        assert len(await told(graph_setup)) == 1  # it stands
        await graph_setup.answer(kept, "first", Choice.RETRY)
        assert [event for event, _ in await told(graph_setup)] == ["graph_run.asks"] * 2
        await graph_setup.answer(kept, "first", Choice.FAIL)
        assert [event for event, _ in await told(graph_setup)][2:] == ["graph_run.failed"]


async def test_who_wants_other_events_or_is_another_user_hears_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        await listen(graph_setup, ["job.failed", "graph_run.failed"])
        await graph_setup.started(ONE)
        await graph_setup.work()
        await restarted(graph_setup)
        assert await told(graph_setup) == []


async def test_an_end_that_is_cut_anywhere_is_told_once(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, tokens=10_000) as graph_setup:
        await listen(graph_setup)
        fuse, count = Fuse(), 0
        for steps in range(STEPS_MAX):
            before = len(await told(graph_setup))
            await graph_setup.started(ONE)
            await graph_setup.deliver(await graph_setup.workers["w1"].job())
            cut = GraphContext(fused(graph_setup.plane.context, fuse))
            fuse.left = steps
            try:
                await read_outbox(cut, cut.context.pools["main"])
                is_cut = False
            except ProcessDied:
                is_cut = True
            fuse.left = None
            await restarted(graph_setup)
            assert len(await told(graph_setup)) == before + 1
            count += is_cut
            if not is_cut:
                break
        else:
            pytest.fail("the advance has no end")
        assert count > 3
