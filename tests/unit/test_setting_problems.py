"""A value is refused for the reasons for which the server would refuse it, and for no others."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.small_server import RESIZE_TYPES, SAMPLERS

from comfyfleet.workflow.edit import problem_with
from comfyfleet.workflow.edit.input_lookup import closest, shown_value

INT = ["INT", {"min": 1, "max": 10}]
FLOAT = ["FLOAT", {"min": 0.0, "max": 1.0}]
COMBO = ["COMBO", {"options": ["a", "b"]}]
DYNAMIC = ["COMFY_DYNAMICCOMBO_V3", {"options": RESIZE_TYPES}]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (INT, 5),
        (INT, "5"),
        (INT, " 7 "),
        (INT, 9.9),
        (INT, True),
        (["INT"], -(10**30)),
        (FLOAT, 1),
        (FLOAT, "0.5"),
        (FLOAT, float("nan")),
        (["STRING", {}], None),
        (["STRING", {"multiline": True}], 5),
        (["BOOLEAN", {}], "false"),
        (["BOOLEAN", {}], None),
        (COMBO, "a"),
        ([["a", "b"], {}], "b"),
        ([[1, 2]], 1.0),
        (["COMBO", {"options": ["a", "b"], "multiselect": True}], {"__value__": ["b", "a"]}),
        ([["cat.png"], {"image_upload": True}], "dog.png [output]"),
        (["COMBO", {"remote": {"route": "/x"}}], "anything"),
        (DYNAMIC, "scale width"),
        (["MODEL", {}], "whatever"),
        (["COLOR", {}], {"__value__": [1, 2]}),
    ],
)
def test_what_the_server_takes_is_no_problem(declared: Any, value: Any) -> None:
    assert problem_with(declared, value) is None


@pytest.mark.parametrize(
    ("declared", "value", "problem"),
    [
        (INT, "many", '"many" is not a whole number'),
        (INT, "5.5", '"5.5" is not a whole number'),
        (INT, None, "null is not a whole number"),
        (INT, float("inf"), "inf is not a whole number"),
        (INT, {"__value__": [1]}, "a list of 1 is not a whole number"),
        (INT, 0, "0 is below the minimum of 1"),
        (INT, 11, "11 is above the maximum of 10"),
        (INT, "11", "11 is above the maximum of 10"),
        (INT, 10**400, "a number of many digits is above the maximum of 10"),
        (FLOAT, "", '"" is not a number'),
        (FLOAT, 1.5, "1.5 is above the maximum of 1.0"),
        (FLOAT, 10**400, "a number of many digits is not a number"),
        (["FLOAT,INT", {"min": 1}], "x", '"x" is not a number'),
        (COMBO, "c", '"c" is not among the choices: "a", "b"'),
        (COMBO, None, 'null is not among the choices: "a", "b"'),
        ([[1, 2]], "1", '"1" is not among the choices: "1", "2"'),
        (COMBO, {"__value__": ["a"]}, 'a list of 1 is not among the choices: "a", "b"'),
        (["COMBO", {"options": []}], "a", '"a" can\'t be chosen, because the server offers no choices'),
        (
            ["COMBO", {"options": ["a", "b"], "multiselect": True}],
            {"__value__": ["a", "c"]},
            '"c" is not among the choices: "a", "b"',
        ),
        (
            DYNAMIC,
            "scale",
            '"scale" is not among the choices: '
            '"scale dimensions", "scale width", "scale by", "match size"',
        ),
    ],
)  # fmt: skip
def test_what_the_server_refuses_is_told_in_words(declared: Any, value: Any, problem: str) -> None:
    assert problem_with(declared, value) == problem


def test_of_many_choices_the_closest_are_named() -> None:
    problem = problem_with([SAMPLERS], "Euler_a")
    assert problem is not None
    assert problem.startswith('"Euler_a" is not among the 10 choices; closest: "euler_ancestral"')
    assert problem_with([SAMPLERS], "zzzzzzz") == '"zzzzzzz" is not among the 10 choices'


def test_a_file_is_found_without_its_folder_and_ending() -> None:
    files = [f"sd{number}.safetensors" for number in range(20)] + ["sdxl/Turbo-fp16.safetensors"]
    assert closest("turbo", files) == ["sdxl/Turbo-fp16.safetensors"]


def test_values_are_shown_on_one_short_line() -> None:
    assert shown_value("two\nlines") == '"two\\nlines"'
    assert len(shown_value("long" * 100)) <= 62
    assert shown_value("half \ud83d, bell \x9b") == '"half \ufffd, bell \ufffd"'
    assert shown_value({"__value__": [1, 2]}) == "a list of 2"
    assert shown_value({"a": 1}) == "an object"
    assert shown_value(10**5000) == "a number of many digits"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["__value__", "key", "x"]), inner, max_size=2)
    ),
    max_leaves=6,
)
OPTION_NAMES = st.sampled_from(["min", "max", "options", "multiselect", "remote", "default", "key"])
KINDS = st.sampled_from(
    ["INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3", "FLOAT,INT", "MODEL"]
)
SPECS = (
    st.tuples(KINDS | VALUES, st.dictionaries(OPTION_NAMES, VALUES, max_size=4)).map(list) | VALUES
)


@settings(max_examples=40)
@given(SPECS, VALUES)
def test_any_value_of_any_input_gets_an_answer(declared: Any, value: Any) -> None:
    problem = problem_with(declared, value)
    assert problem is None or (problem.isprintable() and json.dumps(problem))
