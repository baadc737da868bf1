"""Uploads and downloads files in chunks, so that no file is held in memory as a whole."""

import mimetypes
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx

from comfyfleet.api.media import Upload, UploadPart, UploadSlot, UploadState
from comfyfleet.api.values import Message
from comfyfleet.client.transport import ApiCalls, parse_answer, refusal
from comfyfleet.errors import FleetError, InvalidInput, ServerUnavailable, UnexpectedAnswer
from comfyfleet.transport.error_decoder import error_fields
from comfyfleet.transport.files import Transferred, read_chunks, save_body
from comfyfleet.transport.http import CONNECT_SECONDS, RETRYABLE_STATUSES, Call

CHUNK_BYTES = 256 * 1024
# Smaller files are sent in one piece, because sending them again costs little.
IN_PARTS_BYTES = 8 * 1024**2
TRANSFER_TIMEOUT = httpx.Timeout(300.0, connect=CONNECT_SECONDS)
ANYTHING = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class UploadSource:
    """The source of an upload: a file or bytes."""

    filename: str
    content_type: str
    size: int
    path: Path | None = None
    content: bytes = b""

    async def pieces(self, on_progress: Transferred | None) -> AsyncIterator[bytes]:
        async for piece in self.part(0, self.size, on_progress):
            yield piece

    async def part(
        self, start: int, size: int, on_progress: Transferred | None = None, sent: int = 0
    ) -> AsyncIterator[bytes]:
        """Yields `size` bytes from `start`. `sent` is the number of bytes that were already
        sent."""
        async for piece in self._pieces(start, size):
            yield piece
            sent += len(piece)
            if on_progress:
                on_progress(sent, self.size)

    async def _pieces(self, start: int, size: int) -> AsyncIterator[bytes]:
        if self.path is None:
            for at in range(start, start + size, CHUNK_BYTES):
                yield self.content[at : min(at + CHUNK_BYTES, start + size)]
            return
        async for piece in read_chunks(self.path, CHUNK_BYTES, start=start, size=size):
            yield piece


def upload_source(
    source: Path | str | bytes, *, filename: str | None = None, content_type: str | None = None
) -> UploadSource:
    path = None if isinstance(source, bytes) else Path(source)
    name = filename or (path.name if path else "")
    if not name:
        raise InvalidInput(
            "a filename is required for bytes, because its extension determines the type",
            field="filename",
        )
    kind = content_type or mimetypes.guess_type(name)[0] or ANYTHING
    if isinstance(source, bytes):
        return UploadSource(name, kind, len(source), content=source)
    return UploadSource(name, kind, Path(source).stat().st_size, path=path)


class _Announced(Message):
    """The common fields of the customer and admin APIs for an announced file."""

    file_id: UUID
    upload: UploadSlot


async def upload_to(
    calls: ApiCalls,
    path: str,
    source: UploadSource,
    on_progress: Transferred | None = None,
    **fields: Any,
) -> UUID:
    """Announces a file at a route of the API, uploads it to the URL in the answer, and returns its
    id."""
    size, kind = source.size, source.content_type
    body = {"filename": source.filename, "content_type": kind, "size": size, **fields}
    # If a repeated announcement creates two files, the one without content is deleted later.
    answer = await calls.ask(Call("POST", path, body, is_repeatable=True))
    announced = parse_answer(_Announced, answer)
    await upload_file(calls, announced.upload, source, on_progress)
    return announced.file_id


async def upload_in_parts(
    calls: ApiCalls,
    path: str,
    source: UploadSource,
    on_progress: Transferred | None = None,
    **fields: Any,
) -> UUID:
    """Uploads a file like `upload_to`, but in parts. After an interruption, parts that have arrived
    are not sent again, and expired URLs are renewed."""
    body = {
        "filename": source.filename,
        "content_type": source.content_type,
        "size": source.size,
        "in_parts": True,
        **fields,
    }
    answer = await calls.ask(Call("POST", path, body, is_repeatable=True))
    announced = parse_answer(Upload, answer)
    parts, sent = announced.parts, 0
    for attempt in range(1, calls.retry.attempts_max + 1):
        missing = [part for part in parts if part.upload]
        sent = source.size - sum(part.size for part in missing)
        try:
            for part in missing:
                await _upload_part(calls, part, source, on_progress, sent)
                sent += part.size
        except FleetError:
            if attempt == calls.retry.attempts_max:
                raise
        else:
            return announced.file_id
        state = await calls.ask(Call("GET", f"{path}/{announced.file_id}"))
        parts = parse_answer(UploadState, state).parts
    return announced.file_id


async def _upload_part(
    calls: ApiCalls,
    part: UploadPart,
    source: UploadSource,
    on_progress: Transferred | None,
    sent: int,
) -> None:
    if part.upload is not None:
        await _send(
            calls,
            part.upload,
            part.size,
            lambda: source.part(part.start, part.size, on_progress, sent),
        )


async def upload_file(
    calls: ApiCalls, slot: UploadSlot, source: UploadSource, on_progress: Transferred | None
) -> None:
    """Uploads a file without the API key, because the URL itself grants access. Sending the same
    bytes again is harmless."""
    await _send(calls, slot, source.size, lambda: source.pieces(on_progress))


async def _send(
    calls: ApiCalls, slot: UploadSlot, size: int, pieces: Callable[[], AsyncIterator[bytes]]
) -> None:
    # Set the length explicitly, because storage servers refuse uploads of unknown length.
    headers = {**slot.headers, "Content-Length": str(size)}
    for attempt in range(1, calls.retry.attempts_max + 1):
        is_last = attempt == calls.retry.attempts_max
        try:
            response = await calls.client.request(
                slot.method,
                slot.url,
                headers=headers,
                content=pieces(),
                timeout=TRANSFER_TIMEOUT,
            )
        except httpx.TransportError as error:
            if is_last:
                raise _connection_lost(error) from error
        else:
            if response.is_success:
                return
            if is_last or response.status_code not in RETRYABLE_STATUSES:
                raise _store_refusal(response, "upload")
        await calls.retry.back_off(attempt)


async def download_file(
    calls: ApiCalls, url: str, path: Path, on_progress: Transferred | None = None
) -> Path:
    """Downloads a file under a temporary name until it is complete, so that the target never
    contains half a file."""
    attempt = 0
    while True:
        attempt += 1
        try:
            async with calls.client.stream("GET", url, timeout=TRANSFER_TIMEOUT) as response:
                if not response.is_success:
                    await response.aread()
                    raise _store_refusal(response, "download")
                await save_body(response, path, on_progress)
                return path
        except httpx.TransportError as error:
            if attempt >= calls.retry.attempts_max:
                raise _connection_lost(error) from error
        await calls.retry.back_off(attempt)


_S3_ERROR = re.compile(r"<Code>(\w+)</Code>")


def _store_refusal(response: httpx.Response, what: str) -> FleetError:
    """Returns the API's error if the control plane itself stores files, otherwise an error that
    names the storage server."""
    if error_fields(response) is not None:
        return refusal(response)
    code = _S3_ERROR.search(response.text)
    return UnexpectedAnswer(
        f"the storage server at {response.url.host} refused the {what}: {response.status_code} "
        f"{code[1] if code else response.reason_phrase}",
        hint="Ask the operator of the control plane to check its storage.",
    )


def _connection_lost(error: httpx.TransportError) -> ServerUnavailable:
    return ServerUnavailable(f"the file transfer failed: {str(error) or type(error).__name__}")
