"""What switching takes and gives: frozen values."""

from typing import Any, Literal, NamedTuple


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


class Segment(NamedTuple):
    """One of several parts that repeat. `nodes` are ids as saved, in the order of the file."""

    number: int
    title: str
    nodes: tuple[str, ...]


Kind = Literal["group", "instance", "title"]


class Chain(NamedTuple):
    """Numbered segments, each fed by the one before it or gathered with it.

    `segments` are those that make something, in the order of their numbers. `off` are those that are
    switched off already, or dead shells: they don't count. `graph` is the definition that holds the
    chain, by id; empty for the root graph.
    """

    kind: Kind
    name: str
    segments: tuple[Segment, ...]
    off: tuple[Segment, ...] = ()
    graph: str = ""
