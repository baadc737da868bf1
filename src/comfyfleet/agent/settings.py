"""What can be set about a worker, by its command or its environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from comfyfleet.comfy import Limits, ServerSettings
from comfyfleet.comfy.settings import DEFAULT_BASE_URL
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.wire.messages import CONCURRENCY_MAX

HEARTBEAT_SECONDS = 30.0
HEARTBEAT_SECONDS_MAX = 300.0
GRACE_SECONDS = 60.0
STALL_SECONDS = 300.0
CACHE_BYTES = 10 * 1024**3
# A run's own limit comes with its job.
FOLLOW_SECONDS_MAX = 7 * 24 * 3600.0
LOOK_SECONDS = 2.0
RETRIES_MAX = 5
CANCEL_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`backend_url`: a ComfyUI; None is Comfy Cloud. `secret` is left out of every text."""

    control_url: str
    fleet_slug: str
    stage: str
    worker_id: str
    state: Path
    backend_url: str | None = None
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
    comfyui_environ: Mapping[str, str] = field(default_factory=dict)  # beside what it inherits
    backend_folder: Path | None = None  # holds the backend's input, output and temp
    max_retries: int = RETRIES_MAX

    @property
    def place(self) -> str:
        """Where the backend is, for people: without a key that may stand in its address."""
        if self.backend_url is None:
            return "Comfy Cloud"
        scheme, _, rest = self.backend_url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def is_cloud(self) -> bool:
        return self.backend_url is None

    def server(self, limits: Limits) -> ServerSettings:
        return ServerSettings(self.backend_url or DEFAULT_BASE_URL, limits)

    @property
    def limits(self) -> Limits:
        return Limits(
            job_seconds=FOLLOW_SECONDS_MAX,
            max_retries=self.max_retries,
            poll_seconds=LOOK_SECONDS,
            stall_seconds=self.stall_seconds,
            cancel_seconds=CANCEL_SECONDS,
        )

    @property
    def impatient_limits(self) -> Limits:
        """Of a look whether it answers at all."""
        return Limits(max_retries=0, answer_seconds=10.0, connect_seconds=5.0)


def concurrency_of(environ: Mapping[str, str]) -> int:
    name = "COMFYFLEET_MAX_CONCURRENCY"
    text = environ.get(name) or "1"
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= CONCURRENCY_MAX):
        raise InvalidInput(f"{name} is {text!r}; it takes a whole number, 1 to {CONCURRENCY_MAX}")
    return int(text)


def heartbeat_seconds_of(environ: Mapping[str, str]) -> float:
    name = "COMFYFLEET_HEARTBEAT_SECONDS"
    text = environ.get(name) or f"{HEARTBEAT_SECONDS:g}"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= HEARTBEAT_SECONDS_MAX:
        raise InvalidInput(
            f"{name} is {text!r}; it takes seconds above 0, at most {HEARTBEAT_SECONDS_MAX:g}"
        )
    return seconds
