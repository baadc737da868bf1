"""The backend interface with its values and abilities, and the settings of backends (a ComfyUI
server, Comfy Cloud), which come from the environment or the caller."""

import enum
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from comfyfleet.comfy.events import Event
from comfyfleet.errors import InvalidValue

Prompt: TypeAlias = Mapping[str, Any]
# A function that is called with each text message of a run, exactly as the server sent it.
MessageTap: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: str
    memory_bytes: int
    memory_free_bytes: int
    reserved_bytes: int = 0  # memory that this ComfyUI has reserved


@dataclass(frozen=True, slots=True)
class Description:
    """A description of a backend. `object_info` is the server's own JSON, not parsed. `version` is
    empty if the server doesn't report it."""

    object_info: Mapping[str, Any]
    version: str
    devices: tuple[Device, ...]
    system_stats: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The location where the backend stored a file, often under a different name than the given
    one."""

    name: str
    subfolder: str = ""
    folder: str = "input"

    @property
    def value(self) -> str:
        """Returns the value for the input of a loader node."""
        return f"{self.subfolder}/{self.name}" if self.subfolder else self.name


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted prompt.

    `run_id` is the backend's id of the run. It is our prompt id if the backend lets us choose the
    id. `adopted` means that the run already existed and was not sent again.
    """

    run_id: str
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a run created.

    `key` is the node's name for the kind of output: images, gifs, video, audio, 3d … `folder` is
    output, input or temp. Files in temp are deleted when the server restarts. `reused` means that
    an earlier run created the file, so it may no longer exist. Only the backend itself uses
    `reference`.
    """

    node_id: str
    key: str
    filename: str
    subfolder: str = ""
    folder: str = "output"
    reused: bool = False
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class OutputValue:
    """A string, number, boolean or JSON value that a node showed."""

    node_id: str
    key: str
    value: Any
    reused: bool = False

    @property
    def spoken(self) -> str:
        """Returns strings unchanged, and other values as JSON."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files and values of a run, in the order of the backend's response.

    `reused` contains the nodes whose results came from an earlier run. `history` is the run's entry
    in a ComfyUI's history, without its prompt.
    """

    files: tuple[OutputFile, ...] = ()
    values: tuple[OutputValue, ...] = ()
    reused: tuple[str, ...] = ()
    history: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Fetched:
    path: Path
    size_bytes: int
    content_type: str


class Cancellation(enum.Enum):
    """The confirmed state of a run after a cancel."""

    CANCELLED = "cancelled"
    # The run succeeded or failed before it could be cancelled. `follow` returns the result.
    ENDED_BEFORE = "ended_before"
    NOT_FOUND = "not_found"  # The backend doesn't have the run, so it isn't running.


class Backend(Protocol):
    """Executes prompts. One instance serves many runs, including concurrent ones.

    All methods raise ServerUnavailable (after retries), AccessDenied and UnexpectedAnswer.
    """

    async def describe(self) -> Description: ...

    async def queue_length(self) -> int:
        """Returns the number of waiting and running prompts of all clients."""
        ...

    async def upload(self, path: Path, *, name: str | None = None, subfolder: str = "") -> Uploaded:
        """Uploads a file. Without `name`, the file keeps its own name.

        Use the returned value instead of the given name. `subfolder` is a folder inside the input
        folder, if the backend has one.
        """
        ...

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        """Queues a prompt exactly once. `prompt_id` is a lowercase UUID, which must be new for each
        run.

        Raises PromptRefused. Raises OutcomeUnknown if the prompt may or may not have been accepted.
        In that case, call `adopt` later to find out.
        """
        ...

    async def adopt(self, prompt_id: str) -> Submitted | None:
        """Finds a run that another process submitted, by the id that was passed to `submit`.

        Returns None if there is no such run.
        """
        ...

    def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncIterator[Event]:
        """Yields every event until the run ends. Raises RunLost, RunStalled and RunTimedOut.

        `tap` is called with the server's own messages, if the backend has any.
        """
        ...

    async def outputs(self, run_id: str) -> Outputs:
        """Returns the outputs of a run that has ended. Raises RunLost."""
        ...

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        """Streams a file to the path `to`, which appears only when the file is complete. Raises
        FileGone. Raises LimitExceeded as soon as the file is known to be too large."""
        ...

    async def cancel(self, run_id: str) -> Cancellation:
        """Stops a run and waits until this is confirmed. Raises CancelUnconfirmed."""
        ...

    async def free(self) -> None:
        """Unloads models and drops cached results, if the backend can do this."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendAbilities:
    """The abilities of a backend. A ComfyUI server has all of them.

    - `describes`: it lists its node types. Otherwise, `describe` raises NotOffered.
    - `frees`: it can unload models. Otherwise, `free` does nothing.
    - `reports_nodes`: it reports the start, steps and end of each node, and which results it
      reused. Otherwise, it only reports samples.
    - `returns_texts`: it returns strings as outputs.
    - `reports_folders`: it reports whether a file is temporary.
    - `refuses_partial_prompts`: it reports that only a part of a prompt would run, so that the
      prompt is refused.
    - `reports_error_types`: it returns ComfyUI's own error type for a refused prompt.
    """

    describes: bool = True
    frees: bool = True
    reports_nodes: bool = True
    returns_texts: bool = True
    reports_folders: bool = True
    refuses_partial_prompts: bool = True
    reports_error_types: bool = True


