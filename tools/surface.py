"""Writes tests/tidy/surface.txt, which lists every interface that other programs depend on.

The file has one line for each field of a route or worker message, each command with its options,
each exported name with its parameters, and each error code. It contains no prose. A test compares
it with the code, so that no interface changes by accident. After an intentional change, run
`python tools/surface.py`.
"""

import asyncio
import inspect
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from comfyfleet import client, errors, workflow
from comfyfleet.cli.main import app as commands
from comfyfleet.clock import utc_now
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.http.app import create_app
from comfyfleet.settings import Settings

FILE = Path(__file__).parents[1] / "tests" / "tidy" / "surface.txt"
WORDING = {"description", "summary", "title", "examples", "example", "tags", "info"}
NAMED = {"properties", "paths", "schemas"}  # objects whose keys are our own names


def surface() -> str:
    lines = [*_http(), *_commands(), *_members(workflow), *_members(client), *_errors()]
    return "\n".join(sorted(set(lines))) + "\n"


def _http() -> Iterator[str]:
    return _flat("http", asyncio.run(_openapi()), is_named=False)


async def _openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with open_control_plane(Settings(admin_key="none"), Path(folder), utc_now) as plane:
            return create_app(plane).openapi()


def _flat(place: str, value: Any, *, is_named: bool) -> Iterator[str]:
    """Yields one line for each value. Lists of strings are sorted, so that their order is stable."""
    if isinstance(value, Mapping):
        for name, below in value.items():
            if is_named or name not in WORDING:
                yield from _flat(f"{place} {name}", below, is_named=name in NAMED and not is_named)
        if not value:
            yield place
    elif isinstance(value, list) and all(isinstance(item, str) for item in value):
        yield f"{place} = {', '.join(sorted(value))}"
    elif isinstance(value, list):
        for number, below in enumerate(value):
            yield from _flat(f"{place} {number}", below, is_named=False)
    else:
        yield f"{place} = {value}"


def _commands() -> Iterator[str]:
    """Yields each command with the names of its parameters, as listed in its help."""
    command = ""
    for line in str(commands.generate_docs(heading_level=2)).splitlines():
        if line.startswith("#"):
            command = line.lstrip("# ")
            if command.startswith("comfyfleet"):
                yield f"command {command}"
        elif line.startswith("* ") and command.startswith("comfyfleet"):
            yield f"command {command} {' '.join(re.findall(r'`([^`]+)`', line.split(':')[0]))}"


def _members(module: ModuleType) -> Iterator[str]:
    for name in sorted(set(getattr(module, "__all__", None) or _public(vars(module)))):
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        place = f"python {module.__name__}.{name}"
        yield f"{place}{_parameters(value)}"
        if inspect.isclass(value):
            for part in _public(vars(value)):
                yield f"{place}.{part}{_parameters(getattr(value, part))}"


def _public(names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if not name.startswith("_") and name != "model_config"]


def _parameters(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(map(_parameter, parameters))})"


def _parameter(parameter: inspect.Parameter) -> str:
    """Returns a parameter. A default that isn't a plain value is replaced by `...`."""
    is_plain = isinstance(parameter.default, str | int | float | tuple | None)
    default = parameter.default if is_plain or parameter.default is parameter.empty else ...
    return str(parameter.replace(annotation=parameter.empty, default=default))


def _errors() -> Iterator[str]:
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception):
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            yield f"error {name}({bases}) {getattr(kind, 'code', '')}"


def main() -> None:
    if "--check" in sys.argv:
        is_same = FILE.exists() and FILE.read_text(encoding="utf-8") == surface()
        sys.exit(
            0
            if is_same
            else "surface.txt is out of date: run `python tools/surface.py` and review the diff"
        )
    FILE.write_text(surface(), encoding="utf-8")


if __name__ == "__main__":
    main()
