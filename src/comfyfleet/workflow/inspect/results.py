"""The result of an inspection: plain frozen values, which `--json` writes under the same names."""

from dataclasses import dataclass
from typing import Any, Literal

# The meaning of an input for the user who runs the workflow. Values without a role are details.
Role = Literal["file", "text", "seed", "size", "steps", "model"]
Media = Literal["image", "animation", "video", "audio", "3d", "text", "latent", "model", "unknown"]


@dataclass(frozen=True, slots=True)
class NodeRef:
    """Identifies a node. `id` is its key in the prompt, and `path` contains the enclosing
    subgraphs, outermost first."""

    id: str
    class_type: str
    title: str
    path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectedInput:
    """An input with a value that a user can set with `--set ADDRESS=VALUE`.

    `address` and `input` are None if neither the file nor a server names its values.
    """

    address: str | None
    node: NodeRef
    input: str | None
    type: str
    value: Any
    role: Role | None = None
    # The name that the author of a subgraph gave to the input, as "subgraph.input".
    exposed_as: str | None = None
    # Options that set this input: "seed" stands for `--seed`.
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
    saved: bool  # stored in the output folder; otherwise only displayed
    file_name_prefix: str | None = None


@dataclass(frozen=True, slots=True)
class NamedFile:
    """A file that the workflow names. `present` is only set with a server."""

    name: str
    kind: Literal["model", "embedding", "input"]
    addresses: tuple[str, ...] = ()
    directory: str | None = None
    url: str | None = None
    active: bool = True  # needed by a node that is executed
    present: bool | None = None


@dataclass(frozen=True, slots=True)
class UsedType:
    """A node type and the number of its active nodes. `known` is only set with a server."""

    class_type: str
    count: int
    pack: str | None
    known: bool | None = None


@dataclass(frozen=True, slots=True)
class UsedPack:
    """A node pack, identified by its registry id, its repository (owner/name) or its folder on the
    server."""

    name: str
    versions: tuple[str, ...]
    node_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A titled rectangle. `subgraph` is the name of the subgraph that contains it."""

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
    """Titles of repeated parts. Those in `off` don't count as segments."""

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
    """A value that the server would refuse, usually a model that it lacks."""

    address: str
    node: NodeRef
    value: Any
    problem: str
    closest: tuple[str, ...]  # among the server's choices


@dataclass(frozen=True, slots=True)
class LostInput:
    """An input in the file that was removed from the server's node type."""

    node: NodeRef
    input: str


@dataclass(frozen=True, slots=True)
class MissingParts:
    """The requirements that a server doesn't meet. `files` are input files, which can be uploaded.
    Missing models are in `values`."""

    node_types: tuple[MissingType, ...] = ()
    values: tuple[RefusedValue, ...] = ()
    inputs: tuple[LostInput, ...] = ()
    files: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.node_types or self.values or self.inputs or self.files)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of an inspection. `missing` is only set with an object_info."""

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
