"""`comfyfleet run` and `comfyfleet watch`: convert a workflow file to prompts, with options and the
rows of a table, and run them."""

import asyncio
import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Group, Parameter, validators
from rich.console import Console

from comfyfleet.cli.context import (
    FILE_HELP,
    STANDARD_STREAM,
    CliContext,
    InjectedContext,
    counted,
    open_file,
    read_file,
)
from comfyfleet.cli.run_progress import (
    JsonLines,
    LiveDisplay,
    NodePlan,
    PlainLines,
    Reporter,
    plan_from_outputs,
)
from comfyfleet.cli.run_requirements import download_lines, missing_models, missing_types_error
from comfyfleet.cli.run_session import (
    ANY_TARGET,
    MEDIA,
    FileUpload,
    GivenFile,
    RunRequest,
    RunResults,
    RunSession,
    RunTarget,
    TargetOptions,
    check_folder,
    find_inputs,
    is_file_place,
    open_target,
    parse_given_file,
    remote_targets,
    with_uploaded_names,
)
from comfyfleet.cli.tables import TextTable, plain_text
from comfyfleet.cli.workflow import (
    CONVERSION,
    NO_SWITCHES,
    USUAL_VALUES,
    VALUES,
    Assignments,
    ConversionOptions,
    KnownTypes,
    SettingOptions,
    ShorthandOptions,
    SwitchOptions,
    apply_switches,
    make_prompt,
    print_prompt,
    require_all_set,
    shorthand,
)
from comfyfleet.comfy import Backend, ComfyServer
from comfyfleet.errors import (
    FleetError,
    InvalidInput,
    LimitExceeded,
    RunFailed,
    RunLost,
    UnknownNodeTypes,
)
from comfyfleet.workflow import Conversion
from comfyfleet.workflow.edit import (
    SHORTHANDS,
    Assignment,
    Edit,
    find_input,
    parse_assignment,
    set_shorthands,
    set_values,
    shorthand_places,
)
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.model import Prompt

CSV_BYTES_MAX = 64 * 1024 * 1024
ROWS_MAX = 100_000
ROW_PROBLEMS_MAX = 20
SHORTHAND_NAMES = {name: one.name for one in SHORTHANDS for name in (one.name, *one.aliases)}
EXAMPLE = "The first row must contain column names, such as: prompt,seed,3.steps"


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A row of the table. `number` starts at 1. `usual` contains shorthands, and `named` contains
    `node.input` values."""

    number: int
    usual: Mapping[str, str]
    named: Mapping[str, str]


SINGLE_ROW = BatchRow(1, {}, {})  # for a run without a table


def read_rows(path: Path) -> tuple[BatchRow, ...]:
    data = read_file(path, bytes_max=CSV_BYTES_MAX)
    try:
        return parse_rows(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not UTF-8 text", hint=EXAMPLE) from error
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=EXAMPLE) from error


def parse_rows(text: str) -> tuple[BatchRow, ...]:
    """Parses the rows. An empty cell keeps the file's value, and an empty row is skipped."""
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [name.strip() for name in next(lines, [])]
        _check(columns)
        cells = [line for line in lines if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise InvalidInput(f"line {lines.line_num} isn't valid CSV: {error}") from error
    if not cells:
        raise InvalidInput("the table has no rows")
    if len(cells) > ROWS_MAX:
        raise LimitExceeded(
            f"the table has {len(cells):,} rows, more than the limit of {ROWS_MAX:,}"
        )
    return tuple(_row(number, columns, line) for number, line in enumerate(cells, 1))


def _check(columns: list[str]) -> None:
    if not any(columns):
        raise InvalidInput("the first row has no column names")
    for name in columns:
        if not name:
            raise InvalidInput("a column has no name")
        if name not in SHORTHAND_NAMES and "." not in name.strip("."):
            known = ", ".join(one.name for one in SHORTHANDS)
            raise InvalidInput(f"column {name!r} is neither node.input nor one of {known}")
    twice = {name for name in columns if columns.count(name) > 1}
    if twice:
        raise InvalidInput(f"two columns have the name {sorted(twice)[0]!r}")


def _row(number: int, columns: list[str], line: list[str]) -> BatchRow:
    if len(line) > len(columns):
        raise InvalidInput(f"row {number} has {len(line)} cells for {len(columns)} columns")
    cells = {name: cell for name, cell in zip(columns, line, strict=False) if cell}
    usual = {SHORTHAND_NAMES[name]: cell for name, cell in cells.items() if name in SHORTHAND_NAMES}
    return BatchRow(
        number, usual, {key: cell for key, cell in cells.items() if key not in SHORTHAND_NAMES}
    )


def _media(what: str) -> Parameter:
    return Parameter(
        group=USUAL_VALUES,
        metavar="FILE",
        help=f"Upload a local file for the workflow's only {what} input.",
    )


@Parameter(name="*")
@dataclass(frozen=True)
class RunShorthands(ShorthandOptions):
    """The shorthands of `convert`, but with local files, and with a CSV file as `--batch`."""

    must_fit: ClassVar[bool] = True
    batch: Annotated[str | None, shorthand("batch", "batch-size")] = None
    image: Annotated[str | None, _media("image")] = None
    video: Annotated[str | None, _media("video")] = None
    audio: Annotated[str | None, _media("audio")] = None


@Parameter(name="*")
@dataclass(frozen=True)
class ValueOptions:
    set_: Assignments = ()
    input_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--input",
            group=VALUES,
            metavar="NAME=FILE",
            help="Upload a local file for an input, such as image=cat.png or 3.image=cat.png. Repeatable.",
        ),
    ] = ()
    usual: RunShorthands = RunShorthands()

    def settings(self) -> SettingOptions:
        """Returns the settings without files, which are uploaded first."""
        return SettingOptions(self.set_, replace(self.usual, **dict.fromkeys(MEDIA)))

    def media(self) -> dict[str, Path]:
        return {kind: Path(path) for kind, path in self.usual.given().items() if kind in MEDIA}


