"""Files uploaded and downloaded in pieces: no file is ever held in memory as a whole."""

import mimetypes
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from comfyfleet.api.media import UploadSlot
from comfyfleet.api.values import Message
from comfyfleet.client.transport import ApiCalls, parse_answer, refusal
from comfyfleet.errors import InvalidInput, ServerUnavailable
from comfyfleet.transport.files import Transferred, read_chunks, save_body
from comfyfleet.transport.http import CONNECT_SECONDS, RETRYABLE_STATUSES, Call

CHUNK_BYTES = 256 * 1024
TRANSFER_TIMEOUT = httpx.Timeout(300.0, connect=CONNECT_SECONDS)
ANYTHING = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class UploadSource:
    """What is uploaded: a file, or bytes that are at hand."""

    filename: str
    content_type: str
    size: int
    path: Path | None = None
    content: bytes = b""

    async def pieces(self, told: Transferred | None) -> AsyncIterator[bytes]:
        sent = 0
        async for piece in self._pieces():
            yield piece
            sent += len(piece)
            if told:
                told(sent, self.size)

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.path is None:
            for start in range(0, self.size, CHUNK_BYTES):
                yield self.content[start : start + CHUNK_BYTES]
            return
        async for piece in read_chunks(self.path, CHUNK_BYTES):
            yield piece


def upload_source(
    given: Path | str | bytes, *, filename: str | None = None, content_type: str | None = None
) -> UploadSource:
    path = None if isinstance(given, bytes) else Path(given)
    name = filename or (path.name if path else "")
    if not name:
        raise InvalidInput(
            "bytes need a filename: its ending tells what they are", field="filename"
        )
    kind = content_type or mimetypes.guess_type(name)[0] or ANYTHING
    if isinstance(given, bytes):
        return UploadSource(name, kind, len(given), content=given)
    return UploadSource(name, kind, Path(given).stat().st_size, path=path)


class _Announced(Message):
    """What both APIs, the customers' and the operators', say of a file that is to come."""

    file_id: UUID
    upload: UploadSlot


async def upload_to(
    calls: ApiCalls,
    path: str,
    source: UploadSource,
    told: Transferred | None = None,
    **fields: Any,
) -> UUID:
    """Announces a file at a route of the API, and sends it to where the answer says. Returns its id."""
    size, kind = source.size, source.content_type
    body = {"filename": source.filename, "content_type": kind, "size": size, **fields}
    # Announced twice, one of them stays without content and is swept away.
    answer = await calls.ask(Call("POST", path, body, is_repeatable=True))
    announced = parse_answer(_Announced, answer)
    await upload_file(calls, announced.upload, source, told)
    return announced.file_id


async def upload_file(
    calls: ApiCalls, slot: UploadSlot, source: UploadSource, told: Transferred | None
) -> None:
    """Without the key: the URL is all the right that it takes. The same bytes again do no harm."""
    # An explicit length: a store refuses uploads whose end it can't foresee.
    headers = {**slot.headers, "Content-Length": str(source.size)}
    for attempt in range(1, calls.retry.attempts_max + 1):
        is_last = attempt == calls.retry.attempts_max
        try:
            response = await calls.client.request(
                slot.method,
                slot.url,
                headers=headers,
                content=source.pieces(told),
                timeout=TRANSFER_TIMEOUT,
            )
        except httpx.TransportError as error:
            if is_last:
                raise _connection_lost(error) from error
        else:
            if response.is_success:
                return
            if is_last or response.status_code not in RETRYABLE_STATUSES:
                raise refusal(response)
        await calls.retry.back_off(attempt)


async def download_file(
    calls: ApiCalls, url: str, path: Path, told: Transferred | None = None
) -> Path:
    """Under another name until it is whole, so that what is there is never half a file."""
    attempt = 0
    while True:
        attempt += 1
        try:
            async with calls.client.stream("GET", url, timeout=TRANSFER_TIMEOUT) as response:
                if not response.is_success:
                    await response.aread()
                    raise refusal(response)
                await save_body(response, path, told)
                return path
        except httpx.TransportError as error:
            if attempt >= calls.retry.attempts_max:
                raise _connection_lost(error) from error
        await calls.retry.back_off(attempt)


def _connection_lost(error: httpx.TransportError) -> ServerUnavailable:
    return ServerUnavailable(f"the file did not get through: {str(error) or type(error).__name__}")
