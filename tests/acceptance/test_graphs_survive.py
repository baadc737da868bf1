"""A graph over three engines as real processes: one is offline, one is killed, and so are we."""

import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.jobs.counted_jobs import FLEET
from tests.support.jobs.large_graph import GraphCustomer, check_the_end, document, prepare
from tests.support.server.admin_client import until
from tests.support.server.deployment import Deployment
from tests.unit.graphs.builders import EXAMPLES

from comfyfleet.api.documents import read_document

SETTINGS = {
    "lease_seconds": "4",
    "heartbeat_seconds": "1",
    "sweep_seconds": "0.5",
    "outage_seconds": "30",
    "offline_after_seconds": "25",
    "max_attempts": "9",
    "calls_per_second": "1000",
    "calls_at_once": "1000",
}
END_SECONDS_MAX = 120.0


def runs_on(customer: GraphCustomer, run_id: str, node: str) -> bool:
    found = [each for each in customer.run(run_id)["executions"] if each["node"] == node]
    return any(each["status"] == "running" for each in found)


def die_and_rise(deployment: Deployment, seconds: float) -> None:
    time.sleep(seconds)
    deployment.restart_control()


async def test_a_graph_ends_with_the_right_pictures_whatever_dies(tmp_path: Path) -> None:
    # Soon: the node that is bound to the killed worker waits for it until then.
    settings = {**SETTINGS, "offline_after_seconds": "8"}
    async with Deployment(tmp_path, None, **settings) as deployment:
        secret, customer = prepare(deployment)
        engines = deployment.start_engines("engine-1", "engine-2", "engine-3")
        workers = [
            deployment.start_worker(f"worker-{number}", engine, fleet=FLEET, secret=secret)
            for number, engine in enumerate(engines, 1)
        ]
        until(lambda: len(deployment.admin.worker_ids()) == 3, seconds=60)
        graph_id = customer.stored(document("worker-3", "worker-2"))
        workers[2].process.terminate()
        assert workers[2].process.wait() == 0
        run_id = customer.started(graph_id, "one")
        assert customer.run(run_id)["status"] == "waiting_for_user"
        until(lambda: runs_on(customer, run_id, "bound"), seconds=30, look_seconds=0.02)
        workers[1].process.kill()
        engines[1].process.kill()
        (question,) = customer.run(run_id)["questions"]
        assert question["message"] == "Backend worker:worker-3 is offline"
        customer.ask(
            "POST", f"graph-runs/{run_id}/answer", choice="backend", backend="worker:worker-1"
        )
        check_the_end(customer, customer.finished(run_id, seconds=END_SECONDS_MAX))


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="2-times"), pytest.param(20, id="20-times", marks=pytest.mark.slow)],
)
async def test_a_control_plane_that_is_killed_goes_on_from_where_it_was(
    tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)
    async with Deployment(tmp_path, None, **{**SETTINGS, "lease_seconds": "30"}) as deployment:
        secret, customer = prepare(deployment)
        engines = deployment.start_engines("engine-1", "engine-2", "engine-3")
        for number, engine in enumerate(engines, 1):
            deployment.start_worker(f"worker-{number}", engine, fleet=FLEET, secret=secret)
        until(lambda: len(deployment.admin.worker_ids()) == 3, seconds=60)
        graph_id, runs, left = customer.stored(document("worker-3", "worker-2")), 0, kills
        while left > 0:
            runs += 1
            run_id = customer.started(graph_id, f"run-{runs}")
            while left > 0 and customer.run(run_id)["status"] == "running":
                die_and_rise(deployment, chance.uniform(0, 0.5))
                left -= 1
            check_the_end(customer, customer.finished(run_id, seconds=END_SECONDS_MAX), runs)


def register_examples(deployment: Deployment) -> None:
    registered = read_document((EXAMPLES / "properties.yaml").read_text("utf-8"))
    for slug, fields in registered.items():
        file = EXAMPLES / fields.pop("file", f"workflows/{slug}.json")
        body = {"slug": slug, "document": json.loads(file.read_text("utf-8")), **fields}
        deployment.admin.ask("POST", "/api/admin/workflows", json=body)
    deployment.admin.assign(FLEET, *registered)


def uploaded(customer: GraphCustomer, path: Path) -> str:
    data = path.read_bytes()
    announced = customer.ask(
        "POST", "videos/uploads", filename=path.name, size=len(data), content_type="image/png"
    )
    put = announced["upload"]
    httpx.request(
        put["method"], put["url"], headers=put["headers"], content=data
    ).raise_for_status()
    return str(announced["file_id"])


def example_run(customer: GraphCustomer, name: str, **inputs: Any) -> str:
    document = (EXAMPLES / f"graphs/{name}.yaml").read_text("utf-8")
    return str(customer.ask("POST", "graph-runs", document=document, inputs=inputs)["id"])


# Each with its inputs (a text names a photo), and how many jobs of which price it must have had.
DECIDING: dict[str, tuple[dict[str, Any], int]] = {
    "best-of-eight": ({}, 8 * 2),
    "refine-until-sharp": ({"photo": "photo", "sharp_enough": 9.0}, 4 * 3),
    "caption-then-decide": ({"photo": "photo"}, 3),
    "album-with-approval": ({"photos": ["photo", "photo"]}, 2 * 3),
    "batch-from-csv": (
        {"rows": [{"name": "sky", "width": 64, "height": 32, "colour": 255}] * 3},
        3 * 2,
    ),
}


@pytest.mark.slow
async def test_graphs_that_decide_go_on_when_their_control_plane_is_killed(tmp_path: Path) -> None:
    """Each of the examples is cut several times in its middle, and everything is paid for once."""
    chance = random.Random(1)
    async with Deployment(tmp_path, None, **{**SETTINGS, "lease_seconds": "30"}) as deployment:
        secret, customer = prepare(deployment)
        register_examples(deployment)
        for number, engine in enumerate(deployment.start_engines("engine-1", "engine-2"), 1):
            deployment.start_worker(f"worker-{number}", engine, fleet=FLEET, secret=secret)
        until(lambda: len(deployment.admin.worker_ids()) == 2, seconds=60)
        customer.stored(read_document((EXAMPLES / "graphs/one-row.yaml").read_text("utf-8")))
        photo = uploaded(customer, EXAMPLES / "inputs/photo.png")
        for name, (given, price) in DECIDING.items():
            before = customer.balance()
            inputs = json.loads(
                json.dumps(given).replace('"photo", "photo"', f'"{photo}", "{photo}"')
            )
            inputs |= {"photo": photo} if "photo" in given else {}
            run_id = example_run(customer, name, **inputs)
            for _ in range(3):
                die_and_rise(deployment, chance.uniform(0, 0.4))
            if name == "album-with-approval":
                until(lambda: bool(customer.run(run_id)["questions"]), seconds=END_SECONDS_MAX)  # noqa: B023
                customer.ask("POST", f"graph-runs/{run_id}/answer", choice="approve", picked=[1])
                deployment.restart_control()
            ended = customer.finished(run_id, seconds=END_SECONDS_MAX)
            assert ended["status"] == "completed", ended["error"]
            assert ended["tokens"] == price, name
            assert customer.balance() == before - price, name
