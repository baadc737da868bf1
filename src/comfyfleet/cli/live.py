"""A display that changes in place on a terminal, and is written once elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES_PER_SECOND = 4


@contextmanager
def live_on(console: Console, first: RenderableType | None = None) -> Iterator[Live]:
    with Live(first, console=console, refresh_per_second=REFRESHES_PER_SECOND) as live:
        yield live
    if not console.is_terminal:
        console.print()  # there, its last line is left open
