"""Opens files in threads outside the event loop, and streams bodies to and from them, so that no
file is held in memory as a whole."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, cast

from comfyfleet.errors import LimitExceeded

if TYPE_CHECKING:
    import httpx  # imported lazily, because it is slow to import and not needed for opening files

CHUNK_BYTES = 1024 * 1024
# A callback for the number of transferred bytes, and their total if it is known.
Transferred: TypeAlias = Callable[[int, int | None], None]
T = TypeVar("T")


async def open_file(path: Path, mode: str = "rb") -> BinaryIO:
    return await open_with(lambda: cast(BinaryIO, path.open(mode)), lambda file: file.close())


async def open_with(make: Callable[[], T], close: Callable[[T], Any]) -> T:
    """Calls `make` in a thread and returns the opened object.

    A thread can't be cancelled. If the caller is cancelled in the meantime, `close` is called as
    soon as the thread has opened the object.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))

    def close_it(finished: asyncio.Future[T]) -> None:
        if not finished.cancelled() and finished.exception() is None:
            close(finished.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(close_it)
        raise


async def read_chunks(
    path: Path, chunk_bytes: int = CHUNK_BYTES, *, start: int = 0, size: int | None = None
) -> AsyncIterator[bytes]:
    """Yields a file in chunks, beginning at `start`. Without `size`, continues to the end."""
    with await open_file(path) as file:
        file.seek(start)
        remaining = chunk_bytes if size is None else size
        while chunk := await asyncio.to_thread(file.read, min(remaining, chunk_bytes)):
            remaining -= len(chunk) if size is not None else 0
            yield chunk


async def save_body(
    response: "httpx.Response",
    to: Path,
    on_progress: Transferred | None = None,
    *,
    bytes_max: int | None = None,
) -> int:
    """Streams a body to a file, which appears under its name only when it is complete. Returns its
    size.

    Raises LimitExceeded as soon as the announced or received size is too large.
    """
    announced = response.headers.get("content-length", "")
    if bytes_max is not None and announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(bytes_max)
    part = to.with_name(f".{to.name}.part")
    try:
        async with aclosing(_grouped_chunks(response, on_progress, bytes_max)) as groups:
            size = await _save(groups, part, to)
    except BaseException:
        await asyncio.to_thread(part.unlink, missing_ok=True)
        raise
    return size


def _too_large(bytes_max: int) -> LimitExceeded:
    return LimitExceeded(f"the file is larger than {bytes_max:,} bytes", max_bytes=bytes_max)


async def _save(groups: AsyncIterator[list[bytes]], part: Path, to: Path) -> int:
    first = await anext(groups)
    size = sum(map(len, first))
    if size < CHUNK_BYTES:
        # The file is complete. Most files are small enough to be written with a single switch to a
        # thread.
        await asyncio.to_thread(_write_whole, part, to, first)
        return size
    with await _open_new(part) as file:
        await asyncio.to_thread(file.writelines, first)
        async for chunks in groups:
            await asyncio.to_thread(file.writelines, chunks)
            size += sum(map(len, chunks))
    await asyncio.to_thread(part.replace, to)
    return size


def _write_whole(part: Path, to: Path, chunks: Sequence[bytes]) -> None:
    with _create(part) as file:
        file.writelines(chunks)
    part.replace(to)


async def _open_new(path: Path) -> BinaryIO:
    return await open_with(lambda: _create(path), lambda file: file.close())


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


async def _grouped_chunks(
    response: "httpx.Response", on_progress: Transferred | None, bytes_max: int | None
) -> AsyncGenerator[list[bytes], None]:
    """Groups chunks without copying them, so that each switch to a thread writes enough data."""
    chunks: list[bytes] = []
    size = received = 0
    length = response.headers.get("content-length", "") if on_progress else ""
    async for chunk in response.aiter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        received += len(chunk)
        if bytes_max is not None and received > bytes_max:
            raise _too_large(bytes_max)
        if on_progress:
            on_progress(received, int(length) if length.isdigit() else None)
        if size >= CHUNK_BYTES:
            yield chunks
            chunks, size = [], 0
    yield chunks
