"""From a file and options to prompts that can be handed in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from comfyfleet.cli.convert import CONVERSION, ConversionOptions, make_prompt
from comfyfleet.cli.files import STANDARD_STREAM
from comfyfleet.cli.nodetypes import KnownTypes
from comfyfleet.cli.running.inputs import (
    MEDIA,
    Given,
    Inputs,
    Upload,
    find_inputs,
    is_file_place,
    parse_given,
    with_names,
)
from comfyfleet.cli.running.session import Work
from comfyfleet.cli.running.targets import BUILT_IN, Target
from comfyfleet.cli.running.values import ROWS_MAX, Row
from comfyfleet.cli.settings import (
    USUAL_VALUES,
    VALUES,
    Assignments,
    SettingOptions,
    ShorthandOptions,
    shorthand,
)
from comfyfleet.cli.switches import ALL_AS_SAVED, SwitchOptions, apply_switches
from comfyfleet.cli.world import World, counted
from comfyfleet.kernel.errors import LimitExceeded, UnknownNodeTypes
from comfyfleet.workflow import Conversion
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting import (
    Assignment,
    Edit,
    find_input,
    parse_assignment,
    set_shorthands,
    set_values,
    shorthand_places,
)

LACKING_SHOWN_MAX = 20


def _media(what: str) -> Parameter:
    return Parameter(
        group=USUAL_VALUES,
        metavar="FILE",
        help=f"Local file for the one loader of {what}; it is uploaded.",
    )


@Parameter(name="*")
@dataclass(frozen=True)
class RunShorthands(ShorthandOptions):
    """As for `convert`, but files are local ones, and `--batch` is the name of a CSV file."""

    batch: Annotated[str | None, shorthand("batch", "batch-size")] = None
    image: Annotated[str | None, _media("images")] = None
    video: Annotated[str | None, _media("videos")] = None
    audio: Annotated[str | None, _media("sounds")] = None


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
            help="Upload a local file for an input, named image or 3.image. Repeatable.",
        ),
    ] = ()
    usual: RunShorthands = RunShorthands()

    def settings(self) -> SettingOptions:
        """Without the files: they are uploaded first."""
        return SettingOptions(self.set_, replace(self.usual, **dict.fromkeys(MEDIA)))

    def media(self) -> dict[str, Path]:
        return {kind: Path(path) for kind, path in self.usual.given().items() if kind in MEDIA}


@Parameter(name="*", group=CONVERSION)
@dataclass(frozen=True)
class RunConversion:
    unknown: Annotated[
        Literal["drop", "keep"] | None,
        Parameter(
            help="Nodes of types that the server lacks: leave them out, or send them as the editor does. By default they are an error.",
        ),
    ] = None
    reachable_only: Annotated[
        bool, Parameter(help="Leave out nodes that no output node needs.")
    ] = False
    seed_rng: Annotated[
        int | None,
        Parameter(metavar="N", help="Choose among {a|b} in texts the same way each time."),
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
    """All that makes another prompt of the same file."""

    values: ValueOptions = ValueOptions()
    switches: SwitchOptions = ALL_AS_SAVED
    conversion: RunConversion = RunConversion()


def prepare(
    file: str,
    opened: Opened,
    changes: ChangeOptions,
    target: Target,
    world: World,
) -> Work:
    known = target.types(opened, world)
    values = changes.values
    if changes.switches:
        opened = apply_switches(opened, known, changes.switches, world)
    converted = _runnable(opened, known, changes, target, world)
    prompt, exposed = converted.prompt, converted.exposed
    inputs = find_inputs(
        prompt,
        known.object_info,
        given=[parse_given(text) for text in values.input_],
        media=values.media(),
        beside=folder_of(file),
        exposed=exposed,
    )
    _tell_missing(inputs, target, world)
    shown = with_names(prompt, known.object_info, [(one, one.path.name) for one in inputs.uploads])
    return Work(shown, inputs.uploads, known.object_info, opened.workflow, exposed)


def folder_of(file: str) -> Path | None:
    """What comes through a pipe has no neighbours."""
    return None if file == STANDARD_STREAM else Path(file).parent


def prepare_row(base: Work, row: Row, folder: Path, world: World) -> Work:
    """Files are looked for from the folder of the CSV file."""
    files = {
        name: folder / cell
        for name, cell in row.named.items()
        if is_file_place(base.prompt, base.object_info, name, base.exposed)
        and (folder / cell).is_file()
    }
    media = {kind: folder / cell for kind, cell in row.usual.items() if kind in MEDIA}
    usual = {name: cell for name, cell in row.usual.items() if name not in MEDIA}
    named = [Assignment(name, cell) for name, cell in row.named.items() if name not in files]
    prompt = _warned(
        set_shorthands(base.prompt, base.object_info, usual, exposed=base.exposed), world
    )
    prompt = _warned(set_values(prompt, base.object_info, named, exposed=base.exposed), world)
    given = [Given(name, path) for name, path in files.items()]
    own = find_inputs(
        prompt, base.object_info, given=given, media=media, beside=None, exposed=base.exposed
    ).uploads
    shown = with_names(prompt, base.object_info, [(one, one.path.name) for one in own])
    return replace(base, prompt=shown, uploads=(*_not_replaced(base.uploads, shown, base), *own))


def with_seeds(
    rows: Sequence[Row], count: int, base: Work, values: ValueOptions, world: World
) -> tuple[Row, ...]:
    """Each row `count` times, each time with another seed: else a server answers with what it made
    before. A seed that is set by its node's name, or by the row, stays."""
    if len(rows) * count > ROWS_MAX:
        raise LimitExceeded(f"{len(rows) * count:,} runs, at most {ROWS_MAX:,}")
    free = _has_free_seed(base, values)
    if not free:
        world.warn("no seed is free to be changed: every run gets the same")
    first = values.usual.seed
    made: list[Row] = []
    for row in rows:
        for step in range(count):
            seed = int(first) + step if first and first.isdecimal() else world.new_seed()
            usual = {"seed": str(seed), **row.usual} if free else row.usual
            made.append(replace(row, number=len(made) + 1, usual=usual))
    return tuple(made)


