"""The values of a batch: a CSV file with a row for each run."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from comfyfleet.cli.files import read_file
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.setting import SHORTHANDS

CSV_BYTES_MAX = 64 * 1024 * 1024
ROWS_MAX = 100_000
SHORTHAND_NAMES = {name: one.name for one in SHORTHANDS for name in (one.name, *one.aliases)}
EXAMPLE = "The first row names what is set, such as: prompt,seed,3.steps"


@dataclass(frozen=True, slots=True)
class Row:
    """`number` counts from 1, as people count; `usual` are shorthands, `named` are `node.input`."""

    number: int
    usual: Mapping[str, str]
    named: Mapping[str, str]


ONLY = Row(1, {}, {})  # a run that changes nothing


def read_rows(path: Path) -> tuple[Row, ...]:
    data = read_file(path, bytes_max=CSV_BYTES_MAX)
    try:
        return parse_rows(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text", hint=EXAMPLE) from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=EXAMPLE) from error


def parse_rows(text: str) -> tuple[Row, ...]:
    """An empty cell leaves the value as the file has it, an empty row is no run."""
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [name.strip() for name in next(lines, [])]
        _check(columns)
        cells = [line for line in lines if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise InvalidInput(f"line {lines.line_num} is no CSV: {error}") from error
    if not cells:
        raise InvalidInput("there are no rows")
    if len(cells) > ROWS_MAX:
        raise LimitExceeded(f"{len(cells):,} rows, at most {ROWS_MAX:,}")
    return tuple(_row(number, columns, line) for number, line in enumerate(cells, 1))


def _check(columns: list[str]) -> None:
    if not any(columns):
        raise InvalidInput("the first row names no columns")
    for name in columns:
        if not name:
            raise InvalidInput("a column has no name")
        if name not in SHORTHAND_NAMES and "." not in name.strip("."):
            known = ", ".join(one.name for one in SHORTHANDS)
            raise InvalidInput(f"column {name!r} is neither node.input nor one of {known}")
    twice = {name for name in columns if columns.count(name) > 1}
    if twice:
        raise InvalidInput(f"two columns are named {sorted(twice)[0]!r}")


def _row(number: int, columns: list[str], line: list[str]) -> Row:
    if len(line) > len(columns):
        raise InvalidInput(f"row {number} has {len(line)} cells for {len(columns)} columns")
    cells = {name: cell for name, cell in zip(columns, line, strict=False) if cell}
    usual = {SHORTHAND_NAMES[name]: cell for name, cell in cells.items() if name in SHORTHAND_NAMES}
    return Row(
        number, usual, {key: cell for key, cell in cells.items() if key not in SHORTHAND_NAMES}
    )
