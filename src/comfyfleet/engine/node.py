"""Node types as the executor uses them, the context of a running node (including memory limits),
and a compact notation for node interfaces, which is converted to `/object_info` entries.

The executor calls `run(context, **inputs)` in a thread. Inputs are named as in the prompt
(`images.image0` for a slot of a growing group), and their values are already coerced. Optional
inputs without a value are omitted, and so are inputs that the node doesn't declare. A node fails by
raising an exception. It raises one of our own errors if it can describe the problem better than
numpy, but any other exception may occur.

ComfyUI has two generations of nodes, and clients can see small differences between their entries.
`classic` nodes write choices as a bare list and omit fields that aren't set. Later nodes don't.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol

from comfyfleet.errors import InvalidInput, LimitExceeded
from comfyfleet.media import PIXELS_MAX, Size, require_pixels

FolderName = Literal["input", "output", "temp"]


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders in which nodes read and write files."""

    input: Path
    output: Path
    temp: Path

    def of(self, name: FolderName) -> Path:
        return {"input": self.input, "output": self.output, "temp": self.temp}[name]

    def locate(self, name: str) -> Path:
        """Returns the path of `x.png`, `sub/x.png` or `x.png [output]`. It need not exist."""
        folder, relative = split_annotation(name)
        return path_inside(self.of(folder), relative)

    def holds(self, name: str) -> bool:
        """Checks whether `name` exists in its folder. A name that leads out of the folder doesn't
        count."""
        try:
            return self.locate(name).exists()
        except (InvalidInput, OSError, ValueError):
            return False


def split_annotation(name: str) -> tuple[FolderName, str]:
    """Splits `x.png [temp]` into (temp, x.png). Without an annotation, the folder is input."""
    folders: tuple[FolderName, ...] = ("output", "input", "temp")
    for folder in folders:
        suffix = f"[{folder}]"
        if name.endswith(suffix):
            # Like ComfyUI, this also removes the character before the bracket, which is a space.
            return folder, name[: -len(suffix) - 1]
    return "input", name


def path_inside(base: Path, relative: str) -> Path:
    """Returns `base / relative`. Raises InvalidInput if it is outside `base`, because names come
    from clients.

    Only the path itself is checked. A symlink that the machine's owner put into `base` is followed.
    """
    path = Path(os.path.abspath(base / relative))
    if not path.is_relative_to(os.path.abspath(base)):
        raise InvalidInput(f"{relative!r} is outside its folder", name=relative)
    return path


class Context(Protocol):
    """Everything that a running node may use in addition to its inputs."""

    @property
    def folders(self) -> Folders: ...
    @property
    def prompt(self) -> Mapping[str, Any]:
        """Returns the whole prompt, which is written into saved files (ComfyUI's hidden PROMPT)."""

    @property
    def extra_pnginfo(self) -> Mapping[str, Any] | None:
        """Returns the client's metadata for saved files, such as the workflow (ComfyUI's hidden
        EXTRA_PNGINFO)."""

    @property
    def node_id(self) -> str: ...
    @property
    def random(self) -> Random:
        """Returns the source of random letters for temporary file names."""

    @property
    def memory(self) -> MutableMapping[str, Any]:
        """Returns a dictionary in which a node can store values across runs. It exists as long as
        every prompt contains a node with this id and type.

        ComfyUI's node objects exist for the same time. PreviewImage stores its random letters in
        them.
        """

    def now(self) -> datetime:
        """Returns the local time for dates in file names."""

    def progress(self, done: float, total: float, preview: bytes | None = None) -> None:
        """Reports progress, optionally with an encoded JPEG as a preview. Raises Interrupted if the
        run was cancelled."""

    def show_text(self, text: str) -> None:
        """Shows a line on the node while it runs (a binary frame of type 3)."""

    def pause(self, seconds: float) -> None:
        """Waits. Raises Interrupted as soon as the run is cancelled."""


@dataclass(frozen=True, slots=True)
class NodeResult:
    """The values of a node's outputs, and its entry in the history."""

    outputs: tuple[Any, ...] = ()
    ui: Mapping[str, Any] | None = None


