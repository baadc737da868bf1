"""Keeps full garbage collections from stopping the event loop.

A full collection looks at every container of the process and holds the interpreter lock meanwhile: 0.1 s for a
control plane that has just started, and about 1 s for each million containers. Almost everything is freed
by counting references; collections are needed for cycles only."""

import asyncio
import gc

YOUNG, MIDDLE = (
    2_000,
    10,
)  # objects before a collection of the youngest, and such collections before the next
NEVER = 1_000_000
COLLECT_SECONDS = 60.0
SMALL_OBJECTS = 50_000  # a full collection of so many takes less than 0.05 s
LARGE_PASSES = 60  # a larger heap is collected at every so many passes


def limit_collections() -> None:
    """Exempts everything that exists now from collections, and lets only `keep_collecting` start full ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


async def keep_collecting() -> None:
    """Collects all garbage once a minute while that is quick, and otherwise once an hour. Runs until cancelled."""
    passes = 0
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        passes += 1
        if collect(is_large_allowed=passes % LARGE_PASSES == 0):
            passes = 0


def collect(*, is_large_allowed: bool) -> bool:
    """Returns whether it was a full collection."""
    is_full = is_large_allowed or len(gc.get_objects(generation=2)) <= SMALL_OBJECTS
    gc.collect(2 if is_full else 1)
    return is_full
