"""What a node type is to the executor, and what a running node may use.

The executor calls `run(context, **inputs)` in a thread, with inputs named as in the prompt
(`images.image0` for a slot of a growing group), values already coerced. Optional inputs that are
not given are left out, and so are those that the node does not declare. A node fails by raising:
our own errors where we know better than numpy what went wrong, but any other may come.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from comfyfleet.kernel.errors import InvalidInput

FolderName = Literal["input", "output", "temp"]


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a node finds and leaves files."""

    input: Path
    output: Path
    temp: Path

    def of(self, name: FolderName) -> Path:
        return {"input": self.input, "output": self.output, "temp": self.temp}[name]

    def locate(self, name: str) -> Path:
        """The path of `x.png`, `sub/x.png` or `x.png [output]`; it need not exist."""
        folder, relative = split_annotation(name)
        return inside(self.of(folder), relative)

    def holds(self, name: str) -> bool:
        """Whether `name` exists in its folder; one that leads out of it does not."""
        try:
            return self.locate(name).exists()
        except (InvalidInput, OSError, ValueError):
            return False


def split_annotation(name: str) -> tuple[FolderName, str]:
    """`x.png [temp]` → (temp, x.png); without an annotation a name means the input folder."""
    folders: tuple[FolderName, ...] = ("output", "input", "temp")
    for folder in folders:
        suffix = f"[{folder}]"
        if name.endswith(suffix):
            # ComfyUI cuts one character more: the space before the bracket.
            return folder, name[: -len(suffix) - 1]
    return "input", name


def inside(base: Path, relative: str) -> Path:
    """`base / relative`, refused when it leaves `base`: names come from strangers.

    Only the text counts: a link that the owner of the machine has put into `base` is followed.
    """
    path = Path(os.path.abspath(base / relative))
    if not path.is_relative_to(os.path.abspath(base)):
        raise InvalidInput(f"{relative!r} lies outside its folder", name=relative)
    return path


class Context(Protocol):
    """What a running node may use: nothing else reaches it but its inputs."""

    @property
    def folders(self) -> Folders: ...
    @property
    def prompt(self) -> Mapping[str, Any]:
        """The whole prompt, to be written into saved files (ComfyUI's hidden PROMPT)."""

    @property
    def extra_pnginfo(self) -> Mapping[str, Any] | None:
        """What the client wants kept in saved files, e.g. the workflow (hidden EXTRA_PNGINFO)."""

    @property
    def node_id(self) -> str: ...
    @property
    def random(self) -> Random:
        """For the random letters of temporary file names."""

    @property
    def memory(self) -> MutableMapping[str, Any]:
        """What a node remembers while prompts follow each other that all have a node of this id
        and type: ComfyUI keeps its node objects that long, and PreviewImage its letters."""

    def now(self) -> datetime:
        """Local time, for the date parts of file names."""

    def progress(self, done: float, total: float, preview: bytes | None = None) -> None:
        """Tell how far the node is, with an encoded JPEG; raises Interrupted when cancelled."""

    def show_text(self, text: str) -> None:
        """Put a line on the node while it runs (a binary frame of type 3)."""

    def pause(self, seconds: float) -> None:
        """Wait; raises Interrupted as soon as the run is cancelled."""


@dataclass(frozen=True, slots=True)
class Result:
    """One value for each output, and what history shows for this node."""

    outputs: tuple[Any, ...] = ()
    ui: Mapping[str, Any] | None = None


Run = Callable[..., Result]
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class NodeType:
    """A node type: its `/object_info` entry and what it does."""

    name: str
    info: Mapping[str, Any]
    run: Run
    # ComfyUI's VALIDATE_INPUTS: a message, or None when fine. The inputs in `validated` are
    # judged by it alone: no list or range check, and the error is told for each of them.
    # A value of a wrong type may make it raise, as there.
    validate: Callable[[Folders, Inputs], str | None] | None = None
    validated: tuple[str, ...] = ()
    # ComfyUI's IS_CHANGED: part of the cache key (constants only, linked inputs are left out).
    # It raises when the file can't be read: then nothing is cached.
    fingerprint: Callable[[Folders, Inputs], Any] | None = None
    # ComfyUI's check_lazy_status: names of the lazy inputs still wanted, given the known ones.
    needed: Callable[[Inputs], Sequence[str]] | None = None
    # Inputs whose choices are files; `info` has them empty.
    choices: Mapping[str, Callable[[Folders], list[str]]] = field(default_factory=dict)

    @property
    def is_output(self) -> bool:
        return bool(self.info["output_node"])

    def describe(self, folders: Folders) -> dict[str, Any]:
        """The `/object_info` entry with its file lists as they are now."""
        required = dict(self.info["input"]["required"])
        for name, find in self.choices.items():
            required[name] = _with_choices(required[name], find(folders))
        return {**self.info, "input": {**self.info["input"], "required": required}}


def _with_choices(declared: Sequence[Any], choices: list[str]) -> list[Any]:
    kind, options = declared
    if kind == "COMBO":
        return [kind, {**options, "options": choices}]
    return [choices, options]
