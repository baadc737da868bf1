"""Hides a caller's keys for paid services in everything that a worker reports, stores or logs of the caller's job."""

from collections.abc import Collection
from itertools import takewhile
from typing import Any
from uuid import UUID

from comfyfleet.api.worker import Job

HIDDEN = "[hidden]"
# So many of the first characters of a key are hidden, too: long texts are cut off, and a key with them.
PART_CHARACTERS = 12


def hide(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = _hide_parts(text.replace(secret, HIDDEN), secret)
    return text


def _hide_parts(text: str, secret: str) -> str:
    """Hides the beginnings of a key."""
    first, *rest = text.split(secret[:PART_CHARACTERS])
    return HIDDEN.join([first, *(_without_start(each, secret[PART_CHARACTERS:]) for each in rest)])


def _without_start(text: str, start: str) -> str:
    """Removes as much of `start` as the text begins with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, start, strict=False))
    return text[sum(1 for _ in same) :]


def hide_in_values(value: Any, secrets: Collection[str]) -> Any:
    """Hides secrets in the texts of a JSON value, and in names of fields."""
    if isinstance(value, str):
        return hide(value, secrets)
    if isinstance(value, list):
        return [hide_in_values(item, secrets) for item in value]
    if isinstance(value, dict):
        return {hide(name, secrets): hide_in_values(item, secrets) for name, item in value.items()}
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