@Parameter(name="*", group=CONVERSION)
@dataclass(frozen=True)
class RunConversion:
    unknown: Annotated[
        Literal["drop", "keep"] | None,
        Parameter(
            help="Leave out nodes of unknown types, or send them unchanged, like the editor. By "
            "default, unknown types are an error.",
        ),
    ] = None
    reachable_only: Annotated[
        bool, Parameter(help="Leave out nodes that no output node needs.")
    ] = False
    seed_rng: Annotated[
        int | None,
        Parameter(metavar="N", help="Seed for random choices such as {a|b} in texts."),
    ] = None

    def options(self) -> ConversionOptions:
        return ConversionOptions(
            strict=self.unknown is None,
            unknown=self.unknown or "drop",
            reachable_only=self.reachable_only,
            seed_rng=self.seed_rng,
        )


@Parameter(name="*")
@dataclass(frozen=True)
class ChangeOptions:
    """All options that change the prompt of a file."""

    values: ValueOptions = ValueOptions()
    switches: SwitchOptions = NO_SWITCHES
    conversion: RunConversion = RunConversion()


def prepare_prompt(
    file: str,
    opened: Opened,
    changes: ChangeOptions,
    target: RunTarget,
    context: CliContext,
) -> RunRequest:
    known = target.types(opened, context)
    values = changes.values
    if changes.switches:
        opened = apply_switches(opened, known, changes.switches, context)
    converted = _runnable(opened, known, changes, target, context)
    prompt, exposed = converted.prompt, converted.exposed
    inputs = find_inputs(
        prompt,
        known.object_info,
        given=[parse_given_file(text) for text in values.input_],
        media=values.media(),
        beside=input_folder(file),
        exposed=exposed,
    )
    shown = with_uploaded_names(
        prompt, known.object_info, [(one, one.path.name) for one in inputs.uploads]
    )
    lines = download_lines(missing_models(opened, known.object_info, converted))
    for line in lines:
        context.warn(f"{target.name} doesn't have the model {line}")
    return RunRequest(
        shown,
        inputs.uploads,
        known.object_info,
        opened.workflow,
        exposed,
        tuple(lines),
        inputs.missing,
    )


def input_folder(file: str) -> Path | None:
    """Returns the folder to search for input files. A workflow from a pipe has none."""
    return None if file == STANDARD_STREAM else Path(file).parent


