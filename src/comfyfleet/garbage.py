"""Keeps full garbage collections from stopping the event loop.

A full collection looks at every container of the process and holds the interpreter lock meanwhile: 0.1 s for a
control plane that has just started, and about 1 s for each million containers. Almost everything is freed
by counting references; collections are needed for cycles only.

Objects that live long, such as the connections' prepared statements, are exempted from collections, so that the
rest stays small enough to be collected every few seconds. Exempted cycles that nothing uses are freed once an hour."""

import asyncio
import gc

YOUNG, MIDDLE = (
    2_000,
    10,
)  # objects before a collection of the youngest, and such collections before the next
NEVER = 1_000_000
COLLECT_SECONDS = 10.0
SMALL_OBJECTS = 50_000  # a full collection of so many takes less than 0.05 s
LARGE_PASSES = 360  # exempted objects are collected at every so many passes


def limit_collections() -> None:
    """Exempts everything that exists now from collections, and lets only `keep_collecting` start full ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


async def keep_collecting() -> None:
    """Collects garbage every few seconds, and exempted objects once an hour. Runs until cancelled."""
    passes = 0
    while True:
        await asyncio.sleep(COLLECT_SECONDS)
        passes += 1
        collect(is_large_allowed=passes % LARGE_PASSES == 0)


def collect(*, is_large_allowed: bool) -> bool:
    """Returns whether it was a full collection."""
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
