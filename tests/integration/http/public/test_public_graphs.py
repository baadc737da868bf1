"""Graphs over the API: kept, checked, priced, run, followed, answered."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.integration.http.public.test_public_events import read_until, reader_of
from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on, png

from comfyfleet.server.graphs.runner import read_outbox

GRAPH: dict[str, Any] = {
    "name": "two",
    "nodes": [
        {"id": "width", "type": "input", "value_type": "integer", "default": 64},
        {"id": "draw", "type": "workflow", "workflow": "draw"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [
        {"from": "width.value", "to": "draw.width"},
        {"from": "draw.output", "to": "picture.value"},
    ],
}
YAML = """
name: two
nodes:
  - {id: draw, type: workflow, workflow: draw}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: picture.value}
"""


async def made(ada: Customer, document: Any = GRAPH) -> str:
    answer = await ada.client.post("/api/graphs", json=document)
    assert answer.status_code == 201, answer.text
    graph_id: str = answer.json()["id"]
    return graph_id


async def test_a_graph_is_run_and_followed_to_its_end(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graph_id = await made(ada)
    started = await ada.client.post(
        f"/api/graphs/{graph_id}/runs", json={"inputs": {"width": 32}, "idempotency_key": "a"}
    )
    assert started.status_code == 201, started.text
    run_id = started.json()["id"]
    again = await ada.client.post(
        f"/api/graphs/{graph_id}/runs", json={"inputs": {"width": 32}, "idempotency_key": "a"}
    )
    assert (again.status_code, again.json()["id"]) == (200, run_id)

    async def follow() -> list[str]:
        answer = await ada.client.get(f"/api/graph-runs/{run_id}/events")
        return answer.text.split("\n\n")

    following = asyncio.create_task(follow())
    async with effect_setup.fleet_setup.worker() as worker:
        job = await worker.job()
        assert job["prompt"]["1"]["inputs"]["width"] == 32
        shown = (await ada.get(f"graph-runs/{run_id}"))["progress"]["running_nodes"]
        assert [(each["node_id"], each["backend_id"]) for each in shown] == [("draw", None)]
        await worker.deliver(job)
        await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
    events = [each for each in await following if each]
    assert events[-1].startswith("event: end\n")
    last = json.loads(events[-1].partition("data: ")[2])
    assert (last["status"], last["overall_percent"]) == ("completed", 100.0)
    run = await ada.get(f"graph-runs/{run_id}")
    assert (run["status"], run["document"]) == ("completed", None)
    (file,) = run["outputs"]["picture"]["files"]
    assert (await ada.client.get(file["url"])).content == b"made"
    assert {each["id"]: each["status"] for each in run["nodes"]}["draw"] == "done"
    assert [
        each["url"] for each in await made_by(ada, run_id, "draw", urls=False) if "url" in each
    ] == []
    (made_file,) = await made_by(ada, run_id, "draw", urls=True)
    assert (await ada.client.get(made_file["url"])).content == b"made"
    stored = (await ada.get(f"graphs/{graph_id}"))["document"]
    assert (await ada.client.delete(f"/api/graphs/{graph_id}")).status_code == 204
    assert (await ada.get(f"graph-runs/{run_id}", document=True))["document"] == stored


async def made_by(ada: Customer, run_id: str, node: str, *, urls: bool) -> list[dict[str, Any]]:
    """Files that a node of a run has made."""
    run = await ada.get(f"graph-runs/{run_id}", urls=urls)
    (found,) = [each for each in run["executions"] if each["node"] == node]
    files: list[dict[str, Any]] = found["outputs"]["output"]["files"]
    return files


async def test_a_graph_may_come_as_yaml(effect_setup: EffectSetup, ada: Customer) -> None:
    graph_id = await made(ada, {"document": YAML})
    found = await ada.get(f"graphs/{graph_id}")
    assert "flowchart" in found["mermaid"]
    newer = await ada.client.post(f"/api/graphs/{graph_id}/versions", json=GRAPH)
    assert newer.json()["version"] == 2
    assert (await ada.get(f"graphs/{graph_id}", version=1))["document"]["name"] == "two"
    read = (await ada.client.post("/api/graphs/validate", json={"document": YAML})).json()
    assert read["document"]["nodes"][0] == {"id": "draw", "type": "workflow", "workflow": "draw"}
    foreign = {"document": YAML.replace("workflow: draw", "workflow_id: draw")}
    assert foreign["document"] != YAML
    respelled = (await ada.client.post("/api/graphs/validate", json=foreign)).json()
    assert respelled["document"] == read["document"]
    known = await ada.client.post("/api/graphs/validate", json={"document": GRAPH})
    assert known.json()["document"] is None
    unreadable = await ada.client.post("/api/graphs/validate", json={"document": "name: [a"})
    assert (unreadable.status_code, "line" in unreadable.json()["error"]["message"]) == (422, True)


async def test_all_problems_are_told_with_their_places(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    broken = {**GRAPH, "nodes": [*GRAPH["nodes"], {"id": "x", "type": "workflow", "workflow": "?"}]}
    refused = await ada.client.post("/api/graphs", json=broken)
    assert refused.status_code == 422
    assert refused.json()["error"]["details"]["problems"]
    verdict = (await ada.client.post("/api/graphs/validate", json=broken)).json()
    assert (verdict["valid"], verdict["quote"]) == (False, None)
    assert {each["node"] for each in verdict["problems"]} == {"x"}
    graph_id = await made(ada)
    fine = (await ada.client.post(f"/api/graphs/{graph_id}/validate")).json()
    assert (fine["valid"], fine["problems"]) == (True, [])
    quote = await ada.client.post(f"/api/graphs/{graph_id}/quote", json={})
    assert (quote.json()["jobs_min"], quote.json()["jobs_max"]) == (1, 1)
    budget = effect_setup.plane.settings.max_executions_per_graph_run
    assert quote.json()["executions_limit"] == budget
    assert quote.json()["executions_max"] == len(GRAPH["nodes"])
    unsaved = (await ada.client.post("/api/graphs/validate", json=GRAPH)).json()
    assert unsaved["quote"] == quote.json()


async def test_a_graph_tells_its_ports_also_those_of_graphs_inside(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    inner = await made(ada)
    around = {
        "name": "around",
        "nodes": [
            {"id": "size", "type": "input", "value_type": "integer"},
            {"id": "rows", "type": "input", "columns": {"a": "text"}, "required": False},
            {"id": "one", "type": "graph", "graph": "two", "version": 1, "inputs": {"width": "{{ size }}"}},
            {"id": "whole", "type": "output"},
            {"id": "first", "type": "output"},
            {"id": "table", "type": "output"},
        ],
        "connections": [
            {"from": "rows.value", "to": "table.value"},
            {"from": "one.picture", "to": "whole.value"},
            {"from": "one.picture.images.0", "to": "first.value"},
        ],
    }  # fmt: skip
    outer = await made(ada, around)
    assert await ada.get(f"graphs/{inner}/ports") == {
        "inputs": [{"name": "width", "type": "integer", "required": False}],
        "outputs": [{"name": "picture", "type": "result", "required": False}],
    }
    ports = await ada.get(f"graphs/{outer}/ports", version=1)
    assert [(each["name"], each["type"], each["required"]) for each in ports["inputs"]] == [
        ("size", "integer", True),
        ("rows", "row[]", False),
    ]
    assert [each["type"] for each in ports["outputs"]] == ["result", "image", "row[]"]
    assert (await ada.client.get(f"/api/graphs/{outer}/ports?version=9")).status_code == 404
    assert (await ada.client.get("/api/graphs/nobody/ports")).status_code == 404


async def test_a_run_is_cancelled_and_not_retried(effect_setup: EffectSetup, ada: Customer) -> None:
    graph_id = await made(ada)
    run_id = (await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})).json()["id"]
    cancelled = await ada.client.post(f"/api/graph-runs/{run_id}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert (await ada.client.post(f"/api/graph-runs/{run_id}/retry")).status_code == 409
    answered = await ada.client.post(f"/api/graph-runs/{run_id}/answer", json={"choice": "skip"})
    assert answered.status_code == 409


async def test_graphs_and_runs_are_listed_page_by_page(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graphs = [await made(ada, {**GRAPH, "name": name}) for name in ("one", "two", "three")]
    runs = []
    for graph_id in (graphs[0], graphs[0], graphs[2]):
        body: dict[str, Any] = {"inputs": {"width": 32}}
        runs.append((await ada.client.post(f"/api/graphs/{graph_id}/runs", json=body)).json()["id"])
    await ada.client.post(f"/api/graph-runs/{runs[1]}/cancel")
    page = await ada.get("graphs", limit=2)
    assert [each["id"] for each in page["graphs"]] == [graphs[2], graphs[1]]
    assert page["graphs"][0].keys() == {"id", "user_id", "name", "version", "created_at"}
    rest = await ada.get("graphs", limit=2, before=page["next"])
    assert ([each["id"] for each in rest["graphs"]], rest["next"]) == ([graphs[0]], None)

    async def listed(**wanted: Any) -> list[str]:
        return [each["id"] for each in (await ada.get("graph-runs", **wanted))["runs"]]

    assert await listed() == runs[::-1]
    first = await ada.get("graph-runs", limit=2)
    assert await listed(limit=2, before=first["next"]) == runs[:1]
    assert await listed(graph_id=graphs[0]) == [runs[1], runs[0]]
    assert await listed(graph_id=graphs[1]) == []
    assert await listed(status="cancelled") == [runs[1]]
    assert await listed(status="running", graph_id=graphs[0]) == [runs[0]]
    assert (await ada.get("graph-runs", limit=3))["next"] is None
    (over,) = (await ada.get("graph-runs", status="cancelled"))["runs"]
    assert (over["graph_id"], over["graph_version"], over["tokens"]) == (graphs[0], 1, 0)
    assert over["ended_at"]
    unknown = await ada.client.get("/api/graph-runs", params={"status": "lost"})
    assert unknown.status_code == 422


async def test_a_file_is_named_by_its_id_or_that_of_its_media(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    document = {
        "name": "given",
        "nodes": [
            {"id": "photo", "type": "input", "value_type": "image"},
            {"id": "invert", "type": "workflow", "workflow": "invert"},
            {"id": "picture", "type": "output"},
        ],
        "connections": [
            {"from": "photo.value", "to": "invert.input"},
            {"from": "invert.output", "to": "picture.value"},
        ],
    }
    graph_id, file_id = await made(ada, document), await ada.upload()
    media = (await ada.client.post("/api/videos", json={"file_id": file_id})).json()
    expected = (201, 200, 200)
    runs = set()
    for named, status in zip((media["id"], file_id, media["id"]), expected, strict=True):
        body = {"inputs": {"photo": named}, "idempotency_key": "a"}
        run = await ada.client.post(f"/api/graphs/{graph_id}/runs", json=body)
        assert run.status_code == status, run.text
        assert run.json()["inputs"]["photo"]["file_id"] == file_id
        runs.add(run.json()["id"])
    assert len(runs) == 1
    other = {"inputs": {"photo": await ada.video(png(colour=7))}, "idempotency_key": "a"}
    refused = await ada.client.post(f"/api/graphs/{graph_id}/runs", json=other)
    assert refused.status_code == 409


async def test_progress_is_told_while_something_changes(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graph_id = await made(ada)
    run_id = (await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})).json()["id"]
    async with (
        effect_setup.fleet_setup.worker() as worker,
        reader_of(effect_setup, ada) as reader,
        reader.stream("GET", f"/api/graph-runs/{run_id}/events") as answer,
    ):
        job, pieces, text = await worker.job(), answer.aiter_text(), ""
        for percent, step in ((25, 1), (75, 3)):
            said = {"percent": percent, "node": "3", "step": step, "steps": 4}
            await worker.call_for(job, "heartbeat", started=True, progress=said)
            text += await read_until(pieces, f"node 3, {step} of 4")
        await worker.deliver(job)
        await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
        text += "".join([piece async for piece in pieces])
    texts = [each for each in text.split("\n\n") if each.startswith("event")]
    events = [json.loads(each.partition("data: ")[2]) for each in texts]
    seen = [each["running_nodes"] for each in events if each["running_nodes"]]
    steps = [nodes[0]["current_step"] for nodes in seen]
    assert [each for each in dict.fromkeys(steps) if each] == ["node 3, 1 of 4", "node 3, 3 of 4"]
    assert {
        "node_id": "draw",
        "index": [],
        "backend_id": None,
        "progress": 0.75,
        "current_step": "node 3, 3 of 4",
    } in [nodes[0] for nodes in seen]
    percents = [each["overall_percent"] for each in events]
    assert percents == sorted(percents)
    percents = [each["overall_percent"] for each in events]
    assert percents == sorted(percents)
    assert percents[-1] == 100.0
    weighted = [each["weighted_percent"] for each in events]
    assert weighted == sorted(weighted)
    assert [(each["completed_nodes"], each["total_nodes"]) for each in events][-1] == (3, 3)
    # Silence while nothing changes: two looks a second would have made more of them.
    assert len(events) <= 7
    assert {each["id"]: each["status"] for each in events[-1]["nodes"]} == {
        "width": "done",
        "draw": "done",
        "picture": "done",
    }


async def test_a_graph_is_stored_once_and_run_by_its_name(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graph_id = await made(ada)
    again = await ada.client.post("/api/graphs", json=GRAPH)
    assert (again.status_code, again.json()["id"]) == (200, graph_id)
    other = await made(ada, {**GRAPH, "max_tokens": 9})
    assert other != graph_id
    run = (await ada.client.post("/api/graphs/two/runs", json={})).json()
    assert (run["graph_id"], run["name"]) == (other, "two")
    assert [each["name"] for each in (await ada.get("graph-runs"))["runs"]] == ["two"]
    assert (await ada.client.post("/api/graphs/nope/runs", json={})).status_code == 404


async def test_a_user_has_so_many_graphs_and_no_more(databases: Databases, tmp_path: Path) -> None:
    opening = plane_on(databases, tmp_path, max_graphs_per_user=2)
    async with opening as plane, effect_setup_on(plane) as effect_setup:
        ada = await effect_setup.customer()
        first = await made(ada)
        await made(ada, {**GRAPH, "max_tokens": 1})
        third = {**GRAPH, "max_tokens": 2}
        for path, body in (("graphs", third), ("graph-runs", {"document": third})):
            refused = await ada.client.post(f"/api/{path}", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "limit_exceeded")
            assert "2 graphs (the limit); delete some first" in refused.json()["error"]["message"]
        assert len((await ada.get("graphs"))["graphs"]) == 2
        assert (await ada.get("graph-runs"))["runs"] == []
        # One that is stored already is no other one; a new version is none; others have their own.
        assert (await ada.client.post("/api/graphs", json=GRAPH)).status_code == 200
        version = await ada.client.post(f"/api/graphs/{first}/versions", json=third)
        assert version.status_code == 201, version.text
        await made(await effect_setup.customer(ada.tenant_id))
        assert (await ada.client.delete(f"/api/graphs/{first}")).status_code == 204
        await made(ada, third)


async def test_a_run_that_is_refused_stores_no_graph(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    body: dict[str, Any] = {"document": YAML}
    for wrong in ({"inputs": {"x": 1}}, {"max_tokens": 0}):
        await effect_setup.fleet_setup.admin.patch(
            "/api/admin/workflows/draw", json={"price_tokens": 1}
        )
        refused = await ada.client.post("/api/graph-runs", json={**body, **wrong})
        assert refused.status_code in (409, 422), refused.text
        assert (await ada.get("graphs"))["graphs"] == []
    runs = [(await ada.client.post("/api/graph-runs", json=body)).json() for _ in range(2)]
    (stored,) = (await ada.get("graphs"))["graphs"]
    assert {each["graph_id"] for each in runs} == {stored["id"]}


async def test_a_deleted_graph_leaves_its_runs(effect_setup: EffectSetup, ada: Customer) -> None:
    graph_id = await made(ada)
    run = (await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})).json()
    assert (await ada.client.delete(f"/api/graphs/{graph_id}")).status_code == 204
    assert (await ada.client.delete(f"/api/graphs/{graph_id}")).status_code == 404
    assert (await ada.get("graphs"))["graphs"] == []
    await effect_setup.work()
    await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
    assert (await ada.get(f"graph-runs/{run['id']}"))["status"] == "completed"
    assert (await ada.get("graph-runs"))["runs"][0]["name"] == "two"
    assert await made(ada) != graph_id


async def test_customers_see_what_nodes_may_name(effect_setup: EffectSetup, ada: Customer) -> None:
    await effect_setup.fleet_setup.register_workflow("hidden", price_tokens=None)
    await effect_setup.change(effect_setup.invert, locked=("prefix",), overrides={"prefix": "mine"})
    found = (await ada.get("workflows"))["workflows"]
    assert [(each["kind"], each["name"]) for each in found] == [
        ("effect", "draw"),
        ("effect", "invert"),
        ("workflow", "draw"),
        ("workflow", "invert"),
    ]
    (picture,) = found[1]["properties"]
    assert (picture["name"], picture["type"], picture["required"]) == ("input", "image", True)
    assert (found[1]["price_tokens"], found[3]["price_tokens"]) == (5, 0)
    wrong = {**GRAPH, "connections": [{"from": "width.value", "to": "draw.widht"}]}
    told = (await ada.client.post("/api/graphs/validate", json=wrong)).json()["problems"]
    assert "draw has no property 'widht'; available: prefix, width, colour" in {
        each["message"] for each in told
    }


async def test_an_answer_without_a_backend_says_which_there_are(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    node = {"backend_affinity": "worker:w2", "fallback_strategy": "ask_user"}
    asking = {
        **GRAPH,
        "nodes": [{**each, **node} if each["id"] == "draw" else each for each in GRAPH["nodes"]],
    }
    async with effect_setup.fleet_setup.worker("w1"), effect_setup.fleet_setup.worker("w2") as lost:
        graph_id = await made(ada, asking)
        await lost.call("deregister", worker_id="w2")
        effect_setup.plane.graphs.environment._at = None
        run = (await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})).json()
        assert run["status"] == "waiting_for_user", run
        path = f"/api/graph-runs/{run['id']}/answer"
        refused = await ada.client.post(path, json={"choice": "backend"})
    message = refused.json()["error"]["message"]
    assert message == "specify a backend; online backends that can run it: worker:w1"
