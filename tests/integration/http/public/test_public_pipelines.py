"""Pipelines by the customers' API: a run from its start to its tree, judged on the way."""

from typing import Any

from tests.planekit.customers import Customer, Shop, png

from comfyfleet.loops.pipelines import carry_on

DOCUMENT = """
name: Two steps
steps:
  - name: Base
    workflow: draw
    properties: {width: "{{ variables.width }}"}
  - name: Invert
    workflow: invert
    properties: {input: "{{ parent.file }}"}
"""


async def post(customer: Customer, path: str, expected: int = 200, **body: Any) -> dict[str, Any]:
    answer = await customer.client.post(f"/api/{path}", json=body)
    assert answer.status_code == expected, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def started(customer: Customer, base: int = 2) -> str:
    made = await post(customer, "pipelines", 201, document=DOCUMENT)
    body = {"base_candidates": base, "variables": {"width": 64}, "idempotency_key": "once"}
    run = await post(customer, f"pipelines/{made['id']}/runs", 201, **body)
    again = await post(customer, f"pipelines/{made['id']}/runs", 200, **body)
    assert again["id"] == run["id"]
    run_id: str = run["id"]
    return run_id


async def work_off(shop: Shop) -> None:
    async with shop.yard.worker() as worker:
        for number in range(20):
            for _, pool in shop.plane.pools.items():
                await carry_on(shop.plane.sides, pool)
            polled = await worker.poll(wait_seconds=0)
            if polled["job"] is None:
                return
            done = await worker.deliver(polled["job"], png(colour=number))
            assert done.status_code == 200, done.text
    raise AssertionError("still not done")


async def test_a_run_by_the_api_from_start_to_tree(shop: Shop, ada: Customer) -> None:
    run_id = await started(ada)
    await work_off(shop)
    run = await ada.get(f"pipeline-runs/{run_id}")
    assert run["reason"] == "complete"
    assert [(each["name"], each["wanted"], each["made"]) for each in run["steps"]] == [
        ("Base", 2, 2),
        ("Invert", 2, 2),
    ]
    assert run["success_rate"] == 1.0
    assert run["seconds_left"] == 0
    page = await ada.get(f"pipeline-runs/{run_id}/candidates", limit=3)
    rest = await ada.get(f"pipeline-runs/{run_id}/candidates", limit=3, after=page["next"])
    assert (len(page["candidates"]), len(rest["candidates"]), rest["next"]) == (3, 1, None)
    first = page["candidates"][0]
    file = await ada.client.get(first["url"])
    assert file.status_code == 200
    assert file.content.startswith(b"\x89PNG")
    grown = await ada.get(f"pipeline-runs/{run_id}/tree")
    assert [len(each["children"]) for each in grown["tree"]] == [1, 1]
    listed = await ada.get("pipeline-runs")
    assert [each["id"] for each in listed["runs"]] == [run_id]


async def test_candidates_are_judged_and_compared_by_the_api(shop: Shop, ada: Customer) -> None:
    run_id = await started(ada)
    await work_off(shop)
    found = (await ada.get(f"pipeline-runs/{run_id}/candidates", step=0))["candidates"]
    one, two = found[0]["id"], found[1]["id"]
    at = f"pipeline-runs/{run_id}/candidates/{one}"
    for act, status in (("approve", "approved"), ("winner", "winner"), ("undo", "approved")):
        assert (await post(ada, f"{at}/{act}"))["status"] == status
    assert (await post(ada, f"{at}/reject"))["status"] == "rejected"
    approved = await ada.get(f"pipeline-runs/{run_id}/candidates", status="rejected")
    assert [each["id"] for each in approved["candidates"]] == [one]
    pair = await ada.get(f"pipeline-runs/{run_id}/pair")
    assert {each["step"] for each in pair["candidates"]} == {1}
    vote = await post(ada, f"pipeline-runs/{run_id}/vote", winner=two, loser=one)
    assert vote["scores"][two] == 1016.0
    undone = await post(ada, f"pipeline-runs/{run_id}/votes/{vote['id']}/undo")
    assert undone["scores"] == {one: 1000.0, two: 1000.0}


async def test_a_run_is_paused_changed_and_cancelled_by_the_api(shop: Shop, ada: Customer) -> None:
    run_id = await started(ada)
    assert (await post(ada, f"pipeline-runs/{run_id}/pause"))["status"] == "paused"
    changed = await ada.client.patch(
        f"/api/pipeline-runs/{run_id}", json={"limits": {"tokens": 9, "concurrent_jobs": 2}}
    )
    assert changed.json()["limits"]["tokens"] == 9
    assert (await post(ada, f"pipeline-runs/{run_id}/resume"))["status"] == "active"
    assert await post(ada, f"pipeline-runs/{run_id}/retry") == {"jobs": []}
    assert (await post(ada, f"pipeline-runs/{run_id}/cancel"))["status"] == "cancelled"
    await post(ada, f"pipeline-runs/{run_id}/resume", 409)


async def test_what_is_wrong_with_a_pipeline_is_told_with_its_step(ada: Customer) -> None:
    told = await post(ada, "pipelines", 422, name="x", steps=[{"name": "A", "workflow": "none"}])
    assert told["error"]["details"]["problems"][0]["step"] == "A"
