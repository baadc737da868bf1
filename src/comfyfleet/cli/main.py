"""The entry point. There is one file per command group. Known errors become a single line and exit
code 1."""

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal
from uuid import UUID

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    Group,
    Parameter,
    UnknownOptionError,
)

from comfyfleet import __version__
from comfyfleet.cli import help_texts
from comfyfleet.cli.context import CliContext, InjectedContext, process_context
from comfyfleet.errors import FleetError, InvalidInput, PersonNeeded, WorkerRevoked

FINE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
PERSON_NEEDED = 3  # exit code of a wait that can't succeed without a person
REVOKED = 77  # exit code of a worker that an operator revoked; restarting it is useless


def _default_in_help(value: object) -> str | None:
    """Returns the default for the help. Leaves out disabled switches and empty values."""
    return None if value is None or value is False or value == () else str(value)


# In order of importance for new users.
CORE = Group("Core commands", sort_key=1)
MORE = Group("More on one machine", sort_key=2)
PRODUCTION = Group("In production", sort_key=3)
EFFECTS = Group("Effects and jobs", sort_key=4)
COMPOSED = Group("Graphs and pipelines", sort_key=5)
ABOUT = Group("About", sort_key=6)

app = App(
    name="comfyfleet",
    help="Run ComfyUI as a production service: any saved workflow, any number of GPUs, one durable queue.",
    version=__version__,
    version_flags=("--version", "-V"),
    help_format="markdown",
    version_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=_default_in_help),
)
app["--help"].group = app["--version"].group = (ABOUT,)
# Commands are registered by name and imported when they run, because the imports take longer than a
# conversion.
app.command("comfyfleet.cli.run:run", help=help_texts.RUN, group=CORE, sort_key=1)
app.command("comfyfleet.cli.workflow:inspect", help=help_texts.INSPECT, group=CORE, sort_key=2)
app.command("comfyfleet.cli.workflow:convert", help=help_texts.CONVERT, group=CORE, sort_key=3)
app.command("comfyfleet.cli.extras:up", help=help_texts.UP, group=CORE, sort_key=4)
app.command(
    "comfyfleet.cli.extras:open_pages", name="open", help=help_texts.OPEN, group=CORE, sort_key=5
)
app.command("comfyfleet.cli.run:watch", help=help_texts.WATCH, group=MORE, sort_key=1)
app.command("comfyfleet.cli.engine:engine", help=help_texts.ENGINE, group=MORE, sort_key=2)
app.command("comfyfleet.cli.extras:serve", help=help_texts.SERVE, group=PRODUCTION, sort_key=1)
app.command("comfyfleet.cli.extras:worker", help=help_texts.WORKER, group=PRODUCTION, sort_key=2)
app.command(
    "comfyfleet.cli.admin:app", name="admin", help=help_texts.ADMIN, group=PRODUCTION, sort_key=3
)
app.command(
    "comfyfleet.cli.extras:db_app", name="db", help=help_texts.DB, group=PRODUCTION, sort_key=4
)
app.command(
    "comfyfleet.cli.effects:app", name="effects", help=help_texts.EFFECTS, group=EFFECTS, sort_key=1
)
app.command(
    "comfyfleet.cli.effects:jobs_app", name="jobs", help=help_texts.JOBS, group=EFFECTS, sort_key=2
)
app.command(
    "comfyfleet.cli.effects:wallet",
    name="wallet",
    help=help_texts.WALLET,
    group=EFFECTS,
    sort_key=3,
)
app.command("comfyfleet.cli.graph:app", name="graph", help=help_texts.GRAPH, group=COMPOSED)
app.command(
    "comfyfleet.cli.pipeline:app", name="pipeline", help=help_texts.PIPELINE, group=COMPOSED
)
app.command(
    "comfyfleet.cli.upload:upload_command", name="upload", help=help_texts.UPLOAD, group=COMPOSED
)
app.command(
    "comfyfleet.cli.triggers:app", name="triggers", help=help_texts.TRIGGERS, group=COMPOSED
)
app.command(
    "comfyfleet.cli.webhooks:app", name="webhooks", help=help_texts.WEBHOOKS, group=COMPOSED
)


