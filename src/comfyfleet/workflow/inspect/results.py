"""The result of an inspection. Plain frozen values: `--json` writes them under the names they have here."""

from dataclasses import dataclass
from typing import Any, Literal

# Why an input matters to the person who runs the workflow; every other value is a detail.
Role = Literal["file", "text", "seed", "size", "steps", "model"]
Media = Literal["image", "animation", "video", "audio", "3d", "text", "latent", "model", "unknown"]


@dataclass(frozen=True, slots=True)
class NodeRef:
    """Identifies a node: `id` is its key in the prompt, `path` the subgraphs around it, outermost first."""

    id: str
    class_type: str
    title: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectedInput:
    """An input that holds a value, so that a person can set it: `--set ADDRESS=VALUE`.

    `address` and `input` are None if neither the file nor a server names its values.
    """

    address: str | None
    node: NodeRef
    input: str | None
    type: str
    value: Any
    role: Role | None = None
    # The name that the author of a subgraph gave it, as "subgraph.input".
    exposed_as: str | None = None
    # Options that set it: "seed" is `--seed`.
    shorthands: tuple[str, ...] = ()
    default: Any = None
    min: float | None = None
    max: float | None = None
    step: float | None = None
    choices: tuple[Any, ...] | None = None
    multiline: bool = False


@dataclass(frozen=True, slots=True)
class InspectedOutput:
    """An output node of the workflow."""

    node: NodeRef
    media: Media
    saved: bool  # kept in the output folder; otherwise only shown
    file_name_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that the workflow names. `present` is None without a server."""

    name: str
    kind: Literal["model", "embedding", "input"]
    addresses: tuple[str, ...] = ()
    directory: str | None = None
    url: str | None = None
    active: bool = True  # a node that is executed needs it
    present: bool | None = None


@dataclass(frozen=True, slots=True)
class UsedType:
    """A node type and how often it is executed; `known` is None without a server."""

    class_type: str
    count: int
    pack: str | None
    known: bool | None = None


@dataclass(frozen=True, slots=True)
class UsedPack:
    """A node pack by its registry id, its repository (owner/name) or its folder on the server."""

    name: str
    versions: tuple[str, ...]
    node_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A titled rectangle; `subgraph` is the name of the one that it is drawn in."""

    title: str
    nodes: int
    subgraph: str | None = None


@dataclass(frozen=True, slots=True)
class SubgraphSummary:
    name: str
    nodes: int
    instances: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChainSummary:
    """Repeated parts, by their titles; those that are `off` don't count as segments."""

    name: str
    kind: Literal["group", "instance", "title"]
    segments: tuple[str, ...]
    off: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SwitchedOff:
    node: NodeRef
    how: Literal["muted", "bypassed"]


@dataclass(frozen=True, slots=True)
class MissingType:
    class_type: str
    nodes: tuple[NodeRef, ...]
    pack: str | None


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """A value that the server would refuse, mostly a model that it lacks."""

    address: str
    node: NodeRef
    value: Any
    problem: str
    closest: tuple[str, ...]  # of the server's choices


@dataclass(frozen=True, slots=True)
class LostInput:
    """An input in the file that the server's node type no longer has."""

    node: NodeRef
    input: str


@dataclass(frozen=True, slots=True)
class MissingParts:
    """What a server lacks. `files` are input files, which can be uploaded; models are `values`."""

    node_types: tuple[MissingType, ...] = ()
    values: tuple[RefusedValue, ...] = ()
    inputs: tuple[LostInput, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.values or self.inputs or self.files)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result. `missing` is None without an object_info."""

    file_kind: str
    form: Literal["workflow", "prompt"]
    nodes: int
    takes: tuple[InspectedInput, ...]
    makes: tuple[InspectedOutput, ...]
    files: tuple[NamedFile, ...]
    node_types: tuple[UsedType, ...]
    packs: tuple[UsedPack, ...]
    groups: tuple[GroupSummary, ...]
    subgraphs: tuple[SubgraphSummary, ...]
    chains: tuple[ChainSummary, ...]
    switched_off: tuple[SwitchedOff, ...]
    dead_shells: tuple[NodeRef, ...]
    missing: MissingParts | None
    notes: tuple[str, ...] = ()
