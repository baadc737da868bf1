"""`comfyfleet convert` and `comfyfleet inspect`, and the options shared by commands that use a
workflow: the source of node types, values to set, and parts to switch on and off."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from cyclopts import Group, Parameter, validators

from comfyfleet.cli.context import (
    FILE_HELP,
    HOW_TO_SAVE,
    STANDARD_STREAM,
    CliContext,
    InjectedContext,
    counted,
    open_file,
    read_file,
    read_object_info,
    write_file,
)
from comfyfleet.cli.tables import plain_text, sections
from comfyfleet.errors import FleetError, InvalidInput, ServerUnavailable
from comfyfleet.workflow import Conversion, convert_with_report
from comfyfleet.workflow.edit import SHORTHANDS, Edit, parse_assignment, set_shorthands, set_values
from comfyfleet.workflow.edit.chain_truncation import keep_segments
from comfyfleet.workflow.edit.node_modes import Switched, switch
from comfyfleet.workflow.embedded import Opened, open_document
from comfyfleet.workflow.inspect import Inspection
from comfyfleet.workflow.inspect import inspect as inspect_document
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.object_info import remote_lists
from comfyfleet.workflow.report import Warning

SERVER_VARIABLE = "COMFYUI_BASE_URL"
OR_A_FILE = "Or save its node types while it is running, and use --object-info FILE."

GROUP = Group(
    "Node types",
    help="Node types and their inputs are read from a ComfyUI server.",
    validator=validators.mutually_exclusive,
    sort_key=2,
)


@Parameter(name="*")
@dataclass(frozen=True)
class NodeTypeOptions:
    object_info: Annotated[
        Path | None,
        Parameter(
            group=GROUP,
            metavar="FILE",
            help="The server's /object_info response, saved as JSON or JSON.gz.",
        ),
    ] = None
    server: Annotated[
        str | None,
        Parameter(
            group=GROUP,
            metavar="URL",
            help=f"Address of a running ComfyUI, queried once. Default: ${SERVER_VARIABLE}.",
        ),
    ] = None


NO_NODE_TYPES = NodeTypeOptions()


@dataclass(frozen=True)
class KnownTypes:
    """Node types, and the lists of choices that a server provides under separate routes."""

    object_info: Mapping[str, Any]
    remote_choices: Mapping[str, list[Any]]


def find_types(options: NodeTypeOptions, opened: Opened, context: CliContext) -> KnownTypes | None:
    """Returns the node types from a file or server, or None if neither is specified. A file takes
    precedence over the environment."""
    if options.object_info is not None:
        return KnownTypes(read_object_info(options.object_info), {})
    url = options.server or context.environ.get(SERVER_VARIABLE)
    if not url:
        return None
    try:
        return types_of_server(url, opened, context)
    except ServerUnavailable as error:
        hint = f"{error.details.get('hint', '')} {OR_A_FILE}".strip()
        raise ServerUnavailable(error.message, **{**error.details, "hint": hint}) from error


def types_of_server(url: str, opened: Opened, context: CliContext) -> KnownTypes:
    object_info = context.servers.object_info(url)
    return KnownTypes(object_info, dict(_remote_choices(url, opened, object_info, context)))


def _remote_choices(
    url: str, opened: Opened, object_info: Mapping[str, Any], context: CliContext
) -> Iterator[tuple[str, list[Any]]]:
    for route, remote in remote_lists(opened, object_info).items():
        # A route is a path on that server, but a full address could be anywhere.
        if not route.startswith("/"):
            context.warn(
                f"the choices at {route} are not fetched, because the address is not on the server"
            )
            continue
        try:
            yield route, context.servers.choices(url, remote)
        except FleetError as error:
            context.warn(f"the choices at {route} could not be fetched: {error.message}")


def require_types(known: KnownTypes | None) -> KnownTypes:
    if known is None:
        raise InvalidInput(
            "a workflow can't be converted without the node types of a server",
            hint=f"Add --server http://127.0.0.1:8188, or set {SERVER_VARIABLE}, or add "
            f"--object-info FILE. {HOW_TO_SAVE}",
        )
    return known


VALUES = Group("Values", sort_key=3)
USUAL_VALUES = Group(
    "Common values",
    help="The matching inputs are found automatically. Prints the values that were set and those without a matching input.",
    sort_key=4,
)
RANDOM = "random"  # a seed value that requests a new random seed each time
_HELP = {entry.name: entry.help for entry in SHORTHANDS} | {
    "seed": f"seed of the noise; `{RANDOM}` generates a new one"
}
_ALIASES = {entry.name: entry.aliases for entry in SHORTHANDS}


def shorthand(name: str, *options: str) -> Parameter:
    """Returns the command line option for a shorthand. `options` are the option's names, if they
    differ from the shorthand's own."""
    return Parameter(
        name=[f"--{option}" for option in options or (name, *_ALIASES[name])],
        group=USUAL_VALUES,
        metavar="VALUE",
        help=f"{_HELP[name][:1].upper()}{_HELP[name][1:]}.",
        allow_leading_hyphen=True,
    )


