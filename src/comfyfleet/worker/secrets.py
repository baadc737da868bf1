"""Hides a caller's keys for paid services in everything that a worker reports, stores or logs about
the caller's job."""

from collections.abc import Collection
from itertools import takewhile
from typing import Any
from uuid import UUID

from comfyfleet.api.worker import Job

HIDDEN = "[hidden]"
# A part of a key is hidden if it contains at least the key's first 12 characters, because a long
# text may be cut off in the middle of a key.
PART_CHARACTERS = 12


def hide(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = _hide_parts(text.replace(secret, HIDDEN), secret)
    return text


def _hide_parts(text: str, secret: str) -> str:
    """Hides an incomplete key at the end of a truncated text."""
    first, *rest = text.split(secret[:PART_CHARACTERS])
    return HIDDEN.join([first, *(_without_start(part, secret[PART_CHARACTERS:]) for part in rest)])


def _without_start(text: str, start: str) -> str:
    """Removes the longest common prefix of `text` and `start` from the text."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, start, strict=False))
    return text[sum(1 for _ in same) :]


def hide_in_values(value: Any, secrets: Collection[str]) -> Any:
    """Hides secrets in the strings and field names of a JSON value."""
    if isinstance(value, str):
        return hide(value, secrets)
    if isinstance(value, list):
        return [hide_in_values(item, secrets) for item in value]
    if isinstance(value, dict):
        return {hide(name, secrets): hide_in_values(item, secrets) for name, item in value.items()}
    return value


class JobSecrets:
    """The callers' keys for a worker's current jobs. A job's keys are hidden only in reports about
    that job."""

    def __init__(self) -> None:
        self._by_lease: dict[UUID, Collection[str]] = {}

    def add(self, job: Job) -> None:
        if job.secrets:
            self._by_lease[job.lease_token] = tuple(job.secrets.values())

    def remove(self, job: Job) -> None:
        self._by_lease.pop(job.lease_token, None)

    def of(self, lease_token: UUID | None) -> Collection[str]:
        return self._by_lease.get(lease_token, ()) if lease_token is not None else ()
