"""Nodes for single values: numbers, switches, formulas, strings, and previews of them."""

import ast
import json
import math
import operator
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from comfyfleet.engine.node import (
    MATCH,
    Context,
    EngineNodeType,
    Interface,
    NodeResult,
    autogrow,
    choice,
    flag,
    group,
    integer,
    match_type,
    node,
    number,
    pure,
    socket,
    text,
)
from comfyfleet.errors import InvalidValue, NodeFailed

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
        match = pattern.search(string)
        return match.group(0) if match else ""
    if mode == "All Matches":
        return "\n".join(_first_of(match) for match in pattern.findall(string))
    if mode == "First Group":
        return _group(pattern.search(string), group_index)
    return _all_groups(pattern, string, group_index)


def _first_of(match: str | tuple[str, ...]) -> str:
    # If the pattern has several groups, findall returns a tuple of them. Only the first is used.
    return match if isinstance(match, str) else match[0]


def _group(match: re.Match[str] | None, index: int) -> str | None:
    if match is None or len(match.groups()) < index:
        return ""
    return match.group(index)


def _all_groups(pattern: re.Pattern[str], string: str, index: int) -> str:
    matches = [match for match in pattern.finditer(string) if 0 < len(match.groups()) >= index]
    groups = [match.group(index) for match in matches]
    if None in groups:
        raise NodeFailed(f"group {index} is missing in a match of {pattern.pattern!r}")
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
        raise NodeFailed(f"can't replace with the pattern {regex_pattern!r}: {error}") from error


TEXTS = (
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


EXPRESSION_CHARACTERS_MAX = 10_000
EXPONENT_MAX = 4000
# Maximum size of intermediate results in bits. An expression with larger numbers is only an attempt
# to exhaust the CPU.
RESULT_BITS_MAX = 100_000
SHIFT_BITS_MAX = 10_000
ROUND_DIGITS_MAX = 400  # more digits than a float has before or after the decimal point


def evaluate_expression(expression: str, names: Mapping[str, Any]) -> Any:
    """Evaluates an expression. Raises InvalidValue for any error in it."""
    if not expression.strip():
        raise InvalidValue("the expression is empty")
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise InvalidValue(f"the expression is longer than {EXPRESSION_CHARACTERS_MAX} characters")
    try:
        parsed = ast.parse(expression.strip(), mode="eval").body
        return _Evaluator(names).eval(expression, parsed)
    except (*_MISTAKES, InvalidExpression) as e:
        raise InvalidValue(f"{expression!r} can't be computed: {e}") from e


class _Evaluator(SimpleEval):  # type: ignore[misc]
    """Allows only plain arithmetic: no attributes, no keyword arguments, no string formatting."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        super().__init__(_OPERATORS, FUNCTIONS, names)
        for kind in self.nodes.keys() - set(_SYNTAX):
            del self.nodes[kind]

    def _eval(self, node: ast.AST) -> Any:
        value = super()._eval(node)
        if callable(value):
            raise InvalidValue(f"{ast.unparse(node)!r} is a function, not a value")
        if isinstance(value, int) and value.bit_length() > RESULT_BITS_MAX:
            raise InvalidValue(f"a number of more than {RESULT_BITS_MAX} bits is too large")
        return value


def _of_numbers(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Restricts an operator to numbers, because strings and lists could be multiplied to any
    size."""

    def checked(left: Any, right: Any) -> Any:
        for value in (left, right):
            if not isinstance(value, int | float | complex):
                raise InvalidValue(f"{value!r} is not a number")
        return operate(left, right)

    return checked


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > RESULT_BITS_MAX:
        raise InvalidValue(f"a power of more than {RESULT_BITS_MAX} bits is too large")
    return base**exponent


def _capped_power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > EXPONENT_MAX:
        raise InvalidValue(f"the exponent {exponent} is larger than {EXPONENT_MAX}")
    return _power(base, exponent)


def _shift_left(value: Any, bits: Any) -> Any:
    if bits > SHIFT_BITS_MAX:
        raise InvalidValue(f"a shift of {bits} is larger than {SHIFT_BITS_MAX}")
    return value << bits


def _round(number: Any, digits: Any = None) -> Any:
    if digits is not None and abs(digits) > ROUND_DIGITS_MAX:
        raise InvalidValue(f"round supports at most {ROUND_DIGITS_MAX} digits")
    return round(number, digits)


def _sum(*values: Any) -> Any:
    """Returns the sum of a list, or of the arguments."""
    if len(values) == 1 and isinstance(values[0], list | tuple):
        return sum(values[0])
    return sum(values)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _sum,
    "min": min,
    "max": max,
    "abs": abs,
    "round": _round,
    "pow": _capped_power,
    "sqrt": math.sqrt,
    "ceil": math.ceil,
    "floor": math.floor,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "int": int,
    "float": float,
}
_OPERATORS = {
    **DEFAULT_OPERATORS,
    ast.Add: _of_numbers(operator.add),
    ast.Mult: _of_numbers(operator.mul),
    ast.Mod: _of_numbers(operator.mod),
    ast.Pow: _of_numbers(_power),
    ast.LShift: _of_numbers(_shift_left),
    ast.RShift: _of_numbers(operator.rshift),
}
_SYNTAX = (
    *(ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.BoolOp),
    *(ast.Compare, ast.IfExp, ast.Call, ast.Subscript),
)
_MISTAKES = (ArithmeticError, SyntaxError, TypeError, ValueError, IndexError, RecursionError)


