"""JSON from anywhere is read as the editor reads it, or refused in our words."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.embedded.reader import JSON_DEPTH_MAX, FileLimits, parse_json

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def parsed(text: str | bytes) -> Any:
    return parse_json(text, what="the file")


@settings(max_examples=50)
@given(JSON_VALUES)
def test_what_json_writes_comes_back_unchanged(value: Any) -> None:
    assert parsed(json.dumps(value)) == value
    assert parsed(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "token", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "9" * 5000]
)
def test_a_number_that_is_not_finite_becomes_null_as_in_the_editor(token: str) -> None:
    assert parsed(f'{{"a": [{token}], "b": "{token}"}}') == {"a": [None], "b": token}


@pytest.mark.parametrize("token", ["-NaN", "1NaN", "NaN1", "nan", "+Infinity", "undefined"])
def test_a_token_that_the_editor_refuses_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput):
        parsed(f"[{token}]")


def test_a_large_seed_stays_exact() -> None:
    assert parsed("[18446744073709551615]") == [2**64 - 1]


def test_the_largest_finite_integer_is_kept() -> None:
    largest = int(math.nextafter(math.inf, 0))
    assert parsed(str(largest)) == largest
    assert parsed(str(-largest)) == -largest


def test_of_equal_keys_the_last_one_counts() -> None:
    assert parsed('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\ud800"', "�"),
        (r'"\uDC00x"', "�x"),
        (r'"\ud83d\ud83d\ude00"', "�😀"),
        (r'"\\ud800"', r"\ud800"),
        (r'"\\\ud800"', "\\�"),
        (r'{"\ud800": 1}', {"�": 1}),
        ('"\ud800"', "�"),
    ],
)
def test_half_a_character_is_replaced_so_that_every_string_can_be_stored(
    text: str, value: Any
) -> None:
    assert parsed(text) == value


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_text_with_a_byte_order_mark_is_read(encoding: str) -> None:
    assert parsed('{"ä": "😀"}'.encode(encoding)) == {"ä": "😀"}


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    with pytest.raises(InvalidInput, match="not UTF-8 text: the byte at 6 "):
        parsed(b'{"a":"\xe9"}')


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "ends too early"),
        ('{"a": [1, 2', "ends too early"),
        ('{"a": "b', "ends too early"),
        ("{'a': 1}", "line 1, column 2"),
        ('{"a": 1}\n}', "line 2, column 1"),
        ('{"a": 1,}', "column"),
        ('"\x00"', "control character"),
        ("\x00", "line 1"),
        (r'"\u12"', "escape"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput, match=f"The file is not valid JSON: .*{reason}"):
        parsed(text)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"]":'])
def test_deep_nesting_is_refused_before_it_is_built(opening: str) -> None:
    with pytest.raises(LimitExceeded, match="deeper than 200 levels"):
        parsed(opening * 10_000)


def test_the_deepest_nesting_that_is_allowed_is_read() -> None:
    text = "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX
    assert json.dumps(parsed(text)) == text


def test_brackets_inside_strings_do_not_count_as_nesting() -> None:
    value = ["[" * 1000, '"' + "{" * 1000, "\\", "[" * 1000, '\\"' + "[" * 1000]
    assert parsed(json.dumps(value)) == value


def test_more_values_than_allowed_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="more than 10 values"):
        parse_json("[1,2,3,4,5,6,7,8,9,10,11]", what="the file", limits=FileLimits(json_values=10))


def test_a_longer_text_than_allowed_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="has 12 bytes, more than the limit of 10"):
        parse_json(b'"0123456789"', what="the file", limits=FileLimits(metadata_bytes=10))


@given(st.binary() | st.text() | st.text('[]{}",:\\ud8e1 NaInfty-.'))
def test_any_other_text_ends_in_an_error_of_ours(data: bytes | str) -> None:
    try:
        value = parsed(data)
    except (InvalidInput, LimitExceeded):
        return
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()


def test_the_name_of_a_file_is_told_as_it_is() -> None:
    with pytest.raises(InvalidInput, match=r"^examples/photo\.png is not UTF-8 text"):
        parse_json(b"\x89PNG", what="examples/photo.png")
    with pytest.raises(InvalidInput, match=r"^The file is not valid JSON"):
        parse_json(b"{", what="the file")
