"""Arithmetic that users write as text: numbers, names and a list of functions, nothing else.

The text is parsed as Python and walked; it is never executed, so that it can neither reach
attributes nor run longer than its own length allows.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from comfyfleet.kernel.errors import InvalidValue

EXPRESSION_CHARACTERS_MAX = 10_000
EXPONENT_MAX = 4000
# Of every number on the way: what is larger can only be meant to keep the machine busy.
RESULT_BITS_MAX = 100_000
SHIFT_BITS_MAX = 10_000
ROUND_DIGITS_MAX = 400  # a float has no more, before or behind its point

Names = Mapping[str, Any]


def evaluate(expression: str, names: Names) -> Any:
    """The value of `expression`; whatever is wrong with it is an InvalidValue."""
    if not expression.strip():
        raise InvalidValue("the expression is empty")
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise InvalidValue(f"the expression is longer than {EXPRESSION_CHARACTERS_MAX} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names)
    except (ArithmeticError, SyntaxError, TypeError, ValueError, IndexError, RecursionError) as e:
        raise InvalidValue(f"{expression!r} can't be computed: {e}") from e


def _value(node: ast.expr, names: Names) -> Any:
    reader = _READERS.get(type(node))
    if reader is None:
        raise InvalidValue(f"{type(node).__name__} is not allowed in an expression")
    return _bounded(reader(node, names))


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > RESULT_BITS_MAX:
        raise InvalidValue(f"a number of more than {RESULT_BITS_MAX} bits is too large")
    return value


def _name(node: ast.Name, names: Names) -> Any:
    if node.id not in names:
        raise InvalidValue(f"{node.id!r} is not defined")
    return names[node.id]


def _unary(node: ast.UnaryOp, names: Names) -> Any:
    return _UNARY[type(node.op)](_value(node.operand, names))


def _binary(node: ast.BinOp, names: Names) -> Any:
    operate = _BINARY.get(type(node.op))
    if operate is None:
        raise InvalidValue(f"{type(node.op).__name__} is not allowed in an expression")
    left, right = _value(node.left, names), _value(node.right, names)
    return operate(_number(left), _number(right))


def _number(value: Any) -> Any:
    # Texts and lists could be multiplied into any size.
    if not isinstance(value, int | float | complex):
        raise InvalidValue(f"{value!r} is not a number")
    return value


def _logic(node: ast.BoolOp, names: Names) -> Any:
    stops_at = isinstance(node.op, ast.Or)
    value: Any = None
    for part in node.values:
        value = _value(part, names)
        if bool(value) is stops_at:
            break
    return value


def _comparison(node: ast.Compare, names: Names) -> bool:
    left = _value(node.left, names)
    for comparator, part in zip(node.ops, node.comparators, strict=True):
        right = _value(part, names)
        if not _COMPARISONS[type(comparator)](left, right):
            return False
        left = right
    return True


def _choice(node: ast.IfExp, names: Names) -> Any:
    return _value(node.body if _value(node.test, names) else node.orelse, names)


def _call(node: ast.Call, names: Names) -> Any:
    if not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords:
        raise InvalidValue(f"{ast.unparse(node)} is not a function that can be used here")
    return FUNCTIONS[node.func.id](*(_value(argument, names) for argument in node.args))


def _item(node: ast.Subscript, names: Names) -> Any:
    return _value(node.value, names)[_value(node.slice, names)]


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
        raise InvalidValue(f"round takes at most {ROUND_DIGITS_MAX} digits")
    return round(number, digits)


def _sum(*values: Any) -> Any:
    """Of a list, or of the arguments."""
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
_UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Invert: operator.invert,
}
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.LShift: _shift_left,
    ast.RShift: operator.rshift,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.BitAnd: operator.and_,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
_READERS: Mapping[type[ast.expr], Callable[[Any, Names], Any]] = {
    ast.Constant: lambda node, names: node.value,
    ast.Name: _name,
    ast.UnaryOp: _unary,
    ast.BinOp: _binary,
    ast.BoolOp: _logic,
    ast.Compare: _comparison,
    ast.IfExp: _choice,
    ast.Call: _call,
    ast.Subscript: _item,
}
