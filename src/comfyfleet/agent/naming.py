"""Names that a worker makes. Pure."""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit
from uuid import UUID, uuid5

from comfyfleet.wire.files import NAME_CHARACTERS_MAX

WORKER_ID_CHARACTERS_MAX = 200
_NOT_IN_WORKER_ID = re.compile(r"[^A-Za-z0-9._:-]+")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def prompt_id_of(job_id: UUID, lease_number: int) -> str:
    """The same for one lease, however often it is asked: a prompt is found again by it.

    A new lease is another run. Lower-case, as newer ComfyUIs insist.
    """
    return str(uuid5(job_id, str(lease_number)))


def default_worker_id(hostname: str, backend_url: str | None) -> str:
    """Stable over restarts, and another one for each backend of a machine."""
    parts = urlsplit(backend_url) if backend_url else None
    beside = parts is not None and parts.hostname in ("localhost", "127.0.0.1", "::1")
    where = ["cloud"] if parts is None else [] if beside else [parts.hostname or ""]
    port = [str(parts.port)] if parts is not None and parts.port else []
    text = "-".join([hostname, *where, *port])
    plain = _NOT_IN_WORKER_ID.sub("-", text).strip("-._:")
    return plain[:WORKER_ID_CHARACTERS_MAX] or "worker"


def output_names(filenames: Sequence[str], primary: str | None) -> list[str]:
    """One for each, all different; the first takes the slot that came with the lease."""
    taken: list[str] = []
    for number, filename in enumerate(filenames):
        name = primary if number == 0 and primary else safe(filename)
        taken.append(name if name not in taken else f"{number + 1}-{name}"[:NAME_CHARACTERS_MAX])
    return taken


def safe(text: str) -> str:
    return _NOT_IN_NAME.sub("_", text).strip(".")[-NAME_CHARACTERS_MAX + 20 :] or "file"
