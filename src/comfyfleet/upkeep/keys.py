"""Whose an object is, by its key. Pure."""

import re
from uuid import UUID

_KEY = re.compile(r"tenants/(?P<tenant>[0-9a-f-]{36})/(?:ai-jobs/(?P<job>[0-9a-f-]{36})/)?")


def owner_of(key: str) -> UUID | None:
    """The tenant."""
    return _id_in(key, "tenant")


def job_of(key: str) -> UUID | None:
    """The job that made it; None for what was uploaded."""
    return _id_in(key, "job")


def _id_in(key: str, part: str) -> UUID | None:
    found = _KEY.match(key)
    try:
        return UUID(found[part]) if found and found[part] else None
    except ValueError:
        return None
