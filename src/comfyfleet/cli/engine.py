"""`comfyfleet engine`: a ComfyUI server without ComfyUI."""

import contextlib
import logging
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.kernel.errors import FleetError

NEEDS = "The engine needs packages that are not installed: pip install 'comfyfleet[engine]'"


def engine(
    *,
    host: Annotated[str, Parameter(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="Port to listen on; 0 takes any that is free.")] = 8188,
    data: Annotated[
        Path | None,
        Parameter(help="Folder for input, output and temp files. Without it they go on exit."),
    ] = None,
    pace: Annotated[
        bool,
        Parameter(
            help="Let a large blur last up to 2 s, as on a ComfyUI without GPU, for trying out clients."
        ),
    ] = True,
) -> None:
    """Serve the built-in CPU engine, which speaks ComfyUI's protocol.

    Any ComfyUI client can use it: it validates, queues, executes and caches prompts as a ComfyUI
    does, for nodes that need no model and no GPU. Ctrl-C (or SIGTERM) stops it in order.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        _serve(host, port, data, pace=pace)
    except FleetError as error:
        raise SystemExit(error.message) from error
    except ModuleNotFoundError as error:
        raise SystemExit(f"{NEEDS} ({error.name} is missing)") from error


def _serve(host: str, port: int, data: Path | None, *, pace: bool) -> None:
    # Here, so that help and the other commands do without numpy and its friends.
    from comfyfleet.engine import DataFolder, Engine
    from comfyfleet.engine.features import COMFYUI_VERSION
    from comfyfleet.engine.nodes import registry
    from comfyfleet.engine.pacing import paced
    from comfyfleet.engine.serve import listen, serve, url_of

    with contextlib.ExitStack() as stack:
        root = data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comfyfleet-")))
        nodes = paced(registry()) if pace else registry()
        engine = Engine(DataFolder(root.resolve()), nodes)
        listener = stack.enter_context(listen(host, port))
        kept = "" if data else " (until it stops)"
        _say(
            f"Engine at {url_of(listener)}, as ComfyUI {COMFYUI_VERSION} with "
            f"{len(engine.nodes)} node types\nFiles in {engine.data.root}{kept}"
        )
        serve(engine, listener)
    _say("Stopped")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
