"""`comfyfleet inspect`: what a file takes, makes and needs."""

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from comfyfleet.cli.files import FILE_HELP, open_file
from comfyfleet.cli.nodetypes import NO_NODE_TYPES, NodeTypeOptions, find_types
from comfyfleet.cli.tables import plain, sections
from comfyfleet.cli.world import InWorld, World, counted
from comfyfleet.workflow.inspection import Inspection
from comfyfleet.workflow.inspection import inspect as inspect_document


def inspect(
    file: Annotated[
        str,
        Parameter(help=FILE_HELP, allow_leading_hyphen=True),
    ],
    /,
    *,
    node_types: NodeTypeOptions = NO_NODE_TYPES,
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON for programs.")] = False,
    everything: Annotated[
        bool, Parameter(name="--all", help="Show every value and every row.")
    ] = False,
    world: InWorld,
) -> None:
    """Show what a workflow takes, makes and needs, and what of that a server lacks.

    ```
    comfyfleet inspect cat.png
    comfyfleet inspect flow.json --server http://127.0.0.1:8188
    comfyfleet inspect flow.json --json | jq -r '.takes[] | [.address, .value] | @tsv'
    ```
    """
    opened = open_file(file, world.stdin)
    known = find_types(node_types, opened, world)
    if known is None:
        found = inspect_document(opened)
    else:
        found = inspect_document(opened, known.object_info, remote_choices=known.remote_choices)
    for note in found.notes:
        world.warn(note)
    if as_json:
        _print_json(found, world)
    else:
        _print_tables(file, found, everything=everything, world=world)


def _print_json(found: Inspection, world: World) -> None:
    world.stdout.write(json.dumps(asdict(found), indent=2, ensure_ascii=False).encode() + b"\n")
    world.stdout.flush()


def _print_tables(name: str, found: Inspection, *, everything: bool, world: World) -> None:
    world.out.print(plain(f"{name}: {_summary(found)}\n"), soft_wrap=True)
    for section in sections(found, everything=everything):
        world.out.print(section, soft_wrap=True)
    # Not wrapped by us, so that it can be copied from the terminal.
    world.out.print(plain(_next_step(name, found), "dim"), soft_wrap=True)


def _summary(found: Inspection) -> str:
    kind = "" if found.file_kind == "json" else f" in {found.file_kind.upper()}"
    nodes = counted(found.nodes, "node", "nodes")
    return f"a {found.form}{kind}; {nodes} to run"


def _next_step(name: str, found: Inspection) -> str:
    if found.missing is None:
        return "Add --server URL or --object-info FILE to see types and ranges, and what is missing there."
    settable = next((each.address for each in found.takes if each.role and each.address), None)
    change = f" --set {settable}=…" if settable else ""
    return f"Convert it with: comfyfleet convert {name}{change}"