@Parameter(name="*")
@dataclass(frozen=True)
class ShorthandOptions:
    """The shorthands, each as a field of the same name."""

    prompt: Annotated[str | None, shorthand("prompt")] = None
    negative: Annotated[str | None, shorthand("negative")] = None
    lyrics: Annotated[str | None, shorthand("lyrics")] = None
    seed: Annotated[str | None, shorthand("seed")] = None
    steps: Annotated[str | None, shorthand("steps")] = None
    cfg: Annotated[str | None, shorthand("cfg")] = None
    guidance: Annotated[str | None, shorthand("guidance")] = None
    sampler: Annotated[str | None, shorthand("sampler")] = None
    scheduler: Annotated[str | None, shorthand("scheduler")] = None
    denoise: Annotated[str | None, shorthand("denoise")] = None
    size: Annotated[str | None, shorthand("size")] = None
    width: Annotated[str | None, shorthand("width")] = None
    height: Annotated[str | None, shorthand("height")] = None
    batch: Annotated[str | None, shorthand("batch")] = None
    frames: Annotated[str | None, shorthand("frames")] = None
    duration: Annotated[str | None, shorthand("duration")] = None
    fps: Annotated[str | None, shorthand("fps")] = None
    model: Annotated[str | None, shorthand("model")] = None
    lora: Annotated[str | None, shorthand("lora")] = None
    image: Annotated[str | None, shorthand("image")] = None
    video: Annotated[str | None, shorthand("video")] = None
    audio: Annotated[str | None, shorthand("audio")] = None
    prefix: Annotated[str | None, shorthand("prefix")] = None
    # `run` is costly, so a value that fits no input is an error there. `convert` only warns.
    must_fit: ClassVar[bool] = False

    def given(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


Assignments: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        group=VALUES,
        metavar="NODE.INPUT=VALUE",
        help="Set a value. NODE is an id, a title, or a class that occurs once. For a subgraph, INPUT is the name shown in the editor. Repeatable.",
        allow_leading_hyphen=True,
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class SettingOptions:
    set_: Assignments = ()
    usual: ShorthandOptions = ShorthandOptions()

    def __bool__(self) -> bool:
        return bool(self.set_ or self.usual.given())


NO_SETTINGS = SettingOptions()


def apply_settings(
    converted: Conversion, known: KnownTypes | None, settings: SettingOptions, context: CliContext
) -> Prompt:
    """Applies shorthands first, so that values for a specific input take precedence."""
    prompt, exposed = converted.prompt, converted.exposed
    object_info: Mapping[str, Any] = known.object_info if known else {}
    shorthands = settings.usual.given()
    if shorthands.get("seed") == RANDOM:
        shorthands["seed"] = str(context.new_seed())
    if shorthands:
        edit = set_shorthands(prompt, object_info, shorthands, exposed=exposed)
        if settings.usual.must_fit:
            require_all_set(edit)
        prompt = _report_settings(edit, context)
    assignments = [parse_assignment(text) for text in settings.set_]
    if not assignments:
        return prompt
    return _report_settings(set_values(prompt, object_info, assignments, exposed=exposed), context)


def require_all_set(edit: Edit) -> None:
    """Raises InvalidInput if an option such as --prompt fits no input, or several inputs."""
    if edit.not_set:
        raise InvalidInput(
            "; ".join(f"--{text}" for text in edit.not_set),
            hint="Omit the option, or specify the input: --set NODE.INPUT=VALUE. "
            "`comfyfleet inspect FILE` lists the inputs.",
        )


def _report_settings(edit: Edit, context: CliContext) -> Prompt:
    """Prints the values that were set, so that users can check how their options were applied."""
    for done in edit.done:
        context.say(f"set {done}")
    for warning in (*edit.warnings, *edit.not_set):
        context.warn(warning)
    return edit.prompt


PARTS = Group(
    "Parts",
    help="PART is a node's id, a title or a group. Use `Extend 6-8` or `Extend *` for several, and `group:NAME` or similar if a name is ambiguous. Repeatable.",
    sort_key=5,
)


@Parameter(name="*", group=PARTS)
@dataclass(frozen=True)
class SwitchOptions:
    bypass: Annotated[
        tuple[str, ...],
        Parameter(metavar="PART", help="Bypass these nodes, so that they pass on their input."),
    ] = ()
    mute: Annotated[
        tuple[str, ...],
        Parameter(metavar="PART", help="Mute these nodes, so that they have no outputs."),
    ] = ()
    enable: Annotated[
        tuple[str, ...],
        Parameter(
            metavar="PART", help="Execute these nodes, even if they are switched off in the file."
        ),
    ] = ()
    segments: Annotated[
        int | None,
        Parameter(
            metavar="N",
            help="Run the first N parts of a chain of numbered parts (Extend 1, Extend 2 …), regardless of whether they are switched on in the file, and close the chain after them.",
        ),
    ] = None
    chain: Annotated[
        str | None,
        Parameter(
            metavar="NAME", help="The chain that --segments applies to, if there are several."
        ),
    ] = None

    def __bool__(self) -> bool:
        return bool(self.bypass or self.mute or self.enable or self.segments is not None)


NO_SWITCHES = SwitchOptions()


def apply_switches(
    opened: Opened, known: KnownTypes | None, switches: SwitchOptions, context: CliContext
) -> Opened:
    """Returns the workflow with its parts switched on or off. Drops a prompt that was saved with
    the workflow, because it no longer matches."""
    document = _workflow_of(opened)
    object_info = require_types(known).object_info
    if switches.bypass or switches.mute or switches.enable:
        switched = switch(
            document, bypass=switches.bypass, mute=switches.mute, enable=switches.enable
        )
        document = _report_switches(switched, context)
    if switches.segments is not None:
        shortened = keep_segments(
            document, switches.segments, chain=switches.chain, object_info=object_info
        )
        document = _report_switches(shortened, context)
    return replace(opened, workflow=document, prompt=None)


def _workflow_of(opened: Opened) -> dict[str, Any]:
    if opened.workflow is None:
        raise InvalidInput(
            "a prompt has no parts to switch: muted and bypassed nodes are not part of it",
            hint="Use the original workflow, or an image that contains it.",
        )
    return opened.workflow


def _report_switches(switched: Switched, context: CliContext) -> dict[str, Any]:
    for done in switched.done:
        context.say(done)
    for warning in switched.warnings:
        context.warn(warning)
    return switched.document


CONVERSION = Group("Conversion", sort_key=6)
PROMPT_BYTES_MAX = 64 * 1024 * 1024
# Codes of warnings about nodes that the user switched off deliberately. They are combined in one
# line.
SWITCHED_OFF = ("muted", "bypassed")


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="OUT",
            help="Write to this file instead of stdout. An existing file is only replaced if it is a prompt.",
        ),
    ] = None
    force: Annotated[bool, Parameter(help="Replace any existing file.")] = False


