"""What switching takes and gives: frozen values."""

from typing import Any, NamedTuple


class Switched(NamedTuple):
    """A new document; what was done, and what a person should know about it, in words."""

    document: dict[str, Any]
    done: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class DeadShell(NamedTuple):
    """An instance that can make nothing, for everything in its definition is switched off."""

    id: str  # as in a prompt: `57`, or `57:3` inside instance 57
    title: str
    definition: str