def prepare_row(base: RunRequest, row: BatchRow, folder: Path, context: CliContext) -> RunRequest:
    """Applies a row to the base request. Files are relative to the folder of the CSV file."""
    files = {
        name: folder / cell
        for name, cell in row.named.items()
        if is_file_place(base.prompt, base.object_info, name, base.exposed)
        and (folder / cell).is_file()
    }
    media = {kind: folder / cell for kind, cell in row.usual.items() if kind in MEDIA}
    usual = {name: cell for name, cell in row.usual.items() if name not in MEDIA}
    named = [Assignment(name, cell) for name, cell in row.named.items() if name not in files]
    edit = set_shorthands(base.prompt, base.object_info, usual, exposed=base.exposed)
    require_all_set(edit)
    prompt = _warned(edit, context)
    prompt = _warned(set_values(prompt, base.object_info, named, exposed=base.exposed), context)
    files_given = [GivenFile(name, path) for name, path in files.items()]
    own = find_inputs(
        prompt, base.object_info, given=files_given, media=media, beside=None, exposed=base.exposed
    ).uploads
    shown = with_uploaded_names(prompt, base.object_info, [(one, one.path.name) for one in own])
    return replace(base, prompt=shown, uploads=(*_not_replaced(base.uploads, shown, base), *own))


def check_rows(
    base: RunRequest, rows: Sequence[BatchRow], folder: Path, context: CliContext
) -> list[str]:
    """Checks all rows before the first one runs. Raises InvalidInput for cells that don't fit.

    Returns the names of files that are missing in some row."""
    silent = replace(context, err=Console(quiet=True))  # warnings are shown later, when a row runs
    problems, missing = list[str](), dict[str, None]()
    for row in rows:
        try:
            work = prepare_row(base, row, folder, silent)
        except InvalidInput as error:
            problems.append(f"row {row.number}: {error.message}")
        else:
            missing |= dict.fromkeys(_still_missing(base, work))
    if problems:
        more = len(problems) - ROW_PROBLEMS_MAX
        rest = [f"… and {more} more"] if more > 0 else []
        raise InvalidInput("\n".join([*problems[:ROW_PROBLEMS_MAX], *rest]), hint="No row was run.")
    return list(missing)


def with_seeds(
    rows: Sequence[BatchRow],
    count: int,
    base: RunRequest,
    values: ValueOptions,
    context: CliContext,
) -> tuple[BatchRow, ...]:
    """Repeats each row `count` times with different seeds, because a server would otherwise return
    cached results. Seeds that are set by node or by the row don't change."""
    if len(rows) * count > ROWS_MAX:
        raise LimitExceeded(
            f"this would start {len(rows) * count:,} runs, more than the limit of {ROWS_MAX:,}"
        )
    free = _has_free_seed(base, values)
    if not free:
        context.warn("there is no seed to change, so every run uses the same one")
    first = values.usual.seed
    repeated: list[BatchRow] = []
    for row in rows:
        for step in range(count):
            seed = int(first) + step if first and first.isdecimal() else context.new_seed()
            usual = {"seed": str(seed), **row.usual} if free else row.usual
            repeated.append(replace(row, number=len(repeated) + 1, usual=usual))
    return tuple(repeated)


def _has_free_seed(base: RunRequest, values: ValueOptions) -> bool:
    seeds = set(shorthand_places(base.prompt, base.object_info, "seed"))
    targets = [parse_assignment(text).target for text in values.set_]
    named = {
        place
        for target in targets
        for place in find_input(base.prompt, base.object_info, target, base.exposed)
    }
    return bool(seeds) and not seeds & named


def _not_replaced(
    uploads: tuple[FileUpload, ...], prompt: Prompt, base: RunRequest
) -> Iterator[FileUpload]:
    """Yields the uploads for inputs that the row did not change."""
    for upload in uploads:
        places = [
            place
            for place in upload.places
            if prompt[place.node_id]["inputs"].get(place.input)
            == base.prompt[place.node_id]["inputs"].get(place.input)
        ]
        if places:
            yield replace(upload, places=tuple(places))


def _runnable(
    opened: Opened,
    known: KnownTypes,
    changes: ChangeOptions,
    target: RunTarget,
    context: CliContext,
) -> Conversion:
    settings, conversion = changes.values.settings(), changes.conversion
    try:
        converted = make_prompt(opened, known, settings, conversion.options(), context)
    except UnknownNodeTypes as error:
        raise missing_types_error(error.details["nodes"], target, known.object_info) from error
    unknown = [
        {"type": str(node.get("class_type")), "node_id": key}
        for key, node in converted.prompt.items()
        if node.get("class_type") not in known.object_info
    ]
    if unknown and conversion.unknown is None:
        raise missing_types_error(unknown, target, known.object_info)
    return converted


def _still_missing(base: RunRequest, work: RunRequest) -> Iterator[str]:
    """Yields the names of missing files that a row replaces neither with an upload nor with another
    name."""
    uploaded = {place for upload in work.uploads for place in upload.places}
    for file in base.missing_files:
        if any(
            place not in uploaded
            and work.prompt[place.node_id]["inputs"].get(place.input)
            == base.prompt[place.node_id]["inputs"].get(place.input)
            for place in file.places
        ):
            yield file.name


