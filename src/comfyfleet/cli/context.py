"""What a command touches of the outside: streams, log lines, clock, environment, files, and ComfyUI servers, which are
asked for their node types once."""

import asyncio
import difflib
import json
import logging
import mmap
import os
import secrets
import select
import stat
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, TypeAlias, TypeGuard
from urllib.parse import urlsplit

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded, ServerUnavailable
from comfyfleet.log_context import current_ids
from comfyfleet.server.graphs.parse import read_document
from comfyfleet.workflow.files import Opened, open_document, parse_json

if TYPE_CHECKING:
    import httpx


STANDARD_STREAM = "-"
FILE_HELP = "Workflow or prompt JSON, or a picture, video or sound that ComfyUI saved; - is stdin."
# Pipes can't be mapped into memory, so what comes through one is kept whole.
PIPE_BYTES_MAX = 512 * 1024 * 1024
TEXT_BYTES_MAX = 4 * 1024 * 1024  # of a graph, a pipeline or a list of workflows
NAMES_LOOKED_AT_MAX = 1_000
NAMES_SHOWN_MAX = 3
OPENABLE_SUFFIXES = (
    ".json", ".png", ".webp", ".jpg", ".jpeg", ".mp4", ".webm", ".mov", ".mkv", ".flac", ".mp3",
)  # fmt: skip


def open_file(name: str, stdin: BinaryIO) -> Opened:
    """The workflow or prompt in a file, or in what comes through stdin."""
    if name == STANDARD_STREAM:
        with _named("stdin"):
            return _opened(stdin)
    path = Path(name)
    with (
        explain_errors(path, or_else="Use - to read from stdin."),
        path.open("rb") as file,
        _named(name),
    ):
        return _opened(file)


def read_file(path: Path, *, bytes_max: int) -> bytes:
    with explain_errors(path), path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise LimitExceeded(f"{path} has more than {bytes_max:,} bytes")
    return data


def read_text(path: Path, *, bytes_max: int = TEXT_BYTES_MAX) -> str:
    try:
        return read_file(path, bytes_max=bytes_max).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not UTF-8 text, and so neither YAML nor JSON") from None


def read_structure(path: Path) -> Any:
    """What a YAML or JSON file holds."""
    text = read_text(path)
    with _named(str(path)):
        return read_document(text)


def require_file(path: Path) -> Path:
    """A file that can be read, or an error that says why it can't."""
    with explain_errors(path), path.open("rb"):
        return path


