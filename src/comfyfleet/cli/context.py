"""A command's access to the outside: streams, clock, environment, files and ComfyUI servers.
Servers are queried for their node types only once. Every command imports this module, so modules
that only some commands need are imported where they are used."""

import difflib
import logging
import mmap
import os
import secrets
import stat
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, TypeAlias, TypeGuard
from urllib.parse import urlsplit

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded, ServerUnavailable

if TYPE_CHECKING:
    import httpx

    from comfyfleet.workflow.embedded import Opened


STANDARD_STREAM = "-"
FOLDER = "COMFYFLEET_COMFYUI_FOLDER"
FILE_HELP = (
    "Workflow or prompt JSON, or an image, video or audio file saved by ComfyUI. Use - for stdin."
)
# Pipes can't be mapped into memory, so their content is read completely, up to this limit.
PIPE_BYTES_MAX = 512 * 1024 * 1024
TEXT_BYTES_MAX = 4 * 1024 * 1024  # limit for a graph, a pipeline or a list of workflows
NAMES_LOOKED_AT_MAX = 1_000
NAMES_SHOWN_MAX = 3
OPENABLE_SUFFIXES = (
    ".json", ".png", ".webp", ".jpg", ".jpeg", ".mp4", ".webm", ".mov", ".mkv", ".flac", ".mp3",
)  # fmt: skip


def open_file(name: str, stdin: BinaryIO) -> "Opened":
    """Opens the workflow or prompt in a file or in stdin."""
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
        raise InvalidInput(f"{path} is not UTF-8 text, so it is neither YAML nor JSON") from None


def read_structure(path: Path) -> Any:
    """Returns the content of a YAML or JSON file."""
    from comfyfleet.api.documents import read_document  # slow: imports YAML

    text = read_text(path)
    with _named(str(path)):
        return read_document(text)


def require_file(path: Path) -> Path:
    """Returns the path if the file can be read. Otherwise, raises an error with the reason."""
    with explain_errors(path), path.open("rb"):
        return path


