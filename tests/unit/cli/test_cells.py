"""The API's answers in the cells of a table."""

from typing import Any

import pytest

from comfyfleet.cli.tables import table_cell, value_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (True, "yes"),
        (2.345, "2.3"),
        ([], "–"),
        (["a", "b"], "a, b"),
        ({"a": 1, "b": None}, "a=1, b=–"),
        ("2026-11-15T09:33:31.123456Z", "2026-11-15T09:33:31Z"),
        ("2026-11-15Tea and other long texts", "2026-11-15Tea and other long texts"),
    ],
)
def test_values_are_spoken(value: Any, text: str) -> None:
    assert value_text(value) == text


def test_what_others_wrote_moves_no_cursor_and_fills_no_screen() -> None:
    assert table_cell("\x1b[2Jgone").plain == "?[2Jgone"
    assert len(table_cell("x" * 10_000).plain) == 120
