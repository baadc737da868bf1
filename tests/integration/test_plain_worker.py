"""The worker of the examples, in standard-library Python, against a control plane and an engine."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from tests.support.server.command_process import started
from tests.support.server.commands import EXAMPLES
from tests.support.server.local_server import KEY, WORDS

from comfyfleet.engine import serve_in_thread

WAIT_SECONDS_MAX = 60.0
SOFTEN = json.loads((EXAMPLES / "workflows" / "soften.json").read_text())
PHOTO = (EXAMPLES / "inputs" / "photo.png").read_bytes()
BROKEN = {
    "1": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "no luck", "after_ms": 0},
    }
}
LASTING = {
    "1": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "too late", "after_ms": 600_000},
    }
}


class Admin:
    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.Client(base_url=f"{url}/api/admin/", headers=headers, timeout=30)

    def close(self) -> None:
        self._client.close()

    def say(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = self._client.request(method, path, json=body or None)
        assert answer.status_code < 300, answer.text
        found: dict[str, Any] = answer.json() if answer.content else {}
        return found

    def register(self, slug: str, document: Any, *properties: dict[str, Any]) -> None:
        self.say("POST", "workflows", slug=slug, document=document, properties=list(properties))

    def upload(self, data: bytes) -> str:
        body = {"filename": "photo.png", "content_type": "image/png", "size": len(data)}
        announced = self.say("POST", "uploads", **body)
        slot = announced["upload"]
        httpx.put(slot["url"], content=data, headers=slot["headers"]).raise_for_status()
        file_id: str = announced["file_id"]
        return file_id

    def ended(self, slug: str, **body: Any) -> dict[str, Any]:
        return self.no_more(self.submit(slug, **body), "queued", "processing")

    def cancelled(self, slug: str) -> dict[str, Any]:
        """While it runs."""
        job = self.no_more(self.submit(slug), "queued")
        (leased,) = self.say("GET", "dispatches?status=leased")["dispatches"]
        self.say("POST", f"dispatches/{leased['id']}/cancel")
        return self.no_more(job["id"], "processing")

    def submit(self, slug: str, **body: Any) -> str:
        (job_id,) = self.say("POST", "jobs", workflow_slug=slug, **body)["ids"]
        return str(job_id)

    def no_more(self, job_id: str, *statuses: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < deadline:
            job = self.say("GET", f"jobs/{job_id}")
            if job["status"] not in statuses:
                return job
            time.sleep(0.1)
        raise AssertionError(job)


@contextmanager
def plain_worker(url: str, secret: str, comfyui: str) -> Iterator[None]:
    environ = {
        "PATH": os.environ["PATH"],
        "COMFYFLEET_URL": url,
        "COMFYFLEET_FLEET_SECRET": secret,
        "COMFYUI_URL": comfyui,
    }
    worker = subprocess.Popen([sys.executable, EXAMPLES / "plain_worker.py"], env=environ)
    try:
        yield
    finally:
        worker.kill()
        worker.wait()


def test_a_worker_written_from_the_documents_works(tmp_path: Path) -> None:
    with (
        started("up", "--port", "0", "--no-worker", folder=tmp_path) as running,
        serve_in_thread() as comfy,
        ExitStack() as stack,
    ):
        url, key = running.wait_for_line(KEY).groups()
        admin = Admin(url, key)
        stack.callback(admin.close)
        secret = admin.say("POST", "fleets", slug="plain", stage="production")["secret"]
        admin.register("words", WORDS, {"name": "word", "type": "text", "binding": "1.string_b"})
        admin.register("soften", SOFTEN, {"name": "input", "type": "image", "binding": "1.image"})
        admin.register("broken", BROKEN)
        admin.register("lasting", LASTING)
        slugs = ["words", "soften", "broken", "lasting"]
        admin.say("PUT", "fleets/plain/production/workflows", workflow_slugs=slugs)
        with plain_worker(url, secret, comfy.url):
            softened = admin.ended("soften", files={"input": admin.upload(PHOTO)})
            lasting = admin.cancelled("lasting")
            words = admin.ended("words", properties={"word": "cat"})
            broken = admin.ended("broken")
    assert softened["status"] == "completed"
    assert softened["outputs"][0]["content_type"] == "image/png"
    assert (words["status"], [each["value"] for each in words["values"]]) == (
        "completed",
        ["a cat"],
    )
    assert lasting["status"] == "cancelled"
    assert broken["status"] == "failed"
    assert "no luck" in broken["raw_error"]


def test_the_worker_is_short_enough_to_be_read_at_once() -> None:
    code = (EXAMPLES / "plain_worker.py").read_text().split('"""', 2)[2]
    lines = [line.strip() for line in code.splitlines()]
    assert sum(bool(line) and not line.startswith('"""') for line in lines) <= 88