DEFAULT_BASE_URL = "http://localhost:8188"
DEFAULT_JOB_SECONDS = 300.0
DEFAULT_MAX_RETRIES = 3
DEFAULT_POLL_SECONDS = 5.0
RETRIES_MAX = 20


@dataclass(frozen=True, slots=True)
class BackendLimits:
    """Timeouts in seconds, and the number of retries.

    `stall_seconds` is how long a run may take without any sign of progress. `first_look_seconds` is
    the delay after which a submitted run that hasn't started is first looked up in the queue, to
    find out how many prompts are ahead. By default, this happens with the first poll.
    """

    job_seconds: float = DEFAULT_JOB_SECONDS
    max_retries: int = DEFAULT_MAX_RETRIES
    poll_seconds: float = DEFAULT_POLL_SECONDS
    connect_seconds: float = 10.0
    answer_seconds: float = 60.0
    stall_seconds: float = 120.0
    cancel_seconds: float = 60.0
    first_look_seconds: float = float("inf")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    base_url: str = DEFAULT_BASE_URL
    limits: BackendLimits = field(default_factory=BackendLimits)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise InvalidValue(f"{self.base_url!r} isn't a valid URL such as {DEFAULT_BASE_URL}")


BASE_URL, TIMEOUT, MAX_RETRIES = "COMFYUI_BASE_URL", "COMFYUI_TIMEOUT", "COMFYUI_MAX_RETRIES"
POLL_INTERVAL, SUBMIT_INTERVAL = "COMFYUI_POLL_INTERVAL", "COMFYUI_SUBMIT_INTERVAL"


@dataclass(frozen=True, slots=True)
class ComfyuiVariables:
    """The `COMFYUI_…` variables. None means that a variable isn't set."""

    base_url: str | None = None
    timeout_seconds: float | None = None
    max_retries: int | None = None
    poll_seconds: float | None = None
    submit_seconds: float | None = None


def comfyui_variables(environ: Mapping[str, str]) -> ComfyuiVariables:
    """Reads the variables. Raises InvalidValue for an invalid one."""
    base_url = environ.get(BASE_URL) or None
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise InvalidValue(f"{BASE_URL} must be a URL such as {DEFAULT_BASE_URL}, not {base_url!r}")
    return ComfyuiVariables(
        base_url=base_url,
        timeout_seconds=_positive(environ, TIMEOUT),
        max_retries=_retries(environ, MAX_RETRIES),
        poll_seconds=_positive(environ, POLL_INTERVAL),
        submit_seconds=_positive(environ, SUBMIT_INTERVAL),
    )


def _positive(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InvalidValue(f"{name} must be a number of seconds above 0, not {text!r}")
    return value


def _retries(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= RETRIES_MAX):
        raise InvalidValue(f"{name} must be a whole number from 0 to {RETRIES_MAX}, not {text!r}")
    return int(text)


def limits(environ: Mapping[str, str]) -> BackendLimits:
    """Returns the limits for commands that run a workflow. $COMFYUI_TIMEOUT only applies to `up`
    and workers."""
    variables = comfyui_variables(
        {name: environ.get(name, "") for name in (MAX_RETRIES, POLL_INTERVAL)}
    )
    return BackendLimits(
        max_retries=DEFAULT_MAX_RETRIES if variables.max_retries is None else variables.max_retries,
        poll_seconds=variables.poll_seconds or DEFAULT_POLL_SECONDS,
    )


DEFAULT_CLOUD_URL = "https://cloud.comfy.org"


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """Settings of Comfy Cloud. `key` is omitted from every text representation of this object."""

    key: str = field(default="", repr=False)
    base_url: str = DEFAULT_CLOUD_URL
    limits: BackendLimits = field(default_factory=BackendLimits)


def cloud_settings(environ: Mapping[str, str]) -> CloudSettings:
    return CloudSettings(
        key=environ.get("COMFY_CLOUD_API_KEY") or "",
        base_url=environ.get("COMFY_CLOUD_BASE_URL") or DEFAULT_CLOUD_URL,
        limits=limits(environ),
    )
