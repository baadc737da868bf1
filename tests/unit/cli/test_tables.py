"""Tables that never break words: fitted to a terminal, one row a line in a pipe."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from comfyfleet.cli.tables import TextTable, exact_time, fit_columns, relative_time

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
HEADINGS = ("id", "status", "workflow", "worker", "queued", "last error")
ROW = (
    "12",
    "completed",
    "soften-and-upscale",
    "gpu-host-0123456789.example.internal",
    "3 min ago",
    "node 3 failed: " + "out of memory " * 10,
)


def shown(width: int, *, terminal: bool) -> list[str]:
    listing = TextTable(HEADINGS)
    listing.add(*ROW)
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=terminal, color_system=None, legacy_windows=False
    )
    listing.print_on(console)
    return file.getvalue().splitlines()


def test_a_pipe_gets_one_line_a_row_with_full_values() -> None:
    heading, row = shown(80, terminal=False)
    assert heading.split()[:2] == ["id", "status"]
    for cell in ROW:
        assert cell.strip() in row


@pytest.mark.parametrize("width", [30, 45, 60, 80, 120])
def test_a_terminal_gets_lines_that_fit_and_no_broken_word(width: int) -> None:
    lines = shown(width, terminal=True)
    assert len([line for line in lines if line.startswith("12")]) == 1
    table = [line for line in lines if not line.startswith("hidden because")]
    assert len(table) == 2
    assert all(len(line) <= width for line in table)
    assert "completed" in table[1]


def test_what_is_left_out_is_said() -> None:
    assert shown(30, terminal=True)[-1].startswith("hidden because the terminal is too narrow: ")
    assert not any("hidden because" in line for line in shown(80, terminal=True))


def test_the_widest_columns_are_narrowed_first_and_the_first_never() -> None:
    assert fit_columns([40, 9, 60, 20], 100) == {0: 40, 1: 9, 2: 25, 3: 20}
    assert fit_columns([40, 9, 60], 30) == {0: 40}
    assert fit_columns([5, 5], 80) == {0: 5, 1: 5}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s ago"),
        (59, "59 s ago"),
        (190, "3 min ago"),
        (7_300, "2 h ago"),
        (86_400, "1 day ago"),
        (3 * 86_400, "3 days ago"),
        (-120, "in 2 min"),
        (60 * 86_400, "2025-11-03"),
    ],
)
def test_times_are_told_from_now(seconds: int, words: str) -> None:
    assert relative_time(NOW - timedelta(seconds=seconds), NOW) == words


def test_an_exact_time_names_its_zone() -> None:
    there = NOW.astimezone().replace(microsecond=5)
    assert exact_time(there) == "2026-01-02T03:04:05Z"
