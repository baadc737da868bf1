"""What a command touches of the outside: streams, clock, environment, files, and ComfyUI servers, which are asked for
their node types once. Imported by every command, so what only some of them need is imported where it is used."""

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
FILE_HELP = "Workflow or prompt JSON, or a picture, video or sound that ComfyUI saved; - is stdin."
# Pipes can't be mapped into memory, so what comes through one is kept whole.
PIPE_BYTES_MAX = 512 * 1024 * 1024
TEXT_BYTES_MAX = 4 * 1024 * 1024  # of a graph, a pipeline or a list of workflows
NAMES_LOOKED_AT_MAX = 1_000
NAMES_SHOWN_MAX = 3
OPENABLE_SUFFIXES = (
    ".json", ".png", ".webp", ".jpg", ".jpeg", ".mp4", ".webm", ".mov", ".mkv", ".flac", ".mp3",
)  # fmt: skip


def open_file(name: str, stdin: BinaryIO) -> "Opened":
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
    from comfyfleet.api.documents import read_document  # and YAML with it

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


def _opened(file: BinaryIO) -> "Opened":
    from comfyfleet.workflow.embedded import open_document

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
                f"no server answers at {url_without_password(base)}: {describe_network_error(error)}",
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
    if address.isdecimal():
        raise _no_url(url, port=address)  # it would be read as an IP address
    return base


def comfyui_folder(given: str | Path) -> Path:
    """The absolute path of a ComfyUI's folder. Raises InvalidInput if the folder can't be one."""
    folder = Path(given).expanduser().resolve()
    if not (folder / "output").is_dir():
        raise InvalidInput(f"{folder} has no folder `output`: it is not ComfyUI's folder")
    return folder


def url_without_password(url: str) -> str:
    """The address without a user and password that may stand in it."""
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
            raise LimitExceeded(f"{base} answered with more than {ANSWER_BYTES_MAX:,} bytes")
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
