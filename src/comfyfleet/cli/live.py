"""A display that changes in place on a terminal, and is written once elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.live import Live

REFRESHES_PER_SECOND = 4


class Display(Protocol):
    def update(self, renderable: RenderableType) -> None: ...


class _Last:
    """Keeps what was shown last."""

    def __init__(self, shown: RenderableType | None) -> None:
        self.shown = shown

    def update(self, renderable: RenderableType) -> None:
        self.shown = renderable


@contextmanager
def live_on(console: Console, first: RenderableType | None = None) -> Iterator[Display]:
    if console.is_terminal:
        with Live(first, console=console, refresh_per_second=REFRESHES_PER_SECOND) as live:
            yield live
        return
    last = _Last(first)
    try:
        yield last
    finally:
        if last.shown is not None:
            console.print(last.shown, soft_wrap=True)
