"""The condition language: parses a condition to a tree and evaluates it. Nothing is executed as Python.

    expression = conjunction { "OR" conjunction }
    conjunction = negation { "AND" negation }
    negation   = "NOT" negation | comparison
    comparison = operand [ operator operand ]
    operator   = "==" | "!=" | ">=" | "<=" | ">" | "<" | "contains" | "in"
    operand    = "(" expression ")" | "file_exists" "(" path ")" | path | literal | list
    path       = ( "output" | "" ) { "." ( name | number ) }
    literal    = number | text | "true" | "false" | "null"
    list       = "[" [ literal { "," literal } ] "]"

Words are recognised in any case. A missing field is a result with a note, never an exception."""

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

from comfyfleet.errors import InvalidInput, LimitExceeded

CONDITION_CHARACTERS_MAX = 2_000
CONDITION_DEPTH_MAX = 30
ROOT = "output"
EXISTS = "exists"
FILE_EXISTS = "file_exists"


@dataclass(frozen=True, slots=True)
class LiteralValue:
    value: Any  # a number, text, truth, null, or a tuple of them


@dataclass(frozen=True, slots=True)
class FieldPath:
    """A path from the incoming value; without segments it is that value itself."""

    segments: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join((ROOT, *self.segments))


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
class Not:
    part: "Expression"


