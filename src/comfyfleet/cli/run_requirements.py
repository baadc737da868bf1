"""Determines what is missing on a server to run a workflow: node types, and models with their
download addresses."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from comfyfleet.cli.context import counted
from comfyfleet.cli.run_session import BUILT_IN, RunTarget
from comfyfleet.errors import UnknownNodeTypes
from comfyfleet.workflow import Conversion
from comfyfleet.workflow.embedded import Opened
from comfyfleet.workflow.inspect import inspect
from comfyfleet.workflow.inspect.results import NamedFile

LACKING_SHOWN_MAX = 20
CORE_PACK = "comfy-core"
OWN_TYPE = "ComfyfleetSteps"  # a node type that only the built-in engine has


def missing_types_error(
    nodes: Sequence[Mapping[str, str]], target: RunTarget, object_info: Mapping[str, Any]
) -> UnknownNodeTypes:
    """Returns an error that lists the missing types with their nodes and packs, with a hint on how
    to get them."""
    by_type: dict[str, list[Mapping[str, str]]] = {}
    for node in nodes:
        by_type.setdefault(node["type"], []).append(node)
    lines = [_lacking_line(name, type_nodes) for name, type_nodes in sorted(by_type.items())]
    more = (
        [f"  … and {len(lines) - LACKING_SHOWN_MAX} more"] if len(lines) > LACKING_SHOWN_MAX else []
    )
    kinds = counted(len(by_type), "node type", "node types")
    return UnknownNodeTypes(
        "\n".join([f"{target.name} lacks {kinds}:", *lines[:LACKING_SHOWN_MAX], *more]),
        nodes=list(nodes),
        hint=f"{_where_they_are(nodes, target, object_info)} To leave these nodes out, use --unknown drop.",
    )


def _where_they_are(
    nodes: Sequence[Mapping[str, str]], target: RunTarget, object_info: Mapping[str, Any]
) -> str:
    if target.name == BUILT_IN:
        return "Run it on a ComfyUI that has them (--server http://127.0.0.1:8188) or on Comfy Cloud (--cloud)."
    if OWN_TYPE in object_info:
        return "That server is comfyfleet's built-in engine, which runs no models. Specify a ComfyUI: --server URL."
    packs = {node.get("pack") or "" for node in nodes}
    if CORE_PACK not in packs:
        return "Install the node packs there, or specify another --server."
    update = f"Update that ComfyUI: {CORE_PACK} is ComfyUI itself."
    return update if packs == {CORE_PACK} else f"{update} Install the other node packs there."


def _lacking_line(name: str, nodes: Sequence[Mapping[str, str]]) -> str:
    places = ", ".join(
        f'node {node["node_id"]} "{node["title"]}"'
        if node.get("title")
        else f"node {node['node_id']}"
        for node in nodes[:LACKING_SHOWN_MAX]
    )
    packs = sorted({node["pack"] for node in nodes if node.get("pack")})
    return f"  {name}: {places}" + (f" (node pack {', '.join(packs)})" if packs else "")


def missing_models(
    opened: Opened, object_info: Mapping[str, Any], converted: Conversion
) -> tuple[NamedFile, ...]:
    """Returns the models of the prompt that the server doesn't have."""
    inspection = inspect(replace(opened, prompt=None) if opened.workflow else opened, object_info)
    absent = (file for file in inspection.files if file.kind == "model" and file.present is False)
    return tuple(
        file
        for file in absent
        if any(_value(converted, address) == file.name for address in file.addresses)
    )


def _value(converted: Conversion, address: str) -> Any:
    node_id, _, name = address.partition(".")
    return converted.prompt.get(node_id, {}).get("inputs", {}).get(name)


def download_lines(models: Sequence[NamedFile]) -> list[str]:
    """Returns one line per missing model: its name, and the download address and folder, if the
    file contains them."""
    lines = [_download_line(model) for model in models[:LACKING_SHOWN_MAX]]
    rest = len(models) - LACKING_SHOWN_MAX
    return [*lines, f"… and {rest} more"] if rest > 0 else lines


def _download_line(model: NamedFile) -> str:
    folder = f" into models/{model.directory}" if model.directory else ""
    return f"{model.name}: download {model.url}{folder}" if model.url else f"{model.name}{folder}"
