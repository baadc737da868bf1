"""Parses and evaluates the language of conditions and values. Nothing is executed as Python.

    expression = conjunction { "OR" conjunction }
    conjunction = negation { "AND" negation }
    negation   = "NOT" negation | comparison
    comparison = sum [ operator sum ]
    operator   = "==" | "!=" | ">=" | "<=" | ">" | "<" | "contains" | "in"
    sum        = product { ( "+" | "-" ) product }
    product    = sign { ( "*" | "/" | "%" ) sign }
    sign       = "-" sign | operand { "|" function [ arguments ] }
    operand    = "(" expression ")" | function arguments | path | literal | list
    arguments  = "(" [ expression { "," expression } ] ")"
    path       = ( name | "" ) { "." ( name | number ) }
    literal    = number | text | "true" | "false" | "null"
    list       = "[" [ expression { "," expression } ] "]"

A path without a name begins with `output`. Keywords and function names are recognized in upper and
lower case. In a condition, a missing field is a result with a note, and never an exception. In a
value, a missing field is refused.
"""

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn, TypeAlias

from comfyfleet.api.functions import (
    FUNCTIONS,
    WrongValueError,
    bounded,
    calculate,
    is_finite_number,
    is_number,
    kind_name,
)
from comfyfleet.errors import InvalidInput, LimitExceeded

CONDITION_CHARACTERS_MAX = 2_000
CONDITION_DEPTH_MAX = 30
STEPS_MAX = (
    # Limit for the evaluated parts and visited items of all expressions that belong to a value.
    100_000
)
# The number of characters that count as one step if a string is searched, compared or changed.
CHARACTERS_PER_STEP = 100
VALUE_DEPTH_MAX = 100  # maximum nesting of compared values
ROOT = "output"
EXISTS = "exists"
FILE_EXISTS = "file_exists"


@dataclass(frozen=True, slots=True)
class LiteralValue:
    value: Any  # a number, text, boolean or null, or a tuple of these


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A path into a named value. Without segments, it is the value itself."""

    root: str
    segments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return ".".join((self.root, *self.segments))


@dataclass(frozen=True, slots=True)
class Exists:
    path: FieldPath


@dataclass(frozen=True, slots=True)
class FileExists:
    path: FieldPath


@dataclass(frozen=True, slots=True)
class Compare:
    operator: str
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True)
class Calculate:
    operator: str
    left: "Expression"
    right: "Expression"


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call. `a | trim` is `trim(a)`."""

    function: str
    arguments: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class ListOf:
    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: "Expression"


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple["Expression", ...]


Expression: TypeAlias = (
    LiteralValue
    | FieldPath
    | Exists
    | FileExists
    | Compare
    | Calculate
    | FunctionCall
    | ListOf
    | Not
    | AllOf
    | AnyOf
)


def parse_condition(text: str, roots: Collection[str] = (ROOT,)) -> Expression:
    """Parses a condition. Raises InvalidInput with the problem and its position, counted from 1."""
    return parse_expression(text, roots, what="condition")


def parse_expression(
    text: str, roots: Collection[str] | None, *, what: str = "expression", offset: int = 0
) -> Expression:
    """Parses an expression whose paths begin with one of `roots`. Without roots (None), paths may
    begin with any name.

    `offset` is the expression's position in a longer text, for the positions in errors.
    """
    if len(text) > CONDITION_CHARACTERS_MAX:
        raise LimitExceeded(f"the {what} is longer than {CONDITION_CHARACTERS_MAX:,} characters")
    reader = _Reader(_tokens(text, offset), roots, what)
    expression = reader.expression(0)
    reader.expect_end()
    return expression


class _Token(NamedTuple):
    kind: str  # number, text, name, operator, end
    text: str
    position: int


