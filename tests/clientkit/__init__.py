"""`comfyfleet up` as customers find it: a tenant with a wallet, and effects to apply."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tests.integration.commands import EXAMPLES
from tests.integration.processes import Running, started

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
PROPERTIES: dict[str, list[dict[str, Any]]] = {
    "negative": [
        {"name": "width", "type": "integer", "binding": "2.width", "minimum": 16, "maximum": 1024}
    ],
    "soften": [{"name": "input", "type": "image", "binding": "1.image"}],
    "video": [{"name": "input", "type": "video", "binding": "1.file"}],
    "slow": [{"name": "steps", "type": "integer", "binding": "1.steps"}],
    "failing": [],
}
PRICES = {"negative": 2, "soften": 3, "video": 10, "slow": 1, "failing": 4}


@dataclass(frozen=True)
class Shop:
    running: Running
    url: str
    admin_key: str

    def admin(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        response = httpx.post(f"{self.url}/api/admin{path}", json=body, headers=headers, timeout=30)
        assert response.status_code < 300, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stock(self) -> None:
        for slug, properties in PROPERTIES.items():
            self.admin("/workflows", slug=slug, document=_document(slug), properties=properties)
            self.admin(
                "/effects",
                slug=slug,
                workflow_slug=slug,
                price_tokens=PRICES[slug],
                overrides={},
                published=True,
            )

    def customer(self, tokens: int = 1_000) -> str:
        """The key of a new tenant's first user."""
        tenant = self.admin("/tenants", name="Ada")
        wallet = f"/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
        if tokens:
            self.admin(wallet, amount=tokens, provider_transaction_id="paid-1")
        key: str = tenant["key"]
        return key

    def client(self, tokens: int = 1_000, **options: Any) -> Client:
        patience = Patience(**options) if options else None
        return Client(self.url, self.customer(tokens), patience=patience)


def _document(slug: str) -> dict[str, Any]:
    made = {"slow": SLOW, "failing": FAILING}.get(slug)
    if made:
        return made
    document: dict[str, Any] = json.loads((EXAMPLES / "workflows" / f"{slug}.json").read_text())
    return document


@contextmanager
def shop_in(folder: Path) -> Iterator[Shop]:
    with started("up", "--port", "0", folder=folder) as running:
        url, key = running.hears(KEY).groups()
        running.hears("Worker built-in in fleet default/production")
        shop = Shop(running, url, key)
        shop.stock()
        yield shop
