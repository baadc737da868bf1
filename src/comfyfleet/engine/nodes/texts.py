"""Nodes that work on text."""

import re
from typing import Any

from comfyfleet.engine.declare import Interface, choice, flag, integer, pure, text
from comfyfleet.kernel.errors import NodeFailed

STRINGS = "comfy_extras.nodes_string"
LINES = text(multiline=True)
FLAGS = {
    "case_insensitive": flag(True, advanced=True),
    "multiline": flag(False, advanced=True),
    "dotall": flag(False, advanced=True),
}


def interface(name: str, title: str, *, output: str = "STRING", **more: Any) -> Interface:
    return Interface(name, title, STRINGS, "text", outputs=(output,), **more)


@pure(
    interface(
        "StringConcatenate",
        "Concatenate Text",
        inputs={"string_a": LINES, "string_b": LINES, "delimiter": text("")},
    )
)
def concatenate(string_a: str, string_b: str, delimiter: str) -> str:
    return f"{string_a}{delimiter}{string_b}"


@pure(
    interface(
        "StringReplace",
        "Replace Text",
        inputs={"string": LINES, "find": LINES, "replace": LINES},
    )
)
def replace_text(string: str, find: str, replace: str) -> str:
    return string.replace(find, replace)


@pure(
    interface(
        "StringSubstring",
        "Substring",
        inputs={"string": LINES, "start": integer(), "end": integer()},
    )
)
def substring(string: str, start: int, end: int) -> str:
    return string[start:end]


@pure(
    interface(
        "StringTrim",
        "Trim Text",
        inputs={"string": LINES, "mode": choice("Both", "Left", "Right")},
    )
)
def trim(string: str, mode: str) -> str:
    return {"Both": string.strip, "Left": string.lstrip, "Right": string.rstrip}[mode]()


@pure(
    interface(
        "CaseConverter",
        "Convert Text Case",
        inputs={
            "string": LINES,
            "mode": choice("UPPERCASE", "lowercase", "Capitalize", "Title Case"),
        },
    )
)
def convert_case(string: str, mode: str) -> str:
    ways = {
        "UPPERCASE": string.upper,
        "lowercase": string.lower,
        "Capitalize": string.capitalize,
        "Title Case": string.title,
    }
    return ways[mode]()


@pure(
    interface(
        "StringLength",
        "Text Length",
        output="INT",
        output_names=("length",),
        inputs={"string": LINES},
    )
)
def length(string: str) -> int:
    return len(string)


@pure(
    interface(
        "StringContains",
        "Contains Text",
        output="BOOLEAN",
        output_names=("contains",),
        inputs={
            "string": LINES,
            "substring": LINES,
            "case_sensitive": flag(True, advanced=True),
        },
    )
)
def contains(string: str, substring: str, case_sensitive: bool) -> bool:
    if case_sensitive:
        return substring in string
    return substring.lower() in string.lower()


@pure(
    interface(
        "StringCompare",
        "Compare Text",
        output="BOOLEAN",
        inputs={
            "string_a": LINES,
            "string_b": LINES,
            "mode": choice("Starts With", "Ends With", "Equal"),
            "case_sensitive": flag(True, advanced=True),
        },
    )
)
def compare(string_a: str, string_b: str, mode: str, case_sensitive: bool) -> bool:
    a, b = (string_a, string_b) if case_sensitive else (string_a.lower(), string_b.lower())
    match mode:
        case "Starts With":
            return a.startswith(b)
        case "Ends With":
            return a.endswith(b)
        case _:
            return a == b


def regex_flags(case_insensitive: bool, multiline: bool, dotall: bool) -> re.RegexFlag:
    flags = re.RegexFlag(0)
    flags |= re.IGNORECASE if case_insensitive else re.RegexFlag(0)
    flags |= re.MULTILINE if multiline else re.RegexFlag(0)
    return flags | (re.DOTALL if dotall else re.RegexFlag(0))


@pure(
    interface(
        "RegexMatch",
        "Match Text",
        output="BOOLEAN",
        output_names=("matches",),
        inputs={"string": LINES, "regex_pattern": LINES, **FLAGS},
    )
)
def regex_match(string: str, regex_pattern: str, **flags: bool) -> bool:
    try:
        return re.search(regex_pattern, string, regex_flags(**flags)) is not None
    except re.error:
        return False


@pure(
    interface(
        "RegexExtract",
        "Extract Text",
        inputs={
            "string": LINES,
            "regex_pattern": LINES,
            "mode": choice("First Match", "All Matches", "First Group", "All Groups"),
            **FLAGS,
            "group_index": integer(1, 0, 100, advanced=True),
        },
    )
)
def regex_extract(
    string: str, regex_pattern: str, mode: str, group_index: int, **flags: bool
) -> str | None:
    try:
        pattern = re.compile(regex_pattern, regex_flags(**flags))
    except re.error:
        return ""
    if mode == "First Match":
        found = pattern.search(string)
        return found.group(0) if found else ""
    if mode == "All Matches":
        return "\n".join(_first_of(match) for match in pattern.findall(string))
    if mode == "First Group":
        return _group(pattern.search(string), group_index)
    return _all_groups(pattern, string, group_index)


def _first_of(match: str | tuple[str, ...]) -> str:
    # Where the pattern has several groups, findall gives them all: the first one counts.
    return match if isinstance(match, str) else match[0]


def _group(found: re.Match[str] | None, index: int) -> str | None:
    if found is None or len(found.groups()) < index:
        return ""
    return found.group(index)


def _all_groups(pattern: re.Pattern[str], string: str, index: int) -> str:
    found = [match for match in pattern.finditer(string) if 0 < len(match.groups()) >= index]
    groups = [match.group(index) for match in found]
    if None in groups:
        raise NodeFailed(f"group {index} takes no part in some match of {pattern.pattern!r}")
    return "\n".join(groups)


@pure(
    interface(
        "RegexReplace",
        "Replace Text (Regex)",
        inputs={"string": LINES, "regex_pattern": LINES, "replace": LINES},
        optional={**FLAGS, "count": integer(0, 0, 100, advanced=True)},
    )
)
def regex_replace(
    string: str,
    regex_pattern: str,
    replace: str,
    case_insensitive: bool = True,
    multiline: bool = False,
    dotall: bool = False,
    count: int = 0,
) -> str:
    flags = regex_flags(case_insensitive, multiline, dotall)
    try:
        return re.sub(regex_pattern, replace, string, count=count, flags=flags)
    except re.error as error:
        raise NodeFailed(f"can't replace by {regex_pattern!r}: {error}") from error


NODES = (
    concatenate,
    replace_text,
    substring,
    trim,
    convert_case,
    length,
    contains,
    compare,
    regex_match,
    regex_extract,
    regex_replace,
)