_TOKEN = re.compile(
    r"""(?P<number>\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<name>[^\W\d]\w*(?:-\w+)*(?:\.\w+(?:-\w+)*)*|(?:\.\w+(?:-\w+)*)+)
      | (?P<operator>==|!=|>=|<=|[<>()\[\],+*/%|-])""",
    re.VERBOSE,
)
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t"}


def _tokens(text: str, offset: int) -> list[_Token]:
    tokens: list[_Token] = []
    position = _space_after(text, 0)
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            refuse(_what_is_at(text, position), position + offset)
        tokens.append(_Token(str(match.lastgroup), match.group(), position + offset))
        position = _space_after(text, match.end())
    return [*tokens, _Token("end", "", len(text) + offset)]


def _space_after(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


# Operators and functions of other languages, and our equivalents.
_EQUIVALENTS = {"=>": ">=", "=<": "<=", "=": "==", "&": "AND", "!": "NOT"}
_EQUIVALENTS_FUNCTIONS = {
    "avg": "mean",
    "average": "mean",
    "count": "length",
    "exists": FILE_EXISTS,
    "float": "number",
    "int": "number",
    "len": "length",
    "size": "length",
    "str": "text",
}


def _what_is_at(text: str, position: int) -> str:
    rest = text[position:]
    if rest[0] in "\"'":
        return "unterminated text"
    suggestion = _EQUIVALENTS.get(rest[:2]) or _EQUIVALENTS.get(rest[0])
    question = f"; did you mean {suggestion}?" if suggestion else ""
    return f"unexpected {rest[0]!r}{question}"


def refuse(what: str, position: int) -> NoReturn:
    raise InvalidInput(f"{what} (character {position + 1})", position=position + 1)


_COMPARISONS = frozenset({"==", "!=", ">=", "<=", ">", "<", "contains", "in"})
_CONSTANTS = {"true": True, "false": False, "null": None}
_RESERVED = frozenset({"and", "or", "not", "contains", "in"})


class _Reader:
    """A recursive-descent parser with one method for each rule of the grammar. Each method gets the
    current depth."""

    def __init__(self, tokens: list[_Token], roots: Collection[str] | None, what: str) -> None:
        self.tokens = tokens
        self.roots = roots
        self.what = what
        self.at = 0

    def expression(self, depth: int) -> Expression:
        parts = [self.conjunction(depth)]
        while self.take("or"):
            parts.append(self.conjunction(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def conjunction(self, depth: int) -> Expression:
        parts = [self.negation(depth)]
        while self.take("and"):
            parts.append(self.negation(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def negation(self, depth: int) -> Expression:
        self.check_depth(depth)
        if self.take("not"):
            return Not(self.negation(depth + 1))
        return self.comparison(depth)

    def check_depth(self, depth: int) -> None:
        if depth > CONDITION_DEPTH_MAX:
            refuse(f"nested deeper than {CONDITION_DEPTH_MAX} levels", self.token.position)

    def comparison(self, depth: int) -> Expression:
        operand = self.sum(depth)
        operator = self.token.text.lower()
        if self.token.kind not in ("operator", "name") or operator not in _COMPARISONS:
            return operand
        self.at += 1
        return Compare(operator, operand, self.sum(depth))

    def sum(self, depth: int) -> Expression:
        result = self.product(depth)
        while self.token.kind == "operator" and self.token.text in ("+", "-"):
            result = Calculate(self.next().text, result, self.product(depth))
        return result

    def product(self, depth: int) -> Expression:
        result = self.sign(depth)
        while self.token.kind == "operator" and self.token.text in ("*", "/", "%"):
            result = Calculate(self.next().text, result, self.sign(depth))
        return result

    def sign(self, depth: int) -> Expression:
        self.check_depth(depth)
        if not self.take("-"):
            return self.filtered(depth)
        part = self.sign(depth + 1)
        if isinstance(part, LiteralValue) and is_number(part.value):
            return LiteralValue(-part.value)
        return Calculate("-", LiteralValue(0), part)

    def filtered(self, depth: int) -> Expression:
        expression = self.operand(depth)
        while self.take("|"):
            name = self.next()
            if name.kind != "name" or name.text.lower() not in FUNCTIONS:
                refuse(_unknown_function(name.text), name.position)
            more = self.arguments(depth) if self.token.text == "(" else ()
            expression = self.call(name, (expression, *more))
        return expression

    def operand(self, depth: int) -> Expression:
        if self.take("("):
            inner = self.expression(depth + 1)
            self.expect(")")
            return inner
        if self.take("["):
            return self.list(depth)
        token = self.next()
        is_call = self.token.kind == "operator" and self.token.text == "("
        if token.kind == "name" and is_call and token.text.lower() == FILE_EXISTS:
            return self.file_exists()
        if token.kind == "name" and is_call and token.text.lower() in FUNCTIONS:
            return self.call(token, self.arguments(depth))
        if token.kind == "name" and is_call and "." not in token.text:
            refuse(_unknown_function(token.text), token.position)
        return self.path_or_literal(token)

    def arguments(self, depth: int) -> tuple[Expression, ...]:
        self.expect("(")
        return self.parts(")", depth)

    def call(self, name: _Token, arguments: tuple[Expression, ...]) -> FunctionCall:
        function = FUNCTIONS[name.text.lower()]
        if not function.least <= len(arguments) <= function.most:
            expected = (
                "a value" if function.most == 1 else f"{function.least} to {function.most} values"
            )
            refuse(f"{name.text} expects {expected}, not {len(arguments)}", name.position)
        return FunctionCall(name.text.lower(), arguments)

    def list(self, depth: int) -> Expression:
        parts = self.parts("]", depth)
        values = tuple(part.value for part in parts if isinstance(part, LiteralValue))
        return LiteralValue(values) if len(values) == len(parts) else ListOf(parts)

    def parts(self, end: str, depth: int) -> tuple[Expression, ...]:
        expressions: list[Expression] = []
        while not self.take(end):
            if expressions:
                self.expect(",")
            expressions.append(self.expression(depth + 1))
        return tuple(expressions)

    def path(self, token: _Token) -> FieldPath | Exists:
        root, *segments = token.text.split(".")
        root = ROOT if root.lower() in ("", ROOT) else root
        if self.roots is not None and root not in self.roots:
            refuse(_unknown_field(token.text, self.roots), token.position)
        if segments and segments[-1].lower() == EXISTS:
            return Exists(FieldPath(root, tuple(segments[:-1])))
        return FieldPath(root, tuple(segments))

    def file_exists(self) -> FileExists:
        self.expect("(")
        token = self.next()
        path = self.path(token) if token.kind == "name" else None
        if not isinstance(path, FieldPath):
            example = "file_exists(output.image_path)"
            refuse(f"file_exists expects a field, for example {example}", token.position)
        self.expect(")")
        return FileExists(path)

    def path_or_literal(self, token: _Token) -> Expression:
        word = token.text.lower()
        if token.kind == "number":
            is_float = re.search(r"[.eE]", token.text)
            try:
                return LiteralValue(bounded(float(token.text) if is_float else int(token.text)))
            except WrongValueError as problem:
                refuse(str(problem), token.position)
        if token.kind == "text":
            return LiteralValue(_ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), token.text[1:-1]))
        if token.kind == "name" and word in _CONSTANTS:
            return LiteralValue(_CONSTANTS[word])
        if token.kind == "end":
            refuse(f"the {self.what} ends where a value is expected", token.position)
        if token.kind == "name" and word not in _RESERVED:
            return self.path(token)
        refuse(f"expected a value, not {token.text!r}", token.position)

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def next(self) -> _Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def take(self, text: str) -> bool:
        if self.token.kind not in ("operator", "name") or self.token.text.lower() != text:
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.take(text):
            actual = repr(self.token.text) if self.token.text else "the end"
            refuse(f"expected {text!r}, not {actual}", self.token.position)

    def expect_end(self) -> None:
        if self.token.kind != "end":
            refuse(f"unexpected {self.token.text!r}", self.token.position)


def _unknown_function(name: str) -> str:
    known = sorted({*FUNCTIONS, FILE_EXISTS})
    near = get_close_matches(name.lower(), known, n=1)
    suggestion = _EQUIVALENTS_FUNCTIONS.get(name.lower()) or (near[0] if near else "")
    question = f"; did you mean {suggestion}?" if suggestion else ""
    return f"unknown function {name!r}; use one of {', '.join(known)}{question}"


def _unknown_field(text: str, roots: Collection[str]) -> str:
    root, dot, rest = text.partition(".")
    near = get_close_matches(root.lower(), roots, n=1)
    if near:
        return f"{text!r} is unknown; did you mean {near[0] + dot + rest!r}?"
    begins = " or ".join(f"{root}." for root in roots)
    return f"{text!r} is unknown; a field begins with {begins}"


# Values


NOTES_MAX = 10


class MissingField:
    """Represents a field that doesn't exist. It is not equal to anything, not even to null."""


MISSING = MissingField()

Read: TypeAlias = Callable[[FieldPath], Any]


class ConditionResult(NamedTuple):
    value: bool
    notes: tuple[str, ...] = ()  # missing fields, and values that could not be compared


def evaluate(
    expression: Expression, value: Any, steps: "StepCount | None" = None
) -> ConditionResult:
    """Evaluates a condition about `output`. Every part is evaluated, so the notes don't depend on
    short-circuiting."""
    return evaluate_condition(expression, {ROOT: value}, steps)


def evaluate_condition(
    expression: Expression, values: Mapping[str, Any], steps: "StepCount | None" = None
) -> ConditionResult:
    """Evaluates a condition about several named values."""
    evaluation = _Evaluation(lambda path: value_at(values, (path.root, *path.segments)), steps)
    try:
        truth = _truth(evaluation.value(expression))
    except LimitExceeded as problem:
        truth, evaluation.notes = False, [problem.message, *evaluation.notes]
    return ConditionResult(truth, tuple(dict.fromkeys(evaluation.notes))[:NOTES_MAX])


class StepCount:
    """Counts the work of expressions. All expressions of a value share a counter, because there may
    be thousands of them.

    `total` counts the work for many values together, and has its own limit.
    """

    def __init__(self, total: "StepCount | None" = None, *, most: int = STEPS_MAX) -> None:
        self.count = 0
        self.total = total
        self.most = most

    def add(self, count: int) -> None:
        self.count += count
        if self.total is not None:
            self.total.add(count)
        if self.count > self.most:
            raise LimitExceeded(f"the expression takes more than {self.most:,} steps")


def compute(expression: Expression, read: Read, steps: StepCount | None = None) -> Any:
    """Returns the value of an expression. Raises InvalidInput if something is missing. `read`
    returns MISSING for values that don't exist."""
    evaluation = _Evaluation(read, steps)
    result = evaluation.value(expression)
    if result is MISSING:
        raise InvalidInput(evaluation.notes[0] if evaluation.notes else "it has no value")
    return result


def compute_score(expression: Expression, output: Any, steps: StepCount | None = None) -> float:
    """Returns the number that an expression computes from the `output` of a judge's job."""
    values = {ROOT: output}
    score = compute(expression, lambda path: value_at(values, (path.root, *path.segments)), steps)
    if not is_finite_number(score):
        raise InvalidInput(f"{score!r:.60} is not a number")
    return score  # type: ignore[no-any-return]


def value_at(value: Any, segments: tuple[str, ...]) -> Any:
    """Returns the field at the end of a path, or MISSING."""
    for segment in segments:
        value = _field(value, segment)
        if value is MISSING:
            return MISSING
    return value


def _field(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if name in value:
            return value[name]
        return len(value) if name == "count" else _first_picture(value, name)
    if isinstance(value, list | tuple):
        if name == "count":
            return len(value)
        if name.isdecimal() and len(name) < 10 and int(name) < len(value):
            return value[int(name)]
    return MISSING


def _first_picture(value: Mapping[str, Any], name: str) -> Any:
    """Returns the path of the first image for the name `image_path`, and MISSING for other
    names."""
    pictures = value.get("images")
    if name != "image_path" or not isinstance(pictures, list | tuple) or not pictures:
        return MISSING
    first = pictures[0]
    return first.get("path", MISSING) if isinstance(first, Mapping) else first


def paths_of(expression: Expression, *, needed: bool = False) -> Iterator[FieldPath]:
    """Yields the paths that an expression reads. With `needed`, excludes paths that have a
    default."""
    waiting = [expression]
    while waiting:
        parts: tuple[Expression, ...] = ()
        match waiting.pop():
            case FieldPath() as path:
                yield path
            case Exists(path) if not needed:
                yield path
            case FileExists(path):
                yield path
            case Not(part):
                parts = (part,)
            case Compare(_, left, right) | Calculate(_, left, right):
                parts = (left, right)
            case FunctionCall("default", arguments) if needed:
                parts = arguments[1:]
            case AllOf(items) | AnyOf(items) | ListOf(items) | FunctionCall(_, items):
                parts = items
        waiting.extend(reversed(parts))


_CONTAINERS = (list, tuple, Mapping)


class _Evaluation:
    def __init__(self, read: Read, steps: StepCount | None = None) -> None:
        self.read = read
        self.notes: list[str] = []
        self.steps = steps or StepCount()

    def walk(self, *values: Any) -> None:
        """Counts the items of values, including nested ones, before they are processed."""
        waiting = [(value, 0) for value in values]
        while waiting:
            current, depth = waiting.pop()
            if depth > VALUE_DEPTH_MAX:
                raise LimitExceeded(f"a value is nested deeper than {VALUE_DEPTH_MAX} levels")
            if isinstance(current, _CONTAINERS):
                self.steps.add(len(current))
                inner = current.values() if isinstance(current, Mapping) else current
                waiting.extend((item, depth + 1) for item in inner)
            elif isinstance(current, str):
                self.steps.add(len(current) // CHARACTERS_PER_STEP)

    def value(self, expression: Expression) -> Any:
        self.steps.add(1)
        match expression:
            case LiteralValue(value):
                return value
            case FieldPath():
                return self.field(expression)
            case Compare(name, left, right):
                sides = self.value(left), self.value(right)
                # A list that is compared with a single string or number is only searched, not
                # traversed.
                if all(isinstance(side, _CONTAINERS) for side in sides):
                    self.walk(*sides)
                elif name in ("in", "contains") or all(isinstance(side, str) for side in sides):
                    self.steps.add(_steps_through(*sides))
                return _compare(name, *sides, self.notes)
            case Calculate(name, left, right):
                sides = self.value(left), self.value(right)
                self.steps.add(_steps_through(*sides))
                return self.attempt(calculate, name, *sides)
            case ListOf(parts):
                return self.list(parts)
            case FunctionCall():
                return self.call(expression)
        return self.truth(expression)

    def truth(self, expression: Exists | FileExists | Not | AllOf | AnyOf) -> bool:
        match expression:
            case Exists(path):
                return self.read(path) is not MISSING
            case FileExists(path):
                root = self.read(FieldPath(path.root))
                self.walk(root)
                return _is_file(self.field(path), root)
            case Not(part):
                return not _truth(self.value(part))
        truths = [_truth(self.value(part)) for part in expression.parts]
        return all(truths) if isinstance(expression, AllOf) else any(truths)

    def field(self, path: FieldPath) -> Any:
        value = self.read(path)
        if value is MISSING:
            self.notes.append(f"{path} is missing")
        return value

    def list(self, parts: tuple[Expression, ...]) -> Any:
        values = [self.value(part) for part in parts]
        return MISSING if any(value is MISSING for value in values) else values

    def call(self, call: FunctionCall) -> Any:
        if call.function == "default":
            value = _Evaluation(self.read, self.steps).value(call.arguments[0])
            return self.value(call.arguments[1]) if value is MISSING or value is None else value
        if call.function == "if":
            return self.value(call.arguments[1 if _truth(self.value(call.arguments[0])) else 2])
        arguments = [self.value(argument) for argument in call.arguments]
        self.steps.add(_steps_through(*arguments))
        if call.function == "split":
            self.steps.add(_count_parts(*arguments))
        return self.attempt(FUNCTIONS[call.function].work, *arguments)

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Applies a function. If this fails, adds a note and returns MISSING."""
        if any(argument is MISSING for argument in arguments):
            return MISSING
        try:
            return bounded(work(*arguments))
        except WrongValueError as problem:
            self.notes.append(str(problem))
            return MISSING


def _steps_through(*values: Any) -> int:
    """Returns the number of steps for processing values once. It depends on the number of items in
    lists and on the lengths of strings, including strings in lists."""
    texts = sum(len(value) for value in values if isinstance(value, str))
    lists = [value for value in values if isinstance(value, list | tuple)]
    texts += sum(len(text) for items in lists for text in items if isinstance(text, str))
    return sum(map(len, lists)) + texts // CHARACTERS_PER_STEP


def _count_parts(text: Any, at: Any = ",") -> int:
    """Returns the number of separators in a string, which determines the length of the list that it
    is split into."""
    return text.count(at) if isinstance(text, str) and isinstance(at, str) and at else 0


def _truth(value: Any) -> bool:
    return value is not MISSING and bool(value)


def _is_file(value: Any, root: Any) -> bool:
    """Checks whether a value is a file in `root`: the file itself, or its path or id. A string that
    only looks like a path isn't a file."""
    if isinstance(value, Mapping):
        return "file_id" in value
    return isinstance(value, str) and value in _file_names(root)


def _file_names(value: Any) -> set[str]:
    names: set[str] = set()
    waiting = [value]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Mapping):
            if "file_id" in current:
                names |= {str(current[key]) for key in ("file_id", "path") if key in current}
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
    return names


_ORDERED: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def _compare(name: str, left: Any, right: Any, notes: list[str]) -> bool:
    """Compares two values. A comparison with a missing field is false, so its opposite, `!=`, is
    true."""
    if name in ("==", "!="):
        return is_equal(left, right) is (name == "==")
    if left is MISSING or right is MISSING:
        return False
    if name == "in":
        return _holds(right, left, notes)
    if name == "contains":
        return _holds(left, right, notes)
    if _are_ordered(left, right):
        return _ORDERED[name](left, right)
    notes.append(f"{kind_name(left)} can't be compared with {kind_name(right)} by {name}")
    return False


def _are_ordered(left: Any, right: Any) -> bool:
    if isinstance(left, str):
        return isinstance(right, str)
    return is_number(left) and is_number(right)


def is_equal(left: Any, right: Any) -> bool:
    """Compares values with JSON's rules: 1 equals 1.0, and neither equals true."""
    if left is MISSING or right is MISSING or isinstance(left, bool) is not isinstance(right, bool):
        return False
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        pairs = zip(left, right, strict=False)
        return len(left) == len(right) and all(is_equal(one, other) for one, other in pairs)
    return bool(left == right)


def _holds(container: Any, item: Any, notes: list[str]) -> bool:
    if isinstance(container, str) and isinstance(item, str):
        return item in container
    if isinstance(container, list | tuple):
        return any(is_equal(element, item) for element in container)
    if isinstance(container, Mapping) and isinstance(item, str):
        return item in container
    notes.append(f"{kind_name(container)} can't hold {kind_name(item)}")
    return False
