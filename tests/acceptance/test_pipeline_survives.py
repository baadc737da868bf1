"""A three-step pipeline with a judge on two engines, whose control plane and workers are killed on the way."""

import json
import os
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
import pytest
from tests.support.server.admin_client import until
from tests.support.server.deployment import Deployment, EngineProcess

FLEET = "gpus"
STEP_MS = 50
PRICES = {"draw": 3, "fix": 2, "upscale": 1}
JUDGE, JUDGE_PRICE = "measure", 1
# 6 + 12 + 12 candidates.
BASE, CANDIDATES = 6, [6, 12, 12]
TOKENS = 1000
SETTINGS = {
    "lease_seconds": "5",
    "heartbeat_seconds": "1",
    "sweep_seconds": "0.5",
    "outage_seconds": "2",
    "max_attempts": "12",
}
END_SECONDS_MAX = 150.0
STEPS = {
    "class_type": "ComfyfleetSteps",
    "inputs": {"steps": 4, "step_ms": STEP_MS, "previews": False, "image": ["1", 0]},
}
SAVE = {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}}
DRAW = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 16, "height": 16, "batch_size": 1, "color": 0},
    },
    "2": STEPS,
    "3": SAVE,
}
CHANGE = {"1": {"class_type": "LoadImage", "inputs": {"image": "x.png"}}, "2": STEPS, "3": SAVE}
MEASURE = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "x.png"}},
    "2": {"class_type": "ComfyfleetMeasure", "inputs": {"image": ["1", 0], "measure": "exposure"}},
}
PICTURE = {"name": "input", "type": "image", "binding": "1.image", "required": True}
STEP_COUNT = {"name": "steps", "type": "integer", "binding": "2.steps", "default": 4}
PIPELINE = {
    "name": "Base, fix, upscale",
    "steps": [
        {
            "name": "Base",
            "workflow": "draw",
            "timeout": 120,
            "judge": {
                "workflow": JUDGE,
                "property": "input",
                "approve_above": 0,
                "timeout": 120,
            },
        },
        {
            "name": "Fix",
            "workflow": "fix",
            "properties": {"input": "{{ parent.file }}"},
            "children_per_parent": 2,
            "timeout": 120,
        },
        {
            "name": "Upscale",
            "workflow": "upscale",
            "properties": {"input": "{{ parent.file }}"},
            "timeout": 120,
        },
    ],
}


class Customer:
    """Waits out a control plane that is away."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=20
        )

    def close(self) -> None:
        self._http.close()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self._http.post(f"/api/{path}", json=body)
        assert answer.is_success, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_there() -> bool:
            try:
                answer = self._http.get(f"/api/{path}", params=query)
            except httpx.TransportError:
                return False
            found.update(answer.json() if answer.is_success else {})
            return answer.is_success

        until(is_there, seconds=30)
        return found

    def fetch(self, url: str) -> bytes:
        return self._http.get(url).content


def prepared(deployment: Deployment) -> tuple[str, Customer]:
    """The fleet's secret, and a customer with tokens."""
    deployment.start_control()
    secret = deployment.admin.create_fleet(FLEET)
    for slug, price in PRICES.items():
        is_first = slug == "draw"
        body = {
            "slug": slug,
            "document": DRAW if is_first else CHANGE,
            "properties": [STEP_COUNT] if is_first else [PICTURE, STEP_COUNT],
            "output_node_id": "3",
            "price_tokens": price,
        }
        deployment.admin.ask("POST", "/api/admin/workflows", json=body)
    judge = {
        "slug": JUDGE,
        "document": MEASURE,
        "properties": [PICTURE],
        "output_node_id": "2",
        "price_tokens": JUDGE_PRICE,
    }
    deployment.admin.ask("POST", "/api/admin/workflows", json=judge)
    deployment.admin.assign(FLEET, *PRICES, JUDGE)
    tenant = deployment.admin.ask("POST", "/api/admin/tenants", json={"name": "studio"})
    wallet = f"/api/admin/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    deployment.admin.ask("POST", wallet, json={"amount": TOKENS, "provider_transaction_id": "p"})
    return secret, Customer(deployment.url, tenant["key"])


def made(customer: Customer, run_id: str) -> int:
    return sum(each["made"] for each in customer.get(f"pipeline-runs/{run_id}")["steps"])


def kill_on_the_way(
    deployment: Deployment,
    customer: Customer,
    run_id: str,
    engines: list[EngineProcess],
    secret: str,
    kills: int,
) -> None:
    """Every other time the control plane, every other time a worker, as the run goes on."""
    workers = [
        deployment.start_worker(f"w{number}", engine, fleet=FLEET, secret=secret)
        for number, engine in enumerate(engines)
    ]
    per_kill = sum(CANDIDATES) // (kills + 1)
    for number in range(kills):
        wanted = (number + 1) * per_kill
        until(
            lambda wanted=wanted: made(customer, run_id) >= wanted,  # type: ignore[misc]
            seconds=END_SECONDS_MAX,
            what=lambda: json.dumps(customer.get(f"pipeline-runs/{run_id}")),
        )
        if number % 2:
            which = number // 2 % len(workers)
            workers[which].process.kill()
            workers[which] = deployment.start_worker(
                f"w{which}", engines[which], fleet=FLEET, secret=secret
            )
        else:
            deployment.restart_control()


