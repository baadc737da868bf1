"""The condition language: what it says, what it refuses, and that it never crashes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfyfleet.api.expressions import (
    AnyOf,
    ConditionResult,
    evaluate,
    parse_condition,
)
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded

PICTURE = {"file_id": "f1", "path": "tenants/t/a.png", "mime_type": "image/png"}
OUTPUT = {
    "images": [PICTURE],
    "files": [PICTURE],
    "width": 512,
    "height": 384.0,
    "prompt_id": "p-1",
    "execution_time": 2.5,
    "tags": ["cat", "dog"],
    "is_new": True,
    "nothing": None,
}


def says(text: str, value: Any = OUTPUT) -> bool:
    return evaluate(parse_condition(text), value).value


@pytest.mark.parametrize(
    "text",
    [
        "output.width > 5",
        'output.prompt_id == "p-1"',
        "output.prompt_id == 'p-1'",
        'output.prompt_id != "p-2"',
        "output.width >= 512",
        "output.width <= 512",
        "output.width < 513",
        "output.height == 384",
        "output.execution_time > -1.5e0",
        "output.images.exists",
        "output.nothing.exists",
        "output.images.count > 0",
        ".images.count > 0",
        ".exists",
        "output.images.0.mime_type contains 'png'",
        "file_exists(output.image_path)",
        "file_exists(output.images.0)",
        "output.tags contains 'cat'",
        "'cat' in output.tags",
        "output.width in [256, 512]",
        "output.width > 5 AND output.height > 5",
        "output.width > 5 and NOT output.height < 5",
        "output.width < 5 Or output.is_new",
        "NOT (output.width < 5 OR output.height < 5)",
        "output.is_new == true AND output.nothing == null",
        "output.tags == ['cat', 'dog']",
    ],
)
def test_what_is_so_is_true(text: str) -> None:
    assert says(text)
    assert not says(f"NOT ({text})")


@pytest.mark.parametrize(
    "text",
    [
        "output.width > 512",
        'output.prompt_id == "P-1"',
        "output.nobody.exists",
        "output.images.1.exists",
        "file_exists(output.prompt_id)",
        "file_exists(output.nobody)",
        "output.is_new == 1",
        "output.nothing",
        "'cow' in output.tags",
    ],
)
def test_what_is_not_so_is_false(text: str) -> None:
    assert not says(text)


def test_and_binds_closer_than_or() -> None:
    assert isinstance(parse_condition("output.a OR output.b AND output.c"), AnyOf)


def test_a_plain_value_is_compared_as_it_is() -> None:
    assert says("output > 5", 6)
    assert says("output == 'yes'", "yes")


def test_a_missing_field_is_told() -> None:
    verdict = evaluate(parse_condition("output.nobody > 5 OR output.width > 5"), OUTPUT)
    assert verdict == ConditionResult(True, ("output.nobody is missing",))


def test_a_missing_field_equals_nothing() -> None:
    assert not says("output.nobody == null")
    assert says("output.nobody != 5")


def test_values_of_two_kinds_are_not_compared() -> None:
    verdict = evaluate(parse_condition("output.prompt_id > 5"), OUTPUT)
    assert verdict == ConditionResult(False, ("a text can't be compared with a number by >",))


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("output.width = 5", 14, "did you mean ==?"),
        ("output.width >", 15, "ends where a value"),
        ("(output.width > 5", 18, "expected ')'"),
        ("width > 5", 1, "begins with output"),
        ("output.width > 5 output", 18, "unexpected"),
        ("output.width > 'x", 16, "unterminated"),
        ("output.width; 1", 13, "unexpected"),
        ("__import__('os')", 1, "unknown function '__import__'"),
        ("file_exists('x')", 13, "expects a field"),
        ("AND output.a", 1, "expected a value"),
        ("", 1, "ends where"),
        ("output.a in [1 2]", 16, "expected ','"),
    ],
)
def test_an_error_says_where(text: str, position: int, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_condition(text)
    assert words in caught.value.message
    assert caught.value.details["position"] == position


def test_length_and_depth_are_bounded() -> None:
    with pytest.raises(LimitExceeded):
        parse_condition("output.a AND " * 500 + "output.a")
    with pytest.raises(InvalidInput, match="deeper"):
        parse_condition("(" * 200 + "output.a" + ")" * 200)
    with pytest.raises(InvalidInput, match="deeper"):
        parse_condition("NOT " * 200 + "output.a")


WORDS = st.sampled_from(
    ["output", ".a", "output.images.count", "5", "'x'", "AND", "or", "not", "(", ")", "[", "]",
     ",", "==", ">", "in", "contains", "file_exists", "exists", "null", "output.0", "=", "#"]
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "images", "file_id", "0"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, max_size=12), VALUES)
def test_any_text_is_either_refused_in_our_words_or_judges_any_value(
    words: list[str], value: Any
) -> None:
    try:
        expression = parse_condition(" ".join(words))
    except FleetError:
        return
    assert isinstance(evaluate(expression, value).value, bool)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("output.width => 3", ">="),
        ("output.width =< 3", "<="),
        ("output.width = 3", "=="),
        ("output.width && output.height", "AND"),
        ("!output.width", "NOT"),
        ("len(output.images) > 0", "length"),
        ("file_exist(output.image_path)", "file_exists"),
        ("outputs.width > 3", "'output.width'"),
    ],
)
def test_spellings_of_other_languages_are_answered_with_ours(text: str, meant: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_condition(text)
    assert f"did you mean {meant}?" in refused.value.message


def test_a_field_without_its_beginning_is_told_how_fields_begin() -> None:
    with pytest.raises(InvalidInput, match=r"'width' is unknown; a field begins with output\."):
        parse_condition("width > 3")