def write_file(path: Path, data: bytes) -> None:
    """A reader of that file sees the old content or the new one, never half of either."""
    with explain_errors(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or a device: there is nothing to replace
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _opened(file: BinaryIO) -> Opened:
    if not _is_mappable(file):
        data = file.read(PIPE_BYTES_MAX + 1)
        if len(data) > PIPE_BYTES_MAX:
            raise LimitExceeded(f"more than {PIPE_BYTES_MAX:,} bytes came through the pipe")
        return open_document(data)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data_in_file:
        return open_document(data_in_file)


def _is_mappable(file: BinaryIO) -> bool:
    """An empty file can't be mapped, and a stream that some program stands for has no number."""
    try:
        status = os.fstat(file.fileno())
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors about the content of a file say which file."""
    try:
        yield
    except FleetError as error:
        raise type(error)(f"{name}: {error.message}", **error.details) from error


@contextmanager
def explain_errors(path: Path, *, or_else: str | None = None) -> Iterator[None]:
    """Errors of the system about a path, in words. `or_else` is the hint where nothing is similar."""
    try:
        yield
    except FileNotFoundError as error:
        raise _not_found(path, or_else) from error
    except IsADirectoryError as error:
        raise InvalidInput(f"{path} is a directory", hint=_files_inside(path)) from error
    except PermissionError as error:
        raise InvalidInput(
            f"{path}: you may not access it",
            hint=f"Look at its permissions: ls -l {path}",
        ) from error
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error


def _not_found(path: Path, or_else: str | None) -> InvalidInput:
    if not path.parent.is_dir():
        return InvalidInput(
            f"there is no directory {path.parent}", hint=f"Create it with: mkdir -p {path.parent}"
        )
    close = difflib.get_close_matches(path.name, _names_in(path.parent), n=NAMES_SHOWN_MAX)
    similar = ", ".join(str(path.with_name(name)) for name in close)
    hint = f"Did you mean: {similar}?" if close else or_else
    return InvalidInput(f"there is no file {path}", **({"hint": hint} if hint else {}))


def _files_inside(path: Path) -> str:
    names = [name for name in _names_in(path) if name.lower().endswith(OPENABLE_SUFFIXES)]
    if not names:
        return "Name a file that ComfyUI saved: a workflow's JSON, a picture, a video."
    shown = ", ".join(str(path / name) for name in names[:NAMES_SHOWN_MAX])
    return f"Name a file in it, such as {shown}"


def _names_in(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in islice(entries, NAMES_LOOKED_AT_MAX))
    except OSError:
        return []


OBJECT_INFO_BYTES_MAX = 64 * 1024 * 1024
GZIP_MAGIC = b"\x1f\x8b"
HOW_TO_SAVE = (
    "Save it from a running ComfyUI: curl http://127.0.0.1:8188/object_info -o object_info.json"
)


def read_object_info(path: Path) -> Mapping[str, Any]:
    data = read_file(path, bytes_max=OBJECT_INFO_BYTES_MAX)
    if data.startswith(GZIP_MAGIC):
        data = _unpacked(data, path)
    value = parse_json(data, what=str(path))
    if not is_object_info(value):
        raise InvalidInput(
            f"{path} is not an object_info: {describe_json(value)}", hint=HOW_TO_SAVE
        )
    return value


def is_object_info(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Some of the entries tell what they take; a server may well have others that are broken."""
    entries = value.values() if isinstance(value, dict) else ()
    return any(
        isinstance(entry, dict) and isinstance(entry.get("input"), dict) for entry in entries
    )


def describe_json(value: Any) -> str:
    if not isinstance(value, dict):
        return "it is no JSON object"
    if isinstance(value.get("nodes"), list):
        return "it is a workflow"
    if any(isinstance(entry, dict) and "class_type" in entry for entry in value.values()):
        return "it is a prompt"
    return f"it has the keys {', '.join(sorted(value)[:5])}" if value else "it is empty"


def _unpacked(data: bytes, path: Path) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacker.decompress(data, OBJECT_INFO_BYTES_MAX)
    except zlib.error as error:
        raise InvalidInput(f"{path} is a damaged gzip file", hint=HOW_TO_SAVE) from error
    if unpacker.unconsumed_tail:
        raise LimitExceeded(f"{path} unpacks to more than {OBJECT_INFO_BYTES_MAX:,} bytes")
    return unpacked


CONNECT_SECONDS_MAX = 5.0
# A server with many node packs looks through all its model folders before it answers.
ANSWER_SECONDS_MAX = 60.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
SNIPPET_CHARACTERS_MAX = 60


class ServerCache:
    """Remembers what each server answered."""

    def __init__(
        self,
        *,
        connect_seconds: float = CONNECT_SECONDS_MAX,
        answer_seconds: float = ANSWER_SECONDS_MAX,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._answers: dict[tuple[str, str], Any] = {}

    def object_info(self, url: str) -> Mapping[str, Any]:
        base = base_url(url)
        answer = self._get(base, "/object_info")
        if not is_object_info(answer):
            raise _no_comfyui(url_without_password(base), f"JSON, but {describe_json(answer)}")
        return answer

    def choices(self, url: str, remote: Mapping[str, Any]) -> list[Any]:
        """The choices of an input that the server keeps under a route of their own."""
        route = str(remote.get("route"))
        answer = self._get(base_url(url), route, remote.get("query_params"))
        key = remote.get("response_key")
        found = answer.get(key) if key and isinstance(answer, dict) else answer
        if not isinstance(found, list):
            raise ServerUnavailable(f"{route} answered with something else than a list")
        return found

    def _get(self, base: str, route: str, params: Any = None) -> Any:
        if (base, route) not in self._answers:
            self._answers[(base, route)] = self._fetch(base, route, params)
        return self._answers[(base, route)]

    def _fetch(self, base: str, route: str, params: Any) -> Any:
        # Imported late: most commands never need it, and it takes longer than a conversion.
        import httpx

        timeout = httpx.Timeout(self._answer_seconds, connect=self._connect_seconds)
        try:
            with (
                httpx.Client(timeout=timeout, follow_redirects=True) as client,
                client.stream("GET", base + route, params=params or None) as response,
            ):
                return _json_of(
                    response, url_without_password(base), time.monotonic() + self._answer_seconds
                )
        except httpx.TimeoutException as error:
            raise _too_slow(url_without_password(base), self._answer_seconds) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _no_url(base) from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"no server answers at {url_without_password(base)}: {error}",
                hint="Is ComfyUI running there? Open that address in a browser.",
            ) from error


def base_url(url: str) -> str:
    """People copy addresses from browsers, with and without the parts that browsers add."""
    scheme, separator, rest = url.strip().rpartition("://")
    address = rest.partition("#")[0].partition("?")[0].rstrip("/")
    address = address.removesuffix("/object_info").removesuffix("/api")
    if not address or any(character.isspace() for character in address):
        raise _no_url(url)
    base = f"{scheme if separator else 'http'}://{address}"
    try:
        urlsplit(base).port  # noqa: B018 - it is read only here
    except ValueError:
        raise _no_url(url) from None
    return base


def url_without_password(url: str) -> str:
    """The address without a user and password that may stand in it."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url


def _json_of(response: "httpx.Response", base: str, deadline: float) -> Any:
    if response.status_code != 200:
        raise _no_comfyui(base, f"{response.status_code} {response.reason_phrase}".strip())
    body = bytearray()
    for chunk in response.iter_bytes():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"{base} answered with more than {ANSWER_BYTES_MAX:,} bytes")
        if time.monotonic() > deadline:
            raise _too_slow(base, None)
    try:
        return parse_json(body, what="the answer")
    except FleetError as error:
        kind = response.headers.get("content-type", "something").partition(";")[0]
        beginning = bytes(body[:SNIPPET_CHARACTERS_MAX]).decode("utf-8", "replace")
        raise _no_comfyui(base, f"{kind} that begins with {beginning!r}") from error


def _no_url(url: str) -> InvalidInput:
    return InvalidInput(
        f"{url_without_password(url)} is not the URL of a server",
        hint="Write it as http://HOST:PORT, for example http://127.0.0.1:8188",
    )


def _no_comfyui(base: str, got: str) -> ServerUnavailable:
    return ServerUnavailable(
        f"{base} is not a ComfyUI: asked for its node types, got {got}",
        hint="Give the address under which ComfyUI's editor opens, such as http://127.0.0.1:8188",
    )


def _too_slow(base: str, seconds: float | None) -> ServerUnavailable:
    span = f" within {seconds:g} seconds" if seconds else " in time"
    return ServerUnavailable(
        f"{base} did not answer{span}",
        hint="It may be busy loading a model: try again.",
    )


@dataclass(frozen=True)
class CliContext:
    """Results go to `stdout`, so that they can be piped; everything said to people goes to `err`."""

    stdin: BinaryIO
    stdout: BinaryIO
    out: Console
    err: Console
    environ: Mapping[str, str]
    now: Callable[[], datetime]
    servers: ServerCache = field(default_factory=ServerCache)
    clock: Callable[[], float] = time.monotonic
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    # No larger than the smallest maximum that seeds of nodes have.
    new_seed: Callable[[], int] = lambda: secrets.randbelow(2**32)

    def say(self, text: str) -> None:
        self._line("", text)

    def print_line(self, text: str) -> None:
        """A result: to stdout, at once."""
        self.stdout.write(f"{text}\n".encode())
        self.stdout.flush()

    def warn(self, text: str) -> None:
        self._line("warning: ", text, "yellow")

    def fail(self, text: str, hint: str | None = None) -> None:
        self._line("error: ", text, "bold red")
        if hint:
            self._line("hint: ", hint, "cyan")

    def _line(self, label: str, text: str, style: str = "") -> None:
        # Log lines that wait to be written together were said before.
        for handler in logging.getLogger().handlers:
            handler.flush()
        # One line each, however long: other programs read them, and terminals wrap by themselves.
        self.err.print(Text.assemble((label, style), printable(text)), soft_wrap=True)


# A command asks for it as its last argument; it is no option.
InjectedContext: TypeAlias = Annotated[CliContext, Parameter(parse=False)]


def process_context() -> CliContext:
    return CliContext(
        stdin=sys.stdin.buffer,
        stdout=sys.stdout.buffer,
        out=Console(),
        err=Console(stderr=True),
        environ=os.environ,
        # The editor writes dates in local time, and so the file names of a person's runs.
        now=lambda: datetime.now().astimezone(),
    )


def printable(text: str) -> str:
    """Titles come from files of others: what would move the cursor is shown as a question mark."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    )


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


LogLevel: TypeAlias = Annotated[
    Literal["debug", "info", "warning", "error"],
    Parameter(help="What goes to stderr: lines on a terminal, JSON lines anywhere else."),
]
ACCESS = "comfyfleet.access"
DELAY_SECONDS = 0.05
LINES_MAX = 1_000
# What a pipe takes whole, however full it is.
WRITE_BYTES_MAX: int = getattr(select, "PIPE_BUF", 512)
# What every record has; the rest was given with `extra`.
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# What they say below a warning, only their authors want to know.
_NOISY_LOGGERS = (
    "aiosqlite", "alembic", "asyncio", "boto3", "botocore", "httpcore", "httpx", "sqlalchemy",
    "uvicorn", "websockets",
)  # fmt: skip


def set_up_logs(level: str, err: Console) -> None:
    handler = logging.StreamHandler(err.file) if err.is_terminal else BufferedLines(err.file)
    handler.setFormatter(ConsoleFormatter() if err.is_terminal else JsonFormatter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


class BufferedLines(logging.StreamHandler[IO[str]]):
    """Lines below a warning are written a moment later, several at once: each write wakes the reader.

    A warning is written at once, with all that came before it; so is what a thread without an event
    loop says. The end of the process writes the rest; only a kill can lose lines, those of a moment.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(stream)
        self._lines: list[str] = []
        self._timer: asyncio.TimerHandle | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record) + self.terminator)
            if record.levelno >= logging.WARNING or len(self._lines) >= LINES_MAX:
                self.flush()
            elif self._timer is None:
                self._start()
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 — as the handlers of the standard library do
            self.handleError(record)

    def _start(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
        else:
            self._timer = loop.call_later(DELAY_SECONDS, self.flush)

    def flush(self) -> None:
        with self.lock or nullcontext():
            lines, self._lines, self._timer = self._lines, [], None
            for text in _together(lines):
                self.stream.write(text)
                super().flush()
            super().flush()


def _together(lines: Iterable[str]) -> Iterator[str]:
    """Several processes may write to one pipe: a longer text of one could stand within a line of another."""
    some: list[str] = []
    size = 0
    for line in lines:
        more = len(line.encode("utf-8", "backslashreplace"))
        if some and size + more > WRITE_BYTES_MAX:
            yield "".join(some)
            some, size = [], 0
        some.append(line)
        size += more
    if some:
        yield "".join(some)


class JsonFormatter(logging.Formatter):
    """One object per line, with the ids of what was being done."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_ids(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


class ConsoleFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s%(ids)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        # What an access line gives beside is in its message already.
        given = current_ids() if record.name == ACCESS else _ids(record)
        ids = " ".join(f"{name}={value}" for name, value in given.items())
        record.ids = f"  [{ids}]" if ids else ""
        return super().format(record)


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    given = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
    return {**current_ids(), **given}
