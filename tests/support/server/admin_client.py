"""A small operator's client that retries while the control plane is down."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx

ENDED = frozenset({"completed", "failed", "cancelled"})
AWAY_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.1
PAGE = 500


@dataclass(frozen=True)
class AuditEntry:
    actor: str
    action: str
    subject: str
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        return str(self.details.get("reason", ""))


class Admin:
    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10
        )

    def close(self) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **arguments: Any) -> Any:
        """The answer as JSON; raises for anything but 2xx, with the body."""
        answer = self._http.request(method, path, **arguments)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def look(self, path: str, **arguments: Any) -> Any:
        """A GET that is repeated while the control plane or its database is down."""
        deadline = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                answer = self._http.get(path, **arguments)
            except httpx.TransportError:
                if time.monotonic() > deadline:
                    raise
            else:
                if answer.status_code < 500 or time.monotonic() > deadline:
                    assert answer.is_success, f"GET {path}: {answer.status_code} {answer.text}"
                    return answer.json()
            time.sleep(LOOK_SECONDS)

    def is_ready(self) -> bool:
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def create_fleet(self, slug: str, stage: str = "production") -> str:
        """Returns its secret."""
        return str(
            self.ask("POST", "/api/admin/fleets", json={"slug": slug, "stage": stage})["secret"]
        )

    def create_tenant(self, name: str) -> str:
        """Returns its id."""
        return str(self.ask("POST", "/api/admin/tenants", json={"name": name})["id"])

    def register_workflow(
        self,
        slug: str,
        document: Mapping[str, Any],
        properties: Iterable[Mapping[str, Any]],
        output_node_id: str,
    ) -> None:
        body = {
            "slug": slug,
            "document": document,
            "properties": list(properties),
            "output_node_id": output_node_id,
        }
        self.ask("POST", "/api/admin/workflows", json=body)

    def assign(self, fleet: str, *slugs: str, stage: str = "production") -> None:
        path = f"/api/admin/fleets/{fleet}/{stage}/workflows"
        self.ask("PUT", path, json={"workflow_slugs": list(slugs)})

    def submit(self, tenant_id: str, workflow_slug: str, properties: Mapping[str, Any]) -> str:
        """Returns the job's id."""
        body = {
            "tenant_id": tenant_id,
            "workflow_slug": workflow_slug,
            "properties": properties,
            "priority": 0,
            "count": 1,
        }
        (job_id,) = self.ask("POST", "/api/admin/jobs", json=body)["ids"]
        return str(job_id)

    def job(self, tenant_id: str, job_id: str) -> dict[str, Any]:
        query = {"tenant_id": tenant_id}
        found: dict[str, Any] = self.look(f"/api/admin/jobs/{job_id}", params=query)
        return found

    def worker_ids(self) -> set[str]:
        return {each["worker_id"] for each in self.look("/api/admin/workers")["workers"]}

    def audit(self, **wanted: str) -> list[AuditEntry]:
        """All matching entries, the oldest first."""
        found: list[AuditEntry] = []
        before: dict[str, int] = {}
        while True:
            query = {"limit": PAGE, **wanted, **before}
            page = self.look("/api/admin/audit", params=query)
            found += [
                AuditEntry(each["actor"], each["action"], each["subject"], each["details"])
                for each in page["entries"]
            ]
            if page["next"] is None:
                return found[::-1]
            before = {"before": page["next"]}

    def wait_until_ended(
        self, tenant_id: str, job_ids: Sequence[str], *, seconds: float
    ) -> dict[str, dict[str, Any]]:
        """Every job's record when all have ended, also in the queue, which learns of it a moment later.

        One job at a time is polled, because polling costs, too.
        """
        ended: dict[str, dict[str, Any]] = {}

        def has_ended(job_id: str) -> bool:
            job = ended[job_id] = self.job(tenant_id, job_id)
            dispatch = job["dispatch"]
            return job["status"] in ENDED and (dispatch is None or dispatch["status"] in ENDED)

        deadline = time.monotonic() + seconds
        for job_id in job_ids:
            until(
                partial(has_ended, job_id),
                seconds=deadline - time.monotonic(),
                what=lambda: f"{len(ended) - 1} of {len(job_ids)} jobs have ended",
            )
        return ended


def until(
    condition: Callable[[], object],
    *,
    seconds: float,
    what: Callable[[], str] = lambda: "it did not come",
    look_seconds: float = LOOK_SECONDS,
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds} s: {what()}")
        time.sleep(look_seconds)
