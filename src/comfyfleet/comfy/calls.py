"""HTTP calls to a backend: retried with back-off where that is safe, logged, counted; and files to and from a ComfyUI
server. Time, ids and chance come in as a Runtime, which tests replace."""

import asyncio
import contextlib
import logging
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import httpx

from comfyfleet.comfy.answers import mapping_in, parse_json, shorten, text_at
from comfyfleet.comfy.backend import BackendLimits, Fetched, OutputFile, Uploaded
from comfyfleet.errors import (
    AccessDenied,
    FileGone,
    FleetError,
    InvalidInput,
    LimitExceeded,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport import open_file, open_with

BACKOFF_FIRST_SECONDS = 0.25
BACKOFF_SECONDS_MAX = 8.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """`clock` is monotonic, `chance` gives 0 to 1."""

    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.SystemRandom().random
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())

    async def back_off(self, attempt: int) -> None:
        """Sleep before retry number `attempt`, from 1."""
        await self.sleep(backoff_seconds(attempt, self.chance()))


def backoff_seconds(attempt: int, chance: float) -> float:
    """Twice as long each time, half of it by chance: callers that failed together spread out."""
    full = min(BACKOFF_FIRST_SECONDS * 2.0 ** (attempt - 1), BACKOFF_SECONDS_MAX)
    return full * (0.5 + chance / 2)


# Enough for a percentile of the recent past; older ones are forgotten.
LATENCIES_KEPT_MAX = 1000


class CallMeter(Protocol):
    """`operation` is a method and route without ids: `POST /prompt`."""

    def called(self, operation: str, *, ok: bool, seconds: float) -> None: ...

    def unexpected(self, operation: str) -> None:
        """An answer of a shape that we don't know: worth an alert, the server has changed."""
        ...


class CallTally:
    """A meter that keeps its figures in memory."""

    def __init__(self) -> None:
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.unexpected_answers: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def called(self, operation: str, *, ok: bool, seconds: float) -> None:
        with self._lock:
            (self.successes if ok else self.failures)[operation] += 1
            kept = self.latencies.setdefault(operation, [])
            kept.append(seconds)
            del kept[:-LATENCIES_KEPT_MAX]

    def unexpected(self, operation: str) -> None:
        with self._lock:
            self.unexpected_answers[operation] += 1


CHAIN_MAX = 10
_CAUSE_TEXTS: tuple[tuple[type[BaseException], str], ...] = (
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "the connection was cut"),
    (socket.gaierror, "its name can't be resolved"),
    (httpx.ConnectTimeout, "no connection within the time allowed"),
    (httpx.TimeoutException, "no answer within the time allowed"),
    (TimeoutError, "no answer within the time allowed"),
    (httpx.RemoteProtocolError, "the connection was closed without an answer"),
)


def describe_network_error(error: BaseException) -> str:
    """By the first cause that we have words for; else as it says itself."""
    for each in _chain(error):
        for kind, words in _CAUSE_TEXTS:
            if isinstance(each, kind):
                return words
    return str(error) or type(error).__name__


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and so on; of a group the first."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and len(found) < CHAIN_MAX:
        found.append(each)
        inside = each.exceptions[0] if isinstance(each, BaseExceptionGroup) else None
        each = inside or each.__cause__ or each.__context__
    return found


logger = logging.getLogger(__name__)

# The request did not leave: nothing can have come of it.
NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# What a httpx call raises when the network or the other side fails.
NETWORK_ERRORS = (httpx.TransportError,)


@dataclass(frozen=True, slots=True)
class BackendCall:
    """One request. `route` is its path without ids, for logs and metrics; neither has the query.

    `files`: field to (name, open file). `is_poll`: it is made again and again while something is wrong;
    whoever looks tells of it, once.
    """

    method: str
    route: str
    path: str | None = None
    params: Mapping[str, str] | None = None
    json: object = None
    files: Mapping[str, tuple[str, BinaryIO]] | None = None
    data: Mapping[str, str] | None = None
    headers: Mapping[str, str] | None = None
    is_poll: bool = False

    @property
    def operation(self) -> str:
        return f"{self.method} {self.route}"


