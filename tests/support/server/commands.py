"""Runs `comfyfleet` in this process with its own environment."""

import io
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from comfyfleet.cli.context import CliContext, ServerCache
from comfyfleet.cli.main import run

EXAMPLES = Path(__file__).parents[3] / "examples"
OBJECT_INFO = str(EXAMPLES / "object_info.json")
NEGATIVE = str(EXAMPLES / "workflows" / "negative.json")
SOFTEN = str(EXAMPLES / "workflows" / "soften.json")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


def comfyfleet(
    *arguments: str,
    stdin: bytes = b"",
    environ: dict[str, str] | None = None,
    servers: ServerCache | None = None,
    width: int = 80,
    terminal: bool = False,
) -> Result:
    stdout = io.BytesIO()
    printed, err = io.StringIO(), io.StringIO()
    context = CliContext(
        stdin=io.BytesIO(stdin),
        stdout=stdout,
        out=Console(file=printed, width=width, force_terminal=terminal, color_system=None),
        err=Console(file=err, width=width),
        environ=environ or {},
        now=lambda: NOW,
        servers=servers or ServerCache(),
    )
    code = run(arguments, context)
    return Result(code, stdout.getvalue().decode() + printed.getvalue(), err.getvalue())


@dataclass(frozen=True)
class Admin:
    """Runs `comfyfleet admin` with this control plane and key."""

    url: str
    key: str

    def __call__(self, *arguments: str) -> Result:
        environ = {"COMFYFLEET_URL": self.url, "COMFYFLEET_KEY": self.key}
        return comfyfleet("admin", *arguments, environ=environ, width=250)
