"""Files to and from a ComfyUI server."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import BinaryIO

import httpx

from comfyfleet.comfy.backend import Fetched, OutputFile, Uploaded
from comfyfleet.comfy.calls import NETWORK_ERRORS, Call, Calls, answered_badly, checked, json_of
from comfyfleet.comfy.shapes import cut, mapping_in, text_at
from comfyfleet.kernel.errors import (
    FileGone,
    FleetError,
    InvalidInput,
    LimitExceeded,
    UnexpectedAnswer,
)
from comfyfleet.opened_files import opened, opened_by

CHUNK_BYTES = 1024 * 1024
UPLOAD_ROUTE = "/upload/image"  # for files of every kind
VIEW_ROUTE = "/view"


async def upload_file(calls: Calls, path: Path, name: str | None, subfolder: str = "") -> Uploaded:
    """Safe to repeat: the same bytes under a taken name get the name that they have."""
    file = await _opened(path)
    try:
        return await _upload(calls, file, Path(name or path.name).name, subfolder)
    finally:
        file.close()


async def _upload(calls: Calls, file: BinaryIO, name: str, subfolder: str) -> Uploaded:
    data = {"type": "input", **({"subfolder": subfolder} if subfolder else {})}
    call = Call("POST", UPLOAD_ROUTE, files={"image": (name, file)}, data=data)
    response = await calls.ask(call)
    if response.status_code == 413:
        raise LimitExceeded(f"{name} is larger than the server takes")
    if response.status_code == 400:
        raise InvalidInput(f"the server does not take {name}: {cut(response.text)}")
    with calls.reading(call.operation):
        what = "the answer to an upload"
        answer = mapping_in(json_of(call, response), what)
        subfolder, folder = str(answer.get("subfolder") or ""), str(answer.get("type") or "input")
        return Uploaded(text_at(answer, "name", what), subfolder, folder)


async def _opened(path: Path) -> BinaryIO:
    try:
        return await opened(path)
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror}") from error


async def fetch_file(calls: Calls, file: OutputFile, to: Path) -> Fetched:
    """Attempts until complete; the file appears under its name only then."""
    params = {"filename": file.filename, "subfolder": file.subfolder, "type": file.folder}
    call = Call("GET", VIEW_ROUTE, params=params)
    for attempt in range(calls.limits.max_retries + 1):
        if attempt:
            await calls.surroundings.back_off(attempt)
        try:
            return await _fetch(calls, call, file, to)
        except NETWORK_ERRORS as error:
            trouble: FleetError = calls.unavailable(call, error)
        except _Busy as error:
            trouble = answered_badly(call, error.response)
    raise trouble


class _Busy(Exception):
    """The server failed; it may not the next time."""

    def __init__(self, response: httpx.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


async def _fetch(calls: Calls, call: Call, file: OutputFile, to: Path) -> Fetched:
    async with calls.stream(call) as response:
        await _check(calls, call, file, response)
        size = await save(response, to)
        return Fetched(to, size, response.headers.get("content-type", "application/octet-stream"))


async def _check(calls: Calls, call: Call, file: OutputFile, response: httpx.Response) -> None:
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
    checked(call, response)
    with calls.reading(call.operation):
        raise UnexpectedAnswer(
            f"{call.operation} was answered {response.status_code}: {cut(response.text)}"
        )


async def save(response: httpx.Response, to: Path) -> int:
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
    return await opened_by(lambda: _make(path), lambda file: file.close())


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
