"""Pipelines by the customers' API: a run from its start to its tree, judged on the way."""

import asyncio
import json
from datetime import datetime
from typing import Any

import pytest
from tests.support.server.customers import (
    DRAWN,
    DRAWN_PROPERTIES,
    Customer,
    EffectSetup,
    png,
)

from comfyfleet.server.http.public import pipelines
from comfyfleet.server.maintenance.sweeps import advance_pipelines
from comfyfleet.server.pipelines import store_candidates
from comfyfleet.server.pipelines.run_state import STUCK_RUN_KIND

LIVE_SECONDS = 6.0  # long enough for all that happens while somebody reads
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


async def work_off(effect_setup: EffectSetup, worker_id: str = "w1") -> None:
    async with effect_setup.fleet_setup.worker(worker_id) as worker:
        for number in range(20):
            for _, pool in effect_setup.plane.pools.items():
                await advance_pipelines(effect_setup.plane.context, pool)
            polled = await worker.poll(wait_seconds=0)
            if polled["job"] is None:
                return
            done = await worker.deliver(polled["job"], png(colour=number))
            assert done.status_code == 200, done.text
    raise AssertionError("still not done")


async def test_no_time_is_left_for_children_of_what_was_rejected(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ten_seconds(*_: Any, **__: Any) -> float:
        return 10.0

    monkeypatch.setattr(store_candidates, "mean_seconds", ten_seconds)
    base = {"name": "Base", "workflow": "draw", "needs_approval": True}
    invert = {
        "name": "Invert",
        "workflow": "invert",
        "properties": {"input": "{{ parent.file }}"},
        "children_per_parent": 2,
    }
    document = {"name": "Approved", "steps": [base, invert]}
    made = await post(ada, "pipelines", 201, document=document)
    run = await post(ada, f"pipelines/{made['id']}/runs", 201, base_candidates=2)
    at = f"pipeline-runs/{run['id']}"
    await work_off(effect_setup)
    waits = await ada.get(at)
    assert (waits["reason"], waits["seconds_left"]) == ("waiting_for_judgement", 40)
    one, other = (await ada.get(f"{at}/candidates"))["candidates"]
    await post(ada, f"{at}/candidates/{one['id']}/approve")
    await post(ada, f"{at}/candidates/{other['id']}/reject")
    assert (await ada.get(at))["seconds_left"] == 20
    await work_off(effect_setup, "w2")
    over = await ada.get(at)
    assert (over["reason"], over["seconds_left"]) == ("complete", 0)


async def test_a_variable_may_name_media_of_the_user_and_of_nobody_else(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    step = {
        "name": "Invert",
        "workflow": "invert",
        "properties": {"input": "{{ variables.photo }}"},
    }
    bob, media_id = await effect_setup.customer(ada.tenant_id), await ada.video()
    document = {"name": "Own", "steps": [step]}
    made = await post(ada, "pipelines", 201, document=document)
    body = {
        "base_candidates": 1,
        "variables": {"photo": media_id},
        "idempotency_key": made["id"],
    }
    run = await post(ada, f"pipelines/{made['id']}/runs", 201, **body)
    again = await post(ada, f"pipelines/{made['id']}/runs", 200, **body)
    assert again["variables"] == run["variables"]
    assert run["variables"]["photo"] != media_id
    changed = {"variables": {"photo": media_id}}
    answer = await ada.client.patch(f"/api/pipeline-runs/{run['id']}", json=changed)
    assert answer.json()["variables"] == run["variables"]
    await work_off(effect_setup)
    assert (await ada.get(f"pipeline-runs/{run['id']}"))["reason"] == "complete"
    of_bob = await post(bob, "pipelines", 201, document=document)
    refused = await post(bob, f"pipelines/{of_bob['id']}/runs", 422, **body)
    assert refused["error"]["details"]["field"] == "variables.photo"


ONE_DRAWING = {"name": "One", "steps": [{"name": "Base", "workflow": "draw"}]}


async def test_a_credit_lets_a_stuck_run_go_on_at_once(effect_setup: EffectSetup) -> None:
    admin = effect_setup.fleet_setup.admin
    await admin.patch("/api/admin/workflows/draw", json={"price_tokens": 2})
    poor = await effect_setup.customer(tokens=0)
    made = await post(poor, "pipelines", 201, document=ONE_DRAWING)
    run = await post(poor, f"pipelines/{made['id']}/runs", 201, base_candidates=1)
    at = f"pipeline-runs/{run['id']}"
    await work_off(effect_setup)
    stuck = await poor.get(at)
    assert (stuck["trouble"], stuck["trouble_seconds"]) == ("Insufficient token balance.", 0)
    checked = await post(poor, f"{at}/check")
    assert (checked["trouble"], checked["trouble_seconds"]) == (stuck["trouble"], None)
    await work_off(effect_setup, "w2")
    assert (await poor.get(at))["trouble_seconds"] == 0
    wallet = f"/api/admin/tenants/{poor.tenant_id}/wallets/{poor.user_id}/credits"
    paid = await admin.post(wallet, json={"amount": 5, "provider_transaction_id": run["id"]})
    assert paid.status_code == 201, paid.text
    assert (await poor.get(at))["trouble_seconds"] is None
    await work_off(effect_setup, "w3")
    assert (await poor.get(at))["reason"] == "complete"
    stranger = await effect_setup.customer()
    await post(stranger, f"{at}/check", 404)


async def test_changes_of_workflows_effects_and_workers_wake_stuck_runs(
    effect_setup: EffectSetup,
) -> None:
    fleet_setup, woken = effect_setup.fleet_setup, list[str]()
    notifier = effect_setup.plane.context.notifier
    notifier.subscribe_runs(STUCK_RUN_KIND, lambda: woken.append("woken"))
    for act in (
        fleet_setup.register_workflow("draw", document=DRAWN, properties=DRAWN_PROPERTIES),
        fleet_setup.admin.patch("/api/admin/workflows/draw", json={"price_tokens": 0}),
        fleet_setup.admin.post("/api/admin/workflows/draw/resume"),
        fleet_setup.admin.post("/api/admin/effects/draw/publish"),
        fleet_setup.assign("invert", "draw"),
        fleet_setup.register("w9"),
        fleet_setup.admin.post("/api/admin/workers/w9/undrain"),
    ):
        woken.clear()
        answer = await act
        assert answer.is_success, answer.text
        assert woken == ["woken"], answer.url


async def test_a_run_by_the_api_from_start_to_tree(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run_id = await started(ada)
    await work_off(effect_setup)
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


async def test_candidates_are_judged_and_compared_by_the_api(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run_id = await started(ada)
    await work_off(effect_setup)
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


async def test_a_picture_is_followed_back_to_its_base_and_pairs_are_skipped_and_tied(
    effect_setup: EffectSetup, ada: Customer
) -> None:
    run_id = await started(ada, base=3)
    await work_off(effect_setup)
    at = f"pipeline-runs/{run_id}"
    children = (await ada.get(f"{at}/candidates", step=1))["candidates"]
    (one, two), first = children[:2], await ada.get(f"{at}/pair", step=1)
    assert (first["votes"], first["votes_enough"]) == (0, 3)
    seen = [each["id"] for each in first["candidates"]]
    later = await ada.get(f"{at}/pair", step=1, skipped=seen)
    assert {each["id"] for each in later["candidates"]} != set(seen)
    tie = await post(ada, f"{at}/vote", winner=one["id"], loser=two["id"], is_tie=True)
    assert set(tie["scores"].values()) == {1000.0}
    await post(ada, f"{at}/candidates/{one['parent']}/winner")
    await post(ada, f"{at}/candidates/{two['id']}/reject")
    best = await ada.get(f"{at}/candidates", best=True, limit=5)
    shown = [(each["status"], each["step"]) for each in best["candidates"]]
    assert shown == [("winner", 0), ("active", 1), ("active", 1), ("active", 0), ("active", 0)]
    assert best["next"] is None
    lineage = await ada.get(f"{at}/candidates/{one['id']}/lineage")
    assert [each["id"] for each in lineage["candidates"]] == [one["id"], one["parent"]]
    assert all(each["url"] for each in lineage["candidates"])
    assert (lineage["won"], lineage["lost"], lineage["tied"]) == (0, 0, 1)
    run = await ada.get(at)
    assert run["last_event_id"] > 0
    assert [(each["needs_approval"], each["waiting"]) for each in run["steps"]] == [(False, 0)] * 2


async def test_a_run_is_paused_changed_and_cancelled_by_the_api(
    effect_setup: EffectSetup, ada: Customer
) -> None:
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


async def told(customer: Customer, run_id: str, *, after: int = 0) -> list[Any]:
    """(id, kind, data) of each event, until the stream is let go."""
    headers = {"Last-Event-ID": str(after)} if after else {}
    answer = await customer.client.get(f"/api/pipeline-runs/{run_id}/events", headers=headers)
    assert answer.headers["content-type"].startswith("text/event-stream")
    begin, *events = [each for each in answer.text.split("\n\n") if each]
    assert begin == "retry: 2000"
    fields = [dict(line.split(": ", 1) for line in each.splitlines()) for each in events]
    return [(int(each["id"]), each["event"], json.loads(each["data"])) for each in fields]


async def test_the_stream_tells_what_happened_and_to_whom(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "STREAM_SECONDS_MAX", 0.2)
    run_id = await started(ada, base=1)
    await work_off(effect_setup)
    (one,) = (await ada.get(f"pipeline-runs/{run_id}/candidates", step=0))["candidates"]
    at = f"pipeline-runs/{run_id}/candidates/{one['id']}"
    for act in ("approve", "reject", "undo"):
        await post(ada, f"{at}/{act}")
    await ada.client.patch(f"/api/pipeline-runs/{run_id}", json={"limits": {"tokens": 9}})
    await post(ada, f"pipeline-runs/{run_id}/pause")
    events = await told(ada, run_id)
    kinds = [kind for _, kind, _ in events]
    assert kinds == [
        *("started", "submitted", "candidates", "submitted", "candidates", "no_work"),
        *("approved", "rejected", "undone", "changed", "paused"),
    ]
    ids = [number for number, _, _ in events]
    assert ids == sorted(set(ids))
    data = [each for _, _, each in events]
    assert all(datetime.fromisoformat(each["at"]).tzinfo for each in data)
    assert data[0]["base_candidates"] == 1
    assert data[0]["limits"]["concurrent_jobs"] == 1
    assert (data[1]["step"], data[1]["parent"]) == (0, None)
    assert data[2]["candidates"] == [one["id"]]
    assert data[2]["job_id"] == data[1]["job_id"] == one["job_id"]
    assert (data[3]["step"], data[3]["parent"]) == (1, one["id"])
    assert data[5]["reason"] == "complete"
    assert (data[6]["candidate_id"], data[6]["before"]) == (one["id"], "active")
    assert (data[8]["before"], data[8]["after"]) == ("rejected", "approved")
    assert data[9]["limits"] == {"tokens": 9}
    assert {each["user_id"] for each in data if "user_id" in each} == {str(ada.user_id)}
    rest = await told(ada, run_id, after=ids[-3])
    assert rest == events[-2:]


async def test_the_stream_tells_failures_votes_and_what_comes_while_it_is_read(
    effect_setup: EffectSetup, ada: Customer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "STREAM_SECONDS_MAX", 0.2)
    run_id = await started(ada, base=2)
    await advance_pipelines(effect_setup.plane.context, effect_setup.plane.pools["main"])
    await effect_setup.fail("RuntimeError: out of memory")
    await advance_pipelines(effect_setup.plane.context, effect_setup.plane.pools["main"])
    events = await told(ada, run_id)
    failed = next(data for _, kind, data in events if kind == "job_failed")
    assert (failed["step"], failed["job_id"]) == (0, events[1][2]["job_id"])
    assert failed["error"]
    monkeypatch.setattr(pipelines, "STREAM_SECONDS_MAX", LIVE_SECONDS)
    reading = asyncio.create_task(told(ada, run_id, after=events[-1][0]))
    await post(ada, f"pipeline-runs/{run_id}/retry", job_id=failed["job_id"])
    await work_off(effect_setup)
    pair = [
        each["id"] for each in (await ada.get(f"pipeline-runs/{run_id}/pair", step=0))["candidates"]
    ]
    vote = await post(ada, f"pipeline-runs/{run_id}/vote", winner=pair[0], loser=pair[1])
    await post(ada, f"pipeline-runs/{run_id}/votes/{vote['id']}/undo")
    await post(ada, f"pipeline-runs/{run_id}/candidates/{pair[0]}/winner")
    await post(ada, f"pipeline-runs/{run_id}/cancel")
    seen = {kind: data for _, kind, data in await reading}
    assert seen["retried"]["jobs"] == [failed["job_id"]]
    assert (seen["voted"]["winner"], seen["voted"]["loser"]) == tuple(pair)
    assert seen["voted"]["vote_id"] == seen["vote_undone"]["vote_id"] == vote["id"]
    assert seen["crowned"]["candidate_id"] == pair[0]
    assert seen["cancelled"]["jobs_cancelled"] == 0
