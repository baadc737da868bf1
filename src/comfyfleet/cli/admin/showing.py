"""What the API answers, as tables for people or as JSON for programs."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from comfyfleet.cli.listing import Listing, exact_time, relative_time
from comfyfleet.cli.world import World, printable

CELL_CHARACTERS_MAX = 120
_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
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
    """A column is a field's name; `a:b` shows the field b under the name a.

    Times are relative for people on a terminal, and exact in a pipe.
    """
    names = [column.partition(":") for column in columns]
    listing = Listing([heading.replace("_", " ") for heading, _, _ in names])
    now = world.now() if world.out.is_terminal else None
    for row in rows:
        listing.add(*(_styled(spoken(row.get(field or name), now)) for name, _, field in names))
    if listing.rows:
        listing.print_on(world.out)
    else:
        world.say(none)


def print_fields(fields: Mapping[str, Any], world: World) -> None:
    """One a line; the terminal wraps what is longer, so that it can be copied."""
    shown = {name: value for name, value in fields.items() if value not in (None, [], {}, "")}
    width = max((len(name) for name in shown), default=0) + 2
    for name, value in shown.items():
        said = spoken(value)
        if (moment := _moment(value)) is not None:
            said = f"{said} ({relative_time(moment, world.now())})"
        lines = f"\n{' ' * width}".join(said.splitlines())
        label = Text(name.replace("_", " ").ljust(width), style="dim")
        world.out.print(Text.assemble(label, _styled(lines)), soft_wrap=True)


def cell(value: Any, *, longest: int = CELL_CHARACTERS_MAX) -> Text:
    text = spoken(value)
    return _styled(text if len(text) <= longest else f"{text[: longest - 1]}…")


def _styled(text: str) -> Text:
    return Text(printable(text), style=STYLES.get(text, ""))


def spoken(value: Any, now: datetime | None = None) -> str:
    """A value in words. With `now` moments are told from there, else exactly."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case str():
            moment = _moment(value)
            if moment is None:
                return value
            return exact_time(moment) if now is None else relative_time(moment, now)
        case list():
            return ", ".join(spoken(each, now) for each in value) or "–"
        case dict():
            return ", ".join(f"{name}={spoken(each, now)}" for name, each in value.items()) or "–"
        case _:
            return str(value)


def _moment(value: Any) -> datetime | None:
    """The moment that a text of the API tells; None of any other text."""
    if not isinstance(value, str) or not _MOMENT.match(value):
        return None
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
