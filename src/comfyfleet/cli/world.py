"""What a command may touch of the world outside: streams, clock, environment, servers."""

import logging
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, BinaryIO, TypeAlias

from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from comfyfleet.cli.servers import Servers


@dataclass(frozen=True)
class World:
    """Results go to `stdout`, so that they can be piped; everything said to people goes to `err`."""

    stdin: BinaryIO
    stdout: BinaryIO
    out: Console
    err: Console
    environ: Mapping[str, str]
    now: Callable[[], datetime]
    servers: Servers = field(default_factory=Servers)
    clock: Callable[[], float] = time.monotonic
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    # No larger than the smallest maximum that seeds of nodes have.
    new_seed: Callable[[], int] = lambda: secrets.randbelow(2**32)

    def say(self, text: str) -> None:
        self._line("", text)

    def print_line(self, text: str) -> None:
        """A result: to stdout, at once."""
        self.stdout.write(f"{text}\n".encode())
        self.stdout.flush()

    def warn(self, text: str) -> None:
        self._line("warning: ", text, "yellow")

    def fail(self, text: str, hint: str | None = None) -> None:
        self._line("error: ", text, "bold red")
        if hint:
            self._line("hint: ", hint, "cyan")

    def _line(self, label: str, text: str, style: str = "") -> None:
        # Log lines that wait to be written together were said before.
        for handler in logging.getLogger().handlers:
            handler.flush()
        # One line each, however long: other programs read them, and terminals wrap by themselves.
        self.err.print(Text.assemble((label, style), printable(text)), soft_wrap=True)


# A command asks for it as its last argument; it is no option.
InWorld: TypeAlias = Annotated[World, Parameter(parse=False)]


def real_world() -> World:
    return World(
        stdin=sys.stdin.buffer,
        stdout=sys.stdout.buffer,
        out=Console(),
        err=Console(stderr=True),
        environ=os.environ,
        # The editor writes dates in local time, and so the file names of a person's runs.
        now=lambda: datetime.now().astimezone(),
    )


def printable(text: str) -> str:
    """Titles come from files of others: what would move the cursor is shown as a question mark."""
    return "".join(
        character if character.isprintable() or character == "\n" else "?" for character in text
    )


def counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"
