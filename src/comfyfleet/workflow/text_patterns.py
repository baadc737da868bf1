"""Texts that the editor changes before it sends them: {a|b} choices and %…% patterns."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.model import DEFAULT_LIMITS, Limits

_COMMENTS = re.compile(r"/\*[\s\S]*?\*/|//[^\n\r\u2028\u2029]*")
_ESCAPED = re.compile(r"\\([{}|])")
_PATTERN = re.compile(r"%([^%]+)%")
_DATE_PARTS = re.compile("dd?|MM?|hh?|mm?|ss?|yyy?y?")
_NOT_IN_FILE_NAMES = re.compile(r'[/?<>\\:*|"\x00-\x1f\x7f]')


class Random(Protocol):
    """The part of `random.Random` that is used."""

    def random(self) -> float: ...


def choose(text: str, rng: Random | None, *, limits: Limits = DEFAULT_LIMITS) -> str:
    """Removes comments and picks one of each {a|b}; without `rng` the first."""
    if "{" not in text and "\\" not in text and "/" not in text:
        return text
    return _choose(text, rng, limits.choice_depth_max)


def _choose(text: str, rng: Random | None, depth_left: int) -> str:
    if depth_left == 0:
        raise LimitExceeded("a text with choices {a|b} is nested too deeply")
    text = _COMMENTS.sub("", text)
    parts: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\\":
            parts.append(_escape(text, position))
            position += 1
        elif character == "{":
            options, position = _options(text, position)
            pick = int(rng.random() * len(options)) if rng else 0
            parts.append(_choose(options[pick], rng, depth_left - 1))
        else:
            parts.append(character)
    return _ESCAPED.sub(r"\1", "".join(parts))


def _options(text: str, position: int) -> tuple[list[str], int]:
    """The options of the block that starts here, and where it ends. An unclosed one goes to the end."""
    options: list[str] = []
    choice: list[str] = []
    depth = 0
    while position < len(text):
        character = text[position]
        position += 1
        if character == "\\":
            choice.append(_escape(text, position))
            position += 1
            continue
        if character == "{":
            depth += 1
        elif character == "}":
            if depth == 0:
                break
            depth -= 1
        elif character == "|" and depth == 0:
            options.append("".join(choice))
            choice = []
            continue
        choice.append(character)
    return [*options, "".join(choice)], position


def _escape(text: str, position: int) -> str:
    # A lone backslash at the end: JavaScript appends the word for a missing character.
    return "\\" + (text[position] if position < len(text) else "undefined")


def fill_patterns(
    text: str, find_value: Callable[[str, str], Any], now: datetime | None, missing: object
) -> str:
    """Fills in `%date:yyyy-MM-dd%` and `%Node.widget%`; `find_value(node, widget)` may return
    `missing`.
    """

    def replace(match: re.Match[str]) -> str:
        parts = match.group(1).split(".")
        if len(parts) != 2:
            is_date = parts[0].startswith("date:") and now is not None
            return format_date(parts[0][5:], now) if is_date and now else match.group(0)
        value = find_value(parts[0], parts[1])
        if value is missing:
            return match.group(0)
        return _NOT_IN_FILE_NAMES.sub("_", "" if value is None else javascript_text(value))

    return _PATTERN.sub(replace, text) if "%" in text else text


def format_date(pattern: str, now: datetime) -> str:
    numbers = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}

    def replace(match: re.Match[str]) -> str:
        part = match.group(0)
        if part == "yy":
            return f"{now.year}"[2:]
        if part == "yyyy":
            return f"{now.year}"
        return str(numbers[part[0]]).zfill(len(part)) if part[0] in numbers else part

    return _DATE_PARTS.sub(replace, pattern)


def javascript_text(value: Any) -> str:
    """Formats a JSON value as JavaScript writes it into a text."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, list):
        return ",".join("" if item is None else javascript_text(item) for item in value)
    if isinstance(value, dict):
        return "[object Object]"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return str(int(value))
    return str(value)
