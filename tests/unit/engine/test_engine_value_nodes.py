"""Nodes for numbers, switches and text."""

from typing import Any

import numpy as np
import pytest
from tests.unit.engine.node_runs import NODES, PromptRun, RecordingContext, folders_in, run, value

from comfyfleet.errors import InvalidValue, NodeFailed

FLAGS = {"case_insensitive": True, "multiline": False, "dotall": False}


@pytest.mark.parametrize(
    ("class_type", "given"),
    [
        ("PrimitiveInt", 7),
        ("PrimitiveFloat", 0.5),
        ("PrimitiveString", "x"),
        ("PrimitiveStringMultiline", "a\nb"),
        ("PrimitiveBoolean", True),
    ],
)
def test_a_primitive_hands_on_its_value(class_type: str, given: Any) -> None:
    assert value(class_type, value=given) == given


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", "text"),
        (True, "True"),
        (1.0, "1.0"),
        (1e-07, "1e-07"),
        (None, "None"),
        ({"a": [1], "b": "ü"}, '{\n    "a": [\n        1\n    ],\n    "b": "\\u00fc"\n}'),
        (np.float32(2), "2.0"),
    ],
)
def test_any_value_is_shown_as_python_writes_it(given: Any, expected: str) -> None:
    result = run("PreviewAny", source=given)
    assert result.ui == {"text": (expected,)}
    assert result.outputs == (expected,)


def test_a_formula_gives_three_kinds_of_number() -> None:
    inputs = {"expression": "-a / b + sum(values)", "values.b": 2, "values.a": 5}
    assert run("ComfyMathExpression", **inputs).outputs == (4.5, 4, True)
    assert run("ComfyMathExpression", expression="a > 9", **{"values.a": 1}).outputs == (
        0,
        0,
        False,
    )


@pytest.mark.parametrize("expression", ["'x'", "2 ** 4000", "1e308 * 10", "(-1) ** 0.5"])
def test_a_formula_must_give_a_finite_number(expression: str) -> None:
    with pytest.raises(NodeFailed):
        run("ComfyMathExpression", expression=expression, **{"values.a": 1})


def test_an_empty_formula_is_refused() -> None:
    with pytest.raises(InvalidValue, match="empty"):
        run("ComfyMathExpression", expression=" ", **{"values.a": 1})


def test_a_switch_wants_the_chosen_side_only() -> None:
    needed = NODES["ComfySwitchNode"].needed
    assert needed
    assert needed({"switch": True}) == ["on_true"]
    assert needed({"switch": False, "on_true": 1}) == ["on_false"]
    assert needed({"switch": True, "on_true": None}) == []
    assert value("ComfySwitchNode", switch=True, on_true=1) == 1
    assert value("ComfySwitchNode", switch=False, on_false=2) == 2


def test_the_other_side_of_a_switch_does_not_run(tmp_path: Any) -> None:
    prompt = {
        "1": {"class_type": "PrimitiveInt", "inputs": {"value": 1}},
        "2": {
            "class_type": "ComfyfleetFail",
            "inputs": {"fail": True, "message": "", "after_ms": 0},
        },
        "3": {
            "class_type": "ComfySwitchNode",
            "inputs": {"switch": True, "on_true": ["1", 0], "on_false": ["2", 0]},
        },
    }
    running = PromptRun(prompt, RecordingContext(folders_in(tmp_path)))
    assert running.result("3").outputs == (1,)


