"""Node types of a server that were saved in a file, plain or packed."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from comfyfleet.cli.files import read_file
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.media import parse_json

OBJECT_INFO_BYTES_MAX = 64 * 1024 * 1024
GZIP_MAGIC = b"\x1f\x8b"
HOW_TO_SAVE = (
    "Save it from a running ComfyUI: curl http://127.0.0.1:8188/object_info -o object_info.json"
)


def read_object_info(path: Path) -> Mapping[str, Any]:
    data = read_file(path, bytes_max=OBJECT_INFO_BYTES_MAX)
    if data.startswith(GZIP_MAGIC):
        data = _unpacked(data, path)
    value = parse_json(data, what=str(path))
    if not is_object_info(value):
        raise InvalidInput(f"{path} is not an object_info: {what_it_is(value)}", hint=HOW_TO_SAVE)
    return value


def is_object_info(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Some of the entries tell what they take; a server may well have others that are broken."""
    entries = value.values() if isinstance(value, dict) else ()
    return any(
        isinstance(entry, dict) and isinstance(entry.get("input"), dict) for entry in entries
    )


def what_it_is(value: Any) -> str:
    if not isinstance(value, dict):
        return "it is no JSON object"
    if isinstance(value.get("nodes"), list):
        return "it is a workflow"
    if any(isinstance(entry, dict) and "class_type" in entry for entry in value.values()):
        return "it is a prompt"
    return f"it has the keys {', '.join(sorted(value)[:5])}" if value else "it is empty"


def _unpacked(data: bytes, path: Path) -> bytes:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        unpacked = unpacker.decompress(data, OBJECT_INFO_BYTES_MAX)
    except zlib.error as error:
        raise InvalidInput(f"{path} is a damaged gzip file", hint=HOW_TO_SAVE) from error
    if unpacker.unconsumed_tail:
        raise LimitExceeded(f"{path} unpacks to more than {OBJECT_INFO_BYTES_MAX:,} bytes")
    return unpacked
