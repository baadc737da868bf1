"""Runs a workflow, from its local files to its saved outputs. Also selects where it runs: the least
busy of several servers, Comfy Cloud, or the built-in engine."""

import asyncio
import contextlib
import filecmp
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, validators

from comfyfleet.cli.context import CliContext, base_url, counted, require_file, url_without_password
from comfyfleet.cli.engine import require_engine, start_engine_process
from comfyfleet.cli.run_progress import (
    NodePlan,
    Reporter,
    advance_estimate,
    begin_estimate,
    plan_run,
)
from comfyfleet.cli.workflow import SERVER_VARIABLE, KnownTypes, types_of_server
from comfyfleet.comfy import (
    Backend,
    BackendLimits,
    Cancellation,
    CloudSettings,
    ComfyCloud,
    ComfyServer,
    OutputFile,
    OutputValue,
    ServerSettings,
    cloud_settings,
)
from comfyfleet.comfy.backend import RETRIES_MAX
from comfyfleet.comfy.backend import limits as limits_of
from comfyfleet.comfy.events import Cancelled, End, Failed, Succeeded
from comfyfleet.errors import (
    FileGone,
    FleetError,
    InvalidInput,
    LimitExceeded,
    OutcomeUnknown,
    PromptRefused,
    RunFailed,
    RunLost,
    RunStalled,
    RunTimedOut,
    ServerUnavailable,
    UnexpectedAnswer,
)
from comfyfleet.workflow.edit import (
    Assignment,
    ExposedInput,
    Place,
    find_input,
    set_values,
    shorthand_places,
)
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import Inspection, inspect
from comfyfleet.workflow.model import Prompt

STEM_CHARACTERS_MAX = 120
SUFFIX_CHARACTERS_MAX = 16
FOLDERS_MAX = 16
SAME_NAMES_MAX = 100_000
# The counter that ComfyUI appends to make a name unique in its folder: cat_00012_.png,
# clip_00003-audio.mp4.
_COUNTER = re.compile(r"_\d{5}_?(?=$|-)")
# Names without meaning: ComfyUI's previews, and the hashes used by a cloud as file names.
_MEANINGLESS_NAME = re.compile(r"ComfyUI_temp_[a-z]{5}|[0-9a-f]{32,}")
_UNSAFE = re.compile(r'[\x00-\x1f\x7f<>:"|?*]+')


def readable_name(filename: str, *, node_name: str | None = None) -> str:
    """Returns a readable file name: `cat_00012_.png` becomes `cat.png`. The name can't lead out of
    its folder, whatever name the server reports."""
    base = filename.replace("\\", "/").rpartition("/")[2]
    stem, dot, suffix = base.rpartition(".")
    if not stem:
        stem, dot, suffix = base, "", ""
    stem = _COUNTER.sub("", stem)
    if _MEANINGLESS_NAME.fullmatch(stem):
        stem = (node_name or "output").replace("/", "-").replace("\\", "-")
    stem = _UNSAFE.sub("_", stem).strip(" .")[:STEM_CHARACTERS_MAX] or "output"
    return stem + dot + _UNSAFE.sub("_", suffix)[:SUFFIX_CHARACTERS_MAX]


def readable_folder(subfolder: str) -> Path:
    """Returns a safe folder: `shots\\day 1` becomes `shots/day 1`. It can't lead out of its parent,
    whatever name the server reports."""
    parts = (_UNSAFE.sub("_", part).strip(" .") for part in re.split(r"[\\/]", subfolder))
    names = [part[:STEM_CHARACTERS_MAX] for part in parts if part]
    return Path(*names[:FOLDERS_MAX])


def numbered_names(name: str) -> Iterator[str]:
    """Yields `cat.png`, `cat-2.png`, `cat-3.png` and so on."""
    yield name
    path = Path(name)
    for number in count(2):
        yield f"{path.stem}-{number}{path.suffix}"


