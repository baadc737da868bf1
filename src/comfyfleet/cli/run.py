"""`comfyfleet run`: any workflow file, run to its results."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter, validators

from comfyfleet.cli.convert import print_prompt
from comfyfleet.cli.files import FILE_HELP, open_file
from comfyfleet.cli.running.batch import Batch, summary
from comfyfleet.cli.running.display import LiveDisplay
from comfyfleet.cli.running.naming import check_folder
from comfyfleet.cli.running.preparing import ChangeOptions, prepare, prepare_row, with_seeds
from comfyfleet.cli.running.reporting import JsonLines, PlainLines, Reporter
from comfyfleet.cli.running.session import Made, Session, Work
from comfyfleet.cli.running.targets import ANYWHERE, Target, TargetOptions, chosen_target
from comfyfleet.cli.running.values import ONLY, ROWS_MAX, Row, read_rows
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.comfy import Backend
from comfyfleet.kernel.errors import FleetError, InvalidInput

RESULTS = Group("Results", sort_key=2)
UNCHANGED = ChangeOptions()


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class ResultOptions:
    output_dir: Annotated[
        Path,
        Parameter(
            name=["--output-dir", "-o"],
            metavar="DIR",
            help="Folder for the results. Nothing in it is overwritten: names are numbered.",
        ),
    ] = Path("output")
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print one JSON object per event, for programs.")
    ] = False


INTO_OUTPUT = ResultOptions()


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class WayOptions:
    batch: Annotated[
        str | None,
        Parameter(
            metavar="CSV",
            help="Run once per row. Columns are named as values are set: prompt, seed, 3.steps, image. "
            "A number is the batch size, as for convert.",
        ),
    ] = None
    count: Annotated[
        int,
        Parameter(
            metavar="N",
            validator=validators.Number(gte=1, lte=ROWS_MAX),
            help="Run so many times, each time with a new seed; with --seed N with N, N+1, N+2 …",
        ),
    ] = 1
    detach: Annotated[
        bool, Parameter(help="Print the id of the run and return; comfyfleet watch ID re-attaches.")
    ] = False
    dry_run: Annotated[
        bool, Parameter(help="Print the prompt and what would be uploaded, and run nothing.")
    ] = False


TO_THE_END = WayOptions()


def run(
    file: Annotated[str, Parameter(help=FILE_HELP, allow_leading_hyphen=True)],
    /,
    *,
    where: TargetOptions = ANYWHERE,
    results: ResultOptions = INTO_OUTPUT,
    way: WayOptions = TO_THE_END,
    changes: ChangeOptions = UNCHANGED,
    world: InWorld,
) -> None:
    """See helps.RUN."""
    way, changes = _with_batch_size(way, changes)
    rows = read_rows(Path(way.batch)) if way.batch else None
    check_folder(results.output_dir)
    opened = open_file(file, world.stdin)
    for note in opened.notes:
        world.warn(note)
    with chosen_target(where, world) as target:
        if way.detach and target.options is None:
            raise _nobody_to_leave_it_with()
        base = prepare(file, opened, changes, target, world)
        if way.count > 1:
            rows = with_seeds(rows or (ONLY,), way.count, base, changes.values, world)
        errand = _Errand(target, results, way, rows or (), world)
        if way.dry_run:
            errand.tell(base)
        elif way.detach:
            errand.leave(base)
        elif rows is None:
            errand.run(base, Path(file).name)
        else:
            errand.run_batch(base, Path(file).name)


def _with_batch_size(way: WayOptions, changes: ChangeOptions) -> tuple[WayOptions, ChangeOptions]:
    """`--batch 4` is what `inspect` names and `convert` takes: the size, not a file."""
    if way.batch is None or not way.batch.isdecimal():
        return way, changes
    usual = replace(changes.values.usual, batch=way.batch)
    values = replace(changes.values, usual=usual)
    return replace(way, batch=None), replace(changes, values=values)


def reporter_for(results: ResultOptions, title: str, world: World) -> Reporter:
    if results.as_json:
        return JsonLines(world)
    return LiveDisplay(world, title) if world.err.is_terminal else PlainLines(world)


def print_results(made: Made, target: Target, world: World) -> None:
    """The paths alone on stdout, or the values alone where there is no file: to be piped."""
    for each in made.values if made.paths else ():
        world.say(f"node {each.node_id}: {each.spoken}")
    results = made.paths or [each.spoken for each in made.values]
    for result in results:
        world.stdout.write(f"{result}\n".encode())
    world.stdout.flush()
    files = counted(len(made.paths), "file", "files")
    if made.values:
        files += ", " + counted(len(made.values), "value", "values")
    skipped = f", {counted(made.skipped, 'preview', 'previews')} not saved" if made.skipped else ""
    world.say(f"done in {made.seconds:.1f} s on {target.name}: {files}{skipped}")


@dataclass(frozen=True)
class _Errand:
    """What is done with the prompt once it is known, and where."""

    target: Target
    results: ResultOptions
    way: WayOptions
    rows: tuple[Row, ...]
    world: World

    @property
    def folder(self) -> Path:
        """Of the CSV file."""
        return Path(self.way.batch).parent if self.way.batch else Path()

    def tell(self, base: Work) -> None:
        works = [prepare_row(base, row, self.folder, self.world) for row in self.rows] or [base]
        for work in works:
            print_prompt(work.prompt, self.world)
            for upload in work.uploads:
                self.world.say(f"would upload {upload}")
        self.world.say(
            f"would run {counted(len(works), 'prompt', 'prompts')} on {self.target.name}"
        )

    def run(self, base: Work, title: str) -> None:
        with reporter_for(self.results, title, self.world) as reporter:
            try:
                made = asyncio.run(self._made(base, reporter))
            except FleetError as error:
                reporter.failed(error)
                raise
        if not self.results.as_json:
            print_results(made, self.target, self.world)

    def run_batch(self, base: Work, title: str) -> None:
        reporter = reporter_for(self.results, title, self.world)
        unit = "row" if self.way.batch else "run"
        batch = Batch(self.rows, self.folder, reporter, self.world, unit)
        try:
            with reporter:
                asyncio.run(self._batch(batch, base, reporter))
        finally:
            # Also after Ctrl-C: the rows before have results.
            if not self.results.as_json:
                summary(batch.ended, batch.unit).print_on(self.world.out)
        batch.check()

    def leave(self, base: Work) -> None:
        reporter: Reporter = (
            JsonLines(self.world) if self.results.as_json else PlainLines(self.world)
        )
        for run_id in asyncio.run(self._left(base, reporter)):
            if not self.results.as_json:
                self.world.stdout.write(f"{run_id}\n".encode())
                self.world.say(f"watch it with: comfyfleet watch {run_id} {self.target.options}")
        self.world.stdout.flush()

    async def _made(self, base: Work, reporter: Reporter) -> Made:
        async with aclosing(self.target.connect()) as backend:
            return await self._session(backend, reporter).run(base)

    async def _batch(self, batch: Batch, base: Work, reporter: Reporter) -> None:
        async with aclosing(self.target.connect()) as backend:
            await batch.run(self._session(backend, reporter), base)

    async def _left(self, base: Work, reporter: Reporter) -> list[str]:
        async with aclosing(self.target.connect()) as backend:
            session = self._session(backend, reporter)
            if not self.rows:
                return [await session.leave(base)]
            return await Batch(self.rows, self.folder, reporter, self.world).leave(session, base)

    def _session(self, backend: Backend, reporter: Reporter) -> Session:
        return Session(backend, self.target, reporter, self.results.output_dir, self.world)


def _nobody_to_leave_it_with() -> InvalidInput:
    return InvalidInput(
        "--detach needs a server: the built-in engine ends with this command",
        hint="Add --server URL. `comfyfleet engine` serves the built-in engine for longer.",
    )
