"""Open anything that ComfyUI saves: find the workflow and the prompt in it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.workflow.media import explain
from comfyfleet.workflow.media.formats import Format, format_of
from comfyfleet.workflow.media.json_text import parse_json
from comfyfleet.workflow.media.limits import DEFAULT_LIMITS, Budget, Limits
from comfyfleet.workflow.media.shapes import Pieces, find_pieces
from comfyfleet.workflow.media.span import Damaged, Span
from comfyfleet.workflow.media.text import Text, looks_like_json, read

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Texts under other keys that are tried when neither a workflow nor a prompt is found under its own.
OTHER_TEXTS_MAX = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """What a file held. At least one of workflow and prompt is there; notes say what could not be read."""

    kind: str
    workflow: dict[str, Any] | None
    prompt: dict[str, Any] | None
    notes: tuple[str, ...] = ()


def open_document(data: "ReadableBuffer", *, limits: Limits = DEFAULT_LIMITS) -> Opened:
    """Find the workflow and the prompt in the bytes of a file; a large file is best given as an mmap.

    Raises NoWorkflowFound (it says what was found instead), InvalidInput or LimitExceeded, whatever the bytes.
    """
    with memoryview(data) as buffer, buffer.cast("B") as view:
        return _open(Span(view, 0, len(view)), limits)


def _open(data: Span, limits: Limits) -> Opened:
    found = format_of(data)
    if found:
        return _open_media(found, data, limits)
    if looks_like_json(Text("", data)) or data.peek(0, 64).lstrip().startswith(b"["):
        return _open_json(data, limits)
    raise explain.other_without_workflow(data)


def _open_json(data: Span, limits: Limits) -> Opened:
    value = parse_json(data.copy(limits), what="the file", limits=limits)
    pieces = find_pieces(value, limits)
    if not pieces:
        raise explain.json_without_workflow(value)
    return Opened("json", pieces.workflow, pieces.prompt)


def _open_media(found: Format, data: Span, limits: Limits) -> Opened:
    texts, damage = _collect(found, data, limits)
    pieces, problems = _find_in(texts, limits)
    if pieces:
        notes = [problem.message for problem in problems] + (
            [f"The file is {damage}."] if damage else []
        )
        return Opened(found.kind, pieces.workflow, pieces.prompt, tuple(notes))
    if problems:
        raise problems[0]
    raise explain.media_without_workflow(found.title + found.size(data), texts, damage)


def _collect(found: Format, data: Span, limits: Limits) -> tuple[list[Text], str | None]:
    """The texts of a file, and how it is damaged if it is: a cut-off video may have its metadata in front."""
    texts: list[Text] = []
    try:
        for text in found.texts(data, Budget(limits)):
            if len(texts) >= limits.texts:
                raise LimitExceeded(
                    f"The file has more than {limits.texts:,} texts.", limit=limits.texts
                )
            texts.append(text)
    except Damaged as error:
        return texts, error.message
    return texts, None


def _find_in(texts: Sequence[Text], limits: Limits) -> tuple[Pieces, list[InvalidInput]]:
    problems: list[InvalidInput] = []
    # Of texts with equal keys the last one counts, as in the editor.
    named = {text.key.lower(): text for text in texts if text.is_workflow_or_prompt}
    workflow, prompt = (
        _pieces_of(named.get(key), limits, problems) for key in ("workflow", "prompt")
    )
    pieces = Pieces(workflow.completed_by(prompt).workflow, prompt.completed_by(workflow).prompt)
    for text in _others(texts, limits):
        pieces = pieces or _pieces_of(text, limits, problems)
    return pieces, problems


def _others(texts: Sequence[Text], limits: Limits) -> Iterator[Text]:
    """JSON under other keys, such as comments. Texts may overlap, so their sizes are limited together."""
    others = [text for text in texts if not text.is_workflow_or_prompt and looks_like_json(text)]
    bytes_left = limits.metadata_bytes
    for text in others[:OTHER_TEXTS_MAX]:
        bytes_left -= len(text.value)
        if bytes_left >= 0:
            yield text


def _pieces_of(text: Text | None, limits: Limits, problems: list[InvalidInput]) -> Pieces:
    """A broken text is a problem only if nothing else is found: the editor, too, then takes the prompt."""
    if text is None:
        return Pieces()
    try:
        value = read(text, limits)
        if isinstance(value, str):
            if not value.lstrip().startswith("{"):
                return Pieces()
            value = parse_json(value, what=f"the text {text.key!r}", limits=limits)
        return find_pieces(value, limits)
    except InvalidInput as error:
        problems.append(error)
        return Pieces()
