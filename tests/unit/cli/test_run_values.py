"""Rows of a CSV file."""

from pathlib import Path

import pytest

from comfyfleet.cli.run import BatchRow, parse_rows, read_rows
from comfyfleet.errors import InvalidInput


def test_columns_are_shorthands_or_addresses() -> None:
    rows = parse_rows('prompt,seed,Main sampler.steps\n"a cat, wet",7,30\n')
    assert rows == (
        BatchRow(1, {"prompt": "a cat, wet", "seed": "7"}, {"Main sampler.steps": "30"}),
    )


def test_other_names_of_a_shorthand_are_taken() -> None:
    assert parse_rows("checkpoint\nxl.safetensors\n")[0].usual == {"model": "xl.safetensors"}


def test_an_empty_cell_changes_nothing_and_an_empty_row_is_no_run() -> None:
    rows = parse_rows("seed,3.steps\n1,\n,\n\n2,20\n")
    assert [(row.number, row.usual, row.named) for row in rows] == [
        (1, {"seed": "1"}, {}),
        (2, {"seed": "2"}, {"3.steps": "20"}),
    ]


def test_a_short_row_is_filled_up() -> None:
    assert parse_rows("seed,3.steps\n1\n")[0].named == {}


def test_a_cell_may_hold_lines() -> None:
    assert parse_rows('prompt\n"one\ntwo"\n')[0].usual == {"prompt": "one\ntwo"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no column names"),
        ("seed\n", "no rows"),
        ("sed\n1\n", "column 'sed' is neither"),
        ("seed,\n1,2\n", "has no name"),
        ("seed,seed\n1,2\n", "two columns have the name 'seed'"),
        ("seed\n1,2\n", "row 1 has 2 cells for 1 columns"),
        ('seed\n"1\n', "isn't valid CSV"),
    ],
)
def test_what_is_wrong_is_said(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        parse_rows(text)


def test_a_file_of_a_spreadsheet_begins_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    path.write_bytes(b"\xef\xbb\xbfseed\r\n7\r\n")
    assert read_rows(path)[0].usual == {"seed": "7"}


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "values.csv"
    path.write_bytes(b"seed\n\xff\n")
    with pytest.raises(InvalidInput, match=r"values\.csv is not UTF-8"):
        read_rows(path)