def _tell_missing(names: Iterable[str], target: RunTarget, context: CliContext) -> None:
    for name in dict.fromkeys(names):
        context.warn(
            f"{name} is neither in the file's folder nor on {target.name}; "
            "specify one with --image, --video, --audio or --input NAME=FILE"
        )


def _warned(edit: Edit, context: CliContext) -> Prompt:
    for warning in edit.warnings:
        context.warn(warning)
    return edit.prompt


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of a row's run. `error` is None if the run succeeded."""

    number: int
    seconds: float
    results: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    error: str | None = None


class BatchRun:
    """Runs all rows. A failed row doesn't stop the others. Finished results are kept, even if the
    rest is aborted."""

    def __init__(
        self,
        rows: Sequence[BatchRow],
        folder: Path,
        reporter: Reporter,
        context: CliContext,
        unit: str = "row",
    ) -> None:
        self.unit = unit
        self._rows = rows
        self._folder = folder
        self._reporter = reporter
        self._context = context
        self.ended: list[RowResult] = []

    async def run(self, session: RunSession, base: RunRequest) -> None:
        for row in self._rows:
            self._reporter.row(row.number, len(self._rows), self.unit)
            began = self._context.clock()
            with self._noting(row, began):
                results = await session.run(prepare_row(base, row, self._folder, self._context))
                paths, shown = map(str, results.paths), (value.spoken for value in results.values)
                seconds = self._context.clock() - began
                self.ended.append(RowResult(row.number, seconds, tuple(paths), tuple(shown)))

    async def leave(self, session: RunSession, base: RunRequest) -> list[str]:
        return [
            await session.leave(prepare_row(base, row, self._folder, self._context))
            for row in self._rows
        ]

    @contextmanager
    def _noting(self, row: BatchRow, began: float) -> Iterator[None]:
        try:
            yield
        except FleetError as error:
            self._reporter.failed(error)
            seconds = self._context.clock() - began
            self.ended.append(RowResult(row.number, seconds, error=error.message))

    def check(self) -> None:
        failed = [row.number for row in self.ended if row.error is not None]
        if failed:
            rows = ", ".join(map(str, failed))
            raise RunFailed(
                f"{len(failed)} of {counted(len(self._rows), self.unit, f'{self.unit}s')} failed: {rows}"
            )


def batch_table(ended: Sequence[RowResult], unit: str) -> TextTable:
    """Formats the results. Files and text values have separate columns, so that a script can read
    the files."""
    with_shown = ("shown",) if any(row.shown for row in ended) else ()
    listing = TextTable((unit, "seconds", "result", *with_shown), right=(unit, "seconds"))
    for row in ended:
        result = ", ".join(row.results) or "nothing" if row.error is None else row.error
        cells = (plain_text(result, "" if row.error is None else "red"), ", ".join(row.shown))
        listing.add(str(row.number), f"{row.seconds:.1f}", *cells[: 1 + len(with_shown)])
    return listing


RESULTS = Group("Results", sort_key=2)
NO_CHANGES = ChangeOptions()


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class ResultOptions:
    output_dir: Annotated[
        Path,
        Parameter(
            name=["--output-dir", "-o"],
            metavar="DIR",
            help="Folder for the results. Existing files are not overwritten; new names are numbered.",
        ),
    ] = Path("output")
    as_json: Annotated[bool, Parameter(name="--json", help="Print one JSON object per event.")] = (
        False
    )


RESULT_DEFAULTS = ResultOptions()


@Parameter(name="*", group=RESULTS)
@dataclass(frozen=True)
class ModeOptions:
    batch: Annotated[
        str | None,
        Parameter(
            metavar="CSV",
            help="Run once per row. Each column is named after the value it sets, such as prompt, seed, 3.steps or image. "
            "A number sets the batch size, as in `convert`.",
        ),
    ] = None
    count: Annotated[
        int,
        Parameter(
            metavar="N",
            validator=validators.Number(gte=1, lte=ROWS_MAX),
            help="Run this many times, each time with a new seed. With --seed N, the seeds are N, N+1, N+2 …",
        ),
    ] = 1
    detach: Annotated[
        bool,
        Parameter(help="Print the run's id and return. Follow it later with: comfyfleet watch ID"),
    ] = False
    dry_run: Annotated[
        bool, Parameter(help="Print the prompt and the files to upload, without running it.")
    ] = False


