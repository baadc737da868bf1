"""A workflow is checked as a whole before anything of it is written. Pure."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from comfyfleet.effects.declaring import check_properties
from comfyfleet.effects.model import Draft, Kind, Property, check_slug
from comfyfleet.effects.models import models_of
from comfyfleet.effects.payload import with_defaults
from comfyfleet.effects.placeholders import marked_workflow, marks_in
from comfyfleet.effects.prompting import find_document, marked_prompt_of, placeholders_of
from comfyfleet.effects.values import shown
from comfyfleet.fleets.offers import ModelUse
from comfyfleet.kernel.errors import InvalidInput, LimitExceeded
from comfyfleet.kernel.texts import problem_with_text
from comfyfleet.workflow.inspection import inspect
from comfyfleet.workflow.media import Opened
from comfyfleet.workflow.setting.entries import as_link

DOCUMENT_BYTES_MAX = 64 * 1024**2
WARNED_TYPES_MAX = 20
# As JSON writes it; behind another backslash it is only a text about it.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def draft(
    *,
    slug: str,
    document: Any,
    properties: Sequence[Property],
    output_node_id: str | None,
    object_info: Mapping[str, Any],
    is_reported: bool = True,
) -> Draft:
    """`document` is a workflow, a prompt, or whatever holds one. Raises InvalidInput and its kin.

    Node types that `object_info` lacks are no reason to refuse: the fleet that has them may come later.
    `is_reported`: a worker has told it, so that what is missing there is worth a warning.
    """
    check_slug(slug)
    kind, found = find_document(document)
    data = _written(found)
    prompt = marked_prompt_of(
        kind, found, object_info, placeholders_of(properties), keep_unknown=True
    )
    if not prompt:
        raise InvalidInput("the document has no node that would be executed", field="document")
    prompt, unnamed, hidden = _with_unknown_types(prompt, found, properties, object_info)
    checked = check_properties(properties, prompt, object_info, hidden)
    _check_output(output_node_id, prompt, object_info)
    node_types = tuple(sorted({node["class_type"] for node in prompt.values()}))
    usual = with_defaults(prompt, checked, object_info)
    return Draft(
        slug=slug,
        kind=kind,
        document=data,
        document_hash=hashlib.sha256(data).hexdigest(),
        properties=checked,
        output_node_id=output_node_id,
        node_types=node_types,
        models=(*models_of(usual), *unnamed),
        warnings=tuple(_warnings(node_types, object_info)) if is_reported else (),
        notes=() if is_reported else tuple(_notes(node_types, object_info)),
    )


def best_object_info(
    document: Any, candidates: Iterable[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The one that knows the most of the document's node types; the first of equals."""
    kind, found = find_document(document)
    types = _types_named(kind, found)
    return max(candidates, key=lambda known: len(types & known.keys()), default=None)


def _types_named(kind: Kind, document: Mapping[str, Any]) -> set[str]:
    if kind == "prompt":
        return {node["class_type"] for node in document.values() if "class_type" in node}
    opened = Opened("json", dict(document), None)
    return {used.class_type for used in inspect(opened).node_types}


def _written(document: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(f"the document is no JSON: {error}", field="document") from None
    problem = problem_with_text(text) or ("it holds a NUL character" if _NUL.search(text) else None)
    if problem or "\ue000comfyfleet-" in text:
        raise InvalidInput(
            f"the document: {problem or 'it holds marks of our own'}", field="document"
        )
    data = text.encode()
    if len(data) > DOCUMENT_BYTES_MAX:
        raise LimitExceeded(
            f"the document has {len(data):,} bytes, more than {DOCUMENT_BYTES_MAX:,}",
            limit=DOCUMENT_BYTES_MAX,
        )
    return data


def _check_output(
    node_id: str | None, prompt: Mapping[str, Any], object_info: Mapping[str, Any]
) -> None:
    if node_id is None:
        return
    if node_id not in prompt:
        raise InvalidInput(
            f"the output node {shown(node_id)} is not in the prompt", field="output_node_id"
        )
    class_type = prompt[node_id]["class_type"]
    known = object_info.get(class_type)
    if isinstance(known, dict) and known.get("output_node") is False:
        raise InvalidInput(
            f"node {node_id} ({class_type}) is no output node: nothing is run for it",
            field="output_node_id",
        )


def _with_unknown_types(
    prompt: Mapping[str, Any],
    document: Mapping[str, Any],
    properties: Sequence[Property],
    object_info: Mapping[str, Any],
) -> tuple[dict[str, Any], tuple[ModelUse, ...], set[int]]:
    """A node whose type isn't known is emitted without it, and without the names of its values.

    So all is looked for in the workflow: the type, which values look like a model's file, and which
    placeholders stand anywhere.
    """
    if all("class_type" in node for node in prompt.values()):
        return dict(prompt), (), set()
    seen = inspect(Opened("json", dict(document), None), object_info)
    types = {
        node.id: each.class_type
        for each in (seen.missing.node_types if seen.missing else ())
        for node in each.nodes
    }
    typed = {
        node_id: node
        if "class_type" in node
        else {"class_type": types.get(node_id, ""), "inputs": _links(node)}
        for node_id, node in prompt.items()
    }
    named = {use.file for use in models_of(typed)}
    unnamed = (
        ModelUse("", file.name)
        for file in seen.files
        if file.kind == "model" and file.active and file.name not in named
    )
    hidden = marks_in(marked_workflow(document, placeholders_of(properties)))
    return typed, tuple(unnamed), hidden


def _links(node: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node["inputs"].items() if as_link(value)}


def _notes(node_types: Iterable[str], object_info: Mapping[str, Any]) -> Iterable[str]:
    if any(name not in object_info for name in node_types):
        yield (
            "No worker has told yet what its backend has. Whether this workflow can be run is known "
            "as soon as one has joined."
        )


def _warnings(node_types: Iterable[str], object_info: Mapping[str, Any]) -> Iterable[str]:
    unknown = [name for name in node_types if name not in object_info]
    if unknown:
        listed = ", ".join(unknown[:WARNED_TYPES_MAX])
        more = (
            f" and {len(unknown) - WARNED_TYPES_MAX} more"
            if len(unknown) > WARNED_TYPES_MAX
            else ""
        )
        yield f"No backend that we know has the node types {listed}{more}."