TO_STDOUT = OutputOptions()


@Parameter(name="*", group=CONVERSION)
@dataclass(frozen=True)
class ConversionOptions:
    strict: Annotated[
        bool,
        Parameter(
            help="Fail if node types are missing on the server or required inputs are not connected, and list all of them."
        ),
    ] = False
    unknown: Annotated[
        Literal["drop", "keep"],
        Parameter(
            help="Without --strict, leave out nodes of unknown types, or send them unchanged, like the editor.",
        ),
    ] = "drop"
    reachable_only: Annotated[
        bool,
        Parameter(help="Leave out nodes that no output node needs."),
    ] = False
    seed_rng: Annotated[
        int | None,
        Parameter(metavar="N", help="Seed for random choices such as {a|b} in texts."),
    ] = None


CONVERSION_DEFAULTS = ConversionOptions()


def convert(
    file: Annotated[str, Parameter(help=FILE_HELP, allow_leading_hyphen=True)],
    /,
    *,
    into: OutputOptions = TO_STDOUT,
    node_types: NodeTypeOptions = NO_NODE_TYPES,
    settings: SettingOptions = NO_SETTINGS,
    switches: SwitchOptions = NO_SWITCHES,
    conversion: ConversionOptions = CONVERSION_DEFAULTS,
    context: InjectedContext,
) -> None:
    """See help_texts.CONVERT."""
    opened = open_file(file, context.stdin)
    for note in opened.notes:
        context.warn(note)
    output = _checked_output(into, file)
    # Files and servers that were specified must exist, even if they aren't needed.
    needs_types = bool(opened.workflow or settings or node_types.object_info)
    known = find_types(node_types, opened, context) if needs_types else None
    if switches:
        opened = apply_switches(opened, known, switches, context)
    _write(make_prompt(opened, known, settings, conversion, context).prompt, output, context)


