"""A text with a key, as found in the metadata of a file. Its value is decoded only if it is needed."""

import re
import zlib
from dataclasses import dataclass
from typing import Any

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.media.limits import Limits
from comfyfleet.workflow.media.span import Span

LABEL_BYTES_MAX = 128
# `workflow:{…}`, `Prompt: {…}`: savers that can't choose a key put it in front of the value.
_LABEL = re.compile(r"\s*([A-Za-z][\w.-]{0,31})\s*:\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class Text:
    key: str
    value: Span | str | dict[str, Any]
    encodings: tuple[str, ...] = ("utf-8",)
    deflated: bool = False

    @property
    def is_workflow_or_prompt(self) -> bool:
        return self.key.lower() in ("workflow", "prompt")


def labelled(key: str, value: Span, encoding: str = "utf-8") -> Text:
    """The text under the label in its value (`workflow:{…}`) if it has one, else under `key`."""
    head = value.peek(0, LABEL_BYTES_MAX).decode(encoding, "ignore")
    label = _LABEL.match(head)
    if not label:
        return Text(key, value, (encoding,))
    return Text(label[1], value.cut(len(label[0].encode(encoding))), (encoding,))


def looks_like_json(text: Text) -> bool:
    """Whether it is worth decoding; compressed texts of unknown keys are not."""
    if isinstance(text.value, Span):
        head = text.value.peek(0, LABEL_BYTES_MAX).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")
        return not text.deflated and head.startswith(b"{")
    return isinstance(text.value, dict) or text.value.lstrip().startswith("{")


def read(text: Text, limits: Limits) -> str | dict[str, Any]:
    if not isinstance(text.value, Span):
        return text.value
    data = text.value.copy(limits)
    if text.deflated:
        data = _inflate(data, text.key, limits)
    return _decode(data, text).removeprefix("\ufeff").rstrip("\0")


def _inflate(data: bytes, key: str, limits: Limits) -> bytes:
    try:
        # One byte more than allowed tells a text of exactly that size from one that would go on.
        plain = zlib.decompressobj().decompress(data, limits.metadata_bytes + 1)
    except zlib.error as error:
        raise InvalidInput(f"The compressed text {key!r} is damaged: {error}.") from None
    if len(plain) > limits.metadata_bytes:
        raise LimitExceeded(
            f"The compressed text {key!r} has more than {limits.metadata_bytes:,} bytes.",
            limit=limits.metadata_bytes,
        )
    return plain


def _decode(data: bytes, text: Text) -> str:
    for encoding in text.encodings:
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    raise InvalidInput(f"The text {text.key!r} is not {' or '.join(text.encodings).upper()}.")
