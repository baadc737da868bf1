"""Values and templates: what they make, what they refuse, and that they never crash."""

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfyfleet.api.expressions import (
    CHARACTERS_PER_STEP,
    MISSING,
    STEPS_MAX,
    FieldPath,
    StepCount,
    compute,
    evaluate_condition,
    parse_expression,
    value_at,
)
from comfyfleet.api.functions import FUNCTIONS, TEXT_CHARACTERS_MAX
from comfyfleet.api.templates import fill, parse_template, parse_templates, write_templates
from comfyfleet.errors import FleetError, InvalidInput, LimitExceeded

NAMED: dict[str, Any] = {
    "name": " Ann ",
    "n": 7,
    "half": 0.5,
    "tags": ["b", "a"],
    "scores": [0.2, 0.8, 0.5],
    "row": {"caption": "a cat", "is_new": True, "none": None},
    "my-node": {"output": {"text": "hi"}},
}


def read(path: FieldPath) -> Any:
    return value_at(NAMED, (path.root, *path.segments))


def made(text: str) -> Any:
    return compute(parse_expression(text, None), read)


def filled(template: Any) -> Any:
    return fill(parse_templates(template, None), read)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n + 1", 8),
        ("n - 1 - 1", 5),
        ("2 + n * 2", 16),
        ("(2 + n) * 2", 18),
        ("-n + 10", 3),
        ("n / 2", 3.5),
        ("n % 4", 3),
        ("name | trim", "Ann"),
        ("name | trim | upper", "ANN"),
        ("trim(name) + '!'", "Ann!"),
        ("tags | join(' + ')", "b + a"),
        ("tags | sort | first", "a"),
        ("tags + ['c']", ["b", "a", "c"]),
        ("tags | length", 2),
        ("scores | max", 0.8),
        ("min(n, 3, half)", 0.5),
        ("scores | mean | round(2)", 0.5),
        ("'1, 2' | split | last | number", 2),
        ("'a-b' | replace('-', '_')", "a_b"),
        ("row.nobody | default('none')", "none"),
        ("row.none | default(n + 1)", 8),
        ("if(n > 5, 'many', 'few')", "many"),
        ("n > 5 AND NOT row.nobody.exists", True),
        ("my-node.output.text", "hi"),
        ("[n, half]", [7, 0.5]),
        ("'abcdef' | first(3)", "abc"),
        ("tags | reverse", ["a", "b"]),
        ("n | text", "7"),
    ],
)
def test_values_are_made(text: str, expected: Any) -> None:
    assert made(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("row.nobody + 1", "row.nobody is missing"),
        ("name + 1", r"\+ doesn't support a text and a number"),
        ("n / 0", "division by zero"),
        ("tags | max", "expected numbers"),
        ("row | trim", "expected text, not an object"),
        ("'x' | number", "'x' is not a number"),
        ("[] | first", "the list is empty"),
        ("9e307 * 100", "too large"),
        ("18446744073709551615 * 2", "too large"),
    ],
)
def test_what_a_value_lacks_is_told(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        made(text)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("n | nobody", 5, "unknown function 'nobody'"),
        ("n | join(1, 2, 3)", 5, "expects 1 to 2 values, not 4"),
        ("trim()", 1, "expects a value, not 0"),
        ("n +", 4, "ends where a value"),
        ("n n", 3, "unexpected"),
    ],
)
def test_an_error_says_where(text: str, position: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        parse_expression(text, None)
    assert caught.value.details["position"] == position


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ n }}", 7),
        (" {{ n + 1 }} ", 8),
        ("{{ n }}{{ n }}", "77"),
        ("a {{ name | trim }}, {{ row.is_new }}", "a Ann, true"),
        ("{{ '}}' + \"{{\" }}", "}}{{"),
        ({"a": ["{{ n }}", "plain", 3]}, {"a": [7, "plain", 3]}),
        ("nothing to fill", "nothing to fill"),
    ],
)
def test_templates_are_filled(template: Any, expected: Any) -> None:
    assert filled(template) == expected
    assert write_templates(parse_templates(template, None)) == template


def test_an_error_in_a_template_counts_from_the_beginning_of_the_text() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_template("hello {{ n + }}", None)
    assert caught.value.details["position"] == 14
    with pytest.raises(InvalidInput, match="not closed") as caught:
        parse_template("hello {{ n", None)
    assert caught.value.details["position"] == 7


def test_a_text_is_not_made_of_a_list() -> None:
    with pytest.raises(InvalidInput, match="a list can't be converted to text"):
        filled("x {{ tags }}")


