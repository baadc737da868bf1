"""Keeps glibc's malloc from holding memory that nothing uses."""

import asyncio
import ctypes
import sys

GIVE_BACK_SECONDS = 60.0
M_ARENA_MAX = -8  # from malloc.h


def use_one_arena() -> None:
    """To be called before there are threads. Nothing elsewhere than on glibc.

    Each database connection of SQLite has a thread, and each thread an arena, with free blocks that no other
    thread can use: a control plane on SQLite grew by 600 bytes with each job, though nothing was in use.
    """
    if sys.platform == "linux":
        change = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if change is not None:
            change(M_ARENA_MAX, 1)


def give_free_memory_back() -> None:
    """All pages of the heap that are free, also those between blocks in use. Nothing elsewhere than on glibc.

    The event loop reads into blocks of 256 KB that shrink to what has come, and what stays of them
    leaves holes: without this, a control plane grew by 500 bytes with each job, though nothing was in use.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


async def keep_giving_back() -> None:
    """Until cancelled. In a thread: it takes milliseconds, and holds no lock of Python's."""
    while True:
        await asyncio.sleep(GIVE_BACK_SECONDS)
        await asyncio.to_thread(give_free_memory_back)
