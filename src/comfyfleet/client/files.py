"""Files uploaded and downloaded in pieces: no file is ever held in memory as a whole."""

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
# Smaller files are sent at once: to send one again costs little.
IN_PARTS_BYTES = 8 * 1024**2
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
        async for piece in self.part(0, self.size, told):
            yield piece

    async def part(
        self, start: int, size: int, told: Transferred | None = None, sent: int = 0
    ) -> AsyncIterator[bytes]:
        """The bytes from `start` on; `sent` is how many others went before."""
        async for piece in self._pieces(start, size):
            yield piece
            sent += len(piece)
            if told:
                told(sent, self.size)

    async def _pieces(self, start: int, size: int) -> AsyncIterator[bytes]:
        if self.path is None:
            for at in range(start, start + size, CHUNK_BYTES):
                yield self.content[at : min(at + CHUNK_BYTES, start + size)]
            return
        async for piece in read_chunks(self.path, CHUNK_BYTES, start=start, size=size):
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


async def upload_in_parts(
    calls: ApiCalls, path: str, source: UploadSource, told: Transferred | None = None, **fields: Any
) -> UUID:
    """Like `upload_to`, part by part: what has arrived is not sent again after a break. URLs that have expired
    meanwhile are asked for anew."""
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
        missing = [each for each in parts if each.upload]
        sent = source.size - sum(each.size for each in missing)
        try:
            for each in missing:
                await _upload_part(calls, each, source, told, sent)
                sent += each.size
        except FleetError:
            if attempt == calls.retry.attempts_max:
                raise
        else:
            return announced.file_id
        state = await calls.ask(Call("GET", f"{path}/{announced.file_id}"))
        parts = parse_answer(UploadState, state).parts
    return announced.file_id


async def _upload_part(
    calls: ApiCalls, part: UploadPart, source: UploadSource, told: Transferred | None, sent: int
) -> None:
    if part.upload is not None:
        await _send(
            calls, part.upload, part.size, lambda: source.part(part.start, part.size, told, sent)
        )


async def upload_file(
    calls: ApiCalls, slot: UploadSlot, source: UploadSource, told: Transferred | None
) -> None:
    """Without the key: the URL is all the right that it takes. The same bytes again do no harm."""
    await _send(calls, slot, source.size, lambda: source.pieces(told))


async def _send(
    calls: ApiCalls, slot: UploadSlot, size: int, pieces: Callable[[], AsyncIterator[bytes]]
) -> None:
    # An explicit length: a store refuses uploads whose end it can't foresee.
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
                    raise _store_refusal(response, "download")
                await save_body(response, path, told)
                return path
        except httpx.TransportError as error:
            if attempt >= calls.retry.attempts_max:
                raise _connection_lost(error) from error
        await calls.retry.back_off(attempt)


_S3_ERROR = re.compile(r"<Code>(\w+)</Code>")


def _store_refusal(response: httpx.Response, what: str) -> FleetError:
    """Returns the API's error if the control plane stores files itself; otherwise an error that names
    the store."""
    if error_fields(response) is not None:
        return refusal(response)
    code = _S3_ERROR.search(response.text)
    return UnexpectedAnswer(
        f"the file store at {response.url.host} refused the {what}: {response.status_code} "
        f"{code[1] if code else response.reason_phrase}",
        hint="Ask the operator of the control plane to check its file store.",
    )


def _connection_lost(error: httpx.TransportError) -> ServerUnavailable:
    return ServerUnavailable(f"the file did not get through: {str(error) or type(error).__name__}")
