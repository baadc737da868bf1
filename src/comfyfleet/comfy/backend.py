"""The backend interface, its values and abilities, and the settings of backends (a ComfyUI server,
Comfy Cloud), read from the environment or given by hand."""

import enum
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from comfyfleet.comfy.events import Event
from comfyfleet.errors import InvalidValue

Prompt: TypeAlias = Mapping[str, Any]
# Called with each text message of a run, as the server sent it.
MessageTap: TypeAlias = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: str
    memory_bytes: int
    memory_free_bytes: int
    reserved_bytes: int = 0  # by this ComfyUI


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend is. `object_info` is the server's own JSON, not parsed; `version` is empty if
    the server does not report it."""

    object_info: Mapping[str, Any]
    version: str
    devices: tuple[Device, ...]
    system_stats: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """Where the backend stored a file, often under another name than the one given."""

    name: str
    subfolder: str = ""
    folder: str = "input"

    @property
    def value(self) -> str:
        """The value for the input of a loader node."""
        return f"{self.subfolder}/{self.name}" if self.subfolder else self.name


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted prompt. `run_id` is the backend's id of the run (our prompt id where the backend
    lets us choose). `adopted`: the run already existed and was not sent again."""

    run_id: str
    adopted: bool = False


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that a run made.

    `key` is the node's name for the kind of output: images, gifs, video, audio, 3d… `folder`:
    output, input or temp; files in temp are deleted when the server restarts. `reused`: an earlier
    run made the file, so it may be gone. `reference` is used by the backend only.
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
    """A text, number, boolean or JSON that a node showed."""

    node_id: str
    key: str
    value: Any
    reused: bool = False

    @property
    def spoken(self) -> str:
        """A text as it is, all else as JSON."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files and values of a run, in the order of the backend's answer.

    `reused`: nodes whose results came from an earlier run. `history`: the run's entry in a
    ComfyUI's history, without its prompt.
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
    ENDED_BEFORE = "ended_before"  # it succeeded or failed by itself, see `follow`
    NOT_FOUND = "not_found"  # the backend has no such run, and so runs none


class Backend(Protocol):
    """Executes prompts. One instance serves many runs, also concurrently.

    All methods raise ServerUnavailable (after retries), AccessDenied and UnexpectedAnswer.
    """

    async def describe(self) -> Description: ...

    async def queue_length(self) -> int:
        """Number of waiting and running prompts, of all clients."""
        ...

    async def upload(self, path: Path, *, name: str | None = None, subfolder: str = "") -> Uploaded:
        """Uploads a file. Without `name` it keeps its own name.

        Use the returned value, not the name given. `subfolder` is inside the input folder, if the
        backend has one.
        """
        ...

    async def submit(
        self, prompt: Prompt, *, prompt_id: str, extra_data: Mapping[str, Any] | None = None
    ) -> Submitted:
        """Queues a prompt exactly once. `prompt_id`: a lower-case UUID, new for each run.

        Raises PromptRefused; and OutcomeUnknown when the prompt may or may not have been accepted:
        `adopt` finds out later.
        """
        ...

    async def adopt(self, prompt_id: str) -> Submitted | None:
        """Finds a run that another process submitted, by the id given to `submit`.

        None if there is no such run.
        """
        ...

    def follow(self, run_id: str, *, tap: MessageTap | None = None) -> AsyncIterator[Event]:
        """Yields every event until the run ends. Raises RunLost, RunStalled, RunTimedOut.

        `tap` is called with the server's own messages, where the backend has such.
        """
        ...

    async def outputs(self, run_id: str) -> Outputs:
        """Returns the outputs of an ended run. Raises RunLost."""
        ...

    async def fetch(self, file: OutputFile, to: Path, *, bytes_max: int | None = None) -> Fetched:
        """Streams a file to the path `to`, which appears only when complete. Raises FileGone, and
        LimitExceeded as soon as it is known to be too large."""
        ...

    async def cancel(self, run_id: str) -> Cancellation:
        """Stops a run and waits until that is confirmed. Raises CancelUnconfirmed."""
        ...

    async def free(self) -> None:
        """Unloads models and cached results, if the backend can."""
        ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendAbilities:
    """What a backend can do. A ComfyUI server can do all of this.

    `describes`: it lists its node types; otherwise `describe` raises NotOffered. `frees`: otherwise
    `free` does nothing. `reports_nodes`: it reports the start, steps and end of each node and which
    results it reused; otherwise only samples. `returns_texts`: it returns texts as outputs.
    `reports_folders`: it says whether a file is temporary. `refuses_partial_prompts`: it says that a prompt would
    run only in part, so that it is refused. `reports_error_types`: for a refused prompt it returns
    ComfyUI's own error type.
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
    """Timeouts and the number of retries.

    `stall_seconds`: how long a run may go without any sign of progress. `first_look_seconds`: when a submitted run that
    has not started is first looked for in the queue, to tell how many are ahead; by default with the first poll.
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
            raise InvalidValue(f"{self.base_url!r} is no address like {DEFAULT_BASE_URL}")


BASE_URL, TIMEOUT, MAX_RETRIES = "COMFYUI_BASE_URL", "COMFYUI_TIMEOUT", "COMFYUI_MAX_RETRIES"
POLL_INTERVAL, SUBMIT_INTERVAL = "COMFYUI_POLL_INTERVAL", "COMFYUI_SUBMIT_INTERVAL"


@dataclass(frozen=True, slots=True)
class ComfyuiVariables:
    """The `COMFYUI_…` variables; None means that a variable isn't set."""

    base_url: str | None = None
    timeout_seconds: float | None = None
    max_retries: int | None = None
    poll_seconds: float | None = None
    submit_seconds: float | None = None


def comfyui_variables(environ: Mapping[str, str]) -> ComfyuiVariables:
    """Reads the variables. Raises InvalidValue for one that makes no sense."""
    base_url = environ.get(BASE_URL) or None
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise InvalidValue(
            f"{BASE_URL} is {base_url!r}; it takes an address like {DEFAULT_BASE_URL}"
        )
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
        raise InvalidValue(f"{name} is {text!r}; it takes a number of seconds above 0")
    return value


def _retries(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) <= RETRIES_MAX):
        raise InvalidValue(f"{name} is {text!r}; it takes a whole number, 0 to {RETRIES_MAX}")
    return int(text)


def limits(environ: Mapping[str, str]) -> BackendLimits:
    """The limits of commands that run a workflow: $COMFYUI_TIMEOUT is for `up` and workers only."""
    given = comfyui_variables(
        {name: environ.get(name, "") for name in (MAX_RETRIES, POLL_INTERVAL)}
    )
    return BackendLimits(
        max_retries=DEFAULT_MAX_RETRIES if given.max_retries is None else given.max_retries,
        poll_seconds=given.poll_seconds or DEFAULT_POLL_SECONDS,
    )


DEFAULT_CLOUD_URL = "https://cloud.comfy.org"


@dataclass(frozen=True, slots=True)
class CloudSettings:
    """Settings of Comfy Cloud. `key` is left out of every text made of this object."""

    key: str = field(default="", repr=False)
    base_url: str = DEFAULT_CLOUD_URL
    limits: BackendLimits = field(default_factory=BackendLimits)


def cloud_settings(environ: Mapping[str, str]) -> CloudSettings:
    return CloudSettings(
        key=environ.get("COMFY_CLOUD_API_KEY") or "",
        base_url=environ.get("COMFY_CLOUD_BASE_URL") or DEFAULT_CLOUD_URL,
        limits=limits(environ),
    )