def check_folder(folder: Path) -> None:
    """Checks before a run whether results can be saved in a folder. Leaves nothing behind."""
    lineage = (folder, *folder.absolute().parents)
    missing = list(takewhile(lambda path: not path.exists(), lineage))
    existing = lineage[len(missing)]
    if not existing.is_dir():
        raise InvalidInput(f"{existing} isn't a folder, so results can't be saved in {folder}")
    try:
        _try_to_write(folder)
    except OSError as error:
        raise InvalidInput(
            f"results can't be saved in {folder}: {error.strerror or error}",
            hint="Specify another folder: -o DIR",
        ) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _try_to_write(folder: Path) -> None:
    """Creates a temporary file. Only this reveals whether the folder is read-only or full, or
    doesn't allow new files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def reserve_name(folder: Path, name: str) -> Path:
    """Creates a new empty file in the folder, so that no other run can use its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for candidate, _ in zip(numbered_names(name), range(SAME_NAMES_MAX), strict=False):
            path = folder / candidate
            try:
                path.touch(exist_ok=False)
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise InvalidInput(f"{folder}: {error.strerror or error}") from error
    raise LimitExceeded(f"{folder} has {SAME_NAMES_MAX:,} files with names like {name}")


def find_equal_file(path: Path, name: str) -> Path | None:
    """Returns an existing file with the same content and a lower number."""
    for candidate in islice(numbered_names(name), SAME_NAMES_MAX):
        other = path.with_name(candidate)
        if other == path:
            return None
        if other.is_file() and filecmp.cmp(path, other, shallow=False):
            return other
    return None


MEDIA = ("image", "video", "audio")
INPUT_ANNOTATION = " [input]"
OTHER_ANNOTATIONS = (" [output]", " [temp]")
PLACES_SHOWN_MAX = 8


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file for an input. The input is named as `node.input`, or only by its own name if that is
    unique."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class FileUpload:
    """A file to upload. The inputs in `places` are set to the name that the backend gives it."""

    path: Path
    places: tuple[Place, ...]

    def __str__(self) -> str:
        return f"{self.path} for {', '.join(map(_address, self.places))}"


@dataclass(frozen=True, slots=True)
class MissingFile:
    """A file that the workflow names, and that exists neither locally nor on the server."""

    name: str
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class FileInputs:
    uploads: tuple[FileUpload, ...] = ()
    missing: tuple[MissingFile, ...] = ()


def parse_given_file(text: str) -> GivenFile:
    name, equals, path = text.partition("=")
    if not equals or not name.strip() or not path:
        raise InvalidInput(
            f"--input {text!r} is invalid; use NAME=FILE, such as image=cat.png or 3.image=cat.png"
        )
    return GivenFile(name.strip(), Path(path))


def find_inputs(
    prompt: Prompt,
    object_info: Mapping[str, Any],
    *,
    given: Sequence[GivenFile] = (),
    media: Mapping[str, Path],
    beside: Path | None,
    exposed: Sequence[ExposedInput] = (),
) -> FileInputs:
    """Returns the files to upload: files given by name or kind, and files that the prompt names and
    that exist in the folder `beside`."""
    inspection = inspect(Opened("json", None, prompt), object_info)
    places: dict[Place, Path] = {}
    for kind, path in media.items():
        for place in _places_of_kind(prompt, object_info, kind):
            places[place] = require_file(path)
    for given_file in given:
        path = require_file(given_file.path)
        if "." in given_file.name:
            named_places = find_input(prompt, object_info, given_file.name, exposed)
        else:
            named_places = (_file_place(inspection, given_file.name),)
        places.update(dict.fromkeys(named_places, path))
    named = list(_files_named(inspection, places))
    local = {name: _inside(beside, name) for name, _, _ in named}
    places |= {place: lies for name, place, _ in named if (lies := local[name])}
    missing: dict[str, tuple[Place, ...]] = {}
    for name, place, present in named:
        if local[name] is None and present is False:
            missing[name] = (*missing.get(name, ()), place)
    return FileInputs(_grouped(places), tuple(MissingFile(*entry) for entry in missing.items()))


def with_uploaded_names(
    prompt: Prompt, object_info: Mapping[str, Any], names: Iterable[tuple[FileUpload, str]]
) -> Prompt:
    """Returns the prompt with the names that the files have on the backend."""
    assignments = [
        Assignment(_address(place), name) for upload, name in names for place in upload.places
    ]
    return set_values(prompt, object_info, assignments, check=False).prompt


def is_file_place(
    prompt: Prompt,
    object_info: Mapping[str, Any],
    address: str,
    exposed: Sequence[ExposedInput] = (),
) -> bool:
    """Checks whether an input accepts a file that can be uploaded."""
    places = find_input(prompt, object_info, address, exposed)
    inspection = inspect(Opened("json", None, prompt), object_info)
    return any(Place(one.node.id, one.input or "") in places for one in _takes_files(inspection))


def _places_of_kind(prompt: Prompt, object_info: Mapping[str, Any], kind: str) -> tuple[Place, ...]:
    places = shorthand_places(prompt, object_info, kind)
    if not places:
        raise InvalidInput(f"--{kind}: the workflow has no node that loads this kind of file")
    values = [prompt[place.node_id]["inputs"].get(place.input) for place in places]
    if any(value != values[0] for value in values):
        shown = ", ".join(f"{_address(p)} (now {v})" for p, v in zip(places, values, strict=True))
        raise InvalidInput(
            f"--{kind} matches several inputs: {shown}",
            hint=f"Specify one: --input {_address(places[0])}=FILE",
        )
    return places


def _file_place(inspection: Inspection, name: str) -> Place:
    files = [Place(one.node.id, one.input or "") for one in _takes_files(inspection)]
    places = [place for place in files if place.input == name]
    if len(places) == 1:
        return places[0]
    problem = "several inputs have that name" if places else "no file input has that name"
    shown = ", ".join(map(_address, (places or files)[:PLACES_SHOWN_MAX])) or "none"
    raise InvalidInput(
        f"--input {name}: {problem}; file inputs: {shown}",
        hint="Specify one as NODE.INPUT=FILE, where NODE is its id or title.",
    )


def _takes_files(inspection: Inspection) -> Iterator[Any]:
    return (one for one in inspection.takes if one.role == "file" and one.input is not None)


def _files_named(
    inspection: Inspection, settled: Mapping[Place, Path]
) -> Iterator[tuple[str, Place, bool | None]]:
    for file in inspection.files:
        if file.kind != "input" or not file.active or file.name.endswith(OTHER_ANNOTATIONS):
            continue
        for address in file.addresses:
            node_id, _, name = address.partition(".")
            if Place(node_id, name) not in settled:
                yield file.name, Place(node_id, name), file.present


def _inside(folder: Path | None, name: str) -> Path | None:
    """Returns a file only if it is inside the folder, so that workflows from other people can't
    upload other files."""
    if folder is None:
        return None
    path = folder / name.removesuffix(INPUT_ANNOTATION).replace("\\", "/")
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and path.is_file()
    except (OSError, ValueError):
        return None
    return path if inside else None


def _grouped(places: Mapping[Place, Path]) -> tuple[FileUpload, ...]:
    """Groups the inputs by file, so that a file used by several inputs is uploaded only once."""
    by_path: dict[Path, tuple[Place, ...]] = {}
    for place, path in places.items():
        by_path[path] = (*by_path.get(path, ()), place)
    return tuple(FileUpload(path, inputs) for path, inputs in by_path.items())


def _address(place: Place) -> str:
    return f"{place.node_id}.{place.input}"


WHERE = Group(
    "Where",
    validator=validators.mutually_exclusive,
    sort_key=1,
)
PATIENCE = Group("Patience", sort_key=7)
KEY_VARIABLE = "COMFY_CLOUD_API_KEY"
BUILT_IN = "the built-in engine"
QUEUE_SECONDS_MAX = 10.0
RUN_SECONDS_MAX = 7 * 24 * 3600.0
SILENCE_SECONDS_MAX = 300.0
# short, so that users see their position in the queue early
FIRST_LOOK_SECONDS = 0.5


def _positive_seconds(_type: object, value: float | None) -> None:
    """Raises ValueError for an invalid number, which is reported as a usage error, as for other
    options."""
    if value is not None and not 0 < value < float("inf"):
        raise ValueError("Use a number of seconds above 0.")


@Parameter(name="*")
@dataclass(frozen=True)
class TargetOptions:
    server: Annotated[
        tuple[str, ...],
        Parameter(
            group=WHERE,
            metavar="URL",
            help=f"Address of a running ComfyUI. Repeatable; the least busy one runs the prompt. Default: ${SERVER_VARIABLE}.",
        ),
    ] = ()
    cloud: Annotated[
        bool,
        Parameter(group=WHERE, help=f"Run on Comfy Cloud, with the key in ${KEY_VARIABLE}."),
    ] = False
    timeout: Annotated[
        float | None,
        Parameter(group=PATIENCE, metavar="SECONDS", validator=_positive_seconds, help="Give up on a run that shows no progress for this long. Default: 300."),
    ] = None  # fmt: skip
    max_retries: Annotated[
        int | None,
        Parameter(group=PATIENCE, metavar="N", validator=validators.Number(gte=0, lte=RETRIES_MAX), help="Retries after a broken connection. Default: $COMFYUI_MAX_RETRIES, or 3."),
    ] = None  # fmt: skip
    poll_interval: Annotated[
        float | None,
        Parameter(group=PATIENCE, metavar="SECONDS", validator=_positive_seconds, help="Seconds between polls while a server sends nothing. Default: $COMFYUI_POLL_INTERVAL, or 5."),
    ] = None  # fmt: skip


