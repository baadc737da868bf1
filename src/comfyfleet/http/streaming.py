"""Answers that go on until their reader goes away, which it may do at any moment."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def undisturbed(work: Coroutine[Any, Any, T]) -> T:
    """To its end, though nobody may wait for it any more: a reader that goes away cancels its answer,
    and a statement that is cut off in the middle takes its connection to the database with it."""
    return await asyncio.shield(asyncio.create_task(work))
