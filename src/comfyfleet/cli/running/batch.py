"""A run for each row of a table, and how each of them ended."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from comfyfleet.cli.listing import Listing
from comfyfleet.cli.running.preparing import prepare_row
from comfyfleet.cli.running.reporting import Reporter
from comfyfleet.cli.running.session import Session, Work
from comfyfleet.cli.running.values import Row
from comfyfleet.cli.tables import plain
from comfyfleet.cli.world import World, counted
from comfyfleet.kernel.errors import FleetError, RunFailed


@dataclass(frozen=True, slots=True)
class Ended:
    """How the run of a row ended: `error` is None if it succeeded."""

    number: int
    seconds: float
    results: tuple[str, ...] = ()
    error: str | None = None


class Batch:
    """A row that fails does not stop the others; what has ended is kept, also if the rest is given up."""

    def __init__(
        self,
        rows: Sequence[Row],
        folder: Path,
        reporter: Reporter,
        world: World,
        unit: str = "row",
    ) -> None:
        self.unit = unit
        self._rows = rows
        self._folder = folder
        self._reporter = reporter
        self._world = world
        self.ended: list[Ended] = []

    async def run(self, session: Session, base: Work) -> None:
        for row in self._rows:
            self._reporter.row(row.number, len(self._rows), self.unit)
            began = self._world.clock()
            with self._noting(row, began):
                made = await session.run(prepare_row(base, row, self._folder, self._world))
                results = (*map(str, made.paths), *(each.spoken for each in made.values))
                self.ended.append(Ended(row.number, self._world.clock() - began, results))

    async def leave(self, session: Session, base: Work) -> list[str]:
        return [
            await session.leave(prepare_row(base, row, self._folder, self._world))
            for row in self._rows
        ]

    @contextmanager
    def _noting(self, row: Row, began: float) -> Iterator[None]:
        try:
            yield
        except FleetError as error:
            self._reporter.failed(error)
            seconds = self._world.clock() - began
            self.ended.append(Ended(row.number, seconds, error=error.message))

    def check(self) -> None:
        failed = [row.number for row in self.ended if row.error is not None]
        if failed:
            rows = ", ".join(map(str, failed))
            raise RunFailed(
                f"{len(failed)} of {counted(len(self._rows), self.unit, f'{self.unit}s')} failed: {rows}"
            )


def summary(ended: Sequence[Ended], unit: str) -> Listing:
    listing = Listing((unit, "seconds", "result"), right=(unit, "seconds"))
    for row in ended:
        result = ", ".join(row.results) or "nothing" if row.error is None else row.error
        style = "" if row.error is None else "red"
        listing.add(str(row.number), f"{row.seconds:.1f}", plain(result, style))
    return listing
