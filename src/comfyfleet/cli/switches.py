"""Options that switch parts of a workflow on and off before it is converted."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from cyclopts import Group, Parameter

from comfyfleet.cli.nodetypes import KnownTypes, need_types
from comfyfleet.cli.world import World
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.switching import Switched, keep_segments, switch

PARTS = Group(
    "Parts",
    help="PART is a node's id, a title, or a group; `Extend 6-8` or `Extend *` for several of them; `group:NAME` and the like where it could mean two things. Repeatable.",
    sort_key=5,
)


@Parameter(name="*", group=PARTS)
@dataclass(frozen=True)
class SwitchOptions:
    bypass: Annotated[
        tuple[str, ...],
        Parameter(metavar="PART", help="Let what comes in pass by these nodes."),
    ] = ()
    mute: Annotated[
        tuple[str, ...],
        Parameter(metavar="PART", help="Leave out these nodes; nothing comes out of them."),
    ] = ()
    enable: Annotated[
        tuple[str, ...],
        Parameter(metavar="PART", help="Execute these nodes, whatever the file says."),
    ] = ()
    segments: Annotated[
        int | None,
        Parameter(
            metavar="N",
            help="Of a chain of numbered parts (Extend 1, Extend 2 …) run the first N, whether they are on or off in the file, and close the chain behind them.",
        ),
    ] = None
    chain: Annotated[
        str | None,
        Parameter(metavar="NAME", help="Which chain --segments means, if there are several."),
    ] = None

    def __bool__(self) -> bool:
        return bool(self.bypass or self.mute or self.enable or self.segments is not None)


ALL_AS_SAVED = SwitchOptions()


def apply_switches(
    opened: Opened, known: KnownTypes | None, switches: SwitchOptions, world: World
) -> Opened:
    """The workflow with its parts switched; a prompt that was saved beside it is of no use then."""
    document = _workflow_of(opened)
    object_info = need_types(known).object_info
    if switches.bypass or switches.mute or switches.enable:
        switched = switch(
            document, bypass=switches.bypass, mute=switches.mute, enable=switches.enable
        )
        document = _told(switched, world)
    if switches.segments is not None:
        kept = keep_segments(
            document, switches.segments, chain=switches.chain, object_info=object_info
        )
        document = _told(kept, world)
    return replace(opened, workflow=document, prompt=None)


def _workflow_of(opened: Opened) -> dict[str, Any]:
    if opened.workflow is None:
        raise InvalidInput(
            "a prompt has no parts to switch: what was muted or bypassed is gone from it",
            hint="Use the workflow that it was made of, or a picture that was saved with it.",
        )
    return opened.workflow


def _told(switched: Switched, world: World) -> dict[str, Any]:
    for done in switched.done:
        world.say(done)
    for warning in switched.warnings:
        world.warn(warning)
    return switched.document
