"""A compact notation for node interfaces, from which `/object_info` entries are made.

ComfyUI has two generations of nodes, and their entries differ in small ways that clients see:
`classic` ones write choices as a bare list and leave out what is not set; later ones don't.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from comfyfleet.engine.node import Context, NodeType, Result

Declared = list[Any]

SIZE_MAX = 16384
BATCH_MAX = 4096
COLOR_MAX = 0xFFFFFF


def socket(kind: str, **options: Any) -> Declared:
    """An input that is usually linked."""
    return [kind, options]


def bare(kind: Any) -> Declared:
    """The classic form of an input without options."""
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
    """A width or height in pixels."""
    return integer(default, low, SIZE_MAX, 1)


def offset() -> Declared:
    """A distance in pixels from an edge."""
    return integer(0, 0, SIZE_MAX, 1)


def text(default: str | None = None, *, multiline: bool = False) -> Declared:
    return ["STRING", _given(default=default) | {"multiline": multiline}]


def flag(default: bool | None = None, **more: Any) -> Declared:
    return ["BOOLEAN", _given(default=default) | more]


def choice(*options: str, default: str | None = None, **more: Any) -> Declared:
    listed = {"multiselect": False, "options": list(options)}
    return ["COMBO", _given(default=default) | listed | more]


def matching(template: str, allowed: str, **more: Any) -> Declared:
    """An input whose type decides that of an output."""
    return [MATCH, more | {"template": {"template_id": template, "allowed_types": allowed}}]


def growing(name: str, kind: str, **slots: Any) -> Declared:
    """A group with as many inputs of one kind as are linked."""
    return [
        "COMFY_AUTOGROW_V3",
        {"template": {"input": {"required": {name: [kind, {}]}}, **slots}},
    ]


def selecting(options: Mapping[str, Mapping[str, Declared]]) -> Declared:
    """A choice that brings inputs of its own with each of its options."""
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
    """What clients may know of a node type."""

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
    shows_result: bool = False  # in history, although it is no output node
    deprecated: bool = False
    experimental: bool = False
    essentials: str | None = None
    output_matches: tuple[str, ...] | None = None
    classic: bool = False
    description: str = ""
    aliases: tuple[str, ...] = ()  # further words under which an editor finds it

    def entry(self) -> dict[str, Any]:
        """The `/object_info` entry."""
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


def node(interface: Interface, **more: Any) -> Callable[[Callable[..., Result]], NodeType]:
    """Make a node type of a function that uses the context. `more` are fields of NodeType."""

    def declare(run: Callable[..., Result]) -> NodeType:
        return NodeType(name=interface.name, info=interface.entry(), run=run, **more)

    return declare


def pure(interface: Interface, **more: Any) -> Callable[[Callable[..., Any]], NodeType]:
    """Make a node type of a function from its inputs to its output, or to a tuple of several."""

    def declare(function: Callable[..., Any]) -> NodeType:
        @wraps(function)
        def run(context: Context, **inputs: Any) -> Result:
            value = function(**inputs)
            return Result(value if len(interface.outputs) > 1 else (value,))

        return node(interface, **more)(run)

    return declare


def group(inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The members of a group: `images.image0` → `image0`."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): inputs[key] for key in inputs if key.startswith(prefix)}