class BackendCalls:
    """A client's way to one server."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        limits: BackendLimits,
        meter: CallMeter,
        runtime: Runtime,
    ) -> None:
        self.client = client
        self.limits = limits
        self.meter = meter
        self.runtime = runtime

    async def once(self, call: BackendCall) -> httpx.Response:
        """One attempt. Raises httpx.TransportError; any status is an answer."""
        with self.noting(call) as note:
            response = await self.client.send(self._request(call))
            note.status = response.status_code
            return response

    async def ask(self, call: BackendCall) -> httpx.Response:
        """Attempts until an answer below 500. Only for calls that may safely be made twice.

        Raises ServerUnavailable and AccessDenied; other statuses are the caller's.
        """
        for attempt in range(self.limits.max_retries + 1):
            if attempt:
                await self.runtime.back_off(attempt)
            try:
                response = await self.once(call)
            except NETWORK_ERRORS as error:
                trouble = self.unavailable(call, error)
                continue
            if response.status_code < 500:
                return require_success(call, response)
            trouble = error_from_response(call, response)
        raise trouble

    async def ask_json(self, call: BackendCall) -> Any:
        """The JSON of a 200. Raises UnexpectedAnswer, too."""
        response = await self.ask(call)
        with self.reading(call.operation, logging.INFO if call.is_poll else logging.ERROR):
            return parse_answer(call, response)

    @contextlib.asynccontextmanager
    async def stream(
        self, call: BackendCall, *, follow_redirects: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """One attempt; the body is read inside. Raises httpx.TransportError."""
        with self.noting(call) as note:
            response = await self.client.send(
                self._request(call), stream=True, follow_redirects=follow_redirects
            )
            note.status = response.status_code
            try:
                yield response
            finally:
                await response.aclose()

    @contextlib.contextmanager
    def reading(self, operation: str, level: int = logging.ERROR) -> Iterator[None]:
        """Counts and logs an answer of an unexpected shape that is found inside."""
        try:
            yield
        except UnexpectedAnswer as error:
            self.meter.unexpected(operation)
            logger.log(
                level,
                "unexpected answer",
                extra={"operation": operation, "received": error.message},
            )
            raise

    @contextlib.contextmanager
    def noting(self, call: BackendCall) -> Iterator["CallRecord"]:
        """Logs and counts what is done inside as one call."""
        note, started = CallRecord(), self.runtime.clock()
        failure: str | None = None
        try:
            yield note
        except BaseException as error:
            failure = describe_network_error(error)
            raise
        finally:
            seconds = self.runtime.clock() - started
            ok = failure is None and (note.status or 0) < 400
            self.meter.called(call.operation, ok=ok, seconds=seconds)
            _log(call, self.place, note.status, failure, seconds)

    @property
    def place(self) -> str:
        """For people."""
        return f"{self.client.base_url.host}:{self.client.base_url.port or ''}".rstrip(":")

    def unavailable(self, call: BackendCall, error: Exception) -> ServerUnavailable:
        return ServerUnavailable(
            f"{call.operation} at {self.place} failed: {describe_network_error(error)}"
        )

    def _request(self, call: BackendCall) -> httpx.Request:
        for part in (call.files or {}).values():
            part[1].seek(0)
        return self.client.build_request(
            call.method,
            call.path or call.route,
            params=call.params,
            json=call.json,
            files=call.files,
            data=call.data,
            headers=call.headers,
        )


@dataclass(slots=True)
class CallRecord:
    """What is to be logged about a call, as far as it has come."""

    status: int | None = None


def require_success(call: BackendCall, response: httpx.Response) -> httpx.Response:
    if response.status_code in (401, 403):
        raise AccessDenied(
            f"{call.operation} was answered {response.status_code}: {shorten(response.text)}"
        )
    return response


def error_from_response(call: BackendCall, response: httpx.Response) -> ServerUnavailable:
    status = response.status_code
    return ServerUnavailable(
        f"{call.operation} was answered {status}: {shorten(response.text)}", status=status
    )


def parse_answer(call: BackendCall, response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise UnexpectedAnswer(
            f"{call.operation} was answered {response.status_code}: {shorten(response.text)}",
            status=response.status_code,
            received=shorten(response.text),
        )
    return parse_json(response.content, f"the answer to {call.operation}")


def _log(
    call: BackendCall, place: str, status: int | None, failure: str | None, seconds: float
) -> None:
    """That nobody answers, or not what should, is told by whoever waits, once; not with every attempt."""
    level = logging.WARNING if (status or 0) >= 400 and not call.is_poll else logging.INFO
    logger.log(
        level,
        "backend call",
        extra={
            "backend": place,
            "method": call.method,
            "path": call.path or call.route,
            "status": status,
            "failure": failure,
            "duration_ms": round(seconds * 1000, 1),
        },
    )


CHUNK_BYTES = 1024 * 1024
UPLOAD_ROUTE = "/upload/image"  # for files of every kind
VIEW_ROUTE = "/view"


async def upload_file(
    calls: BackendCalls, path: Path, name: str | None, subfolder: str = ""
) -> Uploaded:
    """Safe to repeat: the same bytes under a taken name get the name that they have."""
    file = await _opened(path)
    try:
        return await _upload(calls, file, Path(name or path.name).name, subfolder)
    finally:
        file.close()


async def _upload(calls: BackendCalls, file: BinaryIO, name: str, subfolder: str) -> Uploaded:
    data = {"type": "input", **({"subfolder": subfolder} if subfolder else {})}
    call = BackendCall("POST", UPLOAD_ROUTE, files={"image": (name, file)}, data=data)
    response = await calls.ask(call)
    if response.status_code == 413:
        raise LimitExceeded(f"{name} is larger than the server takes")
    if response.status_code == 400:
        raise InvalidInput(f"the server does not take {name}: {shorten(response.text)}")
    with calls.reading(call.operation):
        what = "the answer to an upload"
        answer = mapping_in(parse_answer(call, response), what)
        subfolder, folder = str(answer.get("subfolder") or ""), str(answer.get("type") or "input")
        return Uploaded(text_at(answer, "name", what), subfolder, folder)


async def _opened(path: Path) -> BinaryIO:
    try:
        return await open_file(path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from error


async def fetch_file(calls: BackendCalls, file: OutputFile, to: Path) -> Fetched:
    """Attempts until complete; the file appears under its name only then."""
    params = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
    call = BackendCall("GET", VIEW_ROUTE, params=params)
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.runtime.back_off(attempt)
        try:
            return await _fetch(calls, call, file, to)
        except NETWORK_ERRORS as error:
            trouble: FleetError = calls.unavailable(call, error)
        except _Busy as error:
            trouble = error_from_response(call, error.response)
    raise trouble


class _Busy(Exception):
    """The server failed; it may not the next time."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def _fetch(calls: BackendCalls, call: BackendCall, file: OutputFile, to: Path) -> Fetched:
    async with calls.stream(call) as response:
        await _check(calls, call, file, response)
        size = await save_body(response, to)
        return Fetched(to, size, response.headers.get("content-type", "application/octet-stream"))


