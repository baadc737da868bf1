"""What a run made, of every kind, from the outputs in ComfyUI's history."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comfyfleet.comfy.backend import OutputFile, Outputs, OutputValue
from comfyfleet.comfy.shapes import mapping_in

FOLDERS = ("output", "input", "temp")
# Words for the editor about the files beside them, not results.
ABOUT_FILES = frozenset({"animated"})


def find_outputs(outputs: object, reused: Sequence[str] = ()) -> Outputs:
    """Whatever key a node uses: anything that names a file is one, all else is a value."""
    found = tuple(_all(mapping_in(outputs, "the outputs of a run"), frozenset(reused)))
    return Outputs(
        tuple(item for item in found if isinstance(item, OutputFile)),
        tuple(item for item in found if isinstance(item, OutputValue)),
        tuple(reused),
    )


def _all(outputs: Mapping[str, Any], reused: frozenset[str]) -> Iterator[OutputFile | OutputValue]:
    for node_id, shown in outputs.items():
        for key, values in mapping_in(shown, f"the output of node {node_id}").items():
            for value in values if isinstance(values, list) else [values]:
                yield from _one(node_id, key, value, node_id in reused)


def _one(node_id: str, key: str, value: object, reused: bool) -> Iterator[OutputFile | OutputValue]:
    if isinstance(value, dict) and isinstance(name := value.get("filename"), str) and name:
        folder = value.get("type")
        yield OutputFile(
            node_id,
            key,
            name,
            str(value.get("subfolder") or ""),
            folder if folder in FOLDERS else "output",
            reused,
        )
    elif value is not None and key not in ABOUT_FILES:
        yield OutputValue(node_id, key, value, reused)