MODE_DEFAULTS = ModeOptions()


def run(
    file: Annotated[str, Parameter(help=FILE_HELP, allow_leading_hyphen=True)],
    /,
    *,
    where: TargetOptions = ANY_TARGET,
    results: ResultOptions = RESULT_DEFAULTS,
    way: ModeOptions = MODE_DEFAULTS,
    changes: ChangeOptions = NO_CHANGES,
    context: InjectedContext,
) -> None:
    """See help_texts.RUN."""
    with _errors_as_events(results, context):
        _run(file, where, results, way, changes, context)


def _run(
    file: str,
    where: TargetOptions,
    results: ResultOptions,
    way: ModeOptions,
    changes: ChangeOptions,
    context: CliContext,
) -> None:
    way, changes = _with_batch_size(way, changes)
    rows = read_rows(Path(way.batch)) if way.batch else None
    check_folder(results.output_dir)
    opened = open_file(file, context.stdin)
    for note in opened.notes:
        context.warn(note)
    with open_target(where, context) as target:
        if way.detach and target.options is None:
            raise _no_server_to_detach_on()
        base = prepare_prompt(file, opened, changes, target, context)
        if way.count > 1:
            rows = with_seeds(rows or (SINGLE_ROW,), way.count, base, changes.values, context)
        run_command = _RunCommand(target, results, way, rows or (), context)
        if way.dry_run:
            run_command.tell(base)
        elif way.detach:
            run_command.leave(base)
        elif rows is None:
            run_command.run(base, Path(file).name)
        else:
            run_command.run_batch(base, Path(file).name)


@contextmanager
def _errors_as_events(results: ResultOptions, context: CliContext) -> Iterator[None]:
    """Writes an error that ends the command as the last event, if --json is set."""
    try:
        yield
    except FleetError as error:
        if results.as_json:
            JsonLines(context).failed(error)
        raise


def _with_batch_size(way: ModeOptions, changes: ChangeOptions) -> tuple[ModeOptions, ChangeOptions]:
    """Handles `--batch 4` as the batch size, as in `inspect` and `convert`, not as a file name."""
    if way.batch is None or not way.batch.isdecimal():
        return way, changes
    usual = replace(changes.values.usual, batch=way.batch)
    values = replace(changes.values, usual=usual)
    return replace(way, batch=None), replace(changes, values=values)


def reporter_for(results: ResultOptions, title: str, context: CliContext) -> Reporter:
    if results.as_json:
        return JsonLines(context)
    return LiveDisplay(context, title) if context.err.is_terminal else PlainLines(context)


def print_results(outcome: RunResults, target: RunTarget, context: CliContext) -> None:
    """Prints only the paths to stdout, or only the values if there are no files, so that they can
    be piped."""
    for value in outcome.values if outcome.paths else ():
        context.say(f"node {value.node_id}: {value.spoken}")
    results = outcome.paths or [value.spoken for value in outcome.values]
    for result in results:
        context.stdout.write(f"{result}\n".encode())
    context.stdout.flush()
    files = counted(len(outcome.paths), "file", "files")
    if outcome.values:
        files += ", " + counted(len(outcome.values), "value", "values")
    skipped = (
        f", {counted(outcome.skipped, 'preview', 'previews')} not saved" if outcome.skipped else ""
    )
    context.say(f"done in {outcome.seconds:.1f} s on {target.name}: {files}{skipped}")


