"""Options that set values of a prompt."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeAlias

from cyclopts import Group, Parameter

from comfyfleet.cli.nodetypes import KnownTypes
from comfyfleet.cli.world import World
from comfyfleet.workflow import Conversion
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting import (
    SHORTHANDS,
    Edit,
    parse_assignment,
    set_shorthands,
    set_values,
)

VALUES = Group("Values", sort_key=3)
USUAL_VALUES = Group(
    "The usual values",
    help="Found by following the graph; what was set is said, and what was not found.",
    sort_key=4,
)
RANDOM = "random"  # as a seed: a new one each time
_HELP = {each.name: each.help for each in SHORTHANDS} | {
    "seed": f"seed of the noise; `{RANDOM}` takes a new one"
}
_ALIASES = {each.name: each.aliases for each in SHORTHANDS}


def shorthand(name: str, *options: str) -> Parameter:
    """Its words are those of the one table of shorthands; `options` where its name is taken."""
    return Parameter(
        name=[f"--{each}" for each in options or (name, *_ALIASES[name])],
        group=USUAL_VALUES,
        metavar="VALUE",
        help=f"{_HELP[name][:1].upper()}{_HELP[name][1:]}.",
        allow_leading_hyphen=True,
    )


@Parameter(name="*")
@dataclass(frozen=True)
class ShorthandOptions:
    """One for each shorthand, under its name."""

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

    def given(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value is not None}


Assignments: TypeAlias = Annotated[
    tuple[str, ...],
    Parameter(
        name="--set",
        group=VALUES,
        metavar="NODE.INPUT=VALUE",
        help="Set a value; NODE is an id, a title, or a class that occurs once; for a subgraph, INPUT is what it shows. Repeatable.",
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
    converted: Conversion, known: KnownTypes | None, settings: SettingOptions, world: World
) -> Prompt:
    """Shorthands first: what is named exactly wins."""
    prompt, exposed = converted.prompt, converted.exposed
    object_info: Mapping[str, Any] = known.object_info if known else {}
    shorthands = settings.usual.given()
    if shorthands.get("seed") == RANDOM:
        shorthands["seed"] = str(world.new_seed())
    if shorthands:
        prompt = _told(set_shorthands(prompt, object_info, shorthands, exposed=exposed), world)
    assignments = [parse_assignment(text) for text in settings.set_]
    if not assignments:
        return prompt
    return _told(set_values(prompt, object_info, assignments, exposed=exposed), world)


def _told(edit: Edit, world: World) -> Prompt:
    """What was set is said, so that a person can see what was understood."""
    for done in edit.done:
        world.say(f"set {done}")
    for warning in edit.warnings:
        world.warn(warning)
    return edit.prompt
