"""Graphs and pipelines by the Python client, against everything: control plane, worker and engine."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tests.support.server.local_server import PHOTO, LocalServer, local_server_in

from comfyfleet.client import Client, GraphEvent, GraphRunHandle, PipelineRun
from comfyfleet.errors import Conflict, InvalidInput, NotFound, RunFailed, RunTimedOut

TWO = """
name: Two
nodes:
  - {id: width, type: input, value_type: integer, default: 64}
  - {id: draw, type: workflow, workflow: negative}
  - {id: photo, type: input, value_type: image}
  - {id: soften, type: workflow, workflow: soften}
  - {id: both, type: merge, mode: concat_images}
  - {id: pictures, type: output}
connections:
  - {from: width.value, to: draw.width}
  - {from: photo.value, to: soften.input}
  - {from: draw.output, to: both.input_0}
  - {from: soften.output, to: both.input_1}
  - {from: both.output, to: pictures.value}
"""
PIPELINE = """
name: Two steps
steps:
  - name: Base
    workflow: negative
    properties: {width: "{{ variables.width }}"}
    needs_approval: true
  - name: Soften
    workflow: soften
    properties: {input: "{{ parent.file }}"}
    images_per_job: 2
    children_per_parent: 2
"""


AGAIN = """
name: Again
nodes:
  - {id: draw, type: workflow, workflow: negative, properties: {width: 32}}
  - {id: soften, type: workflow, workflow: soften, properties: {radius: 1}}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: soften.input}
  - {from: soften.output, to: picture.value}
