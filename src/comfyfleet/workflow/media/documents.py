"""Files whose metadata is JSON as a whole: GLB, SVG and safetensors (which `.latent` files are)."""

from collections.abc import Iterator
from typing import Any

from comfyfleet.workflow.media.json_text import parse_json
from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text

GLB_HEADER_BYTES = 12
# Larger headers exist in no model; it also keeps the length from looking like text.
SAFETENSORS_HEADER_BYTES_MAX = 2**32 - 1


def is_glb(head: bytes) -> bool:
    return head.startswith(b"glTF")


def is_safetensors(head: bytes) -> bool:
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= SAFETENSORS_HEADER_BYTES_MAX


def is_svg(head: bytes) -> bool:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return start.startswith(b"<svg") or (
        start.startswith((b"<?xml", b"<!--", b"<!doctype svg")) and b"<svg" in start
    )


def glb_texts(glb: Span, budget: Budget) -> Iterator[Text]:
    """ComfyUI puts the texts into `asset.extras` of the first chunk, which is JSON."""
    if glb.take(GLB_HEADER_BYTES + 4, 4) != b"JSON":
        raise Damaged(f"damaged at byte {GLB_HEADER_BYTES}, where the JSON should begin")
    chunk = glb.cut(GLB_HEADER_BYTES + 8, glb.number(GLB_HEADER_BYTES, 4, "little"))
    value = _json(chunk, "the JSON of the GLB", budget)
    yield from _members(_member(_member(value, "asset"), "extras"))


def safetensors_texts(file: Span, budget: Budget) -> Iterator[Text]:
    header = file.cut(8, file.number(0, 8, "little"))
    value = _json(header, "the header of the safetensors file", budget)
    yield from _members(_member(value, "__metadata__"))


def svg_texts(svg: Span, budget: Budget) -> Iterator[Text]:
    """ComfyUI puts one JSON for all into `<metadata><![CDATA[…]]>`."""
    xml = svg.peek(0, budget.limits.metadata_bytes)
    end = 0
    while (start := xml.find(b"<metadata", end)) >= 0:
        budget.step()
        end = xml.find(b"</metadata", start)
        if end < 0:
            raise Damaged("damaged or cut short in its metadata")
        opening, closing = xml.find(b"<![CDATA[", start, end), xml.rfind(b"]]>", start, end)
        if opening >= 0:
            yield Text("metadata", svg.cut(opening + 9, max(0, closing - opening - 9)))


def _json(span: Span, what: str, budget: Budget) -> Any:
    return parse_json(span.copy(budget.limits), what=what, limits=budget.limits)


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _members(value: Any) -> Iterator[Text]:
    for key in value if isinstance(value, dict) else ():
        if isinstance(value[key], str | dict):
            yield Text(key, value[key])