def write_file(path: Path, data: bytes) -> None:
    """Replaces a file atomically, so that readers see either the old or the new content."""
    with explain_errors(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # a pipe or device can't be replaced
            return
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            beside.write_bytes(data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def _opened(file: BinaryIO) -> "Opened":
    from comfyfleet.workflow.embedded import open_document

    if not _is_mappable(file):
        data = file.read(PIPE_BYTES_MAX + 1)
        if len(data) > PIPE_BYTES_MAX:
            raise LimitExceeded(f"the input from the pipe is larger than {PIPE_BYTES_MAX:,} bytes")
        return open_document(data)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data_in_file:
        return open_document(data_in_file)


def _is_mappable(file: BinaryIO) -> bool:
    """Checks whether a file can be mapped into memory. Empty files and streams without a file
    descriptor can't."""
    try:
        status = os.fstat(file.fileno())
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Adds the file's name to errors about its content."""
    try:
        yield
    except FleetError as error:
        raise type(error)(f"{name}: {error.message}", **error.details) from error


@contextmanager
def explain_errors(path: Path, *, or_else: str | None = None) -> Iterator[None]:
    """Converts operating system errors about a path to readable errors. `or_else` is the hint if
    the file is missing and no other file has a similar name."""
    try:
        yield
    except FileNotFoundError as error:
        raise _not_found(path, or_else) from error
    except IsADirectoryError as error:
        raise InvalidInput(f"{path} is a directory", hint=_files_inside(path)) from error
    except PermissionError as error:
        raise InvalidInput(
            f"{path}: permission denied",
            hint=f"Check its permissions with: ls -l {path}",
        ) from error
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error


def _not_found(path: Path, or_else: str | None) -> InvalidInput:
    if not path.parent.is_dir():
        return InvalidInput(
            f"directory {path.parent} doesn't exist", hint=f"Create it with: mkdir -p {path.parent}"
        )
    close = difflib.get_close_matches(path.name, _names_in(path.parent), n=NAMES_SHOWN_MAX)
    similar = ", ".join(str(path.with_name(name)) for name in close)
    hint = f"Did you mean: {similar}?" if close else or_else
    return InvalidInput(f"file {path} was not found", **({"hint": hint} if hint else {}))


def _files_inside(path: Path) -> str:
    names = [name for name in _names_in(path) if name.lower().endswith(OPENABLE_SUFFIXES)]
    if not names:
        return "Specify a file saved by ComfyUI: a workflow's JSON, an image or a video."
    shown = ", ".join(str(path / name) for name in names[:NAMES_SHOWN_MAX])
    return f"Specify a file in it, such as {shown}"


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
    from comfyfleet.workflow.embedded import parse_json

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
    """Checks whether at least one entry describes its inputs. Other entries may be broken on a
    working server."""
    entries = value.values() if isinstance(value, dict) else ()
    return any(
        isinstance(entry, dict) and isinstance(entry.get("input"), dict) for entry in entries
    )


def describe_json(value: Any) -> str:
    if not isinstance(value, dict):
        return "it isn't a JSON object"
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
# A server with many node packs searches all its model folders before it responds.
ANSWER_SECONDS_MAX = 60.0
ANSWER_BYTES_MAX = 64 * 1024 * 1024
SNIPPET_CHARACTERS_MAX = 60


class ServerCache:
    """Caches the responses of each server."""

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
        """Returns the choices of an input that the server provides under a separate route."""
        route = str(remote.get("route"))
        answer = self._get(base_url(url), route, remote.get("query_params"))
        key = remote.get("response_key")
        choices = answer.get(key) if key and isinstance(answer, dict) else answer
        if not isinstance(choices, list):
            raise ServerUnavailable(f"{route} did not respond with a list")
        return choices

    def _get(self, base: str, route: str, params: Any = None) -> Any:
        if (base, route) not in self._answers:
            import asyncio

            self._answers[(base, route)] = asyncio.run(self._fetch(base, route, params))
        return self._answers[(base, route)]

    async def _fetch(self, base: str, route: str, params: Any) -> Any:
        import httpx

        from comfyfleet.transport.http import Call, HttpClient, describe_network_error, open_client
        from comfyfleet.transport.retry import RetryPolicy

        call = Call("GET", route, path=base + route, params=params or None)
        seconds = self._answer_seconds
        try:
            async with (
                open_client(
                    base, answer_seconds=seconds, connect_seconds=self._connect_seconds
                ) as client,
                HttpClient(client, retry=RetryPolicy(attempts_max=1)).stream(
                    call, follow_redirects=True
                ) as response,
            ):
                deadline = time.monotonic() + seconds
                return await _json_of(response, url_without_password(base), deadline)
        except httpx.TimeoutException as error:
            raise _too_slow(url_without_password(base), self._answer_seconds) from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise _no_url(base) from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"no server responds at {url_without_password(base)}: {describe_network_error(error)}",
                hint="Is ComfyUI running there? Open that address in a browser.",
            ) from error


def base_url(url: str) -> str:
    """Normalizes an address, which may have been copied from a browser with additional parts."""
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
    if address.isdecimal():
        raise _no_url(url, port=address)  # it would be interpreted as an IP address
    return base


def comfyui_folder(folder_name: str | Path) -> Path:
    """Returns the absolute path of a ComfyUI folder. Raises InvalidInput if it isn't one."""
    folder = Path(folder_name).expanduser().resolve()
    if not (folder / "output").is_dir():
        raise InvalidInput(f"{folder} is not a ComfyUI folder: it has no folder `output`")
    return folder


def url_without_password(url: str) -> str:
    """Returns the address without a user name and password."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}" if separator else url


async def _json_of(response: "httpx.Response", base: str, deadline: float) -> Any:
    from comfyfleet.workflow.embedded import parse_json

    if response.status_code != 200:
        raise _no_comfyui(base, f"{response.status_code} {response.reason_phrase}".strip())
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > ANSWER_BYTES_MAX:
            raise LimitExceeded(f"{base} responded with more than {ANSWER_BYTES_MAX:,} bytes")
        if time.monotonic() > deadline:
            raise _too_slow(base, None)
    try:
        return parse_json(body, what="the answer")
    except FleetError as error:
        kind = response.headers.get("content-type", "something").partition(";")[0]
        beginning = bytes(body[:SNIPPET_CHARACTERS_MAX]).decode("utf-8", "replace")
        raise _no_comfyui(base, f"{kind} that begins with {beginning!r}") from error


def _no_url(url: str, *, port: str = "8188") -> InvalidInput:
    return InvalidInput(
        f"{url_without_password(url)} is not the URL of a server",
        hint=f"Write it as http://HOST:PORT, for example http://127.0.0.1:{port}",
    )


def _no_comfyui(base: str, got: str) -> ServerUnavailable:
    return ServerUnavailable(
        f"{base} is not a ComfyUI: the request for its node types returned {got}",
        hint="Use the address at which ComfyUI's editor opens, such as http://127.0.0.1:8188",
    )


def _too_slow(base: str, seconds: float | None) -> ServerUnavailable:
    span = f" within {seconds:g} seconds" if seconds else " in time"
    return ServerUnavailable(
        f"{base} did not answer{span}",
        hint="It may be busy loading a model. Try again.",
    )


@dataclass(frozen=True)
class CliContext:
    """The streams and services of a command. Results go to `stdout`, so that they can be piped.
    Messages to the user go to `err`."""

    stdin: BinaryIO
    stdout: BinaryIO
    out: Console
    err: Console
    environ: Mapping[str, str]
    now: Callable[[], datetime]
    servers: ServerCache = field(default_factory=ServerCache)
    clock: Callable[[], float] = time.monotonic
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    # Not larger than the smallest maximum of any node's seed.
    new_seed: Callable[[], int] = lambda: secrets.randbelow(2**32)

    def say(self, text: str) -> None:
        self._line("", text)

    def print_line(self, text: str) -> None:
        """Prints a result to stdout immediately."""
        self.stdout.write(f"{text}\n".encode())
        self.stdout.flush()

    def warn(self, text: str) -> None:
        self._line("warning: ", text, "yellow")

    def fail(self, text: str, hint: str | None = None) -> None:
        self._line("error: ", text, "bold red")
        if hint:
            self._line("hint: ", hint, "cyan")

    def _line(self, label: str, text: str, style: str = "") -> None:
        # Write buffered log lines first, because they precede this line.
        for handler in logging.getLogger().handlers:
            handler.flush()
        # Print one line per message, regardless of its length, because other programs read the
        # lines and terminals wrap them.
        self.err.print(Text.assemble((label, style), printable(text)), soft_wrap=True)


# The type of each command's last argument, which is injected and isn't a command line option.
InjectedContext: TypeAlias = Annotated[CliContext, Parameter(parse=False)]


def process_context() -> CliContext:
    return CliContext(
        stdin=sys.stdin.buffer,
        stdout=sys.stdout.buffer,
        out=Console(),
        err=Console(stderr=True),
        environ=os.environ,
        # The editor formats dates in local time, so the file names of runs use local time as well.
        now=lambda: datetime.now().astimezone(),
    )


def printable(text: str) -> str:
    """Replaces unprintable characters with question marks, because titles come from other people's
    files and could move the cursor."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    )


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
