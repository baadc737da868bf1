"""Measures JSON values without serializing them. Pure."""

from collections.abc import Collection, Iterator
from typing import Any


def count_values(value: Any, *, most: int) -> int:
    """Counts a value and all values nested in it. Stops counting above `most`."""
    count = 0
    for _ in _values(value):
        count += 1
        if count > most:
            break
    return count


def is_larger(value: Any, *, bytes_max: int) -> bool:
    """Checks whether the JSON text of a value certainly has more bytes than the limit.

    The limit is not exact: a text that isn't ASCII can be up to six times longer than measured
    here.
    """
    size = 0
    for item in _values(value):
        if isinstance(item, str):
            size += len(item) + 2  # quotes
        elif isinstance(item, dict):
            size += 1 + 4 * len(item) + sum(map(len, item))  # for quotes, colons and commas
        elif isinstance(item, list):
            size += 1 + len(item)
        else:
            size += 1
        if size > bytes_max:
            return True
    return False


# Limits for values that may be processed in the event loop.
SMALL_VALUES_MAX, SMALL_BYTES_MAX = 2_000, 256 * 1024


def is_small(value: Any) -> bool:
    """Checks whether processing a value takes only a few milliseconds."""
    values, size = 1, 0
    containers: list[Collection[Any]] = [[value]]
    for container in containers:  # the loop appends nested containers
        for item in container:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, dict):
                values += len(item)
                size += sum(map(len, item))
                containers.append(item.values())
            elif isinstance(item, list):
                values += len(item)
                containers.append(item)
        if values > SMALL_VALUES_MAX or size > SMALL_BYTES_MAX:
            return False
    return True


def _values(value: Any) -> Iterator[Any]:
    pending = [value]
    while pending:
        item = pending.pop()
        yield item
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
