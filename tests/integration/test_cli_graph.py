"""`comfyfleet graph` as a client of a control plane that runs."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.acceptancekit.processes import Process, finish
from tests.awskit.ports import free_port

ADMIN_KEY = "a" * 64
GRAPH = """
name: A square
nodes:
  - {id: draw, type: workflow, workflow: draw}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: picture.value}
"""
PROMPT = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 40, "height": 40, "batch_size": 1, "color": 7},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "square"}},
}


@pytest.fixture
def customer(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Everything in one process, with a workflow and a customer's key in the environment."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    environ = {"COMFYFLEET_ADMIN_KEY": ADMIN_KEY}
    up = Process("up", "up", "--port", str(port), folder=tmp_path, environ=environ)
    try:
        up.hears(r"Control plane at|ready|http://")
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        with httpx.Client(base_url=f"{url}/api/admin", headers=headers, timeout=30) as admin:
            for _ in range(600):
                try:
                    if admin.get("/workers").json()["workers"]:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.1)
            body = {"slug": "draw", "document": PROMPT, "properties": [], "output_node_id": "2"}
            assert admin.post("/workflows", json=body).status_code == 201
            key = admin.post("/tenants", json={"name": "acme"}).json()["key"]
        yield {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
    finally:
        up.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by their group")
def test_a_graph_is_checked_run_watched_shown_and_exported(
    tmp_path: Path, customer: dict[str, str]
) -> None:
    file = tmp_path / "square.yaml"
    file.write_text(GRAPH)
    assert "flowchart" in finish("graph", "show", str(file), folder=tmp_path, environ=customer)
    finish("graph", "validate", str(file), folder=tmp_path, environ=customer)
    said = finish("graph", "run", str(file), "--watch", "--json", folder=tmp_path, environ=customer)
    run = json.loads(said)
    assert run["status"] == "completed"
    assert run["outputs"]["picture"]["width"] == 40
    shown = finish("graph", "show", run["id"], folder=tmp_path, environ=customer)
    assert "A square: completed, 2 of 2 nodes, 100 %" in shown
    exported = finish("graph", "export", run["graph_id"], folder=tmp_path, environ=customer)
    assert "workflow: draw" in exported
