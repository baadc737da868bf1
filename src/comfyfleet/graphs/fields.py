"""Reads the fields of one object in a document, and notes what is wrong with them, all of it.

A field that can't be used is reported and read as its default, so that the rest is read as well.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from comfyfleet.graphs.limits import DEFAULT_LIMITS

Choice = TypeVar("Choice", bound=StrEnum)
# code, message, field
Report = Callable[[str, str, str], None]


class Fields:
    def __init__(self, values: Mapping[str, Any], report: Report) -> None:
        self.values = values
        self.report = report
        self.known: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return self.values.get(name, default)

    def text(self, name: str, *, required: bool = False) -> str:
        value = self.take(name)
        if value is None:
            if required:
                self.report("missing_field", f"{name} is missing", name)
            return ""
        most = DEFAULT_LIMITS.text_characters_max
        if not isinstance(value, str) or not value or len(value) > most:
            self.wrong(name, f"a text of 1 to {most} characters")
            return ""
        return value

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        value = self.take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self.wrong(name, f"a whole number from {least:,} to {most:,}")
            return default
        return value

    def optional_whole(self, name: str, *, least: int, most: int) -> int | None:
        if self.take(name) is None:
            return None
        return self.whole(name, least, least=least, most=most)

    def truth(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
            return default
        return value

    def choice(self, name: str, default: Choice) -> Choice:
        value = self.take(name, default.value)
        kind = type(default)
        if value not in [each.value for each in kind]:
            self.wrong(name, "one of " + ", ".join(kind))
            return default
        return kind(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.wrong(name, "an object")
            return {}
        return value

    def wrong(self, name: str, wanted: str) -> None:
        self.report(
            "invalid_field", f"{name} must be {wanted}, not {_shown(self.values[name])}", name
        )

    def refuse_others(self) -> None:
        """After all fields were asked for: what is left was misspelt, most likely."""
        words = ", ".join(sorted(self.known))
        for name in self.values:
            if name not in self.known:
                message = f"there is no field {name!r:.60} here; there are {words}"
                self.report("unknown_field", message, str(name))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
