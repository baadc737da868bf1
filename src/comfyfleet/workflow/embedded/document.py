"""Opens any file that ComfyUI saves. Finds the workflow and the prompt in it, or reports what kind
of file it is instead.

The format is detected from the first bytes, because names and extensions may be wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfyfleet.errors import InvalidInput, LimitExceeded, NoWorkflowFound
from comfyfleet.workflow.embedded import containers, images
from comfyfleet.workflow.embedded.reader import (
    DEFAULT_LIMITS,
    Budget,
    Damaged,
    FileLimits,
    Span,
    Text,
    looks_like_json,
    parse_json,
    read,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


# How many bytes are examined to detect the format. An SVG may have a license as a comment before
# its first element.
HEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Format:
    """A file format that can contain a workflow."""

    kind: str
    title: str
    texts: Callable[[Span, Budget], Iterator[Text]]
    is_it: Callable[[bytes], bool]
    size: Callable[[Span], str] = lambda _: ""


# The first match counts: AVIF files also match MP4, and safetensors has almost no signature.
FORMATS = (
    Format("png", "PNG", images.png_texts, images.is_png, images.png_size),
    Format("jpeg", "JPEG image", images.jpeg_texts, images.is_jpeg),
    Format("webp", "WebP image", images.webp_texts, images.is_webp),
    Format("avif", "AVIF or HEIF image", containers.avif_texts, containers.is_avif),
    Format("mp4", "MP4 or MOV video", containers.mp4_texts, containers.is_mp4),
    Format("webm", "WebM or Matroska video", containers.matroska_texts, containers.is_matroska),
    Format("flac", "FLAC sound", containers.flac_texts, containers.is_flac),
    Format("ogg", "Ogg or Opus sound", containers.ogg_texts, containers.is_ogg),
    Format("mp3", "MP3 sound", containers.mp3_texts, containers.is_mp3),
    Format("glb", "GLB model", containers.glb_texts, containers.is_glb),
    Format("svg", "SVG drawing", containers.svg_texts, containers.is_svg),
    Format(
        "safetensors", "Safetensors file", containers.safetensors_texts, containers.is_safetensors
    ),
)


def format_of(data: Span) -> Format | None:
    head = data.peek(0, HEAD_BYTES)
    return next((candidate for candidate in FORMATS if candidate.is_it(head)), None)


WRAPPER_DEPTH_MAX = 8
# Keys under which workflows and prompts are nested. They occur in the body of POST /prompt and a
# run in /history (`prompt`, `extra_data.extra_pnginfo`), responses of /api/jobs
# (`workflow.prompt`), the editor's graphToPrompt (`output`), queues that wrap the body in `input`,
# and glTF (`asset.extras`).
WRAPPER_KEYS = (
    "workflow", "prompt", "output", "extra_pnginfo", "extra_data", "input", "asset", "extras",
)  # fmt: skip
# A queue entry and the `prompt` of a history item have the form [number, id, prompt, extra_data,
# outputs].
QUEUE_ENTRY_PARTS = slice(2, 4)


@dataclass(frozen=True, slots=True)
class FoundDocuments:
    workflow: dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return self.workflow is not None or self.prompt is not None

    def completed_by(self, other: "FoundDocuments") -> "FoundDocuments":
        return FoundDocuments(
            workflow=other.workflow if self.workflow is None else self.workflow,
            prompt=other.prompt if self.prompt is None else self.prompt,
        )


def is_workflow(value: Any) -> bool:
    """Checks whether a value has a `nodes` list of typed nodes (nodes in glTF have no type). The
    workflow may still be invalid."""
    nodes = value.get("nodes") if isinstance(value, dict) else None
    return isinstance(nodes, list) and (not nodes or any(_has(node, "type") for node in nodes))


def is_prompt(value: Any) -> bool:
    """Checks whether at least one node has a class. Later checks can then report the nodes without
    one."""
    return isinstance(value, dict) and any(_has(node, "class_type") for node in value.values())


def is_history(value: Any) -> bool:
    """Checks whether a value is a response of /history: runs by id."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(_has(run, "prompt") and _has(run, "outputs") for run in value.values())
    )


def find_documents(
    value: Any, limits: FileLimits, *, depth: int = WRAPPER_DEPTH_MAX
) -> FoundDocuments:
    """Finds the workflow and the prompt in a value by their structure, because some savers write a
    prompt under the key `workflow`."""
    if is_workflow(value):
        return FoundDocuments(workflow=value)
    if is_prompt(value):
        return FoundDocuments(prompt=value)
    pieces = FoundDocuments()
    if depth > 0:
        for inner in _inside(value, limits):
            pieces = pieces.completed_by(find_documents(inner, limits, depth=depth - 1))
    return pieces


def _inside(value: Any, limits: FileLimits) -> Iterable[Any]:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return [parse_json(value, what="a JSON text inside the JSON", limits=limits)]
    if isinstance(value, list):
        return value[QUEUE_ENTRY_PARTS]
    if is_history(value) and len(value) == 1:
        return list(value.values())
    if isinstance(value, dict):
        return [value[key] for key in WRAPPER_KEYS if key in value]
    return []


def _has(value: Any, key: str) -> bool:
    return isinstance(value, dict) and bool(value.get(key))


KEYS_SHOWN_MAX = 12
KEY_CHARACTERS_MAX = 40
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
    """Returns the key of a text entry. AUTOMATIC1111's entry is named `parameters` in PNG files and
    has no name in EXIF."""
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
        return "only zero bytes, probably from an interrupted download"
    known = next((words for magic, words in OTHER_KINDS if head.startswith(magic)), None)
    return known or _unknown_kind(head)


