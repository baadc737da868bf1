"""Measures JSON values without writing them as text. Pure."""

from collections.abc import Iterator
from typing import Any


def count_values(value: Any, *, most: int) -> int:
    """Returns the number of values inside of a value, itself included; counting stops above `most`."""
    count = 0
    for _ in _values(value):
        count += 1
        if count > most:
            break
    return count


def is_larger(value: Any, *, bytes_max: int) -> bool:
    """Checks whether the JSON text of a value certainly has more bytes than the limit.

    A text that isn't ASCII is longer than measured here, by a factor of six at most.
    """
    size = 0
    for found in _values(value):
        if isinstance(found, str):
            size += len(found) + 2  # quotes
        elif isinstance(found, dict):
            size += 1 + 4 * len(found) + sum(map(len, found))  # quotes, colons and commas
        elif isinstance(found, list):
            size += 1 + len(found)
        else:
            size += 1
        if size > bytes_max:
            return True
    return False


# What is larger is not gone through in the event loop.
SMALL_VALUES_MAX, SMALL_BYTES_MAX = 2_000, 256 * 1024


def is_small(value: Any) -> bool:
    """Checks whether going through a value takes no longer than a few milliseconds."""
    is_short = count_values(value, most=SMALL_VALUES_MAX) <= SMALL_VALUES_MAX
    return is_short and not is_larger(value, bytes_max=SMALL_BYTES_MAX)


def _values(value: Any) -> Iterator[Any]:
    left = [value]
    while left:
        found = left.pop()
        yield found
        if isinstance(found, dict):
            left.extend(found.values())
        elif isinstance(found, list):
            left.extend(found)
