"""Tables: fitted to the width of a terminal, and elsewhere one row a line with full values."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from comfyfleet.cli.world import printable

GAP_CHARACTERS = 2
# No column is made narrower than that; then one is left out.
SHORTENED_CHARACTERS_MIN = 10
# In a pipe a longer cell moves those behind it, in its own row only.
PADDED_CHARACTERS_MAX = 60
ELLIPSIS = "…"
_UNITS = (("day", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
DAYS_RELATIVE_MAX = 30


@dataclass
class Listing:
    """Headings and rows. Words are never broken: a cell that doesn't fit is shortened.

    On a terminal that is too narrow even so, the last columns are left out, and that is said. The
    first column is what people copy, so it stays in one piece.
    """

    headings: Sequence[str]
    right: Collection[str] = ()
    indent: int = 0
    rows: list[tuple[Text, ...]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        self.rows.append(tuple(map(_one_line, cells)))

    def print_on(self, console: Console) -> None:
        console.print(self, soft_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        headings = tuple(Text(heading, style="dim") for heading in self.headings)
        lines = [headings, *self.rows] if any(self.headings) else self.rows
        widths = [
            max((row[column].cell_len for row in lines), default=0)
            for column in range(len(self.headings))
        ]
        if console.is_terminal:
            shown = fitted(widths, options.max_width - self.indent)
        else:
            shown = {at: min(width, PADDED_CHARACTERS_MAX) for at, width in enumerate(widths)}
        for row in lines:
            yield self._line(row, shown, shorten=console.is_terminal)
        left_out = [name for at, name in enumerate(self.headings) if at not in shown and name]
        if left_out:
            yield Text(f"not shown for want of width: {', '.join(left_out)}", style="dim")

    def _line(self, row: Sequence[Text], shown: Mapping[int, int], *, shorten: bool) -> Text:
        line = Text(" " * self.indent)
        for at, width in shown.items():
            cell = _shortened(row[at], width) if shorten else row[at]
            blank = Text(" " * max(0, width - cell.cell_len))
            parts = (blank, cell) if self.headings[at] in self.right else (cell, blank)
            line += Text.assemble(*parts, " " * GAP_CHARACTERS)
        line.rstrip()
        return line


def fitted(widths: Sequence[int], most: int) -> dict[int, int]:
    """Which columns are shown in `most` characters, and how wide: the widest are narrowed first."""
    shown = dict(enumerate(widths))
    while len(shown) > 1:
        room = most - GAP_CHARACTERS * (len(shown) - 1)
        floors = {
            at: width if at == 0 else min(width, SHORTENED_CHARACTERS_MIN)
            for at, width in shown.items()
        }
        if sum(floors.values()) <= room:
            return _narrowed(shown, floors, room)
        shown.popitem()
    return shown


def _narrowed(widths: dict[int, int], floors: Mapping[int, int], room: int) -> dict[int, int]:
    for _ in range(sum(widths.values()) - room):
        widest = max(
            (at for at in widths if widths[at] > floors[at]), key=lambda at: (widths[at], at)
        )
        widths[widest] -= 1
    return widths


def _one_line(cell: str | Text) -> Text:
    text = cell if isinstance(cell, Text) else Text(printable(cell))
    return Text(" ".join(text.plain.splitlines()), style=text.style)


def _shortened(cell: Text, width: int) -> Text:
    if cell.cell_len <= width:
        return cell
    kept = set_cell_size(cell.plain, max(0, width - cell_len(ELLIPSIS))).rstrip()
    return Text(kept + ELLIPSIS, style=cell.style)


def exact_time(moment: datetime) -> str:
    """With its zone: `2026-01-02T03:04:05Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def relative_time(moment: datetime, now: datetime) -> str:
    """`3 min ago`, `in 2 h`; what is longer ago than a month is a date."""
    span = now - moment
    if abs(span) > timedelta(days=DAYS_RELATIVE_MAX):
        return moment.astimezone(UTC).strftime("%Y-%m-%d")
    seconds = abs(round(span.total_seconds()))
    unit, length = next(((name, size) for name, size in _UNITS if seconds >= size), ("s", 1))
    count = seconds // length
    words = f"{count} {unit}{'s' if unit == 'day' and count > 1 else ''}"
    return f"{words} ago" if span >= timedelta(0) else f"in {words}"
