"""Replaces the prompt inside a WebP, video or audio file in place. No data moves, and no length
changes."""

import json
import zlib
from collections.abc import Iterator
from typing import Any

from comfyfleet.errors import FleetError
from comfyfleet.workflow.embedded.containers import MATROSKA_CRC_BYTES, matroska_tags
from comfyfleet.workflow.embedded.document import format_of
from comfyfleet.workflow.embedded.reader import DEFAULT_LIMITS, Budget, Span, Text

_KINDS = frozenset({"webp", "avif", "mp4", "webm", "flac", "mp3"})
_SIGNATURE = b"c2pa.claim"  # any change would invalidate the signature


def replace_prompt_in_place(data: memoryview, prompt: str) -> None:
    """Overwrites the prompt that ComfyUI or a saver embedded. If the new prompt is too long, an
    empty one is written.

    Damaged, signed and unknown files aren't changed.
    """
    span = Span(data, 0, len(data))
    file_format = format_of(span)
    if file_format is None or file_format.kind not in _KINDS:
        return
    budget = Budget(DEFAULT_LIMITS)
    try:
        places = [place for text in file_format.texts(span, budget) for place in _place(text, span)]
    except FleetError:
        return
    if not places or _is_signed(data):
        return
    for place, is_comment in places:
        length = len(place)
        changed = _in_comment(place, prompt) if is_comment else _fitting(prompt, length)
        data[place.start : place.end] = changed.ljust(length)
    if file_format.kind == "webm":
        _sign_tags(span, data)


def _place(text: Text, file: Span) -> Iterator[tuple[Span, bool]]:
    """Yields the location of a prompt, and whether it is in a comment together with other
    values."""
    value = text.value
    if not isinstance(value, Span) or value.view is not file.view or text.deflated:
        return
    if len(value) > DEFAULT_LIMITS.metadata_bytes or text.encodings[0] not in ("utf-8", "latin-1"):
        return
    if text.key.lower() == "prompt":
        end = value.end
        while end > value.start and not file.view[end - 1]:
            end -= 1
        yield Span(value.view, value.start, end), False
    elif isinstance(_comment(value), dict):
        yield value, True


def _comment(value: Span) -> dict[str, Any] | None:
    if value.peek(0, 1) != b"{":
        return None
    try:
        comment = json.loads(value.take(0, len(value)).rstrip(b"\0"))
    except (ValueError, RecursionError):
        return None
    return comment if isinstance(comment, dict) and "prompt" in comment else None


def _in_comment(place: Span, prompt: str) -> bytes:
    comment = _comment(place) or {}
    is_text = isinstance(comment.get("prompt"), str)
    changed = json.dumps({**comment, "prompt": prompt if is_text else json.loads(prompt)}).encode()
    if len(changed) <= len(place):
        return changed
    others = {key: value for key, value in comment.items() if key != "prompt"}
    return _fitting(json.dumps(others), len(place))


def _fitting(text: str, length: int) -> bytes:
    data = text.encode()
    return data if len(data) <= length else b"{}"[:length]


def _is_signed(data: memoryview) -> bool:
    piece = 1024**2
    return any(
        _SIGNATURE in bytes(data[at : at + piece + len(_SIGNATURE)])
        for at in range(0, len(data), piece)
    )


def _sign_tags(file: Span, data: memoryview) -> None:
    """Corrects the checksums of Matroska's tags."""
    for tags in matroska_tags(file, Budget(DEFAULT_LIMITS)):
        if tags.peek(0, 2) == b"\xbf\x84":
            start = tags.start + MATROSKA_CRC_BYTES
            checksum = zlib.crc32(data[start : tags.end])
            data[tags.start + 2 : start] = checksum.to_bytes(4, "little")
