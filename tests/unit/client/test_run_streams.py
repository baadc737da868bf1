"""Events of graph and pipeline runs: streams that are cut, and places where none comes through."""

import json
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from tests.unit.client.test_retries import Script, stream

from comfyfleet.client.graphs import GraphRunHandle
from comfyfleet.client.pipelines import PipelineRunHandle
from comfyfleet.errors import InvalidInput, ServerUnavailable

RUN = "7f1c6a52-0000-4000-8000-000000000003"
AT = "2026-01-02T03:04:05Z"


def graph_run(status: str, percent: float = 0.0) -> httpx.Response:
    progress = {"overall_percent": percent, "completed_nodes": 0, "total_nodes": 2}
    body = {"id": RUN, "graph_id": RUN, "graph_version": 1, "status": status}
    return httpx.Response(200, json={**body, "progress": progress, "created_at": AT})


def said(kind: str, status: str, percent: float) -> str:
    data = {"run_id": RUN, "status": status, "overall_percent": percent}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


def pipeline_run(**changes: Any) -> httpx.Response:
    body = {
        "id": RUN,
        "pipeline_id": RUN,
        "status": "active",
        "target_folder": "x",
        "base_candidates": 1,
        "created_at": AT,
        "changed_at": AT,
        **changes,
    }
    return httpx.Response(200, json=body)


async def graph_handle(script: Script) -> GraphRunHandle:
    return await script.client.graphs.get_run(RUN)


async def pipeline_handle(script: Script) -> PipelineRunHandle:
    return await script.client.pipelines.get_run(RUN)


async def test_a_graph_runs_cut_stream_is_opened_again() -> None:
    script = Script(
        graph_run("running"),
        stream(said("progress", "running", 10) + "event: progress\ndata: {"),
        stream(
            said("progress", "running", 60)
            + said("progress", "completed", 100)
            + said("end", "completed", 100)
        ),
    )
    handle = await graph_handle(script)
    told = [(each.kind, each.overall_percent) async for each in handle.events()]
    assert told == [("progress", 10), ("progress", 60), ("end", 100)]
    assert len(script.heard) == 3


@pytest.mark.parametrize("trouble", [httpx.Response(404), httpx.Response(200, text="<html>")])
async def test_without_a_stream_a_graph_run_is_polled(trouble: httpx.Response) -> None:
    script = Script(
        graph_run("running"),
        trouble,
        graph_run("running", 10),
        graph_run("running", 10),
        graph_run("failed", 50),
    )
    handle = await graph_handle(script)
    told = [(each.kind, each.overall_percent) async for each in handle.events()]
    assert told == [("progress", 10), ("end", 50)]
    assert handle.run.status == "failed"


async def test_a_retry_and_an_answer_are_not_said_twice() -> None:
    script = Script(graph_run("failed"), httpx.ReadError)
    handle = await graph_handle(script)
    for act in (handle.retry(), handle.answer("skip")):
        with pytest.raises(Exception, match="the server may not have received it"):
            await act
    assert len(script.heard) == 3


async def test_a_pipelines_stream_goes_on_after_the_last_event_that_was_told() -> None:
    script = Script(
        pipeline_run(),
        stream("retry: 2000\n\nid: 4\nevent: started\ndata: {}\n\nid: 5\nevent: sub"),
        stream('id: 5\nevent: submitted\ndata: {"step": 0}\n\n'),
        stream(""),
    )
    handle = await pipeline_handle(script)
    async with aclosing(handle.events(last_id=3)) as events:
        told = [(await anext(events)).id, (await anext(events)).id]
    assert told == [4, 5]
    assert [each.headers.get("last-event-id") for each in script.heard] == [None, "3", "4"]


async def test_where_no_stream_of_a_pipeline_comes_through_it_is_said() -> None:
    script = Script(pipeline_run(), httpx.Response(404), pipeline_run())
    handle = await pipeline_handle(script)
    with pytest.raises(ServerUnavailable, match="can't be followed"):
        await anext(handle.events())


@pytest.mark.parametrize("path", ["../x.png", "/etc/x.png", "a/../../x.png", "C:x.png", ""])
async def test_a_candidates_path_never_leads_out_of_the_folder(path: str, tmp_path: Any) -> None:
    candidate = {
        "id": RUN,
        "step": 0,
        "status": "active",
        "score": 1000.0,
        "path": path,
        "url": "http://fleet.test/file",
        "created_at": AT,
    }
    script = Script(pipeline_run(), httpx.Response(200, json=candidate))
    handle = await pipeline_handle(script)
    with pytest.raises(InvalidInput, match="out of the folder"):
        await handle.download(RUN, tmp_path)
    assert list(tmp_path.iterdir()) == []
