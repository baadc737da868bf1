"""`comfyfleet convert`: a workflow as ComfyUI's editor saves it becomes the prompt that ComfyUI runs."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from comfyfleet.cli.files import (
    FILE_HELP,
    STANDARD_STREAM,
    open_file,
    read_file,
    write_file,
)
from comfyfleet.cli.nodetypes import (
    NO_NODE_TYPES,
    KnownTypes,
    NodeTypeOptions,
    find_types,
    need_types,
)
from comfyfleet.cli.settings import NO_SETTINGS, SettingOptions, apply_settings
from comfyfleet.cli.switches import ALL_AS_SAVED, SwitchOptions, apply_switches
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.kernel.errors import FleetError, InvalidInput
from comfyfleet.workflow import Conversion, convert_with_report
from comfyfleet.workflow.media import Opened, open_document
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.report import Warning

CONVERSION = Group("Conversion", sort_key=6)
# The person switched these off and knows it: one line for all of them.
PROMPT_BYTES_MAX = 64 * 1024 * 1024
SWITCHED_OFF = ("muted", "bypassed")


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    output: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"],
            metavar="OUT",
            help="Write to this file instead of stdout. There, only a prompt is replaced.",
        ),
    ] = None
    force: Annotated[bool, Parameter(help="Replace what is in OUT, whatever it is.")] = False


TO_STDOUT = OutputOptions()


@Parameter(name="*", group=CONVERSION)
@dataclass(frozen=True)
class ConversionOptions:
    strict: Annotated[
        bool,
        Parameter(
            help="Fail if the server lacks a node type or nothing feeds an input that a node needs, and list all of these."
        ),
    ] = False
    unknown: Annotated[
        Literal["drop", "keep"],
        Parameter(
            help="Without --strict, nodes of types that the server lacks are left out, or sent as the editor does.",
        ),
    ] = "drop"
    reachable_only: Annotated[
        bool,
        Parameter(help="Leave out nodes that no output node needs."),
    ] = False
    seed_rng: Annotated[
        int | None,
        Parameter(metavar="N", help="Choose among {a|b} in texts the same way each time."),
    ] = None


AS_THE_EDITOR = ConversionOptions()


def convert(
    file: Annotated[str, Parameter(help=FILE_HELP, allow_leading_hyphen=True)],
    /,
    *,
    into: OutputOptions = TO_STDOUT,
    node_types: NodeTypeOptions = NO_NODE_TYPES,
    settings: SettingOptions = NO_SETTINGS,
    switches: SwitchOptions = ALL_AS_SAVED,
    conversion: ConversionOptions = AS_THE_EDITOR,
    world: InWorld,
) -> None:
    """Turn a workflow into the prompt that ComfyUI's own editor would send.

    The prompt goes to stdout as JSON; what there is to say goes to stderr.

    ```
    comfyfleet convert cat.png --server http://127.0.0.1:8188 -o cat.prompt.json
    comfyfleet convert flow.json --object-info object_info.json --set 3.seed=7
    comfyfleet convert flow.json --prompt "a fox" --seed 7 --bypass Upscale
    curl -s https://example.com/flow.json | comfyfleet convert - | jq 'keys'
    ```

    `comfyfleet inspect FILE` shows what can be set.
    """
    opened = open_file(file, world.stdin)
    for note in opened.notes:
        world.warn(note)
    output = _checked_output(into, file)
    # What is named must be there, whether it is needed or not.
    needs_types = bool(opened.workflow or settings or node_types.object_info)
    known = find_types(node_types, opened, world) if needs_types else None
    if switches:
        opened = apply_switches(opened, known, switches, world)
    _write(make_prompt(opened, known, settings, conversion, world).prompt, output, world)


def make_prompt(
    opened: Opened,
    known: KnownTypes | None,
    settings: SettingOptions,
    conversion: ConversionOptions,
    world: World,
) -> Conversion:
    """Converted, with the values set, and told what there is to say about it."""
    converted = _converted(opened, known, conversion, world)
    prompt = apply_settings(converted, known, settings, world)
    _tell(_still_true(converted, prompt), world)
    return converted._replace(prompt=prompt)


def _converted(
    opened: Opened, known: KnownTypes | None, conversion: ConversionOptions, world: World
) -> Conversion:
    if opened.workflow is None:
        return Conversion(opened.prompt or {}, ())
    if known is None and opened.prompt is not None:
        world.warn("without node types the prompt is taken that was saved beside the workflow")
        return Conversion(opened.prompt, ())
    known = need_types(known)
    return convert_with_report(
        opened.workflow,
        known.object_info,
        now=world.now(),
        rng=random.Random(conversion.seed_rng),  # noqa: S311 (it picks words, not keys)
        unknown=conversion.unknown,
        strict=conversion.strict,
        reachable_only=conversion.reachable_only,
        remote_choices=known.remote_choices,
    )


def _still_true(converted: Conversion, prompt: dict[str, Any]) -> list[Warning]:
    """A value that the server would refuse may have been set to another one since."""
    return [
        each
        for each in converted.warnings
        if each.code != "refused_value"
        or converted.prompt[each.node_id]["inputs"][each.input]
        == prompt[each.node_id]["inputs"].get(each.input)
    ]


def _tell(warnings: Iterable[Warning], world: World) -> None:
    switched_off = 0
    for each in warnings:
        if each.code in SWITCHED_OFF:
            switched_off += 1
        else:
            world.warn(each.message)
    if switched_off:
        world.say(f"{counted(switched_off, 'node is', 'nodes are')} left out: muted or bypassed")


def print_prompt(prompt: Prompt, world: World) -> None:
    world.stdout.write(_json_of(prompt))
    world.stdout.flush()


def _json_of(prompt: Prompt) -> bytes:
    return json.dumps(prompt, indent=2, ensure_ascii=False).encode() + b"\n"


def _checked_output(into: OutputOptions, source: str) -> Path | None:
    """Before the work: what a person drew must not be replaced by what was made of it."""
    output = into.output
    if output is None or str(output) == STANDARD_STREAM:
        return None
    if into.force or not output.is_file():
        return output
    if source != STANDARD_STREAM and output.samefile(source):
        raise _would_replace(output, "it is what is converted")
    if not _is_prompt(output):
        raise _would_replace(output, "there is a file of that name, and it is no prompt")
    return output


def _is_prompt(path: Path) -> bool:
    try:
        data = read_file(path, bytes_max=PROMPT_BYTES_MAX)
        found = open_document(data)
    except FleetError:
        return False
    return found.kind == "json" and found.prompt is not None and found.workflow is None


def _would_replace(path: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"{path} is not overwritten: {why}", hint="Name another -o, or add --force to replace it."
    )


def _write(prompt: Prompt, output: Path | None, world: World) -> None:
    if output is None:
        print_prompt(prompt, world)
        return
    write_file(output, _json_of(prompt))
    world.say(f"wrote {counted(len(prompt), 'node', 'nodes')} to {output}")
