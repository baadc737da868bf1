"""What went wrong, as a customer may read it. The raw text is kept for operators."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from comfyfleet.jobs.model import Failure

MESSAGE_CHARACTERS_MAX = 500
RAW_CHARACTERS_MAX = 50_000
JSON_DEPTH_MAX = 6
UNKNOWN = "Processing failed."
_FIELDS = ("exception_message", "error_message")
# `RuntimeError: …`, `torch.OutOfMemoryError: …`, `"message": "…"`, `error: …`
_SHAPES = (
    re.compile(
        r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Failure):\s*(?P<said>\S.*)$", re.M
    ),
    re.compile(
        r"""["'](?:exception_message|error_message|message)["']\s*:\s*["'](?P<said>[^"'\n]+)"""
    ),
    re.compile(r"^\s*error\s*:\s*(?P<said>\S.*)$", re.I | re.M),
)
# Lines of a traceback, and lines with nothing to read in them, mean nothing to a customer.
_NOISE = re.compile(r"^\s*(?:Traceback \(most recent call last\)|File \"|at \S+ \(|\W*$)")


def presentable(error: str | Mapping[str, Any]) -> Failure:
    raw = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False, default=str)
    document = _document(error)
    said = _said(document) or _matched(raw) or (None if document else _first_line(raw))
    return Failure(_short(said or UNKNOWN), raw[:RAW_CHARACTERS_MAX] or None)


def _document(error: str | Mapping[str, Any]) -> Any:
    if not isinstance(error, str):
        return error
    try:
        document = json.loads(error)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict | list) else None


def _said(document: Any) -> str | None:
    """The first field that carries the message, the outermost first."""
    for field in _FIELDS:
        for found in _values(document, field, JSON_DEPTH_MAX):
            return found
    return None


def _values(document: Any, field: str, depth: int) -> Iterator[str]:
    if depth == 0:
        return
    if isinstance(document, Mapping):
        found = document.get(field)
        if isinstance(found, str) and found.strip():
            yield found.strip()
        for inner in document.values():
            yield from _values(inner, field, depth - 1)
    elif isinstance(document, list | tuple):
        for inner in document:
            yield from _values(inner, field, depth - 1)


def _matched(raw: str) -> str | None:
    for shape in _SHAPES:
        found = shape.search(raw)
        if found:
            return found["said"].strip()
    return None


def _first_line(raw: str) -> str | None:
    lines = (line.strip() for line in raw.splitlines() if not _NOISE.match(line))
    return next((line for line in lines if line), None)


def _short(text: str) -> str:
    line = " ".join(text.split())
    limit = MESSAGE_CHARACTERS_MAX
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