"""


def one_node(workflow: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": workflow,
        "nodes": [
            {"id": "one", "type": "workflow", "workflow": workflow, **fields},
            {"id": "picture", "type": "output"},
        ],
        "connections": [{"from": "one.output", "to": "picture.value"}],
    }


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


async def test_a_graph_is_priced_run_followed_and_downloaded(
    local_server: LocalServer, tmp_path: Path
) -> None:
    told: list[GraphEvent] = []
    async with local_server.client() as client:
        graph = await client.graphs.create(TWO)
        quote = await client.graphs.quote(graph)
        media = await client.upload(PHOTO)
        handle = await client.graphs.run(graph, {"photo": media, "width": 32})
        run = await handle.wait(timeout_seconds=60, on_event=told.append)
        files = await handle.download(tmp_path)
        balance = (await client.wallet()).balance
    assert graph.mermaid.startswith("flowchart")
    assert (quote.tokens_min, quote.tokens_max, quote.jobs_max) == (5, 5, 2)
    assert run.status == "completed"
    assert run.tokens == 5
    assert balance == 1_000 - 5
    assert [each.kind for each in told] == ["progress"] * (len(told) - 1) + ["end"]
    assert told[-1].overall_percent == 100.0
    assert {each.id: each.status for each in run.nodes}["soften"] == "done"
    assert {each.node: each.attempts for each in run.executions}["draw"] == 1
    assert len(files) == len(run.files) == 3
    assert [each.name.partition("_")[0] for each in files] == ["1", "2", "3"]
    with PIL.Image.open(files[0]) as picture:
        assert picture.format == "PNG"


async def test_a_run_is_run_again_from_a_node(local_server: LocalServer) -> None:
    async with local_server.client() as client, local_server.client() as other:
        first = await client.graphs.run_document(AGAIN)
        run = await first.wait(timeout_seconds=60)
        again = await first.rerun("soften", changes={"soften.radius": 2}, idempotency_key="once")
        same = await first.rerun("soften", changes={"soften.radius": 2}, idempotency_key="once")
        assert (same.id, again.idempotency_key) == (again.id, "once")
        made = await again.wait(timeout_seconds=60)
        assert made.rerun_of is not None
        assert (made.rerun_of.run_id, made.rerun_of.node) == (first.id, "soften")
        sources = {each.node: each.reused_from for each in made.executions if each.reused_from}
        assert {node: each.run_id for node, each in sources.items()} == {"draw": first.id}
        assert (await client.wallet()).balance == 1_000 - run.tokens - made.tokens
        assert 0 < made.tokens < run.tokens
        listed = [each.id async for each in client.graphs.runs(rerun_of=first.id)]
        assert listed == [again.id]
        with pytest.raises(Conflict, match="all nodes already have results"):
            await first.rerun()
        with pytest.raises(NotFound):
            await GraphRunHandle(other.calls, run).rerun("soften")


async def test_a_graph_with_problems_is_told_all_of_them(local_server: LocalServer) -> None:
    broken = one_node("nothing", properties={"x": 1})
    async with local_server.client() as client:
        verdict = await client.graphs.validate(broken)
        with pytest.raises(InvalidInput) as refused:
            await client.graphs.create(broken)
    assert not verdict.valid
    assert [(each.code, each.node) for each in verdict.problems] == [("unknown_workflow", "one")]
    assert refused.value.details["problems"][0]["node"] == "one"


async def test_graphs_versions_and_runs_are_found_again(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        offered = {(each.kind, each.name): each for each in await client.graphs.offered()}
        assert offered["workflow", "negative"].properties
        first = await client.graphs.create(one_node("negative"))
        assert (await client.graphs.create(one_node("negative"))).id == first.id
        second = await client.graphs.new_version(first, one_node("negative", priority=3))
        assert (second.id, second.version) == (first.id, 2)
        assert (await client.graphs.get(first.id, version=1)).version == 1
        assert (await client.graphs.validate_stored(first)).valid
        other = await client.graphs.create(one_node("slow"))
        listed = [each.id async for each in client.graphs.all(page_size=1)]
        assert listed == [other.id, first.id]
        handle = await client.graphs.run(first, idempotency_key="a")
        same = await client.graphs.run(first, idempotency_key="a")
        assert same.id == handle.id
        with pytest.raises(Conflict):
            await client.graphs.run(first, {"x": 1}, idempotency_key="a")
        slow = await client.graphs.run(other)
        await handle.wait(timeout_seconds=60)
        runs = [each.id async for each in client.graphs.runs(page_size=1)]
        assert runs == [slow.id, handle.id]
        done = [each.id async for each in client.graphs.runs(graph=first, status="completed")]
        assert done == [handle.id]
        assert (await client.graphs.get_run(handle.id)).run.status == "completed"
        with pytest.raises(RunTimedOut):
            await slow.wait(timeout_seconds=0.5)
        assert (await slow.cancel()).status == "cancelled"
        with pytest.raises(RunFailed):
            await slow.wait()
        assert (await slow.wait(check=False)).status == "cancelled"


async def test_a_run_that_failed_goes_on_where_it_failed(local_server: LocalServer) -> None:
    """It could be paid when it began; then the tokens were spent elsewhere."""
    tenant = local_server.tenant(tokens=2)
    slow = {"id": "wait", "type": "workflow", "workflow": "slow", "properties": {"steps": 60}}
    in_turn = one_node("negative", properties={"width": {"from": "wait.output.width"}})
    in_turn |= {"name": "in turn", "nodes": [slow, *in_turn["nodes"]]}
    async with Client(local_server.url, tenant["key"]) as client:
        handle = await client.graphs.run_document(in_turn)
        other = await client.graphs.run_document(one_node("negative"))
        await other.wait(timeout_seconds=60)
        with pytest.raises(RunFailed, match="Node one failed") as failed:
            await handle.wait(timeout_seconds=60)
        assert failed.value.details["node"] == "one"
        local_server.pay(tenant, 2, "paid-2")
        await handle.retry()
        assert (await handle.wait(timeout_seconds=60)).status == "completed"
        assert (await client.wallet()).balance == 0


async def test_a_question_is_answered(local_server: LocalServer) -> None:
    local_server.offline_worker("away", "negative")
    bound = one_node("negative", backend_affinity="worker:away", fallback_strategy="ask_user")
    async with local_server.client() as client:
        graph = await client.graphs.create(bound)
        handle = await client.graphs.run(graph)
        run = await handle.wait(timeout_seconds=30, until_asked=True)
        (question,) = run.questions
        assert question.message == "Backend worker:away is offline"
        assert question.choices == ("backend", "retry", "skip", "fail")
        assert question.backends == ("worker:built-in",)
        await handle.answer("backend", backend=question.backends[0])
        run = await handle.wait(timeout_seconds=60)
    assert [(each.status, each.backend) for each in run.executions if each.node == "one"] == [
        ("done", "worker:built-in")
    ]


async def test_a_pipeline_is_run_judged_and_taken_home(
    local_server: LocalServer, tmp_path: Path
) -> None:
    boards: list[PipelineRun] = []
    async with local_server.client() as client:
        pipeline = await client.pipelines.create(PIPELINE)
        limits = {"concurrent_jobs": 2, "tokens": 50}
        handle = await client.pipelines.run(pipeline, 2, {"width": 32}, limits=limits)
        run = await handle.wait(timeout_seconds=60, on_change=boards.append)
        assert run.reason == "waiting_for_judgement"
        assert [each.made for each in run.steps] == [2, 0]
        one, two = [each async for each in handle.candidates(step=0, page_size=1)]
        pair = await handle.pair()
        assert {each.id for each in pair or ()} == {one.id, two.id}
        vote = await handle.vote(one, two)
        assert vote.scores[one.id] > vote.scores[two.id]
        assert set((await handle.undo_vote(vote)).scores.values()) == {1000.0}
        assert (await handle.judge(two, "reject")).status == "rejected"
        assert (await handle.undo(two)).status == "active"
        assert (await handle.judge(one, "approve")).status == "approved"
        run = await handle.wait(timeout_seconds=60)
        (grown, bare) = await handle.tree()
        assert (len(grown.children), len(bare.children)) == (2, 0)
        files = [await handle.download(each, tmp_path) async for each in handle.candidates()]
        assert (await client.wallet()).balance == 1_000 - 2 * 2 - 3
    assert run.limits.tokens == 50
    assert run.tokens == 7
    assert boards[-1].success_rate == 1.0
    assert len({*files}) == 4
    assert all(each.suffix == ".png" and each.stat().st_size for each in files)


async def test_events_of_a_pipeline_run_are_resumed(local_server: LocalServer) -> None:
    async with local_server.client() as client:
        handle = await client.pipelines.run(
            await client.pipelines.create(PIPELINE), 1, {"width": 16}
        )
        await handle.wait(timeout_seconds=60)
        await handle.pause()
        kinds: list[str] = []
        last = 0
        for count in (2, 3):  # the second reader goes on where the first one stopped
            async with asyncio.timeout(30), aclosing(handle.events(last_id=last)) as events:
                async for event in events:
                    kinds.append(event.kind)
                    last = event.id
                    count -= 1
                    if not count:
                        break
    assert kinds == ["started", "submitted", "candidates", "no_work", "paused"]


async def test_a_pipeline_run_is_steered(local_server: LocalServer) -> None:
    document = {"name": "Bad", "steps": [{"name": "Base", "workflow": "failing"}]}
    async with local_server.client() as client, local_server.client() as other:
        with pytest.raises(InvalidInput):
            await client.pipelines.create({"name": "x", "steps": []})
        pipeline = await client.pipelines.create(document)
        assert [each.id async for each in client.pipelines.all()] == [pipeline.id]
        assert (await client.pipelines.get(pipeline.id)).name == "Bad"
        handle = await client.pipelines.run(pipeline, 1, idempotency_key="once")
        same = await client.pipelines.run(pipeline, 1, idempotency_key="once")
        assert same.id == handle.id
        run = await handle.wait(timeout_seconds=60)
        assert (run.reason, run.success_rate) == ("failed", 0.0)
        (failure,) = await handle.failures()
        assert failure.error
        assert (await handle.pause()).status == "paused"
        assert await handle.retry(failure.job_id) == [failure.job_id]
        changed = await handle.change(limits={"tokens": 9}, base_candidates=3)
        assert (changed.limits.tokens, changed.base_candidates) == (9, 3)
        assert (await handle.resume()).status == "active"
        assert (await handle.cancel()).status == "cancelled"
        assert [each.id async for each in client.pipelines.runs(pipeline=pipeline)] == [handle.id]
        with pytest.raises(NotFound):
            await other.pipelines.get_run(handle.id)
