"""Hides a caller's keys for paid services in everything that a worker reports, stores or logs of the caller's job."""

from collections.abc import Collection
from typing import Any
from uuid import UUID

from comfyfleet.api.worker import Job

HIDDEN = "[hidden]"


def hide(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def hide_in_values(value: Any, secrets: Collection[str]) -> Any:
    """Hides secrets in the texts of a JSON value, but not in the names of fields."""
    if isinstance(value, str):
        return hide(value, secrets)
    if isinstance(value, list):
        return [hide_in_values(item, secrets) for item in value]
    if isinstance(value, dict):
        return {name: hide_in_values(item, secrets) for name, item in value.items()}
    return value


class JobSecrets:
    """The keys of the jobs that a worker has. Those of a job change nothing of what is reported of others."""

    def __init__(self) -> None:
        self._by_lease: dict[UUID, Collection[str]] = {}

    def add(self, job: Job) -> None:
        if job.secrets:
            self._by_lease[job.lease_token] = tuple(job.secrets.values())

    def remove(self, job: Job) -> None:
        self._by_lease.pop(job.lease_token, None)

    def of(self, lease_token: UUID | None) -> Collection[str]:
        return self._by_lease.get(lease_token, ()) if lease_token is not None else ()
