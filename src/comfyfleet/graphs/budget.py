"""How much the values of a run may hold, counted as they would be written down. Pure.

A merge takes its inputs by reference, so a few nodes in a row could stand for more than any memory
holds: what is counted is every value as often as it is met, and counting stops at the limit.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

SCALAR_CHARACTERS = 8  # of what is no text


class Size(NamedTuple):
    values: int = 0
    characters: int = 0

    def plus(self, other: "Size") -> "Size":
        return Size(self.values + other.values, self.characters + other.characters)

    def fits(self, most: "Size") -> bool:
        return self.values <= most.values and self.characters <= most.characters

    def within(self, most: "Size") -> "Size":
        """What is left of a limit when this much is used."""
        return Size(max(0, most.values - self.values), max(0, most.characters - self.characters))


NOTHING = Size()
VALUE_MAX = Size(values=300_000, characters=8 * 1024**2)  # what one node takes and gives
RUN_MAX = Size(values=1_000_000, characters=48 * 1024**2)
OUTPUTS_MAX = VALUE_MAX  # of all output nodes together: the answer has them whole
ANSWER_MAX = Size(values=50_000, characters=2 * 1024**2)  # of the executions in one answer


def size_of(value: Any, most: Size = VALUE_MAX) -> Size:
    """As soon as it is more than `most`, the rest is not looked at."""
    values, characters, waiting = 0, 0, [value]
    while waiting and values <= most.values and characters <= most.characters:
        current = waiting.pop()
        values += 1
        if isinstance(current, Mapping):
            characters += sum(len(str(name)) for name in current)
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
        else:
            characters += len(current) if isinstance(current, str) else SCALAR_CHARACTERS
    return Size(values, characters)


def too_large(most: Size) -> str:
    return f"more than {most.values:,} values or {most.characters:,} characters"