RunNode = Callable[..., NodeResult]
Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class EngineNodeType:
    """A node type: its `/object_info` entry and its function."""

    name: str
    info: Mapping[str, Any]
    run: RunNode
    # ComfyUI's VALIDATE_INPUTS: returns an error message, or None if the inputs are valid. For the
    # inputs in `validated`, it replaces the checks of lists and ranges, and its error is reported
    # for each of them. As in ComfyUI, it may raise if a value has the wrong type.
    validate: Callable[[Folders, Inputs], str | None] | None = None
    validated: tuple[str, ...] = ()
    # ComfyUI's IS_CHANGED: returns a value that is part of the cache key. It gets constants but no
    # linked inputs. If it raises, for example because a file can't be read, nothing is cached.
    fingerprint: Callable[[Folders, Inputs], Any] | None = None
    # ComfyUI's check_lazy_status: returns the names of lazy inputs that are still needed, given the
    # known ones.
    needed: Callable[[Inputs], Sequence[str]] | None = None
    # Functions that list the choices of inputs whose choices are files. `info` doesn't contain
    # these choices.
    choices: Mapping[str, Callable[[Folders], list[str]]] = field(default_factory=dict)

    @property
    def is_output(self) -> bool:
        return bool(self.info["output_node"])

    def describe(self, folders: Folders) -> dict[str, Any]:
        """Returns the `/object_info` entry with the current file lists."""
        required = dict(self.info["input"]["required"])
        for name, find in self.choices.items():
            required[name] = _with_choices(required[name], find(folders))
        return {**self.info, "input": {**self.info["input"], "required": required}}


@dataclass(frozen=True, slots=True)
class NodeInFolders:
    """A node type that validates prompts with the files that currently exist."""

    kind: EngineNodeType
    folders: Folders

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def info(self) -> Mapping[str, Any]:
        return self.kind.info

    @property
    def is_output(self) -> bool:
        return self.kind.is_output

    @property
    def validated(self) -> Sequence[str]:
        return self.kind.validated

    @property
    def may_waive_types(self) -> bool:
        return False

    def may_waive(self, value: Any) -> bool:
        return False

    def declared_inputs(self) -> Mapping[str, Any]:
        inputs: Mapping[str, Any] = self.kind.describe(self.folders)["input"]
        return inputs

    def check_values(self, values: Inputs) -> str | None:
        return None if self.kind.validate is None else self.kind.validate(self.folders, values)


class NodesInFolders(Mapping[str, NodeInFolders]):
    def __init__(self, nodes: Mapping[str, EngineNodeType], folders: Folders) -> None:
        self._nodes, self._folders = nodes, folders

    def __getitem__(self, name: str) -> NodeInFolders:
        return NodeInFolders(self._nodes[name], self._folders)

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


def _with_choices(declared: Sequence[Any], choices: list[str]) -> list[Any]:
    kind, options = declared
    if kind == "COMBO":
        return [kind, {**options, "options": choices}]
    return [choices, options]


Declared = list[Any]

SIZE_MAX = 16384
BATCH_MAX = 4096
COLOR_MAX = 0xFFFFFF


def socket(kind: str, **options: Any) -> Declared:
    """Declares an input that is usually linked."""
    return [kind, options]


def bare(kind: Any) -> Declared:
    """Declares an input without options in the classic form."""
    return [kind]


def integer(
    default: int | None = None,
    low: int | None = None,
    high: int | None = None,
    step: int | None = None,
    **more: Any,
) -> Declared:
    return ["INT", _given(default=default, min=low, max=high, step=step) | more]


def number(
    default: float | None = None,
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
    **more: Any,
) -> Declared:
    return ["FLOAT", _given(default=default, min=low, max=high, step=step) | more]


def size(default: int = 512, low: int = 1) -> Declared:
    """Declares a width or height in pixels."""
    return integer(default, low, SIZE_MAX, 1)


def offset() -> Declared:
    """Declares a distance in pixels from an edge."""
    return integer(0, 0, SIZE_MAX, 1)


