"""YAML from customers: short, read by the fast reader, beside the event loop."""

import contextlib
import time
from collections.abc import Callable

import pytest

from comfyfleet.api.documents import YAML_CHARACTERS_MAX, read_document
from comfyfleet.errors import FleetError, LimitExceeded

# Each took a second or more at the length that was allowed; the bound is of processor time.
HOSTILE: dict[str, Callable[[int], str]] = {
    "keys": lambda size: "".join(f"k{number}: [a, b]\n" for number in range(size // 14)),
    "flow": lambda size: "a: " + "[[], " * (size // 6),
    "deep": lambda size: "a: " + "[" * (size - 3),
    "dashes": lambda size: "- " * (size // 2),
    "questions": lambda size: "? " * (size // 2),
    "texts": lambda size: "- 'x'\n" * (size // 6),
    "numbers": lambda size: "a: " + "1" * (size - 3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_the_longest_yaml_takes_no_second(name: str) -> None:
    text = HOSTILE[name](YAML_CHARACTERS_MAX)
    begun = time.process_time()
    with contextlib.suppress(FleetError):
        read_document(text)
    assert time.process_time() - begun < 1


def test_longer_yaml_is_refused_unread() -> None:
    with pytest.raises(LimitExceeded, match="32,000 characters"):
        read_document("a: " + "x" * YAML_CHARACTERS_MAX)