@app.command(name="help", group=ABOUT, sort_key=1)
def show_help(
    *command: Annotated[str, Parameter(help="A command, such as: admin workflows register.")],
    context: InjectedContext,
) -> None:
    """Show the help of a command, like its --help option."""
    unknown = app.parse_commands(command)[2]
    if unknown:
        raise InvalidInput(
            f"unknown command: {' '.join(command)}",
            hint="List all commands with: comfyfleet help",
        )
    app.help_print(command, console=context.out)


@app.command(group=ABOUT, sort_key=2)
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Your shell.")],
    /,
    *,
    install: Annotated[
        bool, Parameter(help="Install the script where the shell finds it, instead of printing it.")
    ] = False,
    context: InjectedContext,
) -> None:
    """Print the shell completion script.

    ```
    comfyfleet completion bash > ~/.local/share/bash-completion/completions/comfyfleet
    comfyfleet completion zsh > "${fpath[1]}/_comfyfleet"
    comfyfleet completion fish > ~/.config/fish/completions/comfyfleet.fish
    source <(comfyfleet completion bash)     # for this shell only
    ```
    """
    if install:
        context.say(
            f"wrote {app.install_completion(shell=shell)}; it takes effect in the next {shell}"
        )
    else:
        context.print_line(app.generate_completion(shell=shell))


def main() -> None:
    sys.exit(run(sys.argv[1:], process_context()))


# The command that lists the ids used by a group's commands.
ID_LISTS = {"graph": "graph runs"}
# Common names of the option for ComfyUI's address, and the actual option of each command.
ADDRESS_OPTIONS = frozenset({"--url", "--host", "--address", "--base-url", "--comfyui-url"})
ADDRESS_OPTION_OF = {
    "convert": "--server",
    "inspect": "--server",
    "run": "--server",
    "up": "--backend",
    "worker": "--backend",
}


def _usage_problem(error: CycloptsError) -> tuple[str, str]:
    """Returns the message for a usage error, and a hint."""
    chain = tuple(error.command_chain or ())
    listing = ID_LISTS.get(chain[0]) if chain else None
    if isinstance(error, CoercionError) and error.target_type is UUID and listing and error.token:
        message = f"{error.token.value!r:.80} is not an id"
        return message, f"List the ids with: comfyfleet {listing}"
    return _usage_message(error, chain), " ".join(
        ("comfyfleet", *chain, "--help lists the options")
    )


def _usage_message(error: CycloptsError, chain: Sequence[str]) -> str:
    ours = ADDRESS_OPTION_OF.get(chain[0]) if chain else None
    if isinstance(error, UnknownOptionError) and ours:
        option = error.token.keyword or error.token.value
        if option in ADDRESS_OPTIONS:
            return f"Unknown option: {option}. Did you mean {ours}?"
    return str(error)


def run(arguments: Sequence[str], context: CliContext) -> int:
    """Runs a command and returns its exit code. Only this function catches the application's
    errors."""
    try:
        command, bound, asked_for = app.parse_args(
            arguments,
            console=context.out,
            error_console=context.err,
            exit_on_error=False,
            print_error=False,
        )
        command(
            *bound.args, **bound.kwargs, **({"context": context} if "context" in asked_for else {})
        )
    except CycloptsError as error:
        context.fail(*_usage_problem(error))
        return WRONG_USAGE
    except FleetError as error:
        context.fail(error.message, error.details.get("hint"))
        return _exit_code(error)
    except BrokenPipeError:
        return _reader_is_gone()
    except KeyboardInterrupt:
        return INTERRUPTED
    return FINE


def _exit_code(error: FleetError) -> int:
    if isinstance(error, WorkerRevoked):
        return REVOKED
    return PERSON_NEEDED if isinstance(error, PersonNeeded) else FAILED


def _reader_is_gone() -> int:
    """Handles a closed pipe, as in `comfyfleet … | head`. Discards the remaining output, because
    Python's flush at shutdown would otherwise fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED
