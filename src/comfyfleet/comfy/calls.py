"""HTTP calls to a backend, which are logged, counted, and retried with back-off where this is safe.
Also transfers files to and from a ComfyUI server."""

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import httpx

from comfyfleet.comfy.answers import mapping_in, parse_json, shorten, text_at
from comfyfleet.comfy.backend import BackendLimits, Fetched, OutputFile, Uploaded
from comfyfleet.errors import (
    AccessDenied,
    FileGone,
    InvalidInput,
    LimitExceeded,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.transport.files import open_file, save_body
from comfyfleet.transport.http import Call, CallRecord, HttpClient, describe_network_error
from comfyfleet.transport.retry import RetryPolicy, retry_after_seconds

# Number of latencies to keep for each operation. Recent ones are enough for percentiles.
LATENCIES_KEPT_MAX = 1000


class CallMeter(Protocol):
    """Counts calls. `operation` is a method and route without ids, such as `POST /prompt`."""

    def called(self, operation: str, *, ok: bool, seconds: float) -> None: ...

    def unexpected(self, operation: str) -> None:
        """Counts a malformed response. This is worth an alert, because it means that the server has
        changed."""
        ...


class CallTally:
    """A CallMeter that stores its counts in memory."""

    def __init__(self) -> None:
        self.successes: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.unexpected_answers: Counter[str] = Counter()
        self.latencies: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    def called(self, operation: str, *, ok: bool, seconds: float) -> None:
        with self._lock:
            (self.successes if ok else self.failures)[operation] += 1
            latencies = self.latencies.setdefault(operation, [])
            latencies.append(seconds)
            del latencies[:-LATENCIES_KEPT_MAX]

    def unexpected(self, operation: str) -> None:
        with self._lock:
            self.unexpected_answers[operation] += 1


logger = logging.getLogger(__name__)

# Maximum size of a response in bytes. The node types of a ComfyUI with many custom nodes take tens
# of megabytes.
ANSWER_BYTES_MAX = 128 * 1024 * 1024
# Headers that describe the encoding of the body, which has already been decoded.
OF_TRANSFER = frozenset({"content-encoding", "content-length", "transfer-encoding"})
# The errors that an httpx call raises if the network or the server fails.
NETWORK_ERRORS = (httpx.TransportError,)
T = TypeVar("T")


class BackendCalls(HttpClient):
    """Calls to one backend. They are logged and counted, with the number of attempts that `limits`
    allow."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        limits: BackendLimits,
        meter: CallMeter,
        retry: RetryPolicy,
    ) -> None:
        super().__init__(client, retry=replace(retry, attempts_max=limits.max_retries + 1))
        self.limits = limits
        self.meter = meter

    async def once(self, call: Call) -> httpx.Response:
        """Sends a call once, like the base class, but limits the size of the response."""
        async with self.stream(call) as response:
            content = await _read_bounded(call, response)
        headers = [
            header for header in response.headers.multi_items() if header[0] not in OF_TRANSFER
        ]
        return httpx.Response(
            response.status_code, headers=headers, content=content, request=response.request
        )

    def retryable(self, response: httpx.Response, *, may_repeat: bool) -> bool:
        """Checks whether to retry a call. A 429 is retried only if it has a Retry-After header,
        because it may also mean that the account has no credits."""
        if response.status_code == 429:
            return retry_after_seconds(response.headers) is not None
        return may_repeat and response.status_code >= 500

    async def ask(self, call: Call) -> httpx.Response:
        """Sends a call, and retries it after network errors and server errors. Only use this for
        calls that can safely be repeated.

        Raises ServerUnavailable and AccessDenied. The caller handles other statuses.
        """
        response = await self.send(call, may_repeat=True)
        if response.status_code >= 500:
            raise error_from_response(call, response)
        return require_success(call, response)

    async def repeat(self, call: Call, transfer: Callable[[], Awaitable[T]]) -> T:
        """Runs a file transfer, and retries it if the network or the server fails."""
        for attempt in range(self.retry.attempts_max):
            if attempt:
                await self.retry.back_off(attempt)
            try:
                return await transfer()
            except NETWORK_ERRORS as error:
                failure = self.unavailable(call, error)
            except ServerUnavailable as error:
                failure = error
        raise failure

    async def ask_json(self, call: Call) -> Any:
        """Returns the JSON of a successful response. Also raises UnexpectedAnswer."""
        response = await self.ask(call)
        with self.count_unexpected(call.operation, logging.INFO if call.is_poll else logging.ERROR):
            return parse_answer(call, response)

    @contextlib.contextmanager
    def count_unexpected(self, operation: str, level: int = logging.ERROR) -> Iterator[None]:
        """Counts and logs an UnexpectedAnswer that is raised inside the block."""
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
    def recorded(self, call: Call) -> Iterator[CallRecord]:
        """Logs and counts the block as one call."""
        note, started = CallRecord(), self.retry.clock()
        failure: str | None = None
        try:
            yield note
        except BaseException as error:
            failure = describe_network_error(error)
            raise
        finally:
            seconds = self.retry.clock() - started
            ok = failure is None and (note.status or 0) < 400
            self.meter.called(call.operation, ok=ok, seconds=seconds)
            _log(call, self.place, note.status, failure, seconds)


async def _read_bounded(call: Call, response: httpx.Response) -> bytes:
    chunks, size = list[bytes](), 0
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if size > ANSWER_BYTES_MAX:
            raise UnexpectedAnswer(
                f"{call.operation} returned more than {ANSWER_BYTES_MAX:,} bytes"
            )
    return b"".join(chunks)


def require_success(call: Call, response: httpx.Response) -> httpx.Response:
    if response.status_code in (401, 403):
        raise AccessDenied(
            f"{call.operation} returned {response.status_code}: {shorten(response.text)}"
        )
    return response


def error_from_response(call: Call, response: httpx.Response) -> ServerUnavailable:
    status = response.status_code
    return ServerUnavailable(
        f"{call.operation} returned {status}: {shorten(response.text)}", status=status
    )


def parse_answer(call: Call, response: httpx.Response) -> Any:
    if response.status_code != 200:
        raise UnexpectedAnswer(
            f"{call.operation} returned {response.status_code}: {shorten(response.text)}",
            status=response.status_code,
            received=shorten(response.text),
        )
    return parse_json(response.content, f"the response to {call.operation}")


def _log(call: Call, place: str, status: int | None, failure: str | None, seconds: float) -> None:
    """Logs an attempt. Failed polls are logged only at INFO, because the polling code logs the
    outage once itself."""
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


UPLOAD_ROUTE = "/upload/image"  # accepts files of any type, despite its name
VIEW_ROUTE = "/view"
DEFAULT_TYPE = "application/octet-stream"
GONE = frozenset({404, 410})


async def upload_file(
    calls: BackendCalls, path: Path, name: str | None, subfolder: str = ""
) -> Uploaded:
    """Uploads a file. This is safe to repeat, because the server stores only one copy of the same
    bytes under the same name."""
    file = await _opened(path)
    try:
        return await _upload(calls, file, Path(name or path.name).name, subfolder)
    finally:
        file.close()


async def _upload(calls: BackendCalls, file: BinaryIO, name: str, subfolder: str) -> Uploaded:
    data = {"type": "input", **({"subfolder": subfolder} if subfolder else {})}
    call = Call("POST", UPLOAD_ROUTE, files={"image": (name, file)}, data=data)
    response = await calls.ask(call)
    if response.status_code == 413:
        raise LimitExceeded(f"{name} exceeds the server's upload limit")
    if response.status_code == 400:
        raise InvalidInput(f"the server refused {name}: {shorten(response.text)}")
    with calls.count_unexpected(call.operation):
        what = "the response to an upload"
        answer = mapping_in(parse_answer(call, response), what)
        subfolder, folder = str(answer.get("subfolder") or ""), str(answer.get("type") or "input")
        return Uploaded(text_at(answer, "name", what), subfolder, folder)


async def _opened(path: Path) -> BinaryIO:
    try:
        return await open_file(path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from error


async def fetch_file(
    calls: BackendCalls, file: OutputFile, to: Path, bytes_max: int | None = None
) -> Fetched:
    """Downloads a file, with retries. It appears under its name only when it is complete."""
    params = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
    call = Call("GET", VIEW_ROUTE, params=params)
    return await calls.repeat(call, lambda: _fetch(calls, call, file, to, bytes_max))


async def _fetch(
    calls: BackendCalls, call: Call, file: OutputFile, to: Path, bytes_max: int | None
) -> Fetched:
    async with calls.stream(call) as response:
        reused = "; an earlier run created it" if file.reused else ""
        gone_error = FileGone(f"{file.filename} is no longer in {file.folder}{reused}", file=file)
        await require_file(calls, call, response, gone_error)
        return await save_response(response, to, bytes_max)


async def save_response(
    response: httpx.Response, to: Path, bytes_max: int | None = None
) -> Fetched:
    size_bytes = await save_body(response, to, bytes_max=bytes_max)
    return Fetched(to, size_bytes, response.headers.get("content-type", DEFAULT_TYPE))


async def require_file(
    calls: BackendCalls, call: Call, response: httpx.Response, gone: FileGone
) -> None:
    """Raises an error unless the response is a file. Raises `gone` if the server no longer has the
    file.

    An HTML page must be a proxy's error page, because servers send even HTML files as plain bytes.
    """
    is_page = response.headers.get("content-type", "").startswith("text/html")
    if response.status_code == 200 and not is_page:
        return
    await response.aread()
    if response.status_code in GONE:
        raise gone
    if response.status_code >= 500:
        raise error_from_response(call, response)
    require_success(call, response)
    with calls.count_unexpected(call.operation):
        raise UnexpectedAnswer(
            f"{call.operation} returned {response.status_code}: {shorten(response.text)}"
        )
