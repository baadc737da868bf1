"""Replacements that the editor makes in strings before it sends them: {a|b} choices and %…%
patterns."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.model import DEFAULT_LIMITS, CharacterBudget, Limits

_LINE_COMMENT = re.compile(r"//[^\n\r\u2028\u2029]*")
_COMMENT_START = re.compile(rf"/\*|{_LINE_COMMENT.pattern}")
_CHOICE_START = re.compile(r"[\\{]")
_CHOICE_PART = re.compile(r"[\\{}|]")
_ESCAPED = re.compile(r"\\([{}|])")
_PATTERN = re.compile(r"%([^%]+)%")
_DATE_PARTS = re.compile("dd?|MM?|hh?|mm?|ss?|yyy?y?")
_NOT_IN_FILE_NAMES = re.compile(r'[/?<>\\:*|"\x00-\x1f\x7f]')


class Random(Protocol):
    """The part of `random.Random` that is used."""

    def random(self) -> float: ...


def choice_budget(limits: Limits) -> CharacterBudget:
    return CharacterBudget(limits.choice_characters_max, "nested choices {a|{b|c}}")


def choose(
    text: str,
    rng: Random | None,
    *,
    limits: Limits = DEFAULT_LIMITS,
    budget: CharacterBudget | None = None,
) -> str:
    """Removes comments and picks one option of each {a|b}. Without `rng`, picks the first one.

    `budget` is shared by the texts of one conversion.
    """
    if "{" not in text and "\\" not in text and "/" not in text:
        return text
    return _choose(text, rng, limits.choice_depth_max, budget or choice_budget(limits))


def _choose(text: str, rng: Random | None, depth_left: int, budget: CharacterBudget) -> str:
    if depth_left == 0:
        raise LimitExceeded("choices {a|b} are nested too deeply")
    text = _without_comments(text)
    parts: list[str] = []
    position = 0
    while match := _CHOICE_START.search(text, position):
        parts.append(text[position : match.start()])
        position = match.end()
        if match.group() == "\\":
            parts.append(_escape(text, position))
            position += 1
        else:
            options, position = _options(text, position)
            picked = options[int(rng.random() * len(options)) if rng else 0]
            budget.take(len(picked))
            parts.append(_choose(picked, rng, depth_left - 1, budget))
    parts.append(text[position:])
    return _ESCAPED.sub(r"\1", "".join(parts))


def _without_comments(text: str) -> str:
    """Removes comments in one pass. A block comment without an end is preserved."""
    parts: list[str] = []
    position = 0
    while match := _COMMENT_START.search(text, position):
        is_block = match.group() == "/*"
        end = text.find("*/", match.end()) if is_block else match.end()
        if end < 0:  # later block comments have no end either
            break
        parts.append(text[position : match.start()])
        position = end + 2 if is_block else end
    return "".join(parts) + _LINE_COMMENT.sub("", text[position:])


def _options(text: str, position: int) -> tuple[list[str], int]:
    """Returns the options of the block that starts here, and the position after it. An unclosed
    block extends to the end."""
    options: list[str] = []
    start, depth = position, 0
    while match := _CHOICE_PART.search(text, position):
        position = match.end()
        character = match.group()
        if character == "\\":
            if position == len(text):
                return [*options, text[start : position - 1] + _escape(text, position)], position
            position += 1
        elif character == "{":
            depth += 1
        elif depth == 0:
            options.append(text[start : match.start()])
            start = position
            if character == "}":
                return options, position
        elif character == "}":
            depth -= 1
    return [*options, text[start:]], len(text)


def _escape(text: str, position: int) -> str:
    # After a lone backslash at the end, JavaScript appends "undefined" for the missing character.
    return "\\" + (text[position] if position < len(text) else "undefined")


def fill_budget(limits: Limits) -> CharacterBudget:
    return CharacterBudget(limits.filled_characters_max, "values for %Node.widget% patterns")


def fill_patterns(
    text: str,
    find_value: Callable[[str, str], Any],
    now: datetime | None,
    missing: object,
    *,
    budget: CharacterBudget | None = None,
) -> str:
    """Fills in `%date:yyyy-MM-dd%` and `%Node.widget%`. `find_value(node, widget)` may return
    `missing`.

    `budget` is shared by the texts of one conversion.
    """
    budget = budget or fill_budget(DEFAULT_LIMITS)

    def replace(match: re.Match[str]) -> str:
        parts = match.group(1).split(".")
        if len(parts) != 2:
            is_date = parts[0].startswith("date:") and now is not None
            return format_date(parts[0][5:], now) if is_date and now else match.group(0)
        value = find_value(parts[0], parts[1])
        if value is missing:
            return match.group(0)
        filled = "" if value is None else javascript_text(value)
        budget.take(len(filled))
        return _NOT_IN_FILE_NAMES.sub("_", filled)

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
    """Formats a JSON value like JavaScript's string conversion."""
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