def text(default: str | None = None, *, multiline: bool = False) -> Declared:
    return ["STRING", _given(default=default) | {"multiline": multiline}]


def flag(default: bool | None = None, **more: Any) -> Declared:
    return ["BOOLEAN", _given(default=default) | more]


def choice(*options: str, default: str | None = None, **more: Any) -> Declared:
    listed = {"multiselect": False, "options": list(options)}
    return ["COMBO", _given(default=default) | listed | more]


def match_type(template: str, allowed: str, **more: Any) -> Declared:
    """Declares an input whose type determines the type of an output."""
    return [MATCH, more | {"template": {"template_id": template, "allowed_types": allowed}}]


def autogrow(name: str, kind: str, **slots: Any) -> Declared:
    """Declares a group with as many inputs of a kind as are linked."""
    return [
        "COMFY_AUTOGROW_V3",
        {"template": {"input": {"required": {name: [kind, {}]}}, **slots}},
    ]


def dynamic_choice(options: Mapping[str, Mapping[str, Declared]]) -> Declared:
    """Declares a choice whose options have inputs of their own."""
    listed = [{"key": key, "inputs": {"required": dict(own)}} for key, own in options.items()]
    return ["COMFY_DYNAMICCOMBO_V3", {"options": listed}]


MATCH = "COMFY_MATCHTYPE_V3"
IMAGE = socket("IMAGE")
MASK = socket("MASK")
VIDEO = socket("VIDEO")
AUDIO = socket("AUDIO")
HIDDEN_METADATA = {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Interface:
    """The public description of a node type."""

    name: str
    title: str
    module: str
    category: str
    inputs: Mapping[str, Declared]
    outputs: tuple[str, ...]
    output_names: tuple[str, ...] = ()
    optional: Mapping[str, Declared] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict)
    output_node: bool = False
    # Whether the results are listed in the history although it isn't an output node.
    shows_result: bool = False
    deprecated: bool = False
    experimental: bool = False
    essentials: str | None = None
    output_matches: tuple[str, ...] | None = None
    classic: bool = False
    description: str = ""
    aliases: tuple[str, ...] = ()  # additional search words for finding the node in the editor

    def entry(self) -> dict[str, Any]:
        """Returns the `/object_info` entry."""
        inputs = self._inputs()
        common = {
            "input": inputs,
            "input_order": {group: list(members) for group, members in inputs.items()},
            "is_input_list": False,
            "output": list(self.outputs),
            "output_is_list": [False] * len(self.outputs),
            "output_name": list(self.output_names or self.outputs),
            "name": self.name,
            "display_name": self.title,
            "description": self.description,
            "python_module": self.module,
            "category": self.category,
            "output_node": self.output_node,
            "has_intermediate_output": self.shows_result,
        }
        return common | (self._classic_extras() if self.classic else self._later_extras())

    def _inputs(self) -> dict[str, dict[str, Any]]:
        hidden = {name: kind if self.classic else [kind] for name, kind in self.hidden.items()}
        groups: dict[str, dict[str, Any]] = {
            "required": dict(self.inputs),
            "optional": dict(self.optional),
            "hidden": hidden,
        }
        return {group: members for group, members in groups.items() if members}

    def _classic_extras(self) -> dict[str, Any]:
        extras = _given(
            essentials_category=self.essentials, deprecated=True if self.deprecated else None
        )
        return {"search_aliases": list(self.aliases), **extras}

    def _later_extras(self) -> dict[str, Any]:
        return {
            "output_tooltips": [None] * len(self.outputs),
            "output_matchtypes": list(self.output_matches) if self.output_matches else None,
            "deprecated": self.deprecated,
            "experimental": self.experimental,
            "dev_only": False,
            "api_node": False,
            "price_badge": None,
            "search_aliases": list(self.aliases) or None,
            "essentials_category": self.essentials,
        }


