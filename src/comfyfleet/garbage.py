"""Keeps full garbage collections from blocking the event loop.

A full collection examines every container of the process and holds the interpreter lock in the
meantime: 0.1 s for a control plane that has just started, and about 1 s for each million
containers. Reference counting frees almost everything, so collections are only needed for cycles.

Long-lived objects, such as the connections' prepared statements, are exempted from collections, so
that the remaining ones are few enough to be collected every few seconds. Unused cycles among the
exempted objects are freed once an hour.
"""

import asyncio
import gc

# The number of new objects after which the youngest generation is collected, and the number of such
# collections after which the next generation is collected.
YOUNG, MIDDLE = 2_000, 10
NEVER = 1_000_000
COLLECT_SECONDS = 10.0
SMALL_OBJECTS = 50_000  # a full collection of this many objects takes less than 0.05 s
LARGE_PASSES = 360  # number of passes between collections of the exempted objects


def limit_collections() -> None:
    """Exempts all existing objects from collections, and ensures that only `keep_collecting` starts
    full ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


async def keep_collecting() -> None:
    """Collects garbage every few seconds, and exempted objects once an hour. Runs until
    cancelled."""
    passes = 0
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        passes += 1
        collect(is_large_allowed=passes % LARGE_PASSES == 0)


def collect(*, is_large_allowed: bool) -> bool:
    """Collects garbage. Returns whether it was a full collection."""
    if is_large_allowed:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        return True
    if _old_objects() > SMALL_OBJECTS:
        gc.freeze()
        return False
    gc.collect()
    if _old_objects() > SMALL_OBJECTS // 2:
        gc.freeze()
    return True


def _old_objects() -> int:
    return len(gc.get_objects(generation=2))
