"""Node types that a workflow needs, and the packs that they come from."""

from collections import Counter
from collections.abc import Iterable

from comfyfleet.workflow.inspection.model import UsedPack, UsedType
from comfyfleet.workflow.inspection.view import SeenNode

CORE = "comfy-core"
# Folders that ComfyUI itself loads node types from.
CORE_MODULES = ("nodes", "comfy_extras", "comfy_api_nodes")
CUSTOM_MODULES = "custom_nodes."


def used_types(nodes: Iterable[SeenNode], *, server_known: bool) -> tuple[UsedType, ...]:
    """The most used first. Nodes that are switched off need nothing."""
    active = [node for node in nodes if node.is_active]
    counts = Counter(node.ref.class_type for node in active)
    packs: dict[str, str | None] = {}
    known: dict[str, bool] = {}
    for node in active:
        name = node.ref.class_type
        packs[name] = packs.get(name) or pack_of(node)
        known[name] = node.type is not None
    return tuple(
        UsedType(name, count, packs[name], known[name] if server_known else None)
        for name, count in counts.most_common()
    )


def used_packs(nodes: Iterable[SeenNode]) -> tuple[UsedPack, ...]:
    """ComfyUI's own nodes first, then by name; what no one names the pack of is left out."""
    names: dict[str, str] = {}
    versions: dict[str, set[str]] = {}
    types: dict[str, set[str]] = {}
    for node in nodes:
        pack = pack_of(node) if node.is_active else None
        if pack is None:
            continue
        key = pack.lower()  # registry ids and folders differ in case
        names.setdefault(key, pack)
        types.setdefault(key, set()).add(node.ref.class_type)
        versions.setdefault(key, set()).update(_version(node))
    return tuple(
        UsedPack(names[key], tuple(sorted(versions[key])), tuple(sorted(types[key])))
        for key in sorted(names, key=lambda key: (key != CORE, key))
    )


def pack_of(node: SeenNode) -> str | None:
    """What the file says of the node, else where the server has its type from."""
    for key in ("cnr_id", "aux_id"):
        value = node.properties.get(key)
        if isinstance(value, str) and value:
            return value
    return _pack_of_module(node.type.pack) if node.type and node.type.pack else None


def _pack_of_module(module: str) -> str:
    if module.startswith(CUSTOM_MODULES):
        return module.removeprefix(CUSTOM_MODULES).partition(".")[0]
    return CORE if module.partition(".")[0] in CORE_MODULES else module


def _version(node: SeenNode) -> tuple[str, ...]:
    version = node.properties.get("ver")
    return (version,) if isinstance(version, str) and version else ()
