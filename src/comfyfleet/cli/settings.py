"""Options that set values of a prompt."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Group, Parameter

from comfyfleet.cli.nodetypes import KnownTypes
from comfyfleet.cli.world import World
from comfyfleet.workflow.model import Prompt
from comfyfleet.workflow.setting import parse_assignment, set_values

VALUES = Group("Values", sort_key=3)


@Parameter(name="*", group=VALUES)
@dataclass(frozen=True)
class SettingOptions:
    set_: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            metavar="NODE.INPUT=VALUE",
            help="Set a value; NODE is an id, a title, or a class that occurs once. Repeatable.",
            allow_leading_hyphen=True,
        ),
    ] = ()

    def __bool__(self) -> bool:
        return bool(self.set_)


NO_SETTINGS = SettingOptions()


def apply_settings(
    prompt: Prompt, known: KnownTypes | None, settings: SettingOptions, world: World
) -> Prompt:
    """The prompt with values set; what was set is said, so that a person can see what was meant."""
    object_info: Mapping[str, Any] = known.object_info if known else {}
    assignments = [parse_assignment(text) for text in settings.set_]
    if not assignments:
        return prompt
    edit = set_values(prompt, object_info, assignments)
    for done in edit.done:
        world.say(f"set {done}")
    for warning in edit.warnings:
        world.warn(warning)
    return edit.prompt
