"""What can be set about backends, by environment or by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from comfyfleet.kernel.errors import InvalidValue

DEFAULT_BASE_URL = "http://localhost:8188"
DEFAULT_JOB_SECONDS = 300.0
DEFAULT_MAX_RETRIES = 3
DEFAULT_POLL_SECONDS = 5.0
RETRIES_MAX = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """How long and how often. `stall_seconds`: a run without any sign of progress."""

    job_seconds: float = DEFAULT_JOB_SECONDS
    max_retries: int = DEFAULT_MAX_RETRIES
    poll_seconds: float = DEFAULT_POLL_SECONDS
    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    stall_seconds: float = 120.0
    cancel_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    base_url: str = DEFAULT_BASE_URL
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidValue(f"{self.base_url!r} is no address like {DEFAULT_BASE_URL}")


def server_settings(environ: Mapping[str, str]) -> ServerSettings:
    return ServerSettings(environ.get("COMFYUI_BASE_URL") or DEFAULT_BASE_URL, limits(environ))


def limits(environ: Mapping[str, str]) -> Limits:
    return Limits(
        job_seconds=_positive(environ, "COMFYUI_TIMEOUT", DEFAULT_JOB_SECONDS),
        max_retries=_retries(environ, "COMFYUI_MAX_RETRIES"),
        poll_seconds=_positive(environ, "COMFYUI_POLL_INTERVAL", DEFAULT_POLL_SECONDS),
    )


def _positive(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidValue(f"{name} is {text!r}; it takes a number of seconds above 0")
    return value


def _retries(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name)
    if not text:
        return DEFAULT_MAX_RETRIES
    if not (text.isascii() and text.isdigit() and int(text) <= RETRIES_MAX):
        raise InvalidValue(f"{name} is {text!r}; it takes a whole number, 0 to {RETRIES_MAX}")
    return int(text)
