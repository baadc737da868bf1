"""Judges of pipelines by the customers' API: what they found, who judged, and how candidates are ordered by it."""

import json
from collections.abc import Sequence
from typing import Any

from tests.support.server.customers import Customer, EffectSetup, png

from comfyfleet.server.maintenance.sweeps import advance_pipelines

JUDGE = {"workflow": "invert", "property": "input", "approve_above": 6, "reject_below": 3}
DOCUMENT = {
    "name": "Judged",
    "steps": [
        {"name": "Base", "workflow": "draw", "judge": JUDGE},
        {"name": "Invert", "workflow": "invert", "properties": {"input": "{{ parent.file }}"}},
    ],
}


async def post(customer: Customer, path: str, expected: int = 200, **body: Any) -> dict[str, Any]:
    answer = await customer.client.post(f"/api/{path}", json=body)
    assert answer.status_code == expected, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def judged(
    effect_setup: EffectSetup, customer: Customer, scores: Sequence[str]
) -> dict[str, Any]:
    """A run of which every base candidate was judged, in order."""
    made = await post(customer, "pipelines", 201, document=DOCUMENT)
    started = await post(customer, f"pipelines/{made['id']}/runs", 201, base_candidates=len(scores))
    run_path, left = f"pipeline-runs/{started['id']}", list(scores)
    async with effect_setup.fleet_setup.worker() as worker:
        for number in range(30):
            for _, pool in effect_setup.plane.pools.items():
                await advance_pipelines(effect_setup.plane.context, pool)
            job = (await worker.poll(wait_seconds=0))["job"]
            if job is None:
                return await customer.get(run_path)
            steps = (await customer.get(run_path))["steps"]
            if steps[0]["judging"]:
                value = {"node_id": "9", "name": "score", "value": left.pop(0)}
                done = await worker.call_for(job, "complete", outputs=[], values=[value])
            else:
                done = await worker.deliver(job, png(colour=number))
            assert done.status_code == 200, done.text
    raise AssertionError("still not done")


async def test_the_api_tells_what_the_judge_found_and_who_judged(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await judged(effect_setup, ada, ["2.5", "7", "4"])
    base, invert = run["steps"]
    assert base["judge"] == {"name": "invert", "approve_above": 6.0, "reject_below": 3.0}
    assert invert["judge"] is None
    assert run["reason"] == "waiting_for_judgement"
    assert [base[name] for name in ("needs_approval", "waiting", "unjudged", "judging")] == [
        *(True, 1, 0, 0)
    ]
    assert (invert["wanted"], invert["made"]) == (1, 1)
    at = f"pipeline-runs/{run['id']}/candidates"
    found = (await ada.get(at, step=0, sort="score"))["candidates"]
    assert [(each["judge_score"], each["status"], each["judged_by"]) for each in found] == [
        (7.0, "approved", "judge"),
        (4.0, "active", None),
        (2.5, "rejected", "judge"),
    ]
    page = await ada.get(at, step=0, sort="score", limit=1)
    rest = await ada.get(at, step=0, sort="score", limit=5, after=page["next"])
    assert [each["id"] for each in (*page["candidates"], *rest["candidates"])] == [
        each["id"] for each in found
    ]
    best = await ada.get(at, sort="best", limit=1)
    assert (best["candidates"][0]["id"], best["next"]) == (found[0]["id"], None)
    tree = (await ada.get(f"pipeline-runs/{run['id']}/tree"))["tree"]
    assert [(each["judge_score"], each["judged_by"]) for each in tree] == [
        (2.5, "judge"),
        (7.0, "judge"),
        (4.0, None),
    ]
    assert (await ada.client.get(f"/api/{at}", params={"sort": "beauty"})).status_code == 422


async def test_a_person_overrules_the_judge_by_the_api(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await judged(effect_setup, ada, ["1"])
    at = f"pipeline-runs/{run['id']}/candidates"
    (one,) = (await ada.get(at))["candidates"]
    approved = await post(ada, f"{at}/{one['id']}/approve")
    assert (approved["status"], approved["judged_by"]) == ("approved", "person")
    undone = await post(ada, f"{at}/{one['id']}/undo")
    assert (undone["status"], undone["judged_by"], undone["judge_score"]) == (
        *("rejected", "judge"),
        1.0,
    )


async def test_a_judge_without_a_number_is_listed_as_failed(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run = await judged(effect_setup, ada, ["lovely"])
    at = f"pipeline-runs/{run['id']}"
    (one,) = (await ada.get(f"{at}/candidates"))["candidates"]
    (failure,) = (await ada.get(f"{at}/failures"))["failures"]
    assert (failure["is_judge"], failure["parent"], failure["step"]) == (True, one["id"], "Base")
    assert one["judge_error"] == failure["error"]
    assert "the judge returned no score" in one["judge_error"]
    assert run["steps"][0]["waiting"] == 1


async def test_what_is_wrong_with_a_judge_is_answered_before_anything_runs(
    ada: Customer,
) -> None:
    judge = {**JUDGE, "workflow": "nothing", "reject_below": 7}
    step = {"name": "Base", "workflow": "draw", "judge": judge}
    document = json.dumps({"name": "Wrong", "steps": [step]})
    refused = await post(ada, "pipelines", 422, document=document)
    told = {(each["step"], each["field"]) for each in refused["error"]["details"]["problems"]}
    assert told == {("Base", "judge.workflow"), ("Base", "judge.reject_below")}
    assert (await ada.get("pipelines"))["pipelines"] == []
