"""`comfyfleet engine`: a ComfyUI server without ComfyUI."""

import contextlib
import logging
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from comfyfleet.cli.files import explained
from comfyfleet.cli.world import InWorld, World
from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.kernel.extras import missing_extra

if TYPE_CHECKING:
    from comfyfleet.engine import Engine
    from comfyfleet.engine.node import NodeType

PACKAGES = ("av", "numpy", "PIL")
Port = Annotated[
    int,
    Parameter(
        help="Port to listen on; 0 takes any that is free.",
        validator=validators.Number(gte=0, lte=65535),
    ),
]


def require_engine(hint: str = "") -> None:
    """Raises what to install where the built-in engine can't be imported."""
    missing = next((name for name in PACKAGES if find_spec(name) is None), None)
    if missing is not None:
        error = missing_extra("the built-in engine", missing, "engine")
        raise InvalidInput(error.message, hint=f"{error.details['hint']}{hint}")


def engine(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Port = 8188,
    data: Annotated[
        Path | None,
        Parameter(help="Folder for input, output and temp files. Without it they go on exit."),
    ] = None,
    no_pace: Annotated[
        bool,
        Parameter(
            help="Be as fast as it can. Else a large blur lasts up to 2 s, as on a ComfyUI without "
            "GPU, for trying out clients."
        ),
    ] = False,
    world: InWorld,
) -> None:
    """Serve the built-in CPU engine, which speaks ComfyUI's protocol.

    Any ComfyUI client can use it: it validates, queues, executes and caches prompts as a ComfyUI
    does, for nodes that need no model and no GPU. Ctrl-C (or SIGTERM) stops it in order.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    require_engine()
    _serve(host, port, data, world, pace=not no_pace)


def _serve(host: str, port: int, data: Path | None, world: World, *, pace: bool) -> None:
    # Here, so that help and the other commands do without numpy and its friends.
    from comfyfleet.engine.features import COMFYUI_VERSION
    from comfyfleet.engine.limits import limit_memory, limits_of
    from comfyfleet.engine.nodes import registry
    from comfyfleet.engine.pacing import paced
    from comfyfleet.engine.serve import listen, serve, url_of

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, port))
        root = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-")))
        nodes = paced(registry()) if pace else registry()
        engine = _engine_in(root, nodes)
        limit_memory(limits_of(world.environ))
        kept = "" if data else " (until it stops)"
        world.print_line(
            f"Engine at {url_of(listener)}, as ComfyUI {COMFYUI_VERSION} with "
            f"{len(engine.nodes)} node types\nFiles in {engine.data.root}{kept}"
        )
        serve(engine, listener)
    world.print_line("Stopped")


def _engine_in(folder: Path, nodes: "Mapping[str, NodeType]") -> "Engine":
    from comfyfleet.engine import DataFolder, Engine

    with explained(folder):
        return Engine(DataFolder(folder.resolve()), nodes)
