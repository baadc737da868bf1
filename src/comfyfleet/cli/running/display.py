"""The live display of a run in a terminal."""

from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comfyfleet.cli.running.progress import Plan, Standing, begin
from comfyfleet.cli.running.reporting import spoken
from comfyfleet.cli.world import World, printable
from comfyfleet.comfy import OutputValue
from comfyfleet.comfy.events import Blocked, Event, NodeText, Reconnected
from comfyfleet.kernel.errors import FleetError

REFRESH_PER_SECOND = 8
BAR_CHARACTERS = 28
NAME_CHARACTERS_MAX = 30
# These deserve a line that stays; everything else shows in the bars.
LASTING = (NodeText, Blocked, Reconnected)


class LiveDisplay:
    """Two bars, for the whole run and for its current node; a third one for a batch."""

    def __init__(self, world: World, title: str) -> None:
        self._world = world
        self._title = title
        self._standing = begin(Plan({}), world.clock())
        self._rows: tuple[int, int] | None = None
        self._unit = "row"
        self._doing = "preparing"
        self._live = Live(
            console=world.err,
            get_renderable=self._now,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def row(self, number: int, total: int, unit: str) -> None:
        self._rows, self._unit = (number, total), unit
        self._standing = begin(Plan({}), self._world.clock())

    def uploaded(self, path: Path, name: str) -> None:
        self._doing = f"uploaded {path.name}"

    def submitted(self, run_id: str, target: str) -> None:
        self._doing = f"queued on {target}"

    def heard(self, event: Event, standing: Standing) -> None:
        self._standing = standing
        if isinstance(event, LASTING) and (line := spoken(event, standing)):
            self._world.say(line)

    def saved(self, path: Path, node_id: str) -> None:
        self._doing = f"saved {path.name}"

    def shown(self, value: OutputValue) -> None:
        """Said by the command."""

    def failed(self, error: FleetError) -> None:
        """Said by the command."""

    def _now(self) -> RenderableType:
        standing = self._standing
        if not standing.succeeded:
            standing = replace(standing, now=self._world.clock())
        rows, unit = self._rows, self._unit
        return render(standing, title=self._title, doing=self._doing, rows=rows, unit=unit)


def render(
    standing: Standing, *, title: str, doing: str, rows: tuple[int, int] | None, unit: str = "row"
) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    if rows is not None:
        number, total = rows
        grid.add_row(
            Text("batch", style="bold"), _bar(number - 1, total), f"{unit} {number} of {total}"
        )
    grid.add_row(
        Text(_cut(title), style="bold"), _whole_bar(standing), _whole_words(standing, doing)
    )
    if standing.current is not None and not standing.succeeded:
        grid.add_row(*_node_row(standing, standing.current))
    return Group(grid)


def _whole_bar(standing: Standing) -> ProgressBar:
    if standing.fraction is None:
        return ProgressBar(total=None, width=BAR_CHARACTERS, pulse=True)
    return _bar(standing.fraction, 1.0)


def _whole_words(standing: Standing, doing: str) -> Text:
    if standing.ahead:
        return Text(f"{standing.ahead} ahead in the queue, {clock_time(standing.seconds)}")
    if standing.started is None:
        return Text(printable(doing))
    parts = [clock_time(standing.seconds)]
    if standing.total:
        parts.insert(0, f"{len(standing.done)} of {standing.total} nodes")
    if (left := standing.seconds_left) is not None:
        parts.append(f"about {clock_time(left)} left")
    return Text(", ".join(parts))


def _node_row(standing: Standing, node_id: str) -> tuple[RenderableType, ...]:
    name = Text(_cut(standing.plan.name(node_id)), style="cyan")
    if standing.steps_total <= 0:
        return name, ProgressBar(total=None, width=BAR_CHARACTERS, pulse=True), Text("")
    words = f"step {standing.steps_done:g} of {standing.steps_total:g}"
    return name, _bar(standing.steps_done, standing.steps_total), Text(words)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=total, completed=done, width=BAR_CHARACTERS)


def _cut(text: str) -> str:
    text = printable(text).replace("\n", " ")
    return text if len(text) <= NAME_CHARACTERS_MAX else f"{text[: NAME_CHARACTERS_MAX - 1]}…"


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
