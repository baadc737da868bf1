"""The condition language: its text becomes a small tree. Nothing of it is ever executed as Python.

    expression = conjunction { "OR" conjunction }
    conjunction = negation { "AND" negation }
    negation   = "NOT" negation | comparison
    comparison = operand [ operator operand ]
    operator   = "==" | "!=" | ">=" | "<=" | ">" | "<" | "contains" | "in"
    operand    = "(" expression ")" | "file_exists" "(" path ")" | path | literal | list
    path       = ( "output" | "" ) { "." ( name | number ) }
    literal    = number | text | "true" | "false" | "null"
    list       = "[" [ literal { "," literal } ] "]"

Words are recognised in any case. What a tree says of a value is in `verdicts`.
"""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded

CONDITION_CHARACTERS_MAX = 2_000
CONDITION_DEPTH_MAX = 30
ROOT = "output"
EXISTS = "exists"
FILE_EXISTS = "file_exists"


@dataclass(frozen=True, slots=True)
class Literal:
    value: Any  # a number, text, truth, null, or a tuple of them


@dataclass(frozen=True, slots=True)
class Path:
    """Where to look, from the value that came in; no segments: that value itself."""

    segments: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join((ROOT, *self.segments))


@dataclass(frozen=True, slots=True)
class Exists:
    path: Path


@dataclass(frozen=True, slots=True)
class FileExists:
    path: Path


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


Expression: TypeAlias = Literal | Path | Exists | FileExists | Compare | Not | AllOf | AnyOf


def parse_condition(text: str) -> Expression:
    """InvalidInput says what is wrong and at which character, counted from 1."""
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
    """One function for each rule of the grammar; each is given how deep it stands."""

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
            return Literal(tuple(self.items()))
        if self.token.kind == "path":
            return self.path()
        if self.token.kind == "word" and self.token.text.lower() == FILE_EXISTS:
            return self.file_exists()
        return Literal(self.literal())

    def path(self) -> Path | Exists:
        segments = tuple(self.next().text.split(".")[1:])
        if segments and segments[-1].lower() == EXISTS:
            return Exists(Path(segments[:-1]))
        return Path(segments)

    def file_exists(self) -> FileExists:
        self.at += 1
        self.expect("(")
        position = self.token.position
        path = self.path() if self.token.kind == "path" else None
        if not isinstance(path, Path):
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
