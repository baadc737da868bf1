"""What travels over a websocket: JSON texts, and ComfyUI's three binary frames."""

import json
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Binary(IntEnum):
    IMAGE = 1
    TEXT = 3
    IMAGE_WITH_METADATA = 4


class ImageFormat(IntEnum):
    JPEG = 1
    PNG = 2


def message(event: str, data: object) -> str:
    return json.dumps({"type": event, "data": data})


def image(picture: bytes) -> bytes:
    return struct.pack(">II", Binary.IMAGE, _format(picture)) + picture


def image_with_metadata(picture: bytes, metadata: Mapping[str, Any]) -> bytes:
    mime_type = f"image/{_format(picture).name.lower()}"
    header = json.dumps({**metadata, "image_type": mime_type}).encode()
    return struct.pack(">II", Binary.IMAGE_WITH_METADATA, len(header)) + header + picture


def text(node_id: str, line: str) -> bytes:
    name = node_id.encode()
    return struct.pack(">II", Binary.TEXT, len(name)) + name + line.encode()


def _format(picture: bytes) -> ImageFormat:
    return ImageFormat.PNG if picture.startswith(PNG_SIGNATURE) else ImageFormat.JPEG
