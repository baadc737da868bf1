"""A graph of twelve nodes over three engines, and a customer who runs it."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import httpx
from tests.support.jobs.counted_jobs import FLEET
from tests.support.server.admin_client import AWAY_SECONDS_MAX, until
from tests.support.server.deployment import Deployment

PRICE, TOKENS = 2, 1000
WIDTHS = [32, 48, 64, 80]
OVER = frozenset({"completed", "failed", "cancelled"})
MAKE = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 32, "height": 16, "batch_size": 1, "color": 0},
    },
    "2": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 4, "step_ms": 100, "previews": False, "image": ["1", 0]},
    },
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}},
}
MAKE_PROPERTIES = [
    {"name": "width", "type": "integer", "binding": "1.width", "default": 32},
    {"name": "color", "type": "integer", "binding": "1.color", "default": 0},
]
TURN = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
    "3": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 4, "step_ms": 100, "previews": False, "image": ["2", 0]},
    },
    "4": {"class_type": "SaveImage", "inputs": {"images": ["3", 0], "filename_prefix": "turned"}},
}
TURN_PROPERTIES = [{"name": "input", "type": "image", "binding": "1.image", "required": True}]


def _workflow(id: str, workflow: str, **fields: Any) -> dict[str, Any]:
    return {"id": id, "type": "workflow", "workflow": workflow, **fields}


def document(offline: str, lost: str) -> dict[str, Any]:
    """Twelve nodes: five of them have jobs, and two of those run once for each width."""
    nodes = [
        {"id": "widths", "type": "input", "value_type": "integer[]"},
        {"id": "each", "type": "fanout", "mode": "distribute", "per_item": True},
        _workflow("make", "make", properties={"color": 255}),
        {"id": "is_wide", "type": "condition", "condition": "output.width > 40"},
        _workflow("turn", "turn"),
        {"id": "album", "type": "merge", "mode": "concat_images", "over": "each"},
        _workflow(
            "bound",
            "make",
            properties={"width": 100},
            backend_affinity=f"worker:{lost}",
            fallback_strategy="auto_select",
            priority=10,
        ),
        _workflow(
            "asked",
            "make",
            properties={"width": 110},
            backend_affinity=f"worker:{offline}",
            fallback_strategy="ask_user",
        ),
        _workflow("last", "turn"),
        {"id": "all", "type": "merge", "mode": "concat_images"},
        {"id": "pictures", "type": "output"},
        {"id": "turned", "type": "output"},
    ]
    connections = [
        "widths.value > each.items",
        "each.item > make.width",
        "make.output > is_wide.input",
        "is_wide.true > turn.input",
        "turn.output > album.input_0",
        "is_wide.false > album.input_1",
        "album.output > all.input_0",
        "bound.output > all.input_1",
        "asked.output > all.input_2",
        "asked.output > last.input",
        "all.output.images > pictures.value",
        "last.output.images > turned.value",
    ]
    pairs = [each.split(" > ") for each in connections]
    return {
        "name": "twelve",
        "nodes": nodes,
        "connections": [{"from": source, "to": target} for source, target in pairs],
    }


JOBS = len(WIDTHS) + sum(width > 40 for width in WIDTHS) + 3
SIZES = [*WIDTHS, 100, 110]


def prepare(deployment: Deployment) -> tuple[str, "GraphCustomer"]:
    """Sets up a fleet and two workflows; returns its secret and a customer with tokens."""
    deployment.start_control()
    secret = deployment.admin.create_fleet(FLEET)
    for slug, prompt, properties, output in (
        ("make", MAKE, MAKE_PROPERTIES, "3"),
        ("turn", TURN, TURN_PROPERTIES, "4"),
    ):
        body = {
            "slug": slug,
            "document": prompt,
            "properties": properties,
            "output_node_id": output,
            "price_tokens": PRICE,
        }
        deployment.admin.ask("POST", "/api/admin/workflows", json=body)
    deployment.admin.assign(FLEET, "make", "turn")
    tenant = deployment.admin.ask("POST", "/api/admin/tenants", json={"name": "acme"})
    path = f"/api/admin/tenants/{tenant['id']}/wallets/{tenant['user_id']}/credits"
    paid = {"amount": TOKENS, "provider_transaction_id": "first"}
    deployment.admin.ask("POST", path, json=paid)
    customer = GraphCustomer(deployment.url, tenant["key"])
    deployment.at_end(customer.close)
    return secret, customer


class GraphCustomer:
    """A customer's client that retries while the control plane is down."""

    def __init__(self, url: str, key: str) -> None:
        self.key = key
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10
        )

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **body: Any) -> Any:
        deadline = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                answer = self._http.request(method, f"/api/{path}", json=body or None)
                if answer.status_code < 500 and answer.status_code != 429:
                    break
            except httpx.TransportError:
                assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json()

    def stored(self, graph: dict[str, Any]) -> str:
        return str(self.ask("POST", "graphs", **graph)["id"])

    def started(self, graph_id: str, key: str) -> str:
        wanted = {"inputs": {"widths": WIDTHS}, "idempotency_key": key}
        return str(self.ask("POST", f"graphs/{graph_id}/runs", **wanted)["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"graph-runs/{run_id}")
        return found

    def finished(self, run_id: str, *, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def is_over() -> bool:
            found.update(self.run(run_id))
            return found["status"] in OVER

        until(is_over, seconds=seconds, what=lambda: str(found.get("executions"))[:3000])
        return found

    def balance(self) -> int:
        return int(self.ask("GET", "wallet")["balance"])

    def sizes(self, pictures: Iterable[dict[str, Any]]) -> list[int]:
        """The widths of pictures in the store."""
        found = []
        for each in pictures:
            data = httpx.get(each["url"]).content
            assert data[:8] == b"\x89PNG\r\n\x1a\n"
            found.append(int.from_bytes(data[16:20], "big"))
        return found


def check_the_end(customer: GraphCustomer, run: dict[str, Any], runs: int = 1) -> None:
    """Asserts: the right pictures in the right order, one result for each job, and paid once."""
    assert run["status"] == "completed", run["error"]
    assert customer.sizes(run["outputs"]["pictures"]) == SIZES
    assert customer.sizes(run["outputs"]["turned"]) == [110]
    assert run["tokens"] == JOBS * PRICE
    assert customer.balance() == TOKENS - runs * JOBS * PRICE
    done = Counter(each["node"] for each in run["executions"] if each["status"] == "done")
    assert (done["make"], done["turn"], done["last"]) == (4, 3, 1)
