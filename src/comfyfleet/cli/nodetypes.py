"""Where a command has node types from: a file, or a server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter, validators

from comfyfleet.cli.object_info import HOW_TO_SAVE, read_object_info
from comfyfleet.cli.world import World
from comfyfleet.kernel.errors import FleetError, InvalidInput, ServerUnavailable
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.remote import remote_lists

SERVER_VARIABLE = "COMFYUI_BASE_URL"
OR_A_FILE = "Or save what it knows while it runs, and use --object-info FILE."

GROUP = Group(
    "Node types",
    help="A workflow names node types; what inputs they have only a ComfyUI server knows.",
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
            help="What the server answers at /object_info, saved as JSON or JSON.gz.",
        ),
    ] = None
    server: Annotated[
        str | None,
        Parameter(
            group=GROUP,
            metavar="URL",
            help=f"Address of a running ComfyUI, asked once. By default that in ${SERVER_VARIABLE}.",
        ),
    ] = None


NO_NODE_TYPES = NodeTypeOptions()


@dataclass(frozen=True)
class KnownTypes:
    """Node types, and the lists of choices that a server keeps elsewhere."""

    object_info: Mapping[str, Any]
    remote_choices: Mapping[str, list[Any]]


def find_types(options: NodeTypeOptions, opened: Opened, world: World) -> KnownTypes | None:
    """None if neither a file nor a server is given. A file that is given goes before the environment."""
    if options.object_info is not None:
        return KnownTypes(read_object_info(options.object_info), {})
    url = options.server or world.environ.get(SERVER_VARIABLE)
    if not url:
        return None
    try:
        return types_of_server(url, opened, world)
    except ServerUnavailable as error:
        hint = f"{error.details.get('hint', '')} {OR_A_FILE}".strip()
        raise ServerUnavailable(error.message, **{**error.details, "hint": hint}) from error


def types_of_server(url: str, opened: Opened, world: World) -> KnownTypes:
    object_info = world.servers.object_info(url)
    return KnownTypes(object_info, dict(_remote_choices(url, opened, object_info, world)))


def _remote_choices(
    url: str, opened: Opened, object_info: Mapping[str, Any], world: World
) -> Iterator[tuple[str, list[Any]]]:
    for route, remote in remote_lists(opened, object_info).items():
        # A route is a path on that server; a full address may be anywhere.
        if not route.startswith("/"):
            world.warn(f"the choices at {route} are not fetched: it is not on the server")
            continue
        try:
            yield route, world.servers.choices(url, remote)
        except FleetError as error:
            world.warn(f"the choices at {route} could not be fetched: {error.message}")


def need_types(known: KnownTypes | None) -> KnownTypes:
    if known is None:
        raise InvalidInput(
            "a workflow can't be converted without the node types of a server",
            hint=f"Add --server http://127.0.0.1:8188, or set {SERVER_VARIABLE}, or add "
            f"--object-info FILE. {HOW_TO_SAVE}",
        )
    return known
