"""A small graph can't be made to stand for more than memory holds."""

from typing import Any

from tests.support.server.customers import Customer, EffectSetup

FED = 10  # times that each merge is fed by the one before


def merges(levels: int) -> dict[str, Any]:
    """Each merge holds ten times what the one before holds."""
    names = ["x", *(f"m{number}" for number in range(1, levels + 1))]
    ports = ["x.value", *(f"m{number}.output" for number in range(1, levels + 1))]
    nodes: list[dict[str, Any]] = [{"id": "x", "type": "input"}]
    nodes += [{"id": name, "type": "merge"} for name in names[1:]]
    nodes.append({"id": "out", "type": "output"})
    connections = [
        {"from": ports[level], "to": f"{names[level + 1]}.input_{port}"}
        for level in range(levels)
        for port in range(FED)
    ]
    connections.append({"from": ports[-1], "to": "out.value"})
    return {"name": "grows", "nodes": nodes, "connections": connections}


async def test_six_merges_in_a_row_are_refused_before_anything_runs(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    for levels in (6, 498):
        refused = await ada.client.post("/api/graphs", json=merges(levels))
        assert refused.status_code == 422
        first = refused.json()["error"]["details"]["problems"][0]
        assert (first["node"], first["code"]) == ("m6", "too_large")


async def test_values_are_counted_while_they_grow(effect_setup: EffectSetup, ada: Customer) -> None:
    """What the check before can't know, as it lies in what the run is given."""
    graph = (await ada.client.post("/api/graphs", json=merges(5))).json()
    run = await ada.client.post(
        f"/api/graphs/{graph['id']}/runs", json={"inputs": {"x": ["a"] * 1000}}
    )
    assert run.status_code == 201, run.text
    answer = run.json()
    assert answer["status"] == "failed"
    assert (answer["error"]["node"], answer["outputs"]) == ("m3", None)
    assert "more than 300,000 values" in answer["error"]["message"]
    assert len(run.content) < 3_000_000
    left_out = [each["node"] for each in answer["executions"] if not each["has_values"]]
    assert left_out == ["m2"]
    assert len((await ada.client.get(f"/api/graph-runs/{answer['id']}")).content) < 3_000_000


async def test_a_run_has_a_budget_for_all_its_nodes(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    """Each node stays below the limit of one, and all together don't."""
    document = merges(0)
    nodes, wires = [document["nodes"][0]], []
    for number in range(20):
        nodes += [{"id": f"m{number}", "type": "merge"}, {"id": f"o{number}", "type": "output"}]
        wires += [{"from": "x.value", "to": f"m{number}.input_{port}"} for port in range(FED)]
        wires.append({"from": f"m{number}.output.count", "to": f"o{number}.value"})
    document = {"name": "wide", "nodes": nodes, "connections": wires}
    graph = (await ada.client.post("/api/graphs", json=document)).json()
    body = {"inputs": {"x": ["a"] * 20_000}}
    answer = (await ada.client.post(f"/api/graphs/{graph['id']}/runs", json=body)).json()
    assert answer["status"] == "failed"
    assert "the values of the run are more than 1,200,000 values" in answer["error"]["message"]


async def test_inputs_that_are_too_large_start_nothing(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    graph = (await ada.client.post("/api/graphs", json=merges(1))).json()
    body = {"inputs": {"x": [0] * 300_001}}
    refused = await ada.client.post(f"/api/graphs/{graph['id']}/runs", json=body)
    assert refused.status_code == 413, refused.text
    assert (await ada.get("graph-runs"))["runs"] == []