def make_prompt(
    opened: Opened,
    known: KnownTypes | None,
    settings: SettingOptions,
    conversion: ConversionOptions,
    context: CliContext,
) -> Conversion:
    """Converts the workflow, sets the values, and prints the warnings."""
    converted = _converted(opened, known, conversion, context)
    prompt = apply_settings(converted, known, settings, context)
    _tell(_still_true(converted, prompt), context)
    return converted._replace(prompt=prompt)


def _converted(
    opened: Opened, known: KnownTypes | None, conversion: ConversionOptions, context: CliContext
) -> Conversion:
    if opened.workflow is None:
        return Conversion(opened.prompt or {}, ())
    if known is None and opened.prompt is not None:
        context.warn("without node types, the prompt that was saved with the workflow is used")
        return Conversion(opened.prompt, ())
    known = require_types(known)
    return convert_with_report(
        opened.workflow,
        known.object_info,
        now=context.now(),
        rng=random.Random(conversion.seed_rng),  # noqa: S311 (it picks words, not keys)
        unknown=conversion.unknown,
        strict=conversion.strict,
        reachable_only=conversion.reachable_only,
        remote_choices=known.remote_choices,
    )


def _still_true(converted: Conversion, prompt: dict[str, Any]) -> list[Warning]:
    """Drops refused_value warnings for inputs that were overridden after the conversion."""
    return [
        warning
        for warning in converted.warnings
        if warning.code != "refused_value"
        or converted.prompt[warning.node_id]["inputs"][warning.input]
        == prompt[warning.node_id]["inputs"].get(warning.input)
    ]


