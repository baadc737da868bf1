"""Settings of a worker from its command line or environment, and the ids and names derived from
them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID, uuid5

from comfyfleet.api.values import NAME_CHARACTERS_MAX
from comfyfleet.api.worker import CONCURRENCY_MAX
from comfyfleet.comfy import BackendLimits, ServerSettings
from comfyfleet.comfy.backend import DEFAULT_BASE_URL, ComfyuiVariables
from comfyfleet.errors import InvalidInput

WORKER_ID_CHARACTERS_MAX = 200
_NOT_IN_WORKER_ID = re.compile(r"[^A-Za-z0-9._:-]+")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def prompt_id_of(job_id: UUID, lease_number: int) -> str:
    """Returns the prompt id of a lease. The id is derived from the lease, so that a restarted
    worker can find the prompt.

    Each lease of a job has a different id. The id is lowercase, which newer ComfyUI versions
    require.
    """
    return str(uuid5(job_id, str(lease_number)))


def default_worker_id(hostname: str, backend_url: str | None) -> str:
    """Returns a worker id that stays the same across restarts and is different for each backend of
    a machine."""
    parts = urlsplit(backend_url) if backend_url else None
    is_local = parts is not None and parts.hostname in ("localhost", "127.0.0.1", "::1")
    where = ["cloud"] if parts is None else [] if is_local else [parts.hostname or ""]
    port = [str(parts.port)] if parts is not None and parts.port else []
    text = "-".join([hostname, *where, *port])
    plain = _NOT_IN_WORKER_ID.sub("-", text).strip("-._:")
    return plain[:WORKER_ID_CHARACTERS_MAX] or "worker"


def output_names(filenames: Sequence[str], primary: str | None) -> list[str]:
    """Returns a distinct name for each output. The first one may use the lease's upload slot
    (`primary`)."""
    names: list[str] = []
    for number, filename in enumerate(filenames):
        name = primary if number == 0 and primary else safe_name(filename)
        names.append(name if name not in names else f"{number + 1}-{name}"[:NAME_CHARACTERS_MAX])
    return names


def safe_name(text: str) -> str:
    return _NOT_IN_NAME.sub("_", text).strip(".")[-NAME_CHARACTERS_MAX + 20 :] or "file"


HEARTBEAT_SECONDS = 30.0
HEARTBEAT_SECONDS_MAX = 300.0
GRACE_SECONDS = 60.0
STALL_SECONDS = 300.0
CACHE_BYTES = 10 * 1024**3
FREE_MEMORY_MIN = 0.1
# The worker stops following a run after this many seconds. The run's own limit, which the job
# defines, is usually much shorter.
FOLLOW_SECONDS_MAX = 7 * 24 * 3600.0
LOOK_SECONDS = 2.0
RETRIES_MAX = 5
CANCEL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The settings of a worker. `backend_url` is a ComfyUI address, or None for Comfy Cloud.
    `secret` is left out of the repr."""

    control_url: str
    fleet_slug: str
    stage: str
    worker_id: str
    state: Path
    backend_url: str | None = None
    more_control_urls: tuple[str, ...] = ()  # additional addresses of the same control plane
    is_default_id: bool = False
    secret: str = field(default="", repr=False)
    max_concurrency: int = 1
    heartbeat_seconds: float = HEARTBEAT_SECONDS
    capabilities: tuple[str, ...] = ()
    workflow_slugs: tuple[str, ...] = ()
    grace_seconds: float = GRACE_SECONDS
    stall_seconds: float = STALL_SECONDS
    cache_bytes: int = CACHE_BYTES
    comfyui_command: str | None = None
    # If less than this share of the memory is free, the worker makes its ComfyUI free memory. 0
    # disables this.
    free_memory_min: float = FREE_MEMORY_MIN
    # Environment variables for ComfyUI, in addition to the inherited ones.
    comfyui_environ: Mapping[str, str] = field(default_factory=dict)
    backend_folder: Path | None = None  # contains the backend's input, output and temp folders
    max_retries: int = RETRIES_MAX
    job_seconds: float | None = None  # limit for a whole job, or None for only the job's own limit
    poll_seconds: float = LOOK_SECONDS
    passthrough: tuple[str, ...] = ()  # prefixes of routes whose calls are sent to the backend

    @property
    def place(self) -> str:
        """The backend's address for use in messages, without credentials."""
        if self.backend_url is None:
            return "Comfy Cloud"
        scheme, _, rest = self.backend_url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def backend_address(self) -> tuple[str, int] | None:
        """The backend's host and port, or None for Comfy Cloud."""
        if self.backend_url is None:
            return None
        parts = urlsplit(self.backend_url)
        return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_cloud(self) -> bool:
        return self.backend_url is None

    def server(self, limits: BackendLimits) -> ServerSettings:
        return ServerSettings(self.backend_url or DEFAULT_BASE_URL, limits)

    @property
    def limits(self) -> BackendLimits:
        return BackendLimits(
            job_seconds=FOLLOW_SECONDS_MAX,
            max_retries=self.max_retries,
            poll_seconds=self.poll_seconds,
            stall_seconds=self.stall_seconds,
            cancel_seconds=CANCEL_SECONDS,
        )

    @property
    def probe_limits(self) -> BackendLimits:
        """The limits for calls that check whether the backend responds."""
        return BackendLimits(max_retries=0, answer_seconds=10.0, connect_seconds=5.0)

    def with_variables(self, variables: ComfyuiVariables) -> "WorkerSettings":
        """Returns the settings with the limits from the `COMFYUI_…` variables."""
        return replace(
            self,
            job_seconds=variables.timeout_seconds,
            max_retries=(
                self.max_retries if variables.max_retries is None else variables.max_retries
            ),
            poll_seconds=variables.poll_seconds or self.poll_seconds,
        )


def _first_set(environ: Mapping[str, str], ours: str, other: str) -> str:
    """Returns `other` if only that variable is set. Otherwise, returns `ours`."""
    return other if environ.get(other) and not environ.get(ours) else ours


def concurrency_from(environ: Mapping[str, str]) -> int:
    name = _first_set(environ, "COMFYFLEET_MAX_CONCURRENCY", "MAX_CONCURRENCY")
    text = environ.get(name) or "1"
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= CONCURRENCY_MAX):
        raise InvalidInput(
            f"{name} must be a whole number from 1 to {CONCURRENCY_MAX}, not {text!r}"
        )
    return int(text)


def heartbeat_seconds_from(environ: Mapping[str, str]) -> float:
    name = _first_set(environ, "COMFYFLEET_HEARTBEAT_SECONDS", "HEARTBEAT_INTERVAL_SECONDS")
    text = environ.get(name) or f"{HEARTBEAT_SECONDS:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= HEARTBEAT_SECONDS_MAX:
        raise InvalidInput(
            f"{name} must be a number of seconds above 0 and at most {HEARTBEAT_SECONDS_MAX:g}, "
            f"not {text!r}"
        )
    return seconds
