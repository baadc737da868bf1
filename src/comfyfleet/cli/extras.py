"""Commands that require an extra. They are registered with names in this module, such as
`comfyfleet.cli.extras:serve`. If the extra is missing, a placeholder command explains what to
install. Help, completion and all other commands work without the extra."""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

from cyclopts import Parameter

from comfyfleet.errors import install_line, missing_extra

# The module of each command, and the extras it requires.
COMMANDS = {
    "serve": ("comfyfleet.cli.serve", "server"),
    "db_app": ("comfyfleet.cli.serve", "server"),
    "worker": ("comfyfleet.cli.worker", "worker"),
    "up": ("comfyfleet.cli.up", "server,worker,engine"),
    "open_pages": ("comfyfleet.cli.up", "server,worker,engine"),
}


def __getattr__(name: str) -> Any:
    if name not in COMMANDS:
        raise AttributeError(name)
    module, extras = COMMANDS[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("comfyfleet"):
            raise
        return _refusal(name, error.name, extras)


def _is_without_engine(argument: str) -> bool:
    """Checks whether this option makes `up` start without the built-in engine."""
    return argument.partition("=")[0] in ("--backend", "--no-worker")


def _refusal(name: str, package: str, extras: str) -> Callable[..., None]:
    command = f"comfyfleet {name.removesuffix('_app').removesuffix('_pages')}"
    help_text = (
        f"Not shown, because they require {package}, which is not installed. {install_line(extras)}"
    )
    options = Parameter(name="OPTIONS", allow_leading_hyphen=True, help=help_text)

    def refuse(*arguments: Annotated[str, options]) -> None:
        needs_engine = name == "up" and not any(map(_is_without_engine, arguments))
        raise missing_extra(
            command, package, extras if needs_engine or name != "up" else "server,worker"
        )

    return refuse