ANY_TARGET = TargetOptions()


@dataclass(frozen=True, slots=True)
class RunTarget:
    """A place where prompts can run. `options` are the `comfyfleet watch` options that select it,
    or None if the target ends with this process."""

    name: str
    options: str | None
    connect: Callable[[], Backend]
    types: Callable[[Opened, CliContext], KnownTypes]


@contextlib.contextmanager
def open_target(options: TargetOptions, context: CliContext) -> Iterator[RunTarget]:
    limits = limits_from_options(options, context)
    if options.cloud:
        yield cloud_target(limits, context)
        return
    urls = server_urls(options, context)
    if urls:
        yield server_target(find_least_busy(urls, limits, context), limits)
        return
    with _built_in_url(context.environ) as url:
        yield replace(server_target(url, limits), name=BUILT_IN, options=None)


def remote_targets(options: TargetOptions, context: CliContext) -> list[RunTarget]:
    """Returns the targets that keep running after this process exits, for detached runs."""
    limits = limits_from_options(options, context)
    if options.cloud:
        return [cloud_target(limits, context)]
    targets = [server_target(url, limits) for url in server_urls(options, context)]
    if not targets:
        raise InvalidInput(
            "no server given; runs on the built-in engine end with the command that started them",
            hint=f"Add --server http://127.0.0.1:8188, or set {SERVER_VARIABLE}, or add --cloud.",
        )
    return targets


def limits_from_options(options: TargetOptions, context: CliContext) -> BackendLimits:
    limits = limits_of(context.environ)
    retries = limits.max_retries if options.max_retries is None else options.max_retries
    return replace(
        limits,
        first_look_seconds=FIRST_LOOK_SECONDS,
        job_seconds=RUN_SECONDS_MAX,
        # A run may take any amount of time, as long as it makes progress.
        stall_seconds=options.timeout or SILENCE_SECONDS_MAX,
        poll_seconds=options.poll_interval or limits.poll_seconds,
        max_retries=retries,
    )


def server_urls(options: TargetOptions, context: CliContext) -> list[str]:
    named = options.server or tuple(filter(None, [context.environ.get(SERVER_VARIABLE)]))
    return list(dict.fromkeys(map(base_url, named)))


def server_target(url: str, limits: BackendLimits) -> RunTarget:
    def types(opened: Opened, context: CliContext) -> KnownTypes:
        return types_of_server(url, opened, context)

    settings = ServerSettings(url, limits)
    return RunTarget(
        url_without_password(url),
        f"--server {url_without_password(url)}",
        lambda: ComfyServer(settings),
        types,
    )


def cloud_target(limits: BackendLimits, context: CliContext) -> RunTarget:
    settings = replace(cloud_settings(context.environ), limits=limits)
    if not settings.key:
        raise InvalidInput(
            f"Comfy Cloud requires a key, and {KEY_VARIABLE} is not set",
            hint="Create one at https://platform.comfy.org/profile/api-keys",
        )

    def types(opened: Opened, context: CliContext) -> KnownTypes:
        return KnownTypes(asyncio.run(_cloud_node_types(settings)), {})

    return RunTarget("Comfy Cloud", "--cloud", lambda: ComfyCloud(settings), types)


async def _cloud_node_types(settings: CloudSettings) -> Mapping[str, Any]:
    async with ComfyCloud(settings) as cloud:
        return (await cloud.describe()).object_info


def find_least_busy(urls: Sequence[str], limits: BackendLimits, context: CliContext) -> str:
    """Returns the least busy server that responds. The first one wins a tie."""
    if len(urls) == 1:
        return urls[0]
    impatient = replace(limits, max_retries=0, answer_seconds=QUEUE_SECONDS_MAX)
    lengths = asyncio.run(_queue_lengths(urls, impatient))
    answering: dict[str, int] = {}
    for url, length in zip(urls, lengths, strict=True):
        if isinstance(length, FleetError):
            context.warn(f"{url_without_password(url)} is skipped: {length.message}")
        else:
            answering[url] = length
    if not answering:
        raise ServerUnavailable(f"none of {len(urls)} servers responds")
    chosen = min(answering, key=answering.__getitem__)
    context.say(
        f"{url_without_password(chosen)} is the least busy: {counted(answering[chosen], 'prompt', 'prompts')} in its queue"
    )
    return chosen