@dataclass(frozen=True)
class _RunCommand:
    """Runs or shows the prepared prompt on a target."""

    target: RunTarget
    results: ResultOptions
    way: ModeOptions
    rows: tuple[BatchRow, ...]
    context: CliContext

    @property
    def folder(self) -> Path:
        """The folder of the CSV file."""
        return Path(self.way.batch).parent if self.way.batch else Path()

    def tell(self, base: RunRequest) -> None:
        works = [prepare_row(base, row, self.folder, self.context) for row in self.rows] or [base]
        self._tell_missing(name for work in works for name in _still_missing(base, work))
        for work in works:
            print_prompt(work.prompt, self.context)
            for upload in work.uploads:
                self.context.say(f"would upload {upload}")
        self.context.say(
            f"would run {counted(len(works), 'prompt', 'prompts')} on {self.target.name}"
        )

    def run(self, base: RunRequest, title: str) -> None:
        self._tell_missing(_still_missing(base, base))
        with reporter_for(self.results, title, self.context) as reporter:
            outcome = asyncio.run(self._made(base, reporter))
        if not self.results.as_json:
            print_results(outcome, self.target, self.context)

    def run_batch(self, base: RunRequest, title: str) -> None:
        self._tell_missing(check_rows(base, self.rows, self.folder, self.context))
        reporter = reporter_for(self.results, title, self.context)
        unit = "row" if self.way.batch else "run"
        batch = BatchRun(self.rows, self.folder, reporter, self.context, unit)
        try:
            with reporter:
                asyncio.run(self._batch(batch, base, reporter))
        finally:
            # Print the table even after Ctrl-C, because earlier rows have results.
            if not self.results.as_json:
                batch_table(batch.ended, batch.unit).print_on(self.context.out)
        batch.check()

    def leave(self, base: RunRequest) -> None:
        missing = check_rows(base, self.rows, self.folder, self.context)
        self._tell_missing(missing if self.rows else _still_missing(base, base))
        reporter: Reporter = (
            JsonLines(self.context) if self.results.as_json else PlainLines(self.context)
        )
        for run_id in asyncio.run(self._left(base, reporter)):
            if not self.results.as_json:
                self.context.stdout.write(f"{run_id}\n".encode())
                self.context.say(f"follow it with: comfyfleet watch {run_id} {self.target.options}")
        self.context.stdout.flush()

    def _tell_missing(self, names: Iterable[str]) -> None:
        _tell_missing(names, self.target, self.context)

    async def _made(self, base: RunRequest, reporter: Reporter) -> RunResults:
        async with aclosing(self.target.connect()) as backend:
            return await self._session(backend, reporter).run(base)

    async def _batch(self, batch: BatchRun, base: RunRequest, reporter: Reporter) -> None:
        async with aclosing(self.target.connect()) as backend:
            await batch.run(self._session(backend, reporter), base)

    async def _left(self, base: RunRequest, reporter: Reporter) -> list[str]:
        async with aclosing(self.target.connect()) as backend:
            session = self._session(backend, reporter)
            if not self.rows:
                return [await session.leave(base)]
            return await BatchRun(self.rows, self.folder, reporter, self.context).leave(
                session, base
            )

    def _session(self, backend: Backend, reporter: Reporter) -> RunSession:
        return RunSession(backend, self.target, reporter, self.results.output_dir, self.context)


def _no_server_to_detach_on() -> InvalidInput:
    return InvalidInput(
        "--detach requires a server, because the built-in engine ends with this command",
        hint="Add --server URL. To keep the built-in engine running, use `comfyfleet engine`.",
    )


def watch(
    run_id: Annotated[
        str, Parameter(metavar="ID", help="The run's id, as printed by `comfyfleet run --detach`.")
    ],
    /,
    *,
    where: TargetOptions = ANY_TARGET,
    results: ResultOptions = RESULT_DEFAULTS,
    context: InjectedContext,
) -> None:
    """See help_texts.WATCH."""
    with _errors_as_events(results, context):
        _watch(run_id, where, results, context)


def _watch(run_id: str, where: TargetOptions, results: ResultOptions, context: CliContext) -> None:
    check_folder(results.output_dir)
    targets = remote_targets(where, context)
    with reporter_for(results, run_id[:8], context) as reporter:
        try:
            target, outcome = asyncio.run(_finished(run_id, targets, reporter, results, context))
        except KeyboardInterrupt:
            context.say(f"no longer watched; run {run_id} continues")
            raise
    if not results.as_json:
        print_results(outcome, target, context)


async def _finished(
    run_id: str,
    targets: Sequence[RunTarget],
    reporter: Reporter,
    results: ResultOptions,
    context: CliContext,
) -> tuple[RunTarget, RunResults]:
    for target in targets:
        async with aclosing(target.connect()) as backend:
            # A cloud uses its own run ids and is the only target, so there is nothing to search.
            if len(targets) > 1 and await backend.adopt(run_id) is None:
                continue
            session = RunSession(backend, target, reporter, results.output_dir, context)
            plan = await _plan(backend, run_id)
            return target, await session.finish(run_id, plan, again=True)
    names = ", ".join(target.name for target in targets)
    raise RunLost(f"run {run_id} was not found on {names}", hint="Is it the right --server?")


async def _plan(backend: Backend, run_id: str) -> NodePlan:
    """Returns the run's nodes and their names. Empty for Comfy Cloud, which doesn't return the
    submitted prompt."""
    submitted = await backend.submitted_prompt(run_id) if isinstance(backend, ComfyServer) else None
    return NodePlan({}) if submitted is None else plan_from_outputs(*submitted)