def test_what_has_a_default_is_not_needed() -> None:
    template = parse_template("{{ a.b | default(c) }} {{ d }} {{ if(e.exists, 1, 2) }}", None)
    assert [str(each) for each in template.paths] == ["a.b", "c", "d", "e"]
    assert [str(each) for each in template.needed_paths] == ["c", "d"]


def test_only_known_names_begin_a_path() -> None:
    with pytest.raises(InvalidInput, match=r"begins with output. or round."):
        parse_expression("previous.x", ("output", "round"))


def test_texts_and_steps_are_bounded() -> None:
    long = {"text": "x" * TEXT_CHARACTERS_MAX, "list": list(range(STEPS_MAX + 1))}
    for text in ("text + 'y'", "text | replace('x', 'yy')", "[text, text] | join"):
        with pytest.raises(InvalidInput, match="long"):
            compute(parse_expression(text, None), lambda path: long[path.root])
    with pytest.raises(LimitExceeded, match="steps"):
        compute(parse_expression("list | sum", None), lambda path: long[path.root])


PIECES = st.sampled_from([
    "n", "name", "row.caption", "tags", "1", "'x'", "+", "-", "*", "/", "%", "|", "(", ")", "[", "]", ",", "==", "and", "not",
    "{{", "}}", *FUNCTIONS,
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12))
def test_no_text_does_anything_but_give_a_value_or_say_why_not(pieces: list[str]) -> None:
    with contextlib.suppress(FleetError):
        assert filled("{{ " + " ".join(pieces) + " }}") is not MISSING


LONG: list[Any] = list(range(60_000))
DEEP: Any = 0
for _ in range(3000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "text",
    [
        "+".join(["x"] * 100),
        " OR ".join(["1.5 in x"] * 150),
        " OR ".join(["x contains 1.5"] * 100),
        " OR ".join(["x == y"] * 200),
        " OR ".join(["file_exists(x.0)"] * 100),
        "deep == deep",
    ],
)
def test_what_walks_long_values_is_counted_and_given_up(text: str) -> None:
    """One text of 2,000 characters held a control plane for 20 seconds, or took a gigabyte."""
    named = {"x": LONG, "y": [*LONG[:-1], 0], "deep": DEEP}
    with pytest.raises(LimitExceeded):
        compute(
            parse_expression(text, None),
            lambda path: value_at(named, (path.root, *path.segments)),
        )
    verdict = evaluate_condition(parse_expression(text, None), named)
    assert verdict.value is False
    assert "more than" in verdict.notes[0] or "deeper than" in verdict.notes[0]


def test_a_long_value_is_compared_with_a_short_one_in_no_time() -> None:
    named = {"x": LONG * 3, "m": dict.fromkeys(map(str, LONG * 3))}
    for text in ("x != null", "NOT (x == 1)", "m contains '5'", "'5' in m", "x.count > 5"):
        assert evaluate_condition(parse_expression(text, None), named) == (True, ()), text


@pytest.mark.parametrize(
    "part",
    [
        "split(t, ';') == 1",
        "t contains 'x'",
        "'x' in t",
        "t == u",
        "t < u",
        "[t, u] == [u, t]",
        "length(sort([t, u])) == 1",
        "upper(t) == 1",
        "replace(t, 'x', '') == 1",
        "number(t) == 1",
        "t + u == 1",
        "first(t, 9) == 1",
    ],
)
def test_texts_that_are_gone_through_take_steps(part: str) -> None:
    """Each alone may be worth it, but not many times."""
    text = "ab;" * 30_000
    texts = {"t": text, "u": f"{text};"}
    steps = StepCount()
    compute(parse_expression(part, None), lambda path: texts[path.root], steps)
    assert steps.count >= len(text) // CHARACTERS_PER_STEP


def test_a_text_is_not_split_into_more_parts_than_there_are_steps() -> None:
    with pytest.raises(LimitExceeded, match="steps"):
        compute(parse_expression("split(t, ';') == 1", None), lambda _: "a;" * 200_000)


def test_all_templates_of_one_value_share_their_steps() -> None:
    value = parse_templates([["{{ x | length }}"]] * 3, None)
    with pytest.raises(LimitExceeded):
        fill(value, lambda _: LONG)
    assert fill(value[:1], lambda _: LONG) == [[60_000]]


@pytest.mark.parametrize("text", ["1e999", "-1e999", "[1e999]", "9" * 100])
def test_a_number_that_is_no_number_of_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="too large"):
        parse_expression(text, None)
