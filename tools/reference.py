"""Writes what can be read off the code: docs/reference, what the built-in engine can do, and the types of web/.

`make docs` runs it; a test checks for drift (in a process of its own: the commands' help looks at how
Python was started).
"""

import asyncio
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from cyclopts import App, Parameter
from web_types import typescript

from comfyfleet import client, errors, workflow
from comfyfleet.cli.main import app as commands
from comfyfleet.clock import utc_now
from comfyfleet.engine.node import Folders
from comfyfleet.engine.nodes import registry
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.catalog.service import ENGINE_FILE
from comfyfleet.server.http.app import create_app
from comfyfleet.server.http.errors import STATUS_OF
from comfyfleet.settings import (
    COMFYUI_VARIABLES,
    KNOWN_BEFORE,
    OTHER_VARIABLES,
    Settings,
    remarks,
    variable_of,
)

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
WEB_TYPES = ROOT / "web" / "src" / "api" / "schema.ts"
MADE = "<!-- Made by `make docs` from {source}: change it there. -->\n"


def pages() -> dict[Path, str]:
    """Files and their whole text."""
    document = asyncio.run(_openapi())
    return {
        FOLDER / "settings.md": settings_page(),
        FOLDER / "errors.md": errors_page(),
        FOLDER / "api.md": api_page(document),
        WEB_TYPES: typescript(document),
        FOLDER / "python.md": python_page(),
        FOLDER / "commands.md": commands_page(),
        ENGINE_FILE: engine_object_info(),
    }


def engine_object_info() -> str:
    """What the built-in engine's nodes tell of themselves, for who does not want to import them."""
    # Folders without files: what lies in an engine's folders is no part of what it can do.
    nowhere = Path("/nonexistent")
    folders = Folders(nowhere, nowhere, nowhere)
    told = {name: kind.describe(folders) for name, kind in registry().items()}
    return json.dumps(told, indent=1) + "\n"


def settings_page() -> str:
    rows = [
        f"| `{variable_of(each.name)}` | {_default(each.default)} | {_remark(each.name)} |"
        for each in fields(Settings)
        if not each.name.startswith(KNOWN_BEFORE)
    ]
    return "\n".join(
        [
            "# Settings",
            "",
            MADE.format(source="settings.py"),
            "All settings are environment variables. A command-line option takes precedence over its variable.",
            "AWS credentials come from the usual sources (`AWS_…`, a profile, or a role).",
            "",
            "## Control plane",
            "",
            "`comfyfleet serve`, `up` and `db` read these variables. Units are in the names.",
            "",
            "| variable | default | what it is |",
            "|---|---|---|",
            *rows,
            "",
            "## ComfyUI",
            "",
            "An invalid value is reported when the command starts.",
            "",
            *_variable_table(COMFYUI_VARIABLES),
            "",
            "## Workers, commands and proxies",
            "",
            *_variable_table(OTHER_VARIABLES),
            "",
        ]
    )


def _variable_table(variables: tuple[tuple[str, ...], ...]) -> list[str]:
    return [
        "| variable | default | what it is | read by |",
        "|---|---|---|---|",
        *(f"| `{name}` | {' | '.join(cells)} |" for name, *cells in variables),
    ]


def _remark(name: str) -> str:
    if name not in remarks():
        raise SystemExit(f"settings.py says nothing about {name}")
    return remarks()[name].replace("|", "\\|")


def _default(value: Any) -> str:
    if value == "":
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def errors_page() -> str:
    """The tree at the top of the module, as a table."""
    lines = [
        "# Error codes",
        "",
        MADE.format(source="errors.py"),
        'Every error of the API is `{"error": {"code", "message", "details"}}`. The code is stable;',
        "`details.hint`, where there is one, says what to do. 429 and 503 carry `Retry-After`.",
        "Errors without a status come from commands and backends only.",
        "",
        "| code | status | means |",
        "|---|---|---|",
        "| `internal` | 500 | something went wrong on our side; the error is logged under `request_id` |",
    ]
    for name, meaning in re.findall(r"[├└]─ (\w+) +(.+)", errors.__doc__ or ""):
        kind = getattr(errors, name)
        lines.append(f"| `{kind.code}` | {_status(kind)} | {meaning} |")
    return "\n".join([*lines, ""])


def _status(kind: type[errors.FleetError]) -> str:
    return next((str(STATUS_OF[each]) for each in kind.__mro__ if each in STATUS_OF), "")


def python_page() -> str:
    lines = [
        "# Python API",
        "",
        MADE.format(source="the modules' `__all__`"),
        "Three modules are public: their names below, with parameters, fields and what they raise. They change only with a",
        "minor version (0.1 to 0.2) before 1.0, with a major one after it, and the [changelog](../../CHANGELOG.md) says how. New names,",
        "optional parameters and fields of answers may come with any version. Everything else in the package is internal and may",
        "change without notice.",
    ]
    for module in (workflow, client, errors):
        lines += ["", f"## `{module.__name__}`", ""]
        if module is errors:
            lines += ["What each means, and its code: [error codes](errors.md).", ""]
            lines += [", ".join(f"`{name}`" for name in module.__all__) + "."]
        else:
            lines += [_first_paragraph(module), "", "| name | what it is |", "|---|---|"]
            lines += [
                f"| `{name}` | {_first_paragraph(getattr(module, name))} |"
                for name in module.__all__
            ]
    return "\n".join([*lines, ""])


def _first_paragraph(value: Any) -> str:
    """Of its own docstring: not of the class that it inherits from, nor of the one that Python makes."""
    if isinstance(value, str):
        return f"`{value}`"
    told = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    text = inspect.cleandoc(told or "")
    is_made = text.startswith(f"{value.__name__}(")
    return "" if is_made else " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def api_page(document: dict[str, Any]) -> str:
    lines = [
        "# HTTP API",
        "",
        MADE.format(source="the endpoints themselves"),
        "A running control plane describes it in full at `/docs` and `/openapi.json`.",
        "",
        "| | path | what it does |",
        "|---|---|---|",
        *_endpoints(document),
    ]
    return "\n".join([*lines, ""])


def _endpoints(document: dict[str, Any]) -> Iterator[str]:
    for path, methods in sorted(document["paths"].items()):
        for method, endpoint in methods.items():
            told = endpoint.get("description") or endpoint.get("summary", "")
            first = told.strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
            yield f"| {method.upper()} | `{path}` | {first} |"


async def _openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with open_control_plane(Settings(admin_key="none"), Path(folder), utc_now) as plane:
            return create_app(plane).openapi()


def commands_page() -> str:
    _inherit_defaults(commands)
    text = commands.generate_docs(heading_level=2)
    return "\n".join(
        ["# Commands", "", MADE.format(source="the commands' own help"), text.strip(), ""]
    )


def _inherit_defaults(group: App) -> None:
    """Gives nested commands the defaults of the whole program, which has no `--no-…` and `--empty-…` options.

    Parsing and `--help` do that by themselves. `generate_docs` does it for the outermost commands only.
    """
    for name in group:
        command = group[name]
        command.default_parameter = Parameter.combine(
            group.default_parameter, command.default_parameter
        )
        _inherit_defaults(command)


def drifted() -> list[str]:
    """Names of files that are not as the code would have them."""
    return [
        file.name
        for file, text in pages().items()
        if not file.exists() or file.read_text(encoding="utf-8") != text
    ]


def main() -> None:
    if "--check" in sys.argv:
        sys.exit(" ".join(drifted()) or 0)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{file.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
