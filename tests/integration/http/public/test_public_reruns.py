"""Runs again from a node, over the API."""

from typing import Any
from uuid import uuid4

from tests.support.server.control_plane import client_of
from tests.support.server.customers import Customer, EffectSetup

from comfyfleet.server.graphs.runner import read_outbox

GRAPH: dict[str, Any] = {
    "name": "two",
    "nodes": [
        {"id": "width", "type": "input", "value_type": "integer", "default": 64},
        {"id": "draw", "type": "workflow", "workflow": "draw"},
        {
            "id": "again",
            "type": "workflow",
            "workflow": "draw",
            "properties": {"width": "{{ draw.output.images.count + 64 }}"},
        },
        {"id": "picture", "type": "output"},
        {"id": "first", "type": "output"},
    ],
    "connections": [
        {"from": "width.value", "to": "draw.width"},
        {"from": "again.output", "to": "picture.value"},
        {"from": "draw.output", "to": "first.value"},
    ],
}


async def work(effect_setup: EffectSetup, jobs: int, name: str = "w1") -> list[int]:
    """Runs so many jobs, one after the other; returns the widths that they were given."""
    widths = []
    async with effect_setup.fleet_setup.worker(name) as worker:
        for _ in range(jobs):
            job = await worker.job()
            widths.append(job["prompt"]["1"]["inputs"]["width"])
            await worker.deliver(job)
            await read_outbox(effect_setup.plane.graphs, effect_setup.plane.pools["main"])
    return widths


async def ended(effect_setup: EffectSetup, ada: Customer) -> dict[str, Any]:
    started = await ada.client.post("/api/graph-runs", json={"document": GRAPH})
    assert started.status_code == 201, started.text
    await work(effect_setup, 2)
    run: dict[str, Any] = await ada.get(f"graph-runs/{started.json()['id']}")
    assert run["status"] == "completed"
    return run


async def test_a_run_is_run_again_from_a_node_and_names_where_it_came_from(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await ended(effect_setup, ada)
    path, body = f"/api/graph-runs/{run['id']}/rerun", {"from": "again", "set": {"again.width": 48}}
    made = await ada.client.post(path, json={**body, "idempotency_key": "a"})
    assert made.status_code == 201, made.text
    repeated = await ada.client.post(path, json=body, headers={"Idempotency-Key": "a"})
    assert (repeated.status_code, repeated.json()["id"]) == (200, made.json()["id"])
    other = await ada.client.post(path, json={"from": "draw", "idempotency_key": "a"})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert await work(effect_setup, 1, "w2") == [48]
    again = await ada.get(f"graph-runs/{made.json()['id']}", document=True)
    assert again["status"] == "completed"
    assert again["rerun_of"] == {
        "run_id": run["id"],
        "node": "again",
        "inputs": [],
        "set": {"again.width": 48},
    }
    assert again["tokens"] * 2 == run["tokens"]
    seen = {each["node"]: each for each in again["executions"]}
    was = {each["node"]: each for each in run["executions"]}
    assert seen["draw"]["reused_from"] == {"job_id": was["draw"]["job_id"], "run_id": run["id"]}
    assert (seen["draw"]["job_id"], seen["draw"]["attempts"]) == (None, 0)
    assert seen["again"]["reused_from"] is None
    assert run["rerun_of"] is None
    listed = (await ada.get("graph-runs", rerun_of=run["id"]))["runs"]
    assert [(each["id"], each["rerun_of"]) for each in listed] == [(again["id"], run["id"])]
    assert (await ada.get("graph-runs", rerun_of=again["id"]))["runs"] == []


async def test_a_rerun_that_cannot_be_is_refused_with_the_field_or_node(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await ended(effect_setup, ada)
    path = f"/api/graph-runs/{run['id']}/rerun"
    for body, status, said in (
        (None, 409, "all nodes already have results"),
        ({}, 409, "all nodes already have results"),
        ({"from": "paint"}, 422, "no node 'paint'"),
        ({"from": 7}, 422, "from"),
        ({"from": ""}, 422, "no node ''"),
        ({"start": "draw"}, 422, "unknown field 'start'"),
        ({"set": {"draw": 1}}, 422, "must have the form node.property"),
        ({"set": {f"draw.p{number}": 1 for number in range(101)}}, 422, "set"),
        ({"set": {"draw.width": "{{ again.output.images.count }}"}}, 422, "cycle"),
        ({"inputs": {"width": "wide"}}, 422, "must be of type integer"),
        ({"version": 9}, 404, "version 9"),
        ({"from": "draw", "max_tokens": -1}, 422, "max_tokens"),
    ):
        answer = await ada.client.post(path, json=body)
        assert answer.status_code == status, (body, answer.text)
        assert said in answer.text, (body, answer.text)
    unknown = await ada.client.post(f"/api/graph-runs/{uuid4()}/rerun", json={"from": "draw"})
    assert unknown.status_code == 404
    async with client_of(effect_setup.plane, None) as stranger:
        assert (await stranger.post(path, json={"from": "draw"})).status_code == 401
    assert len((await ada.get("graph-runs"))["runs"]) == 1


async def test_texts_that_no_database_stores_are_refused(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await ended(effect_setup, ada)
    path = f"/api/graph-runs/{run['id']}/rerun"
    for body in (
        b'{"set": {"draw.width": "\\u0000"}}',
        b'{"set": {"draw.width": "\\ud800"}}',
        b'{"set": {"draw.\\u0000": 1}}',
        b'{"from": "\\u0000"}',
        b'{"set": {"draw.width": NaN}}',
    ):
        headers = {"Content-Type": "application/json"}
        answer = await ada.client.post(path, content=body, headers=headers)
        assert answer.status_code == 422, (body, answer.text)
