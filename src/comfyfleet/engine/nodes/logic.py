"""Nodes for single values: numbers, switches, formulas, and showing any of them."""

import json
import math
import string
from collections.abc import Mapping
from typing import Any

from comfyfleet.engine.declare import (
    MATCH,
    Interface,
    flag,
    group,
    growing,
    integer,
    matching,
    node,
    number,
    pure,
    socket,
    text,
)
from comfyfleet.engine.expression import evaluate
from comfyfleet.engine.node import Context, NodeType, Result
from comfyfleet.kernel.errors import NodeFailed

NUMBER_MAX = 2**63 - 1
LETTERS = list(string.ascii_lowercase)


def primitive(name: str, title: str, value: list[Any], essentials: str | None = None) -> NodeType:
    """A node that only holds a value, for others to share."""
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
def preview_any(context: Context, source: Any = None) -> Result:
    shown = as_text(source)
    return Result((shown,), {"text": (shown,)})


def as_text(value: Any) -> str:
    """As Python writes it; objects as JSON where that is possible."""
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
            "values": growing("value", "FLOAT,INT,BOOLEAN", names=LETTERS, min=1),
        },
        outputs=("FLOAT", "INT", "BOOLEAN"),
        output_names=("FLOAT", "INT", "BOOL"),
    )
)
def math_expression(expression: str, **inputs: Any) -> tuple[float, int, bool]:
    given = group(inputs, "values")
    values = {name: given[name] for name in LETTERS if name in given}
    result = evaluate(expression, {**values, "values": list(values.values())})
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
            "on_false": matching("switch", "*", lazy=True),
            "on_true": matching("switch", "*", lazy=True),
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


NODES = (*PRIMITIVES, preview_any, math_expression, switch)
