"""What the API answers, as tables for people or as JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.table import Table
from rich.text import Text

from comfyfleet.cli.world import World, printable

CELL_CHARACTERS_MAX = 120
STYLES = {
    "completed": "green",
    "failed": "red",
    "cancelled": "yellow",
    "leased": "cyan",
    "processing": "cyan",
    "online": "green",
    "offline": "red",
    "draining": "yellow",
    "revoked": "red",
}


def print_json(answer: object, world: World) -> None:
    text = json.dumps(answer, indent=2, ensure_ascii=False, default=str)
    world.stdout.write(f"{text}\n".encode())
    world.stdout.flush()


def print_rows(
    rows: Iterable[Mapping[str, Any]], columns: Sequence[str], world: World, *, none: str
) -> None:
    """A column is a field's name; `a:b` shows the field b under the name a."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    names = [column.partition(":") for column in columns]
    for index, (heading, _, _) in enumerate(names):
        # The first column is what people copy, so it stays in one piece.
        table.add_column(heading.replace("_", " "), overflow="fold", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(cell(row.get(field or heading)) for heading, _, field in names))
    if table.row_count:
        world.out.print(table)
    else:
        world.say(none)


def print_fields(fields: Mapping[str, Any], world: World) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, value in fields.items():
        if value not in (None, [], {}, ""):
            grid.add_row(Text(name.replace("_", " "), style="dim"), cell(value, longest=2000))
    world.out.print(grid)


def cell(value: Any, *, longest: int = CELL_CHARACTERS_MAX) -> Text:
    text = spoken(value)
    if len(text) > longest:
        text = f"{text[: longest - 1]}…"
    return Text(printable(text), style=STYLES.get(text, ""))


def spoken(value: Any) -> str:
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case str():
            return _moment(value)
        case list():
            return ", ".join(map(spoken, value)) or "–"
        case dict():
            return ", ".join(f"{name}={spoken(each)}" for name, each in value.items()) or "–"
        case _:
            return str(value)


def _moment(text: str) -> str:
    """A moment without its fractions; any other text as it is."""
    if len(text) < len("2026-01-01T00:00:00") or text[10:11] != "T":
        return text
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text
