from datetime import UTC, datetime
from random import Random
from typing import Any

import pytest

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.text_patterns import choose, fill_patterns, format_date, javascript_text

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
MISSING = object()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("{a|b} x", "a x"),
        ("{only}", "only"),
        ("{a|{b|c}}", "a"),
        ("{{x|y}|b}", "x"),
        (r"\{a\|b\}", "{a|b}"),
        (r"a\nb", r"a\nb"),
        ("open {a|b", "open a"),
        ("a /* cut */ b // rest\nc", "a  b \nc"),
        ("http://x", "http:"),
        ("", ""),
        ("end\\", "end\\undefined"),
    ],
)
def test_choices_and_comments_without_chance(text: str, expected: str) -> None:
    assert choose(text, None) == expected


def test_chance_picks_every_choice_sooner_or_later() -> None:
    rng = Random(5)
    assert {choose("{a|b|c}", rng) for _ in range(100)} == {"a", "b", "c"}


def test_choices_nested_too_deeply_are_refused() -> None:
    with pytest.raises(LimitExceeded):
        choose("{" * 1000, None)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("yyyy-MM-dd", "2026-01-02"),
        ("yy-M-d h:m:s", "26-1-2 3:4:5"),
        ("yyy", "yyy"),
        ("hh", "03"),
    ],
)
def test_dates_are_written_as_the_pattern_says(pattern: str, expected: str) -> None:
    assert format_date(pattern, NOW) == expected


def find(node: str, widget: str) -> Any:
    return {("K", "seed"): 7, ("K", "name"): "a/b:c", ("K", "on"): True}.get(
        (node, widget), MISSING
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%K.seed%_%K.on%", "7_true"),
        ("%K.name%", "a_b_c"),
        ("%K.gone% %X.seed%", "%K.gone% %X.seed%"),
        ("%width%", "%width%"),
        ("%date:yyyy%", "2026"),
        ("100%", "100%"),
    ],
)
def test_patterns_are_filled_in_and_unknown_ones_stay(text: str, expected: str) -> None:
    assert fill_patterns(text, find, NOW, MISSING) == expected


def test_without_a_clock_dates_stay() -> None:
    assert fill_patterns("%date:yyyy%", find, None, MISSING) == "%date:yyyy%"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.0, "1"), (1.5, "1.5"), (True, "true"), (None, "null"), ([1, None, "a"], "1,,a"), ({}, "[object Object]")],
)  # fmt: skip
def test_values_in_texts_look_as_javascript_writes_them(value: Any, expected: str) -> None:
    assert javascript_text(value) == expected
