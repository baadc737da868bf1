"""Reads JSON and YAML documents and their fields, and reports all problems together.

Untrusted text may be huge, deeply nested, or small but expand to something huge (YAML aliases). All
three are limited before the result is processed. A field with an invalid value is reported and gets
its default.
"""

import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

import yaml

from comfyfleet.api.functions import is_finite_number
from comfyfleet.api.graph_model import DEFAULT_LIMITS
from comfyfleet.api.values import problem_with_text
from comfyfleet.errors import InvalidInput, LimitExceeded

JSON_CHARACTERS_MAX = 1_000_000
YAML_CHARACTERS_MAX = 32_000  # the YAML parser is slow, so longer documents must be sent as JSON
DEPTH_MAX = 50
VALUES_MAX = 100_000  # counted after all aliases are resolved


def read_document(text: str) -> Any:
    """Parses a JSON or YAML text. It is treated as JSON if it begins like JSON."""
    is_json = text.lstrip("\ufeff \t\r\n")[:1] in ("{", "[")
    most = JSON_CHARACTERS_MAX if is_json else YAML_CHARACTERS_MAX
    if len(text) > most:
        raise LimitExceeded(f"the document is longer than {most:,} characters")
    try:
        value = _read_json(text) if is_json else _read_yaml(text)
    except RecursionError:
        raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels") from None
    _check_size(value)
    return value


def _read_json(text: str) -> Any:
    """Parses JSON. A document that begins with a bracket may still be YAML in flow style."""
    try:
        return json.loads(text.lstrip("\ufeff"), object_pairs_hook=_unique)
    except json.JSONDecodeError as problem:
        if len(text) > YAML_CHARACTERS_MAX:
            raise _unreadable(problem.msg, problem.lineno, problem.colno) from None
        return _read_yaml(text)
    except ValueError as problem:  # a number with thousands of digits
        raise InvalidInput(f"the document can't be read: {problem}") from None


def _read_yaml(text: str) -> Any:
    try:
        _check_depth(text)
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader with even fewer types
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        what = problem.problem or problem.context or "it can't be read"
        raise _unreadable(
            what, mark.line + 1 if mark else 1, mark.column + 1 if mark else 1
        ) from None
    except (yaml.YAMLError, ValueError) as problem:
        raise InvalidInput(f"the document can't be read: {problem}") from None


def _check_depth(text: str) -> None:
    """Checks the depth event by event, because the constructor recurses in C for each level,
    without a limit."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_MAX:
            raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels")


def _unreadable(what: str, line: int, column: int) -> InvalidInput:
    message = f"the document can't be read: line {line}, column {column}: {what}"
    return InvalidInput(message, line=line, column=column)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise InvalidInput(f"the document contains {key!r} twice in the same object", field=key)
        members[key] = value
    return members


# Uses libyaml if the package was built with it. It is ten times as fast, and its depth is limited.
_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Safe):  # type: ignore[misc]
    """Loads values with JSON's types: `on` stays a string and 1:30 isn't a number. Refuses
    duplicate keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a string", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} occurs twice in the same object", key.start_mark
                )
            seen.add(key.value)
        return {str(key.value): self.construct_object(value, deep) for key, value in node.value}


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.yaml_implicit_resolvers[""] = _Loader.yaml_implicit_resolvers["n"]
_resolve("int", r"^[-+]?(?:0|[1-9][0-9]{0,30})$", "-+0123456789")
_resolve("float", r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")


def _check_size(value: Any) -> None:
    """Checks the number of values and the depth. An alias counts as the value that it refers to. An
    alias that contains itself is infinitely deep."""
    count = 0
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        current, depth = waiting.pop()
        count += 1
        if depth > DEPTH_MAX:
            raise LimitExceeded(f"the document is nested deeper than {DEPTH_MAX} levels")
        if count > VALUES_MAX:
            raise LimitExceeded(f"the document contains more than {VALUES_MAX:,} values")
        _refuse_unstorable(current)
        waiting.extend((inner, depth + 1) for inner in _inside(current))


def _refuse_unstorable(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput("the document has a number that is not finite")
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
    for text in texts:
        problem = problem_with_text(text)
        if problem:
            raise InvalidInput(f"the document contains characters that can't be stored: {problem}")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


# excluded from suggestions, because these names are too short
FIELDS_OF_ALL = frozenset({"id", "type"})
Choice = TypeVar("Choice", bound=StrEnum)
# code, message, field
Report = Callable[[str, str, str], None]


class FieldReader:
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

    def optional_number(self, name: str) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if not is_finite_number(value):
            self.wrong(name, "a number")
            return None
        return float(value)

    def truth(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false")
            return default
        return value

    def choice(self, name: str, default: Choice) -> Choice:
        value = self.take(name, default.value)
        kind = type(default)
        if value not in [member.value for member in kind]:
            self.wrong(name, "one of " + ", ".join(kind), meant=did_you_mean(value, list(kind)))
            return default
        return kind(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.take(name, {})
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            self.wrong(name, "an object")
            return {}
        return value

    def wrong(self, name: str, expected: str, *, meant: str = "") -> None:
        value = _shown(self.values[name])
        self.report("invalid_field", f"{name} must be {expected}, not {value}{meant}", name)

    def refuse_others(self) -> None:
        """Reports the fields that were not read, which are probably misspelled. Call this last."""
        words = ", ".join(sorted(self.known))
        for name in self.values:
            if name not in self.known:
                suggestion = did_you_mean(name, self.known - FIELDS_OF_ALL)
                message = f"unknown field {name!r:.60}; use one of {words}{suggestion}"
                self.report("unknown_field", message, str(name))


def did_you_mean(value: Any, known: Iterable[str]) -> str:
    """Returns "; did you mean 'mode'?" for a word that is similar to a known one, and otherwise an
    empty string."""
    if not isinstance(value, str):
        return ""
    word, words = value[:60].lower(), sorted(known)
    near = get_close_matches(word, words, n=1) or [
        candidate for candidate in words if word in candidate
    ]
    return f"; did you mean {str(near[0])!r}?" if word and near else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