@pytest.mark.parametrize(
    ("class_type", "inputs", "expected"),
    [
        ("StringConcatenate", {"string_a": "a", "string_b": "b", "delimiter": "-"}, "a-b"),
        ("StringReplace", {"string": "Cat cat", "find": "cat", "replace": "dog"}, "Cat dog"),
        ("StringSubstring", {"string": "a🎈b", "start": 1, "end": 2}, "🎈"),
        ("StringTrim", {"string": " x ", "mode": "Both"}, "x"),
        ("StringTrim", {"string": " x ", "mode": "Left"}, "x "),
        ("StringTrim", {"string": " x ", "mode": "Right"}, " x"),
        ("CaseConverter", {"string": "it's", "mode": "UPPERCASE"}, "IT'S"),
        ("CaseConverter", {"string": "It's", "mode": "lowercase"}, "it's"),
        ("CaseConverter", {"string": "it's 3rd", "mode": "Capitalize"}, "It's 3rd"),
        ("CaseConverter", {"string": "it's 3rd", "mode": "Title Case"}, "It'S 3Rd"),
        ("StringLength", {"string": "🎈é"}, 2),
        ("StringContains", {"string": "Ab", "substring": "AB", "case_sensitive": True}, False),
        ("StringContains", {"string": "Ab", "substring": "AB", "case_sensitive": False}, True),
    ],
)
def test_texts(class_type: str, inputs: dict[str, Any], expected: Any) -> None:
    assert value(class_type, **inputs) == expected


@pytest.mark.parametrize(
    ("mode", "a", "b", "expected"),
    [
        ("Starts With", "Hello", "he", True),
        ("Ends With", "Hello", "LO", True),
        ("Equal", "Straße", "STRASSE", False),
    ],
)
def test_texts_are_compared(mode: str, a: str, b: str, expected: bool) -> None:
    inputs = {"string_a": a, "string_b": b, "mode": mode}
    assert value("StringCompare", case_sensitive=False, **inputs) is expected
    assert value("StringCompare", case_sensitive=True, **inputs) is False


@pytest.mark.parametrize(
    ("pattern", "flags", "expected"),
    [
        ("B", {}, True),
        ("B", {"case_insensitive": False}, False),
        ("^b", {}, False),
        ("^b", {"multiline": True}, True),
        ("a.b", {}, False),
        ("a.b", {"dotall": True}, True),
        ("(", {}, False),
    ],
)
def test_a_pattern_is_searched(pattern: str, flags: dict[str, bool], expected: bool) -> None:
    found = value("RegexMatch", string="a\nb", regex_pattern=pattern, **(FLAGS | flags))
    assert found is expected


@pytest.mark.parametrize(
    ("mode", "pattern", "index", "expected"),
    [
        ("First Match", r"([a-z])=(\d+)", 2, "x=10"),
        ("All Matches", r"([a-z])=(\d+)", 2, "x\ny"),
        ("All Matches", r"\d+", 1, "10\n20"),
        ("First Group", r"([a-z])=(\d+)", 2, "10"),
        ("First Group", r"([a-z])=(\d+)", 3, ""),
        ("First Group", r"z(\d)", 1, ""),
        ("All Groups", r"([a-z])=(\d+)", 2, "10\n20"),
        ("All Groups", r"\d+", 1, ""),
        ("First Match", r"z", 1, ""),
        ("First Match", r"(", 1, ""),
    ],
)
def test_parts_of_a_text_are_extracted(mode: str, pattern: str, index: int, expected: str) -> None:
    inputs = {"string": "x=10, y=20", "mode": mode, "group_index": index, **FLAGS}
    assert value("RegexExtract", regex_pattern=pattern, **inputs) == expected


def test_a_group_that_took_no_part_fails() -> None:
    inputs = {"string": "ab", "mode": "All Groups", "group_index": 2, **FLAGS}
    with pytest.raises(NodeFailed, match="is missing in a match"):
        value("RegexExtract", regex_pattern="(a)|(b)", **inputs)


def test_a_pattern_is_replaced() -> None:
    inputs = {"string": "a1A2", "regex_pattern": "(a)", "replace": r"<\1>"}
    assert value("RegexReplace", **inputs) == "<a>1<A>2"
    assert value("RegexReplace", count=1, **inputs) == "<a>1A2"
    assert value("RegexReplace", case_insensitive=False, **inputs) == "<a>1A2"
    with pytest.raises(NodeFailed, match="can't replace"):
        value("RegexReplace", string="a", regex_pattern="a", replace=r"\3")