def _has_free_seed(base: Work, values: ValueOptions) -> bool:
    seeds = set(shorthand_places(base.prompt, base.object_info, "seed"))
    targets = [parse_assignment(text).target for text in values.set_]
    named = {
        place
        for target in targets
        for place in find_input(base.prompt, base.object_info, target, base.exposed)
    }
    return bool(seeds) and not seeds & named


def _not_replaced(uploads: tuple[Upload, ...], prompt: Prompt, base: Work) -> Iterator[Upload]:
    """An upload is for the inputs that still hold what they held before the row was applied."""
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
    target: Target,
    world: World,
) -> Conversion:
    settings, conversion = changes.values.settings(), changes.conversion
    try:
        converted = make_prompt(opened, known, settings, conversion.options(), world)
    except UnknownNodeTypes as error:
        raise lacking(error.details["nodes"], target) from error
    unknown = [
        {"type": str(node.get("class_type")), "node_id": key}
        for key, node in converted.prompt.items()
        if node.get("class_type") not in known.object_info
    ]
    if unknown and conversion.unknown is None:
        raise lacking(unknown, target)
    return converted


def lacking(nodes: Sequence[Mapping[str, str]], target: Target) -> UnknownNodeTypes:
    """What is missing, and what to do about it."""
    by_type: dict[str, list[Mapping[str, str]]] = {}
    for node in nodes:
        by_type.setdefault(node["type"], []).append(node)
    lines = [_lacking_line(name, found) for name, found in sorted(by_type.items())]
    more = (
        [f"  … and {len(lines) - LACKING_SHOWN_MAX} more"] if len(lines) > LACKING_SHOWN_MAX else []
    )
    kinds = counted(len(by_type), "node type", "node types")
    return UnknownNodeTypes(
        "\n".join([f"{target.name} lacks {kinds}:", *lines[:LACKING_SHOWN_MAX], *more]),
        nodes=list(nodes),
        hint=(
            "Run it on a ComfyUI that has them: --server http://127.0.0.1:8188, or on Comfy Cloud: --cloud."
            if target.name == BUILT_IN
            else "Install the node packs there, or name another --server."
        )
        + " --unknown drop leaves these nodes out.",
    )


def _lacking_line(name: str, nodes: Sequence[Mapping[str, str]]) -> str:
    places = ", ".join(
        f'node {node["node_id"]} "{node["title"]}"'
        if node.get("title")
        else f"node {node['node_id']}"
        for node in nodes[:LACKING_SHOWN_MAX]
    )
    packs = sorted({node["pack"] for node in nodes if node.get("pack")})
    return f"  {name}: {places}" + (f" (node pack {', '.join(packs)})" if packs else "")


def _tell_missing(inputs: Inputs, target: Target, world: World) -> None:
    for name in inputs.missing:
        world.warn(
            f"{name} neither lies beside the file nor is on {target.name}; "
            "give one with --image, --video, --audio or --input NAME=FILE"
        )


def _warned(edit: Edit, world: World) -> Prompt:
    for warning in edit.warnings:
        world.warn(warning)
    return edit.prompt
