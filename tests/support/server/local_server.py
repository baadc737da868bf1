"""Runs `comfyfleet up` for customers: with effects, and a tenant with a wallet."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.support.server.command_process import CommandProcess, started
from tests.support.server.commands import EXAMPLES

from comfyfleet.client import Client, Patience

KEY = r"export COMFYFLEET_URL=(\S+) COMFYFLEET_KEY=(\w{64})"
PHOTO = EXAMPLES / "inputs" / "photo.png"
CLIP = EXAMPLES / "inputs" / "clip.mp4"
SLOW = {
    "1": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 300, "step_ms": 100, "previews": False},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "slow"}},
}
FAILING = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "nothing-of-that-name.png"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "bad"}},
}
WORDS = {
    "1": {
        "class_type": "StringConcatenate",
        "inputs": {"string_a": "a ", "string_b": "", "delimiter": ""},
    },
    "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
}
PROPERTIES: dict[str, list[dict[str, Any]]] = {
    "negative": [
        {"name": "width", "type": "integer", "binding": "2.width", "minimum": 16, "maximum": 1024},
        {"name": "colour", "type": "integer", "binding": "2.color", "default": 3368601},
    ],
    "soften": [
        {"name": "input", "type": "image", "binding": "1.image"},
        {"name": "radius", "type": "integer", "binding": "2:20.blur_radius", "default": 3},
    ],
    "video": [{"name": "input", "type": "video", "binding": "1.file"}],
    "slow": [{"name": "steps", "type": "integer", "binding": "1.steps"}],
    "failing": [],
    "words": [{"name": "word", "type": "text", "binding": "1.string_b"}],
}
PRICES = {"negative": 2, "soften": 3, "video": 10, "slow": 1, "failing": 4, "words": 1}
# What a job of a graph or a pipeline costs.
WORKFLOW_PRICES = {"negative": 2, "soften": 3}


@dataclass(frozen=True)
class LocalServer:
    running: CommandProcess
    url: str
    admin_key: str
    folder: Path  # where it was started

    def admin(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        response = httpx.post(f"{self.url}/api/admin{path}", json=body, headers=headers, timeout=30)
        assert response.status_code < 300, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stock(self) -> None:
        for slug, properties in PROPERTIES.items():
            price = WORKFLOW_PRICES.get(slug, 0)
            self.admin(
                "/workflows",
                slug=slug,
                document=_document(slug),
                properties=properties,
                price_tokens=price,
            )
            self.admin(
                "/effects",
                slug=slug,
                workflow_slug=slug,
                price_tokens=PRICES[slug],
                overrides={},
                published=True,
            )

    def tenant(self, tokens: int = 1_000) -> dict[str, Any]:
        """A new tenant with its first user and key."""
        tenant = self.admin("/tenants", name="Ada")
        if tokens:
            self.pay(tenant, tokens)
        return tenant

    def pay(self, tenant: dict[str, Any], tokens: int, said: str = "paid-1") -> None:
        wallet = f"/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
        # Tests share the server, and a payment counts once for all tenants.
        self.admin(wallet, amount=tokens, provider_transaction_id=f"{said}-{tenant['user_id']}")

    def customer(self, tokens: int = 1_000) -> str:
        """The key of a new tenant's first user."""
        key: str = self.tenant(tokens)["key"]
        return key

    def offline_worker(self, worker_id: str, *slugs: str) -> None:
        """A registered worker that may run these workflows and takes no jobs."""
        fleet = {"slug": f"of-{worker_id}", "stage": "production"}
        secret = self.admin("/fleets", **fleet)["secret"]
        headers = {"Authorization": f"Bearer {self.admin_key}", "X-Fleet-Secret": secret}
        address = f"{self.url}/api/admin/fleets/{fleet['slug']}/production/workflows"
        with httpx.Client(headers=headers, timeout=30) as client:
            given = client.put(address, json={"workflow_slugs": list(slugs)})
            assert given.status_code == 200, given.text
            body = {
                "worker_id": worker_id,
                "fleet_slug": fleet["slug"],
                "stage": "production",
                "max_concurrency": 1,
                "capabilities": [],
                "protocol_version": 1,
            }
            joined = client.post(f"{self.url}/api/worker/register", json=body)
            assert joined.status_code == 200, joined.text
        self.admin(f"/workers/{worker_id}/drain")

    def client(self, tokens: int = 1_000, **options: Any) -> Client:
        patience = Patience(**options) if options else None
        return Client(self.url, self.customer(tokens), patience=patience)


def _document(slug: str) -> dict[str, Any]:
    made = {"slow": SLOW, "failing": FAILING, "words": WORDS}.get(slug)
    if made:
        return made
    document: dict[str, Any] = json.loads((EXAMPLES / "workflows" / f"{slug}.json").read_text())
    return document


@contextmanager
def local_server_in(folder: Path, **environ: str) -> Iterator[LocalServer]:
    with started("up", "--port", "0", folder=folder, **environ) as running:
        url, key = running.wait_for_line(KEY).groups()
        running.wait_for_line("Worker built-in in fleet default/production")
        local_server = LocalServer(running, url, key, folder)
        local_server.stock()
        yield local_server