async def _check(
    calls: BackendCalls, call: BackendCall, file: OutputFile, response: httpx.Response
) -> None:
    # A page is never the file: ComfyUI serves even those as plain bytes. It is somebody's error.
    is_page = response.headers.get("content-type", "").startswith("text/html")
    if response.status_code == 200 and not is_page:
        return
    await response.aread()
    if response.status_code == 404:
        reused = "; an earlier run made it" if file.reused else ""
        raise FileGone(f"{file.filename} is no longer in {file.folder}{reused}", file=file)
    if response.status_code >= 500:
        raise _Busy(response)
    require_success(call, response)
    with calls.reading(call.operation):
        raise UnexpectedAnswer(
            f"{call.operation} was answered {response.status_code}: {shorten(response.text)}"
        )


async def save_body(response: httpx.Response, to: Path) -> int:
    """Stream a body to a file; its size. Also for other servers' files."""
    part = to.with_name(f".{to.name}.part")
    try:
        async with aclosing(_gathered(response)) as gathered:
            size = await _save(gathered, part, to)
    except BaseException:
        await asyncio.to_thread(part.unlink, missing_ok=True)
        raise
    return size


async def _save(gathered: AsyncIterator[list[bytes]], part: Path, to: Path) -> int:
    first = await anext(gathered)
    size = sum(map(len, first))
    if size < CHUNK_BYTES:
        # There is no more. Most files are small, and then one change of threads is enough.
        await asyncio.to_thread(_write_whole, part, to, first)
        return size
    with await _made(part) as file:
        await asyncio.to_thread(file.writelines, first)
        async for chunks in gathered:
            await asyncio.to_thread(file.writelines, chunks)
            size += sum(map(len, chunks))
    await asyncio.to_thread(part.replace, to)
    return size


def _write_whole(part: Path, to: Path, chunks: Sequence[bytes]) -> None:
    with _make(part) as file:
        file.writelines(chunks)
    part.replace(to)


async def _made(path: Path) -> BinaryIO:
    return await open_with(lambda: _make(path), lambda file: file.close())


def _make(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


async def _gathered(response: httpx.Response) -> AsyncGenerator[list[bytes], None]:
    """As they came, without being copied together, but enough at once to be worth a thread."""
    chunks: list[bytes] = []
    gathered = 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        gathered += len(chunk)
        if gathered >= CHUNK_BYTES:
            yield chunks
            chunks, gathered = [], 0
    yield chunks
