"""What a file without a workflow is instead, in words that help to find the right one."""

from collections.abc import Sequence
from typing import Any

from comfyfleet.kernel.errors import NoWorkflowFound
from comfyfleet.workflow.media.shapes import is_history
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

KEYS_SHOWN_MAX = 12
KEY_CHARACTERS_MAX = 40
HEAD_BYTES = 1024
USER_COMMENT_BYTES_SEARCHED = 64 * 1024

LOST = (
    "It was saved without metadata, or lost it when it was converted or sent through a messenger: "
    "look for the original file."
)
AGAIN = "Copy or download it again."
EXPORT = "Use a file saved by ComfyUI's editor or by one of its save nodes."

KNOWN_KEYS = {
    "parameters": "an AUTOMATIC1111 prompt",
    "invokeai_metadata": "by InvokeAI",
    "sd-metadata": "by InvokeAI",
    "fooocus_scheme": "by Fooocus",
    "workflow": "not ComfyUI's",
    "prompt": "not ComfyUI's",
}

OTHER_KINDS = (
    (b"GIF8", "a GIF image, which has no place for a workflow"),
    (b"BM", "a BMP image, which has no place for a workflow"),
    (b"II*\0", "a TIFF image"),
    (b"MM\0*", "a TIFF image"),
    (b"v/1\x01", "an OpenEXR image"),
    (b"8BPS", "a Photoshop document"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL image"),
    (b"\xff\x0a", "a JPEG XL image"),
    (b"PK\x03\x04", "a ZIP archive (or a checkpoint, which is one)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"%PDF", "a PDF document"),
    (b"GGUF", "a GGUF model"),
    (b"RIFF", "a WAV or AVI file, which ComfyUI saves without a workflow"),
    (b"\xef\xbf\xbd", "a binary file that some program has ruined by treating it as text"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch the real file with `git lfs pull`"),
)


def media_without_workflow(
    title: str, texts: Sequence[Text], damage: str | None
) -> NoWorkflowFound:
    keys = list(dict.fromkeys(_shown(_key(text)) for text in texts))
    has = (
        f"it has the text keys: {_listed([_with_origin(key) for key in keys])}"
        if keys
        else "it has no text metadata at all"
    )
    state = f"; the file is {damage}" if damage else ""
    hint = AGAIN if damage else LOST
    return NoWorkflowFound(
        f"{title} without ComfyUI metadata; {has}{state}. {hint}", keys=keys, damage=damage
    )


def _key(text: Text) -> str:
    """AUTOMATIC1111 calls its text `parameters` in a PNG and leaves it without a name in EXIF."""
    if text.key == "UserComment" and isinstance(text.value, Span):
        start = text.value.peek(0, USER_COMMENT_BYTES_SEARCHED)
        if b"Steps: " in start.replace(b"\0", b""):
            return "parameters"
    return text.key


def json_without_workflow(value: Any) -> NoWorkflowFound:
    return NoWorkflowFound(f"The file is {_json_kind(value)}. {EXPORT}")


def other_without_workflow(data: Span) -> NoWorkflowFound:
    return NoWorkflowFound(f"The file is {_other_kind(data.peek(0, HEAD_BYTES))}. {EXPORT}")


def _other_kind(head: bytes) -> str:
    if not head:
        return "empty"
    if not head.strip(b"\0"):
        return "nothing but zero bytes, as an interrupted download leaves"
    known = next((words for magic, words in OTHER_KINDS if head.startswith(magic)), None)
    return known or _unknown_kind(head)


def _unknown_kind(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page, not the file that the page shows; use the page's download link"
    if start.startswith(b"<"):
        return "an XML document"
    if b"\0" in head:
        return "of a kind that we don't know"
    return f"neither JSON nor media; it begins with {head[:20].decode('latin-1')!a}"


def _json_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "JSON, but a list or a single value instead of a workflow"
    if not value:
        return "an empty JSON object"
    if isinstance(value.get("templates"), list):
        return "a file of node templates"
    if is_history(value):
        return f"a history of {len(value)} runs; keep only one of them in it"
    if "error" in value:
        return f"an error answer of a server: {_shown(str(value['error']))}"
    if all(
        isinstance(each, dict) and "input" in each and "output" in each for each in value.values()
    ):
        return "a list of node definitions (/object_info)"
    return f"JSON, but neither a workflow nor a prompt; it has the keys: {_listed([_shown(key) for key in value])}"


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - KEYS_SHOWN_MAX:,} more" if len(keys) > KEYS_SHOWN_MAX else ""
    return ", ".join(keys[:KEYS_SHOWN_MAX]) + more


def _with_origin(key: str) -> str:
    return f"{key} ({KNOWN_KEYS[key.lower()]})" if key.lower() in KNOWN_KEYS else key


def _shown(key: str) -> str:
    """Keys are as hostile as the rest: no control characters, no novels."""
    clean = "".join(
        character if character.isprintable() else "?" for character in key[: KEY_CHARACTERS_MAX + 1]
    )
    return clean if len(clean) <= KEY_CHARACTERS_MAX else clean[: KEY_CHARACTERS_MAX - 1] + "…"
