"""The timeline of a run and the comparison of two, over the API."""

from typing import Any
from uuid import uuid4

from tests.integration.http.public.test_public_graphs import GRAPH, made
from tests.support.server.customers import Customer, EffectSetup

from comfyfleet.server.graphs.runner import read_outbox


async def run_to_its_end(effect_setup: EffectSetup, ada: Customer, **body: Any) -> str:
    graph_id = await made(ada) if "graph_id" not in body else body.pop("graph_id")
    started = await ada.client.post(f"/api/graphs/{graph_id}/runs", json=body)
    assert started.status_code == 201, started.text
    run_id: str = started.json()["id"]
    async with effect_setup.fleet_setup.worker(f"w{uuid4().hex[:8]}") as worker:
        job = await worker.job()
        await worker.deliver(job)
        await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
    return run_id


async def test_a_run_has_a_timeline_while_it_goes_on_and_when_it_is_over(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graph_id = await made(ada)
    started = await ada.client.post(f"/api/graphs/{graph_id}/runs", json={})
    run_id = started.json()["id"]
    waiting = await ada.get(f"graph-runs/{run_id}/timeline")
    rows = {each["id"]: each for each in waiting["nodes"]}
    assert [each["kind"] for each in rows["draw"]["spans"]] == ["queued"]
    assert (rows["draw"]["name"], rows["picture"]["after"]) == ("draw", "draw")
    async with effect_setup.fleet_setup.worker() as worker:
        await worker.deliver(await worker.job())
        await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
    over = await ada.get(f"graph-runs/{run_id}/timeline")
    run = await ada.get(f"graph-runs/{run_id}")
    assert (over["status"], over["run_id"]) == ("completed", run["id"])
    assert [each["node"] for each in over["critical_path"]] == ["width", "draw", "picture"]
    assert {each["id"] for each in over["nodes"] if each["is_critical"]} == {
        "width",
        "draw",
        "picture",
    }
    assert sum(each["end"] - each["start"] for each in over["critical_path"]) <= over["seconds"]


async def test_two_runs_are_compared_and_files_by_their_content(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    one = await run_to_its_end(effect_setup, ada, inputs={"width": 32})
    other = {**GRAPH, "nodes": [*GRAPH["nodes"], {"id": "also", "type": "output"}]}
    other["connections"] = [*GRAPH["connections"], {"from": "draw.output", "to": "also.value"}]
    graph_id = await made(ada, other)
    two = await run_to_its_end(effect_setup, ada, graph_id=graph_id, inputs={"width": 48})
    found = await ada.get("graph-runs/compare", a=one, b=two)
    values = {(each["section"], each["name"]): (each["a"], each["b"]) for each in found["values"]}
    assert values["inputs", "width"] == ("32", "48")
    assert values["nodes", "also.type"] == (None, "output")
    assert values["connections", "draw.output → also.value"] == (None, "connected")
    # The worker made the same bytes under another id.
    assert ("outputs", "picture.files.0") not in values
    assert (found["a"]["id"], found["b"]["id"], found["left_out"]) == (one, two, 0)
    whole = await ada.get("graph-runs/compare", a=one, b=two, all=True)
    same = {(each["section"], each["name"]) for each in whole["values"] if each["is_same"]}
    assert ("outputs", "picture.files.0") in same
    assert ("workflows", "draw") in same
    assert len(whole["values"]) == whole["same"] + whole["different"]
    assert found["different"] == len(found["values"])


async def test_a_run_is_the_same_as_itself(effect_setup: EffectSetup, ada: Customer) -> None:
    one = await run_to_its_end(effect_setup, ada)
    found = await ada.get("graph-runs/compare", a=one, b=one)
    assert (found["values"], found["different"]) == ([], 0)
    assert found["same"]


async def test_runs_of_others_are_as_unknown_as_those_that_never_were(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    own = await run_to_its_end(effect_setup, ada)
    eve = await effect_setup.customer()
    foreign = own
    for run_id in (foreign, str(uuid4())):
        for path in (
            f"/api/graph-runs/{run_id}/timeline",
            f"/api/graph-runs/compare?a={run_id}&b={run_id}",
        ):
            refused = await eve.client.get(path)
            assert refused.status_code == 404
            assert refused.json()["error"]["message"] == f"graph run {run_id} was not found"
    missing = await ada.client.get(f"/api/graph-runs/compare?a={own}")
    assert missing.status_code == 422
    assert "b" in missing.text