def require_right(customer: Customer, run_id: str) -> None:
    run = customer.get(f"pipeline-runs/{run_id}")
    assert [each["made"] for each in run["steps"]] == CANDIDATES
    assert run["jobs"] == {"done": sum(CANDIDATES) + BASE}  # each of the base is judged once
    found = customer.get(f"pipeline-runs/{run_id}/candidates", limit=100)["candidates"]
    children = Counter(each["parent"] for each in found)
    for each in found:
        wanted = {0: 2, 1: 1, 2: 0}[each["step"]]
        assert each["child_count"] == children[each["id"]] == wanted
    assert children[None] == BASE
    assert len({each["path"] for each in found}) == len(found)
    judged = [(each["judged_by"], each["status"]) for each in found if each["step"] == 0]
    assert judged == [("judge", "approved")] * BASE
    for each in found:
        data = customer.fetch(each["url"])
        assert len(data) == each["size"]
        assert data.startswith(b"\x89PNG")
    spent = sum(count * price for count, price in zip(CANDIDATES, PRICES.values(), strict=True))
    spent += BASE * JUDGE_PRICE
    assert run["tokens"] == spent
    assert customer.get("wallet")["balance"] == TOKENS - spent
    require_paid_once(customer, {each["job_id"] for each in found}, spent)


def require_paid_once(customer: Customer, jobs: set[str], spent: int) -> None:
    lines = customer.get("wallet/transactions", limit=100)
    assert lines["next"] is None
    of_jobs = [each for each in lines["transactions"] if each["job_id"]]
    paid = {each["job_id"] for each in of_jobs}
    assert jobs < paid
    assert len(paid - jobs) == BASE  # the judge's
    assert Counter((each["job_id"], each["type"]) for each in of_jobs) == {
        (job_id, kind): 1 for job_id in paid for kind in ("JOB_RESERVE", "JOB_CONSUME")
    }
    assert sum(each["amount"] for each in of_jobs) == -spent


def require_no_file_without_a_candidate(
    deployment: Deployment, customer: Customer, run_id: str, objects: Path
) -> None:
    """What a killed worker had delivered and nobody accepted is a leftover: it goes when it is a day old."""
    found = customer.get(f"pipeline-runs/{run_id}/candidates", limit=100)["candidates"]
    wanted = {unquote(urlsplit(each["url"]).path).partition("/tenants/")[2] for each in found}
    assert len(wanted) == len(found)
    beside = next(iter(wanted)).rpartition("/")[0]
    (objects / "tenants" / beside / "output-lost.png").write_bytes(b"of a lease that was lost")
    assert wanted < objects_in(objects)
    two_days_ago = time.time() - 2 * 86_400
    for each in objects.rglob("*"):
        os.utime(each, (two_days_ago, two_days_ago))
    deployment.restart_control()  # a sweep's first pass is at once
    until(
        lambda: objects_in(objects) == wanted,
        seconds=30,
        what=lambda: str(sorted(objects_in(objects) - wanted)),
    )
    for each in customer.get(f"pipeline-runs/{run_id}/candidates", limit=100)["candidates"]:
        assert len(customer.fetch(each["url"])) == each["size"]


def objects_in(objects: Path) -> set[str]:
    """Of all tenants, of which there is one."""
    tenants = objects / "tenants"
    return {each.relative_to(tenants).as_posix() for each in tenants.rglob("*") if each.is_file()}


async def survived(folder: Path, kills: int) -> None:
    async with Deployment(folder, None, **SETTINGS) as deployment:
        secret, customer = prepared(deployment)
        with closing(customer):
            engines = deployment.start_engines("engine-a", "engine-b")
            pipeline = customer.post("pipelines", document=PIPELINE)
            run_id = customer.post(
                f"pipelines/{pipeline['id']}/runs",
                base_candidates=BASE,
                limits={"concurrent_jobs": 4},
            )["id"]
            kill_on_the_way(deployment, customer, run_id, engines, secret, kills)
            until(
                lambda: customer.get(f"pipeline-runs/{run_id}")["reason"] == "complete",
                seconds=END_SECONDS_MAX,
                what=lambda: json.dumps(customer.get(f"pipeline-runs/{run_id}")),
            )
            require_right(customer, run_id)
            require_no_file_without_a_candidate(
                deployment, customer, run_id, folder / "files" / "objects"
            )


async def test_a_pipeline_makes_its_thirty_candidates_though_processes_are_killed(
    tmp_path: Path,
) -> None:
    await survived(tmp_path, kills=2)


@pytest.mark.slow
async def test_a_pipeline_outlives_ten_kills(tmp_path: Path) -> None:
    await survived(tmp_path, kills=10)
