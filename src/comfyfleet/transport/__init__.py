"""Calls over HTTP: safe fetches of customers' URLs, server-sent events, and files opened in threads beside the event loop.

Internal: may change without notice.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

T = TypeVar("T")


async def open_file(path: Path, mode: str = "rb") -> BinaryIO:
    return await open_with(lambda: cast(BinaryIO, path.open(mode)), lambda file: file.close())


async def open_with(make: Callable[[], T], close: Callable[[T], Any]) -> T:
    """A thread can't be cancelled: what it opens for somebody who has gone is closed."""
    making = asyncio.ensure_future(asyncio.to_thread(make))

    def close_it(made: asyncio.Future[T]) -> None:
        if not made.cancelled() and made.exception() is None:
            close(made.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(close_it)
        raise
