"""Programs written from descriptions alone: a worker, a front end, a pipeline and a graph.

All jobs run on the worker of `from_text`, which knows nothing else of comfyfleet.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.acceptance.from_text.front_end import FrontEnd
from tests.support.server.command_process import started
from tests.support.server.commands import EXAMPLES, comfyfleet
from tests.support.server.local_server import KEY
from tests.unit import saved_files

from comfyfleet.engine import serve_in_thread

WORKER = Path(__file__).parent / "from_text" / "worker.py"
PHOTO = (EXAMPLES / "inputs" / "photo.png").read_bytes()
SOFTEN = json.loads((EXAMPLES / "workflows" / "soften.json").read_text())
NEGATIVE = json.loads((EXAMPLES / "workflows" / "negative.json").read_text())
COPY = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "{{INPUT_VIDEO}}"}},
    "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "copy"}},
}
BROKEN = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "{{INPUT_VIDEO}}"}},
    "2": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "no face was found", "after_ms": 0, "value": ["1", 0]},
    },
    "9": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "x"}},
}
INPUT = {"name": "input", "type": "image", "placeholder": "{{INPUT_VIDEO}}"}
WIDTH = {"name": "width", "type": "integer", "binding": "2.width"}
WORKFLOWS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "copy": (COPY, [INPUT]),
    "broken": (BROKEN, [INPUT]),
    "soften": (SOFTEN, [{"name": "input", "type": "image", "binding": "1.image"}]),
    "negative": (NEGATIVE, [WIDTH]),
}
PRICE, TOKENS = 4, 200
WAIT_SECONDS_MAX = 90.0


@dataclass
class Service:
    url: str
    admin_key: str
    front_end: FrontEnd
    key: str

    def admin(self, method: str, path: str, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        url = f"{self.url}/api/admin/{path}"
        answer = httpx.request(method, url, json=body or None, headers=headers, timeout=30)
        assert answer.status_code < 300, answer.text
        return answer.json()

    def balance(self) -> int:
        found: int = self.front_end.call("GET", "wallet")["balance"]
        return found


@contextmanager
def running_worker(url: str, secret: str, comfyui: str) -> Iterator[None]:
    environ = {
        "PATH": os.environ["PATH"],
        "BACKEND_URL": url,
        "FLEET_SECRET": secret,
        "COMFYUI_URL": comfyui,
        "WORKER_ID": "i-worker",
        "WORKFLOW_SLUGS": ",".join(WORKFLOWS),
    }
    command = [sys.executable, str(WORKER)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environ, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    try:
        yield
        out, _ = process.communicate("", timeout=WAIT_SECONDS_MAX)
        assert out.endswith("deregistered\n"), "it leaves by itself"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    with ExitStack() as stack:
        up = stack.enter_context(started("up", "--port", "0", "--no-worker", folder=folder))
        comfyui = stack.enter_context(serve_in_thread(data=folder / "engine"))
        url, key = up.wait_for_line(KEY).groups()
        service = Service(url, key, FrontEnd(url, ""), "")
        secret = _fleet(service)
        tenant = service.admin("POST", "tenants", name="Ada")
        wallet = f"tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
        service.admin("POST", wallet, amount=TOKENS, provider_transaction_id="paid")
        service.front_end, service.key = FrontEnd(url, tenant["key"]), tenant["key"]
        stack.callback(service.front_end.http.close)
        stack.enter_context(running_worker(url, secret, comfyui.url))
        yield service


def _fleet(service: Service) -> str:
    secret: str = service.admin("POST", "fleets", slug="gpu", stage="production")["secret"]
    for slug, (document, properties) in WORKFLOWS.items():
        given = {"slug": slug, "document": document, "properties": properties}
        service.admin("POST", "workflows", **given, price_tokens=PRICE)
    slugs = [*WORKFLOWS]
    service.admin("PUT", "fleets/gpu/production/workflows", workflow_slugs=slugs)
    for slug in ("copy", "broken"):
        given = {"slug": slug, "workflow_id": slug, "credits_cost": PRICE}
        service.admin("POST", "effects", **given, published=True)
    return secret


def test_a_front_end_and_a_worker_take_a_job_from_upload_to_result(service: Service) -> None:
    front_end, before = service.front_end, service.balance()
    effect = front_end.effect("copy")
    assert effect["last_processing_time_seconds"] is None
    video_id = front_end.upload(PHOTO)
    job = front_end.submit(effect["id"], video_id)
    video = front_end.ended(video_id)
    assert video["status"] == "completed", video
    shown = service.admin("GET", f"jobs/{job['id']}")
    assert re.fullmatch(r"[0-9a-f-]{36}", shown["provider_job_id"]), "ComfyUI's id of the run"
    assert shown["prompt_id"] is None, "no client of the gateway sent it"
    result = front_end.http.get(video["processed_file_url"])
    assert result.headers["content-type"] == "image/png"
    assert result.content.startswith(saved_files.png({})[:8])
    assert service.balance() == before - PRICE
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while front_end.effect("copy")["last_processing_time_seconds"] is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_failure_of_the_worker_reaches_the_front_end_and_is_refunded(service: Service) -> None:
    front_end, before = service.front_end, service.balance()
    video_id = front_end.upload(PHOTO)
    front_end.submit(front_end.effect("broken")["id"], video_id)
    video = front_end.ended(video_id)
    assert video["status"] == "failed"
    assert "no face was found" in video["error"]
    assert service.balance() == before


GRAPH = {
    "name": "Two ways",
    "nodes": [
        {
            "id": "photo",
            "type": "INPUT",
            "config": {"value_type": "image"},
            "position": {"x": 40, "y": 80},
        },
        {
            "id": "copied",
            "type": "WORKFLOW",
            "workflow_id": "copy",
            "backend_affinity": "i-worker",
            "fallback_strategy": "ASK_USER",
        },
        {
            "id": "any",
            "type": "CONDITION",
            "config": {"expression": "output.images.count > 0 AND output.images.exists"},
        },
        {"id": "twice", "type": "FANOUT", "config": {"mode": "broadcast", "output_count": 2}},
        {"id": "first", "type": "WORKFLOW", "workflow_id": "soften"},
        {"id": "second", "type": "WORKFLOW", "workflow_id": "copy"},
        {"id": "both", "type": "MERGE", "config": {"mode": "concat_images"}},
        {"id": "made", "type": "OUTPUT"},
    ],
    "connections": [
        {"from": "photo", "to": "copied"},
        {"from": "copied", "to": "any"},
        {"from": "any.true", "to": "twice"},
        {"from": "twice.output_0", "to": "first"},
        {"from": "twice.output_1", "to": "second.input"},
        {"from": "first", "to": "both"},
        {"from": "second", "to": "both"},
        {"from": "both.images", "to": "made"},
    ],
}


def test_a_graph_in_the_spelling_of_its_description_runs(service: Service) -> None:
    call = service.front_end.call
    stored = call("POST", "graphs", **GRAPH)
    document = call("GET", f"graphs/{stored['id']}")["document"]
    assert not re.search(
        r"INPUT\b|WORKFLOW|workflow_id|ASK_USER|config|expression|position", str(document)
    )
    run = call("POST", f"graphs/{stored['id']}/runs", inputs={"photo": _file(service)})
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while (seen := call("GET", f"graph-runs/{run['id']}"))["status"] in ("pending", "running"):
        assert time.monotonic() < deadline, seen
        time.sleep(0.2)
    assert seen["status"] == "completed", seen
    assert len(seen["outputs"]["made"]["images"]) == 2


def _file(service: Service) -> str:
    body = {"filename": "photo.png", "content_type": "image/png", "size": len(PHOTO)}
    made = service.front_end.call("POST", "videos/uploads", **body)
    put = service.front_end.http.put(
        made["upload"]["url"], content=PHOTO, headers=made["upload"]["headers"]
    )
    assert put.status_code in (200, 201)
    return str(made["file_id"])


PIPELINE = """
name: Gym shoot
steps:
  - name: Base
    workflow: negative
    properties: {width: "{{ variables.width }}"}
  - name: Face fix
    workflow_id: copy
    children_per_parent: 2
"""


def test_a_pipeline_makes_candidates_and_names_their_files(
    service: Service, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    environ = {"COMFYFLEET_URL": service.url, "COMFYFLEET_KEY": service.key}
    given = ("--base", "2", "--set", "width=32", "--folder", "runs/gym-shoot")
    ran = comfyfleet("pipeline", "run", str(file), *given, "--wait", environ=environ)
    assert ran.code == 0, ran.err
    run_id = ran.out.strip()
    saved = comfyfleet("pipeline", "export", run_id, "-o", str(tmp_path), environ=environ)
    assert saved.code == 0, saved.err
    found = sorted((tmp_path / "runs").rglob("*.png"))
    assert len(found) == 2 + 4
    assert all(re.fullmatch(r"[0-9a-f-]{36}_[0-9]{14}\.png", path.name) for path in found)
    steps = {path.parent.relative_to(tmp_path).as_posix() for path in found}
    assert steps == {"runs/gym-shoot/base", "runs/gym-shoot/face-fix"}
