"""Entry point: one file per command group, errors of ours become one line and exit code 1."""

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter

from comfyfleet import __version__
from comfyfleet.cli import helps
from comfyfleet.cli.convert import convert
from comfyfleet.cli.engine import engine
from comfyfleet.cli.inspect import inspect
from comfyfleet.cli.world import World, real_world
from comfyfleet.kernel.errors import FleetError

FINE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130


def _default_in_help(value: object) -> str | None:
    """That a switch is off, or nothing is given, goes without saying."""
    return None if value is None or value is False or value == () else str(value)


app = App(
    name="comfyfleet",
    help="Run ComfyUI as a production service: any saved workflow, any number of GPUs, one durable queue.",
    version=__version__,
    help_format="markdown",
    default_parameter=Parameter(negative=(), show_default=_default_in_help),
)
# By name: what they import (httpx, websockets) takes longer than a conversion.
app.command("comfyfleet.cli.run:run", help=helps.RUN)
app.command("comfyfleet.cli.watch:watch", help=helps.WATCH)
app.command("comfyfleet.cli.up:up", help=helps.UP)
app.command("comfyfleet.cli.serve:serve", help=helps.SERVE)
app.command("comfyfleet.cli.worker:worker", help=helps.WORKER)
app.command("comfyfleet.cli.db:app", name="db", help=helps.DB)
app.command("comfyfleet.cli.admin:app", name="admin", help=helps.ADMIN)
app.command("comfyfleet.cli.graph:app", name="graph", help=helps.GRAPH)
app.command("comfyfleet.cli.pipeline:app", name="pipeline", help=helps.PIPELINE)
app.command(convert)
app.command(inspect)
app.command(engine)


def main() -> None:
    sys.exit(run(sys.argv[1:], real_world()))


def run(arguments: Sequence[str], world: World) -> int:
    """The exit code of one command. The only place that catches our errors."""
    try:
        command, bound, asked_for = app.parse_args(
            arguments,
            console=world.out,
            error_console=world.err,
            exit_on_error=False,
            print_error=False,
        )
        command(*bound.args, **bound.kwargs, **({"world": world} if "world" in asked_for else {}))
    except CycloptsError as error:
        world.fail(
            str(error),
            " ".join(("comfyfleet", *(error.command_chain or ()), "--help shows what there is")),
        )
        return WRONG_USAGE
    except FleetError as error:
        world.fail(error.message, error.details.get("hint"))
        return FAILED
    except BrokenPipeError:
        return _reader_is_gone()
    except KeyboardInterrupt:
        return INTERRUPTED
    return FINE


def _reader_is_gone() -> int:
    """`comfyfleet … | head`: nothing can be written any more, not even when Python shuts down."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