def node(
    interface: Interface, **more: Any
) -> Callable[[Callable[..., NodeResult]], EngineNodeType]:
    """Decorator that creates a node type from a function that uses the context.

    `more` are fields of EngineNodeType.
    """

    def declare(run: Callable[..., NodeResult]) -> EngineNodeType:
        return EngineNodeType(name=interface.name, info=interface.entry(), run=run, **more)

    return declare


def pure(interface: Interface, **more: Any) -> Callable[[Callable[..., Any]], EngineNodeType]:
    """Decorator that creates a node type from a function of its inputs. The function returns the
    output, or a tuple of several outputs."""

    def declare(function: Callable[..., Any]) -> EngineNodeType:
        @wraps(function)
        def run(context: Context, **inputs: Any) -> NodeResult:
            value = function(**inputs)
            return NodeResult(value if len(interface.outputs) > 1 else (value,))

        return node(interface, **more)(run)

    return declare


def group(inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the members of a group: `images.image0` becomes `image0`."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): inputs[key] for key in inputs if key.startswith(prefix)}


log = logging.getLogger(__name__)

MEMORY, PIXELS = "COMFYFLEET_ENGINE_MEMORY_BYTES", "COMFYFLEET_MAX_PICTURE_PIXELS"
MEMORY_BYTES_MAX = 8 * 1024**3
MEMORY_BYTES_MIN = 256 * 1024**2
# Bytes of memory that a node needs for each value of an array. A node reads one array and creates
# another, often with one or two intermediate arrays, and each value takes 4 bytes.
BYTES_PER_VALUE = 4 * 4
# Bytes of memory for each pixel of an image that is loaded, blurred and saved, including all
# copies. The measured value is 105.
BYTES_PER_PIXEL = 160


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine. `memory_bytes` is the memory that the process may use in addition to
    its memory when idle."""

    memory_bytes: int = MEMORY_BYTES_MAX
    pixels_max: int = PIXELS_MAX

    @property
    def values_max(self) -> int:
        return self.memory_bytes // BYTES_PER_VALUE


_limits = EngineLimits()


def limits_of(environ: Mapping[str, str]) -> EngineLimits:
    """Returns the configured limits. By default, the engine may use half of the machine's memory,
    and at most 8 GiB.

    Images may have as many pixels as fit into this memory. A larger image is refused with a message
    about its size, instead of failing because the memory is exhausted.
    """
    usual = max(MEMORY_BYTES_MIN, min(MEMORY_BYTES_MAX, _physical_bytes() // 2))
    memory = _number(environ, MEMORY, usual, least=MEMORY_BYTES_MIN)
    most = min(PIXELS_MAX, memory // BYTES_PER_PIXEL)
    return EngineLimits(memory, _number(environ, PIXELS, most, least=1))


def use_limits(limits: EngineLimits) -> None:
    global _limits
    _limits = limits


def limit_memory(limits: EngineLimits) -> None:
    """Limits the memory of this process, if the system supports it. A node that needs more memory
    then fails without affecting anything else.

    Call this after all imports, because memory that is already in use isn't counted.
    """
    use_limits(limits)
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        data_bytes = _data_bytes() + limits.memory_bytes
        most = data_bytes if hard == resource.RLIM_INFINITY else min(data_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    except (ImportError, OSError, ValueError):
        log.warning("the memory of the engine can't be limited on this system")


def _data_bytes() -> int:
    """Returns the data size of the process (heap and stacks), which is what Linux limits."""
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * os.sysconf("SC_PAGE_SIZE")


def require_memory(*shape: int) -> None:
    """Refuses an array that is too large, before it is created."""
    if math.prod(shape) > _limits.values_max:
        size = "x".join(map(str, shape))
        raise LimitExceeded(f"an array of {size} values is too large for the memory of the engine")


def require_small(size: Size | None) -> None:
    """Refuses an image with too many pixels, before it is decoded."""
    require_pixels(size, _limits.pixels_max)


def _physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 2 * MEMORY_BYTES_MAX


def _number(environ: Mapping[str, str], name: str, usual: int, *, least: int) -> int:
    text = environ.get(name) or str(usual)
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise InvalidInput(f"{name} must be a whole number of at least {least:,}, not {text!r}")
    return int(text)
