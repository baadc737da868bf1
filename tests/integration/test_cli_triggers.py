"""`comfyfleet triggers` as a client of a control plane that runs, with the built-in engine behind it."""

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.server.commands import EXAMPLES, Result, comfyfleet
from tests.support.server.local_server import LocalServer, local_server_in

from comfyfleet.api.webhooks import HEADER, sign

GRAPH = """
name: A square
nodes:
  - {id: width, type: input, value_type: integer, default: 40}
  - {id: draw, type: workflow, workflow: negative}
  - {id: picture, type: output}
connections:
  - {from: width.value, to: draw.width}
  - {from: draw.output, to: picture.value}
"""
SECONDS_MAX = 120


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


class Customer:
    def __init__(self, local_server: LocalServer) -> None:
        key = local_server.tenant(1_000)["key"]
        self.url = local_server.url
        self.environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": key}
        self.headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(
            f"{self.url}/api/graphs", json={"document": GRAPH}, headers=self.headers, timeout=60
        )
        assert answer.status_code == 201, answer.text

    def says(self, *arguments: str, code: int = 0) -> Result:
        done = comfyfleet("triggers", *arguments, environ=self.environ, width=250)
        assert done.code == code, done.out + done.err
        return done

    def made(self, name: str, *more: str) -> dict[str, Any]:
        usual = ("--graph", "A square", "--tokens-per-day", "100", "--json")
        found: dict[str, Any] = self.says("create", name, *more, *usual).json
        return found

    def ended(self, run_id: str) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            path = f"{self.url}/api/graph-runs/{run_id}"
            found: dict[str, Any] = httpx.get(path, headers=self.headers, timeout=60).json()
            if found["status"] in ("completed", "failed", "cancelled"):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.1)


@pytest.fixture
def customer(local_server: LocalServer) -> Customer:
    return Customer(local_server)


SOFT = """
name: Soft
nodes:
  - {id: photos, type: input, value_type: "image[]"}
  - {id: each, type: map, over: input.photos, do: {workflow: soften, properties: {input: "{{ item }}"}}}
  - {id: album, type: output}
connections:
  - {from: each.output.images, to: album.value}
"""


def test_a_schedule_uses_files_that_are_uploaded_with_it(customer: Customer) -> None:
    answer = httpx.post(
        f"{customer.url}/api/graphs", json={"document": SOFT}, headers=customer.headers, timeout=60
    )
    assert answer.status_code == 201, answer.text
    given = ("--graph", "Soft", "--tokens-per-day", "50", "--cron", "0 3 * * *", "--json")
    photo = EXAMPLES / "inputs" / "photo.png"
    missing = customer.says("create", "x", "--input", "photos=@no.png,", *given, code=1)
    assert "file no.png was not found" in missing.err
    made = customer.says("create", "nightly", "--input", f"photos=@{photo},", *given).json
    assert len(made["inputs"]["photos"]) == 1
    run_id = customer.says("fire", made["id"]).out.strip()
    assert customer.ended(run_id)["status"] == "completed"


def test_a_webhook_names_all_inputs_that_its_graph_needs(customer: Customer) -> None:
    document = {"document": SOFT.replace("name: Soft", "name: Softer")}
    httpx.post(f"{customer.url}/api/graphs", json=document, headers=customer.headers, timeout=60)
    given = ("--graph", "Softer", "--tokens-per-day", "50")
    refused = customer.says("create", "shop", *given, code=1)
    assert "photos: is required" in refused.err
    unknown = customer.says("create", "shop", "-i", "photos=body.a", "-i", "b=1", *given, code=1)
    assert "the graph has no input 'b'; available inputs: photos" in unknown.err
    customer.says("create", "shop", "--input", "photos=body.order.photos", *given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cron", "61 2 * * *"), "the minute of a schedule must be 0 to 59, not '61'"),
        (("--cron", "0 0 30 2 *"), "a day that the month has, not '30'"),
        (("--cron", "0 0 * * *", "--timezone", "Berlin"), "use a name such as Europe/Berlin"),
    ],
)
def test_a_schedule_that_is_none_is_refused_with_what_is_allowed(
    customer: Customer, options: tuple[str, ...], said: str
) -> None:
    usual = ("--graph", "A square", "--tokens-per-day", "100")
    assert said in customer.says("create", "x", *options, *usual, code=1).err


def test_a_webhook_makes_a_picture_of_what_it_is_sent(customer: Customer) -> None:
    made = customer.made("shop", "--input", "width=body.order.width")
    body = json.dumps({"order": {"width": 24}}).encode()
    now = int(time.time())
    sent = httpx.post(
        f"{customer.url}{made['path']}",
        content=body,
        headers={HEADER: sign(made["secret"], body, timestamp=now)},
        timeout=60,
    )
    assert sent.status_code == 202, sent.text
    run = customer.ended(sent.json()["run_id"])
    assert run["status"] == "completed", run["error"]
    assert run["inputs"] == {"width": 24}
    assert len(run["outputs"]["picture"]["files"]) == 1
    shown = customer.says("show", made["id"]).out
    assert "webhook at /hooks/" in shown
    assert sent.json()["run_id"] in shown
    assert made["secret"] not in shown


def test_it_is_fired_by_hand_listed_paused_resumed_and_deleted(
    customer: Customer, tmp_path: Path
) -> None:
    made = customer.made("yearly", "--cron", "0 0 1 1 *", "--timezone", "Europe/Berlin")
    assert datetime.fromisoformat(made["next_at"]).astimezone(UTC).hour == 23
    [listed] = customer.says("list", "--json").json
    assert listed["id"] == made["id"]
    run_id = customer.says("fire", made["id"]).out.strip()
    assert customer.ended(run_id)["status"] == "completed"
    customer.says("pause", made["id"])
    assert "paused" in customer.says("show", made["id"]).out
    customer.says("resume", made["id"])
    assert "next at" in customer.says("show", made["id"]).out
    customer.says("delete", made["id"])
    assert customer.says("list", "--json").json == []
    body = tmp_path / "order.json"
    body.write_text('{"width": "wide"}')
    hook = customer.made("shop", "--input", "width=body.width")
    refused = customer.says("fire", hook["id"], "--body", f"@{body}", code=1)
    assert "width" in refused.err
    plain = customer.says("create", "plain", "--graph", "A square", "--tokens-per-day", "5").out
    trigger_id, address, secret = plain.splitlines()
    assert address == f"{customer.url}/hooks/{trigger_id}"
    assert secret.startswith("hook_")


def test_a_trigger_is_found_by_its_name(customer: Customer) -> None:
    made = customer.made("daily", "--cron", "0 0 * * *")
    assert "daily: 0 0 * * *" in customer.says("show", "daily").out
    customer.says("pause", "daily")
    assert "paused" in customer.says("show", made["id"]).out
    unknown = customer.says("show", "weekly", code=1).err
    assert "trigger 'weekly' was not found" in unknown
    assert "comfyfleet triggers list" in unknown
    customer.made("daily", "--cron", "0 1 * * *")
    assert "2 triggers are named 'daily'; use an id" in customer.says("delete", "daily", code=1).err
    customer.says("delete", made["id"])
    customer.says("delete", "daily")
    assert customer.says("list", "--json").json == []
