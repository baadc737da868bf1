"""Nobody gets a workflow for less than its operator asks, whichever way they name it."""

from typing import Any

import pytest
from tests.support.server.customers import DRAWN, DRAWN_PROPERTIES, Customer, EffectSetup

from comfyfleet.server.graphs.runner import read_outbox
from comfyfleet.server.maintenance.sweeps import advance_pipelines

PRICE = 5000


def graph(**work: Any) -> dict[str, Any]:
    return {
        "name": "vip",
        "nodes": [{"id": "draw", "type": "workflow", **work}, {"id": "out", "type": "output"}],
        "connections": [{"from": "draw.output", "to": "out.value"}],
    }


def pipeline(**work: Any) -> dict[str, Any]:
    return {"name": "vip", "steps": [{"name": "Base", **work}]}


@pytest.fixture
async def vip(effect_setup: EffectSetup) -> EffectSetup:
    """A dear effect that is not published, on a workflow that has no price of its own."""
    made = await effect_setup.fleet_setup.register_workflow(
        "vip", document=DRAWN, properties=DRAWN_PROPERTIES, price_tokens=None
    )
    assert made.status_code == 201, made.text
    await effect_setup.fleet_setup.assign("invert", "draw", "vip")
    settings: dict[str, Any] = {
        "overrides": {"prefix": "locked"},
        "locked": ("prefix",),
        "price_tokens": PRICE,
    }
    await effect_setup.publish("vip", **settings, is_published=False)
    return effect_setup


async def problems(customer: Customer, path: str, document: dict[str, Any]) -> list[str]:
    answer = await customer.client.post(f"/api/{path}", json={"document": document})
    assert answer.status_code == 422, answer.text
    return [each["message"] for each in answer.json()["error"]["details"]["problems"]]


async def test_a_workflow_that_is_not_offered_is_unknown_to_graphs_and_pipelines(
    vip: EffectSetup, ada: Customer
) -> None:
    mine = {"properties": {"prefix": "mine"}}
    for made, path in ((graph, "graphs"), (pipeline, "pipelines")):
        for name in ("workflow", "effect"):
            (hidden,) = await problems(ada, path, made(**{name: "vip"}, **mine))
            (nowhere,) = await problems(ada, path, made(**{name: "vap"}, **mine))
            assert hidden.replace("vip", "vap") == nowhere
            assert "draw" in hidden  # what there is instead
    assert await ada.balance() == 100


async def test_that_a_hidden_workflow_can_be_run_somewhere_is_not_told(
    vip: EffectSetup, ada: Customer
) -> None:
    async with vip.fleet_setup.worker("w1"):
        told = [
            await problems(ada, "graphs", graph(workflow=name, backend_affinity="worker:w1"))
            for name in ("vip", "vap")
        ]
    assert [each.replace("vip", "vap") for each in told[0]] == told[1]


async def test_a_node_of_an_effect_costs_what_the_effect_costs(
    vip: EffectSetup, ada: Customer
) -> None:
    await vip.change(vip.effects["vip"], is_published=True)
    rich = await vip.customer(ada.tenant_id, tokens=2 * PRICE)
    made = (await rich.client.post("/api/graphs", json=graph(effect="vip"))).json()
    quote = (await rich.client.post(f"/api/graphs/{made['id']}/quote", json={})).json()
    assert (quote["tokens_min"], quote["tokens_max"]) == (PRICE, PRICE)
    run = (await rich.client.post(f"/api/graphs/{made['id']}/runs", json={})).json()
    async with vip.fleet_setup.worker("w1") as worker:
        job = await worker.job()
        assert job["prompt"]["2"]["inputs"]["filename_prefix"].endswith("locked")
        await worker.deliver(job)
    await read_outbox(vip.plane.graphs, vip.plane.pools["main"])
    assert (await rich.get(f"graph-runs/{run['id']}"))["status"] == "completed"
    assert await rich.balance() == PRICE


async def test_a_step_of_an_effect_costs_what_the_effect_costs(
    vip: EffectSetup, ada: Customer
) -> None:
    await vip.change(vip.effects["vip"], is_published=True)
    rich = await vip.customer(ada.tenant_id, tokens=2 * PRICE)
    made = (
        await rich.client.post("/api/pipelines", json={"document": pipeline(effect="vip")})
    ).json()
    await rich.client.post(f"/api/pipelines/{made['id']}/runs", json={"base_candidates": 1})
    await advance_pipelines(vip.plane.context, vip.plane.pools["main"])
    async with vip.fleet_setup.worker("w1") as worker:
        job = await worker.job()
    assert job["prompt"]["2"]["inputs"]["filename_prefix"].endswith("locked")
    assert await rich.balance() == PRICE


async def test_a_locked_value_is_nobodys_to_set(vip: EffectSetup, ada: Customer) -> None:
    effect = vip.effects["vip"]
    await vip.change(effect, is_published=True)
    mine = {"properties": {"prefix": "mine"}}
    for made, path in ((graph, "graphs"), (pipeline, "pipelines")):
        (refused,) = await problems(ada, path, made(effect="vip", **mine))
        assert refused == "vip has no property 'prefix'; available properties: width, colour"
    shown = await ada.get(f"effects/{effect.id}")
    assert "prefix" not in shown["properties"]["properties"]
    rich = await vip.customer(ada.tenant_id, tokens=PRICE)
    sent = await rich.submit(effect, **mine)
    assert (sent.status_code, await rich.balance()) == (422, PRICE)


async def test_an_offer_that_ends_keeps_runs_going_and_refuses_new_ones(
    vip: EffectSetup, ada: Customer
) -> None:
    offered = await vip.fleet_setup.admin.patch(
        "/api/admin/workflows/vip", json={"price_tokens": 7}
    )
    assert offered.json()["price_tokens"] == 7
    made = (await ada.client.post("/api/graphs", json=graph(workflow="vip"))).json()
    run = (await ada.client.post(f"/api/graphs/{made['id']}/runs", json={})).json()
    await vip.fail()
    await read_outbox(vip.plane.graphs, vip.plane.pools["main"])
    ended = await vip.fleet_setup.admin.patch(
        "/api/admin/workflows/vip", json={"is_withdrawn": True}
    )
    assert ended.json()["price_tokens"] is None
    retried = await ada.client.post(f"/api/graph-runs/{run['id']}/retry")
    assert retried.json()["status"] == "running", retried.text
    assert await ada.balance() == 93
    again = await ada.client.post(f"/api/graphs/{made['id']}/runs", json={})
    assert again.status_code == 422