async def _queue_lengths(urls: Sequence[str], limits: BackendLimits) -> list[int | FleetError]:
    return await asyncio.gather(*(_queue_length(url, limits) for url in urls))


async def _queue_length(url: str, limits: BackendLimits) -> int | FleetError:
    async with ComfyServer(ServerSettings(url, limits)) as server:
        try:
            return await server.queue_length()
        except FleetError as error:
            return error


@contextlib.contextmanager
def _built_in_url(environ: Mapping[str, str]) -> Iterator[str]:
    require_engine(". Or specify a ComfyUI: --server http://127.0.0.1:8188")
    with start_engine_process(environ) as url:
        yield url


# The run's end is known, so there is nothing to resume.
FINAL_ERRORS = (RunFailed, PromptRefused, RunLost)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A prompt and the data it needs. `workflow` is embedded in the images, as in the editor."""

    prompt: Prompt
    uploads: tuple[FileUpload, ...]
    object_info: Mapping[str, Any]
    workflow: Mapping[str, Any] | None
    # inputs exposed by its subgraphs, for values that are set later
    exposed: tuple[ExposedInput, ...] = ()
    missing_models: tuple[str, ...] = ()  # each with its download address
    missing_files: tuple[MissingFile, ...] = ()


@dataclass(frozen=True, slots=True)
class RunResults:
    """The results of a run. `skipped` is the number of previews that were left on the server,
    because there are real outputs."""

    paths: tuple[Path, ...]
    values: tuple[OutputValue, ...]
    seconds: float
    skipped: int = 0


class RunSession:
    """Runs prompts on a backend and reports their progress."""

    def __init__(
        self,
        backend: Backend,
        target: RunTarget,
        reporter: Reporter,
        folder: Path,
        context: CliContext,
    ) -> None:
        self._backend = backend
        self._target = target
        self._reporter = reporter
        self._folder = folder
        self._context = context
        self._names: dict[Path, str] = {}

    async def run(self, work: RunRequest) -> RunResults:
        """Runs a prompt and saves its results. If this task is cancelled, cancels the run on the
        backend before raising CancelledError."""
        prompt = await self._upload_and_submit(work)
        prompt_id, run_id = self._context.new_id(), None
        try:
            run_id = await self._submit(work, prompt, prompt_id)
            return await self.finish(run_id, plan_run(prompt, work.object_info))
        except asyncio.CancelledError:
            # A separate task, because this one is being cancelled.
            await asyncio.create_task(self._cancel(prompt_id, run_id))
            raise
        except FleetError as error:
            raise self._with_resume_hint(error, prompt_id, run_id) from error

    async def leave(self, work: RunRequest) -> str:
        """Submits a prompt without waiting for its end."""
        return await self._submit(work, await self._upload_and_submit(work), self._context.new_id())

    async def finish(self, run_id: str, plan: NodePlan, *, again: bool = False) -> RunResults:
        """Waits for a run and saves its results. With `again`, results that were already saved are
        not saved again."""
        began = self._context.clock()
        await self._follow(run_id, plan)
        outputs = await self._backend.outputs(run_id)
        final_files = [file for file in outputs.files if file.folder != "temp"]
        files = final_files or list(outputs.files)
        names = output_names(files, plan)
        paths = [await self._save(file, names.get(file.node_id), again) for file in files]
        for value in outputs.values:
            self._reporter.shown(value)
        seconds = self._context.clock() - began
        skipped = len(outputs.files) - len(files)
        return RunResults(tuple(path for path in paths if path), outputs.values, seconds, skipped)

    async def _upload_and_submit(self, work: RunRequest) -> Prompt:
        names = [(upload, await self._upload(upload.path)) for upload in work.uploads]
        return with_uploaded_names(work.prompt, work.object_info, names) if names else work.prompt

    async def _upload(self, path: Path) -> str:
        """Uploads a file once for all rows of a batch. Returns its name on the backend."""
        if path not in self._names:
            self._names[path] = (await self._backend.upload(path)).value
            self._reporter.uploaded(path, self._names[path])
        return self._names[path]

    async def _submit(self, work: RunRequest, prompt: Prompt, prompt_id: str) -> str:
        pictures = {"extra_pnginfo": {"workflow": work.workflow}} if work.workflow else None
        try:
            submitted = await self._backend.submit(prompt, prompt_id=prompt_id, extra_data=pictures)
        except PromptRefused as error:
            if not work.missing_models:
                raise
            hint = "Missing models:\n  " + "\n  ".join(work.missing_models)
            raise PromptRefused(error.message, **{**error.details, "hint": hint}) from error
        self._reporter.submitted(submitted.run_id, self._target.name)
        return submitted.run_id

    async def _follow(self, run_id: str, plan: NodePlan) -> None:
        estimate, end = begin_estimate(plan, self._context.clock()), None
        async for event in self._backend.follow(run_id):
            estimate = advance_estimate(estimate, event, self._context.clock())
            self._reporter.report(event, estimate)
            end = event if isinstance(event, End) else end
        require_success(end, plan, run_id)

    async def _save(self, file: OutputFile, node_name: str | None, again: bool) -> Path | None:
        folder = self._folder / readable_folder("" if file.folder == "temp" else file.subfolder)
        name = readable_name(file.filename, node_name=node_name)
        path = reserve_name(folder, name)
        try:
            await self._backend.fetch(file, path)
        except FileGone as error:
            path.unlink(missing_ok=True)
            self._context.warn(error.message)
            return None
        except OSError as error:
            path.unlink(missing_ok=True)
            raise InvalidInput(f"{path} could not be written: {error.strerror}") from error
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        if again and (before := find_equal_file(path, name)):
            path.unlink()
            path = before
        self._reporter.saved(path, file.node_id)
        return path

    async def _cancel(self, prompt_id: str, run_id: str | None) -> None:
        """Cancels a run. Without a run id, it is unknown whether the prompt was submitted, so the
        backend is queried."""
        place = self._target.name
        try:
            adopted = None if run_id else await self._backend.adopt(prompt_id)
            run_id = run_id or (adopted.run_id if adopted else prompt_id)
            outcome = await self._backend.cancel(run_id)
        except FleetError as error:
            self._context.warn(f"the run on {place} may not have been cancelled: {error.message}")
            return
        self._context.say(
            {
                Cancellation.CANCELLED: f"cancelled on {place}: run {run_id}",
                Cancellation.ENDED_BEFORE: f"run {run_id} had ended on {place} before it could be cancelled",
                Cancellation.NOT_FOUND: f"interrupted; the run was not found on {place}",
            }[outcome]
        )

    def _with_resume_hint(
        self, error: FleetError, prompt_id: str, run_id: str | None
    ) -> FleetError:
        may_go_on = run_id is not None or isinstance(error, OutcomeUnknown)
        if isinstance(error, FINAL_ERRORS) or not may_go_on:
            return error
        if self._target.options is None:
            if not isinstance(error, RunStalled | RunTimedOut):
                return error
            hint = "Use --timeout SECONDS to allow more time."
        else:
            resumable = run_id or prompt_id
            hint = f"Follow it with: comfyfleet watch {resumable} {self._target.options}"
        return type(error)(error.message, **{**error.details, "hint": hint})


def output_names(files: Sequence[OutputFile], plan: NodePlan) -> dict[str, str]:
    """Returns names for outputs by node: the node's title, with its id if several nodes have the
    same title."""
    titles = {
        file.node_id: plan.names[file.node_id] for file in files if file.node_id in plan.names
    }
    counts = Counter(titles.values())
    return {
        node_id: title if counts[title] == 1 else f"{title} node {node_id}"
        for node_id, title in titles.items()
    }


def require_success(end: End | None, plan: NodePlan, run_id: str) -> None:
    """Raises RunFailed unless the run succeeded."""
    match end:
        case Succeeded():
            return
        case Failed(node_id=node_id, node_type=node_type, message=message):
            raise RunFailed(_failure(plan, node_id, node_type, message), run_id=run_id)
        case Cancelled():
            raise RunFailed("the run was cancelled on the server", run_id=run_id)
    raise UnexpectedAnswer(f"run {run_id} ended without a result")


def _failure(plan: NodePlan, node_id: str | None, node_type: str | None, message: str) -> str:
    if node_id is None:
        return f"the run failed: {message}"
    name = plan.names.get(node_id)
    known = f' "{name}"' if name and name != node_type else ""
    kind = f" ({node_type})" if node_type else ""
    return f"node {node_id}{known}{kind} failed: {message.strip()}"