@dataclass(frozen=True, slots=True)
class AllOf:
    parts: tuple["Expression", ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: tuple["Expression", ...]


Expression: TypeAlias = (
    LiteralValue | FieldPath | Exists | FileExists | Compare | Not | AllOf | AnyOf
)


def parse_condition(text: str) -> Expression:
    """Parses a condition; InvalidInput says what is wrong and at which character, counted from 1."""
    if len(text) > CONDITION_CHARACTERS_MAX:
        raise LimitExceeded(f"the condition is longer than {CONDITION_CHARACTERS_MAX} characters")
    reader = _Reader(_tokens(text))
    expression = reader.expression(0)
    reader.expect_end()
    return expression


class _Token(NamedTuple):
    kind: str  # number, text, word, path, operator, end
    text: str
    position: int


_TOKEN = re.compile(
    r"""(?P<number>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.]))
      | (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<path>(?:output(?!\w)|(?=\.))(?:\.\w+)*)
      | (?P<word>[^\W\d]\w*)
      | (?P<operator>==|!=|>=|<=|[<>()\[\],])""",
    re.VERBOSE | re.IGNORECASE,
)
_SPACE = re.compile(r"\s*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t"}


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    position = _space_after(text, 0)
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None or match.end() == position:
            _refuse(_what_is_at(text, position), position)
        tokens.append(_Token(str(match.lastgroup), match.group(), position))
        position = _space_after(text, match.end())
    return [*tokens, _Token("end", "", len(text))]


def _space_after(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _what_is_at(text: str, position: int) -> str:
    rest = text[position:]
    if rest[0] in "\"'":
        return "a text is not closed"
    if rest[0] == "=":
        return "a single = says nothing; write =="
    return f"{rest[0]!r} is not understood here"


def _refuse(what: str, position: int) -> NoReturn:
    raise InvalidInput(f"{what} (character {position + 1})", position=position + 1)


_COMPARISONS = frozenset({"==", "!=", ">=", "<=", ">", "<", "contains", "in"})
_CONSTANTS = {"true": True, "false": False, "null": None}


class _Reader:
    """A recursive-descent parser: one method for each rule of the grammar, each given its depth."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
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
        if depth > CONDITION_DEPTH_MAX:
            _refuse(f"nested deeper than {CONDITION_DEPTH_MAX} levels", self.token.position)
        if self.take("not"):
            return Not(self.negation(depth + 1))
        return self.comparison(depth)

    def comparison(self, depth: int) -> Expression:
        left = self.operand(depth)
        operator = self.token.text.lower()
        if self.token.kind not in ("operator", "word") or operator not in _COMPARISONS:
            return left
        self.at += 1
        return Compare(operator, left, self.operand(depth))

    def operand(self, depth: int) -> Expression:
        if self.take("("):
            inner = self.expression(depth + 1)
            self.expect(")")
            return inner
        if self.take("["):
            return LiteralValue(tuple(self.items()))
        if self.token.kind == "path":
            return self.path()
        if self.token.kind == "word" and self.token.text.lower() == FILE_EXISTS:
            return self.file_exists()
        return LiteralValue(self.literal())

    def path(self) -> FieldPath | Exists:
        segments = tuple(self.next().text.split(".")[1:])
        if segments and segments[-1].lower() == EXISTS:
            return Exists(FieldPath(segments[:-1]))
        return FieldPath(segments)

    def file_exists(self) -> FileExists:
        self.at += 1
        self.expect("(")
        position = self.token.position
        path = self.path() if self.token.kind == "path" else None
        if not isinstance(path, FieldPath):
            _refuse("file_exists takes a field, as in file_exists(output.image_path)", position)
        self.expect(")")
        return FileExists(path)

    def items(self) -> list[Any]:
        found: list[Any] = []
        while not self.take("]"):
            if found:
                self.expect(",")
            found.append(self.literal())
        return found

    def literal(self) -> Any:
        token = self.next()
        if token.kind == "number":
            return float(token.text) if re.search(r"[.eE]", token.text) else int(token.text)
        if token.kind == "text":
            return _ESCAPE.sub(lambda m: _ESCAPED.get(m[1], m[1]), token.text[1:-1])
        if token.kind == "word" and token.text.lower() in _CONSTANTS:
            return _CONSTANTS[token.text.lower()]
        if token.kind == "end":
            _refuse("the condition ends where a value should be", token.position)
        if token.kind == "word" and token.text.lower() not in _RESERVED:
            _refuse(f"{token.text!r} is unknown; a field begins with output.", token.position)
        _refuse(f"a value should be here, not {token.text!r}", token.position)

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def next(self) -> _Token:
        token = self.token
        self.at = min(self.at + 1, len(self.tokens) - 1)
        return token

    def take(self, text: str) -> bool:
        if self.token.kind not in ("operator", "word") or self.token.text.lower() != text:
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.take(text):
            found = repr(self.token.text) if self.token.text else "the end"
            _refuse(f"{text!r} should be here, not {found}", self.token.position)

    def expect_end(self) -> None:
        if self.token.kind != "end":
            _refuse(f"{self.token.text!r} is not understood here", self.token.position)


_RESERVED = frozenset({"and", "or", "not", "contains", "in"})


NOTES_MAX = 10


class MissingField:
    """Stands for a field that isn't there; equal to nothing, not even to null."""


MISSING = MissingField()


class ConditionResult(NamedTuple):
    value: bool
    notes: tuple[str, ...] = ()  # fields that were missing, values that could not be compared


def evaluate(expression: Expression, value: Any) -> ConditionResult:
    """Evaluates a condition. Every part is evaluated, so the notes don't depend on
    short-circuiting.
    """
    notes: list[str] = []
    truth = _truth(_value(expression, value, notes))
    return ConditionResult(truth, tuple(dict.fromkeys(notes))[:NOTES_MAX])


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
    """`image_path` is short for the path of the first picture."""
    pictures = value.get("images")
    if name != "image_path" or not isinstance(pictures, list | tuple) or not pictures:
        return MISSING
    first = pictures[0]
    return first.get("path", MISSING) if isinstance(first, Mapping) else first


def _value(expression: Expression, root: Any, notes: list[str]) -> Any:
    match expression:
        case LiteralValue(value):
            return value
        case FieldPath():
            return _read_field(expression, root, notes)
        case Exists(path):
            return value_at(root, path.segments) is not MISSING
        case FileExists(path):
            return _is_file(_read_field(path, root, notes), root)
        case Not(part):
            return not _truth(_value(part, root, notes))
        case AllOf(parts):
            return all(_evaluate_all(parts, root, notes))
        case AnyOf(parts):
            return any(_evaluate_all(parts, root, notes))
        case Compare(name, left, right):
            return _compare(name, _value(left, root, notes), _value(right, root, notes), notes)


def _evaluate_all(parts: tuple[Expression, ...], root: Any, notes: list[str]) -> list[bool]:
    return [_truth(_value(part, root, notes)) for part in parts]


def _read_field(path: FieldPath, root: Any, notes: list[str]) -> Any:
    found = value_at(root, path.segments)
    if found is MISSING:
        notes.append(f"{path} is missing")
    return found


def _truth(value: Any) -> bool:
    return value is not MISSING and bool(value)


def _is_file(value: Any, root: Any) -> bool:
    """Whether it is a file of this value, by itself or by its path; a text that only looks like one
    is not.
    """
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
    """Compares two values. A comparison with a missing field is false, and so `!=`, its opposite,
    is true.
    """
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
    notes.append(f"{_kind(left)} can't be compared with {_kind(right)} by {name}")
    return False


def _are_ordered(left: Any, right: Any) -> bool:
    if isinstance(left, str):
        return isinstance(right, str)
    return _is_number(left) and _is_number(right)


def is_equal(left: Any, right: Any) -> bool:
    """Compares as JSON does: 1 equals 1.0, and neither equals true."""
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
        return any(is_equal(each, item) for each in container)
    if isinstance(container, Mapping) and isinstance(item, str):
        return item in container
    notes.append(f"{_kind(container)} can't hold {_kind(item)}")
    return False


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    return "a list" if isinstance(value, list | tuple) else "an object"