def _unknown_kind(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "a web page, not the file that the page shows; use the page's download link"
    if start.startswith(b"<"):
        return "an XML document"
    if b"\0" in head:
        return "in an unknown format"
    return f"neither JSON nor media; it begins with {head[:20].decode('latin-1')!a}"


def _json_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "JSON, but a list or a single value instead of a workflow"
    if not value:
        return "an empty JSON object"
    if isinstance(value.get("templates"), list):
        return "a file of node templates"
    if is_history(value):
        return f"a history of {len(value)} runs; remove all except one"
    if "error" in value:
        return f"a server's error response: {_shown(str(value['error']))}"
    if all(
        isinstance(entry, dict) and "input" in entry and "output" in entry
        for entry in value.values()
    ):
        return "a list of node definitions (/object_info)"
    return f"JSON, but neither a workflow nor a prompt; it has the keys: {_listed([_shown(key) for key in value])}"


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - KEYS_SHOWN_MAX:,} more" if len(keys) > KEYS_SHOWN_MAX else ""
    return ", ".join(keys[:KEYS_SHOWN_MAX]) + more


def _with_origin(key: str) -> str:
    return f"{key} ({KNOWN_KEYS[key.lower()]})" if key.lower() in KNOWN_KEYS else key


def _shown(key: str) -> str:
    """Returns a key for messages, shortened and without control characters, because keys may be
    hostile."""
    clean = "".join(
        character if character.isprintable() else "?" for character in key[: KEY_CHARACTERS_MAX + 1]
    )
    return clean if len(clean) <= KEY_CHARACTERS_MAX else clean[: KEY_CHARACTERS_MAX - 1] + "…"


# How many entries with other keys are tried if no workflow or prompt is found under its usual key.
OTHER_TEXTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """The content of a file: a workflow, a prompt, or both. `notes` describe parts that could not
    be read."""

    kind: str
    workflow: dict[str, Any] | None
    prompt: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def open_document(data: "ReadableBuffer", *, limits: FileLimits = DEFAULT_LIMITS) -> Opened:
    """Finds the workflow and the prompt in the bytes of a file. Use an mmap for large files.

    For any input, raises only NoWorkflowFound (which describes what was found instead),
    InvalidInput or LimitExceeded.
    """
    with memoryview(data) as buffer, buffer.cast("B") as view:
        return _open(Span(view, 0, len(view)), limits)


def _open(data: Span, limits: FileLimits) -> Opened:
    file_format = format_of(data)
    if file_format:
        return _open_media(file_format, data, limits)
    if looks_like_json(Text("", data)) or data.peek(0, 64).lstrip().startswith(b"["):
        return _open_json(data, limits)
    raise other_without_workflow(data)


def _open_json(data: Span, limits: FileLimits) -> Opened:
    value = parse_json(data.copy(limits), what="the file", limits=limits)
    pieces = find_documents(value, limits)
    if not pieces:
        raise json_without_workflow(value)
    return Opened("json", pieces.workflow, pieces.prompt)


def _open_media(file_format: Format, data: Span, limits: FileLimits) -> Opened:
    texts, damage = _collect(file_format, data, limits)
    pieces, problems = _find_in(texts, limits)
    if pieces:
        notes = [problem.message for problem in problems] + (
            [f"The file is {damage}."] if damage else []
        )
        return Opened(file_format.kind, pieces.workflow, pieces.prompt, tuple(notes))
    if problems:
        raise problems[0]
    raise media_without_workflow(file_format.title + file_format.size(data), texts, damage)


def _collect(file_format: Format, data: Span, limits: FileLimits) -> tuple[list[Text], str | None]:
    """Returns the text entries of a file and a description of its damage, if any. A truncated video
    may still have its metadata at the front."""
    texts: list[Text] = []
    try:
        for text in file_format.texts(data, Budget(limits)):
            if len(texts) >= limits.texts:
                raise LimitExceeded(
                    f"The file has more than {limits.texts:,} text entries.", limit=limits.texts
                )
            texts.append(text)
    except Damaged as error:
        return texts, error.message
    return texts, None


def _find_in(
    texts: Sequence[Text], limits: FileLimits
) -> tuple[FoundDocuments, list[InvalidInput]]:
    problems: list[InvalidInput] = []
    # If several entries have the same key, the last one counts, as in the editor.
    named = {text.key.lower(): text for text in texts if text.is_workflow_or_prompt}
    workflow, prompt = (
        _documents_in(named.get(key), limits, problems) for key in ("workflow", "prompt")
    )
    pieces = FoundDocuments(
        workflow.completed_by(prompt).workflow, prompt.completed_by(workflow).prompt
    )
    for text in _others(texts, limits):
        pieces = pieces or _documents_in(text, limits, problems)
    return pieces, problems


def _others(texts: Sequence[Text], limits: FileLimits) -> Iterator[Text]:
    """Yields JSON entries with other keys, such as comments. Entries may overlap, so their total
    size is limited."""
    others = [text for text in texts if not text.is_workflow_or_prompt and looks_like_json(text)]
    bytes_left = limits.metadata_bytes
    for text in others[:OTHER_TEXTS_MAX]:
        bytes_left -= len(text.value)
        if bytes_left >= 0:
            yield text


def _documents_in(
    text: Text | None, limits: FileLimits, problems: list[InvalidInput]
) -> FoundDocuments:
    """Returns the documents in a text entry. An invalid entry is only added to `problems`, because
    another entry may be sufficient. The editor also falls back to the prompt."""
    if text is None:
        return FoundDocuments()
    try:
        value = read(text, limits)
        if isinstance(value, str):
            if not value.lstrip().startswith("{"):
                return FoundDocuments()
            value = parse_json(value, what=f"the text {text.key!r}", limits=limits)
        return find_documents(value, limits)
    except InvalidInput as error:
        problems.append(error)
        return FoundDocuments()
