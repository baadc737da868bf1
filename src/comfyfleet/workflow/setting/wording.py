"""Values and names as our sentences show them: short, on one line, whatever they are."""

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

TEXT_CHARACTERS_MAX = 60
NUMBER_BITS_MAX = 256  # Python refuses to write out numbers of thousands of digits
CLOSEST_MAX = 3
LISTED_MAX = 8  # so few names are all listed: none is far from what was meant
COMPARED_NAMES_MAX = 5_000
COMPARED_CHARACTERS_MAX = 100
CLOSENESS_MIN = 0.5


def shown(value: Any) -> str:
    """As in JSON, but never long and never nested."""
    match value:
        case str():
            return quoted(value)
        case bool() | None:
            return json.dumps(value)
        case int() if value.bit_length() > NUMBER_BITS_MAX:
            return "a number of many digits"
        case dict():
            return shown(value["__value__"]) if set(value) == {"__value__"} else "an object"
        case list():
            return f"a list of {len(value)}"
        case _:
            return str(value)


def quoted(text: str) -> str:
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
    text = json.dumps(cut, ensure_ascii=False)
    # Half a character could not be printed, and a control character would speak to the terminal.
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def listed(names: Iterable[str], total: int) -> str:
    some = list(names)
    more = f" and {total - len(some)} more" if total > len(some) else ""
    return ", ".join(some) + more


def closest(wanted: str, names: Sequence[str]) -> list[str]:
    """The names that were probably meant, best first."""
    key = wanted[:COMPARED_CHARACTERS_MAX].lower()
    by_key: dict[str, str] = {}
    for name in names[:COMPARED_NAMES_MAX]:
        by_key.setdefault(name[:COMPARED_CHARACTERS_MAX].lower(), name)
    inside = [known for known in by_key if key and (key in known)]
    alike = get_close_matches(key, by_key, n=CLOSEST_MAX, cutoff=CLOSENESS_MIN)
    # A part of a name is the better hint: people leave out folders and endings.
    keys = dict.fromkeys([*(known for known in alike if known in inside), *inside, *alike])
    return [by_key[known] for known in keys][:CLOSEST_MAX]


def hint(wanted: str, names: Sequence[str], what: str = "known") -> str:
    """What to say after "not known": the closest names, or all of them if they are few."""
    if not names:
        return ""
    if len(names) <= LISTED_MAX:
        return f"; {what}: " + listed(map(quoted, names), len(names))
    near = closest(wanted, names)
    return "; closest: " + ", ".join(map(quoted, near)) if near else ""