NUMBER_MAX = 2**63 - 1
LETTERS = list(string.ascii_lowercase)


def primitive(
    name: str, title: str, value: list[Any], essentials: str | None = None
) -> EngineNodeType:
    """Returns a node type that holds a value for other nodes to share."""
    interface = Interface(
        name,
        title,
        "comfy_extras.nodes_primitive",
        "utilities/primitive",
        inputs={"value": value},
        outputs=(value[0],),
        essentials=essentials,
    )
    return pure(interface)(lambda value: value)


PRIMITIVES = (
    primitive(
        "PrimitiveInt",
        "Int",
        integer(low=-NUMBER_MAX, high=NUMBER_MAX, control_after_generate="fixed"),
    ),
    primitive("PrimitiveFloat", "Float", number(low=-NUMBER_MAX, high=NUMBER_MAX, step=0.1)),
    primitive("PrimitiveString", "Text", text()),
    primitive("PrimitiveStringMultiline", "Text (Multiline)", text(multiline=True), "Basics"),
    primitive("PrimitiveBoolean", "Boolean", flag()),
)


@node(
    Interface(
        "PreviewAny",
        "Preview as Text",
        "comfy_extras.nodes_preview_any",
        "utilities",
        inputs={"source": socket("*")},
        outputs=("STRING",),
        output_node=True,
        classic=True,
        description="Preview any input value as text.",
        aliases=("show output", "inspect", "debug", "print value", "show text"),
    )
)
def preview_any(context: Context, source: Any = None) -> NodeResult:
    shown = as_text(source)
    return NodeResult((shown,), {"text": (shown,)})


def as_text(value: Any) -> str:
    """Returns the value as Python prints it, or objects as JSON if possible."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    try:
        return json.dumps(value, indent=4)
    except (TypeError, ValueError):
        return str(value)


@pure(
    Interface(
        "ComfyMathExpression",
        "Math Expression",
        "comfy_extras.nodes_math",
        "utilities",
        inputs={
            "expression": text("a + b", multiline=True),
            "values": autogrow("value", "FLOAT,INT,BOOLEAN", names=LETTERS, min=1),
        },
        outputs=("FLOAT", "INT", "BOOLEAN"),
        output_names=("FLOAT", "INT", "BOOL"),
    )
)
def math_expression(expression: str, **inputs: Any) -> tuple[float, int, bool]:
    linked_values = group(inputs, "values")
    values = {name: linked_values[name] for name in LETTERS if name in linked_values}
    result = evaluate_expression(expression, {**values, "values": list(values.values())})
    if not isinstance(result, int | float):
        raise NodeFailed(f"{expression!r} gives {result!r}, which is not a number")
    try:
        as_float = float(result)
    except OverflowError as error:
        raise NodeFailed(f"{expression!r} is too large for a float") from error
    if not math.isfinite(as_float):
        raise NodeFailed(f"{expression!r} gives {result!r}, which is not finite")
    return as_float, int(result), bool(result)


def _wanted_side(known: Mapping[str, Any]) -> list[str]:
    side = "on_true" if known.get("switch") else "on_false"
    return [] if side in known else [side]


@pure(
    Interface(
        "ComfySwitchNode",
        "If/Else Switch",
        "comfy_extras.nodes_logic",
        "utilities/logic",
        inputs={
            "switch": flag(),
            "on_false": match_type("switch", "*", lazy=True),
            "on_true": match_type("switch", "*", lazy=True),
        },
        outputs=(MATCH,),
        output_names=("output",),
        output_matches=("switch",),
        experimental=True,
        aliases=("if", "then", "switch", "conditional", "branch"),
    ),
    needed=_wanted_side,
)
def switch(switch: bool, on_false: Any = None, on_true: Any = None) -> Any:
    return on_true if switch else on_false


LOGIC = (*PRIMITIVES, preview_any, math_expression, switch)