def _tell(warnings: Iterable[Warning], context: CliContext) -> None:
    switched_off = 0
    for warning in warnings:
        if warning.code in SWITCHED_OFF:
            switched_off += 1
        else:
            context.warn(warning.message)
    if switched_off:
        context.say(f"{counted(switched_off, 'node is', 'nodes are')} left out: muted or bypassed")


def print_prompt(prompt: Prompt, context: CliContext) -> None:
    context.stdout.write(_json_of(prompt))
    context.stdout.flush()


def _json_of(prompt: Prompt) -> bytes:
    return json.dumps(prompt, indent=2, ensure_ascii=False).encode() + b"\n"


def _checked_output(into: OutputOptions, source: str) -> Path | None:
    """Checks the output path before the conversion, so that a prompt never replaces a user's
    workflow."""
    output = into.output
    if output is None or str(output) == STANDARD_STREAM:
        return None
    if into.force or not output.is_file():
        return output
    if source != STANDARD_STREAM and output.samefile(source):
        raise _would_replace(output, "it is the input file")
    if not _is_prompt(output):
        raise _would_replace(output, "the existing file isn't a prompt")
    return output


def _is_prompt(path: Path) -> bool:
    try:
        data = read_file(path, bytes_max=PROMPT_BYTES_MAX)
        opened = open_document(data)
    except FleetError:
        return False
    return opened.kind == "json" and opened.prompt is not None and opened.workflow is None


def _would_replace(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is not overwritten: {why}",
        hint="Specify another file with -o, or add --force to replace it.",
    )


def _write(prompt: Prompt, output: Path | None, context: CliContext) -> None:
    if output is None:
        print_prompt(prompt, context)
        return
    write_file(output, _json_of(prompt))
    context.say(f"wrote {counted(len(prompt), 'node', 'nodes')} to {output}")


def inspect(
    file: Annotated[
        str,
        Parameter(help=FILE_HELP, allow_leading_hyphen=True),
    ],
    /,
    *,
    node_types: NodeTypeOptions = NO_NODE_TYPES,
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON.")] = False,
    everything: Annotated[
        bool, Parameter(name="--all", help="Show every value and every row.")
    ] = False,
    context: InjectedContext,
) -> None:
    """See help_texts.INSPECT."""
    opened = open_file(file, context.stdin)
    known = find_types(node_types, opened, context)
    if known is None:
        inspection = inspect_document(opened)
    else:
        inspection = inspect_document(
            opened, known.object_info, remote_choices=known.remote_choices
        )
    for note in inspection.notes:
        context.warn(note)
    if as_json:
        _print_json(inspection, context)
    else:
        _print_tables(file, inspection, everything=everything, context=context)


def _print_json(inspection: Inspection, context: CliContext) -> None:
    context.stdout.write(
        json.dumps(asdict(inspection), indent=2, ensure_ascii=False).encode() + b"\n"
    )
    context.stdout.flush()


def _print_tables(
    name: str, inspection: Inspection, *, everything: bool, context: CliContext
) -> None:
    context.out.print(plain_text(f"{name}: {_summary(inspection)}\n"), soft_wrap=True)
    for section in sections(inspection, everything=everything):
        context.out.print(section, soft_wrap=True)
    # Not wrapped, so that it can be copied from the terminal.
    context.out.print(plain_text(_next_step(name, inspection), "dim"), soft_wrap=True)


def _summary(inspection: Inspection) -> str:
    kind = "" if inspection.file_kind == "json" else f" in {inspection.file_kind.upper()}"
    nodes = counted(inspection.nodes, "node", "nodes")
    return f"a {inspection.form}{kind}; {nodes} to run"


def _next_step(name: str, inspection: Inspection) -> str:
    if inspection.missing is None:
        return "Add --server URL or --object-info FILE to see types, ranges and missing parts."
    settable = next((item.address for item in inspection.takes if item.role and item.address), None)
    change = f" --set {settable}=…" if settable else ""
    return f"Convert it with: comfyfleet convert {name}{change}"
