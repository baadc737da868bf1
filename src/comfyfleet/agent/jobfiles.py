"""The files of a job on its backend: a folder of its own, and nobody else's files. Pure.

Many tenants share a backend. What it loads and saves for one of them lies in a folder whose name can't
be guessed, and a prompt may name no file of another one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from blake3 import blake3

from comfyfleet.agent.facts import choices_of, specs_of
from comfyfleet.agent.naming import safe
from comfyfleet.comfy import NodeProblem
from comfyfleet.kernel.errors import InvalidInput, PromptRefused
from comfyfleet.kernel.filetypes import ENDINGS, sniffed

ROOT = "comfyfleet"
FOLDER_CHARACTERS = 32
PREFIX = "filename_prefix"
PREFIX_USUAL = "ComfyUI"
JOIN = "StringConcatenate"
NAME_CHARACTERS_MAX = 60
# `cat.png [output]` names a file of another folder than that of inputs.
_ANNOTATED = re.compile(r"\[(input|output|temp)\]\s*$")
UNKNOWN_ENDING = ".dat"  # not one of those that models have


def folder_of(lease_token: UUID) -> str:
    """Made of the token, which only its worker knows: the same again after a restart."""
    return f"{ROOT}/{blake3(lease_token.bytes).hexdigest()[:FOLDER_CHARACTERS]}"


def input_name(name: str, first: bytes) -> str:
    """What an input is called on the backend; its ending tells what it is, whatever it was called."""
    ending = ENDINGS.get(sniffed(first) or "", UNKNOWN_ENDING)
    return f"{safe(name)[:NAME_CHARACTERS_MAX]}{ending}"


def flat_name(folder: str, name: str) -> str:
    """For a place without subfolders: as hard to guess."""
    return f"{folder.rpartition('/')[2]}-{name}"


def is_unlisted(error: PromptRefused, names: Iterable[str]) -> bool:
    """Whether a loader refused one of these files because its list doesn't have it."""
    problems = [
        each for each in error.details.get("problems") or () if isinstance(each, NodeProblem)
    ]
    given = set(names)
    return any(each.kind == "value_not_in_list" and each.received in given for each in problems)


@dataclass(frozen=True, slots=True)
class FileInputs:
    """What a backend's node types say about files. An input is named `Class.input`.

    `offered`: inputs that take an upload, with the files that stand there for everyone. `choices`:
    all other inputs with a list. `prefixes`: node types that save files, with their usual prefix.
    """

    offered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    choices: frozenset[str] = frozenset()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    can_join: bool = False


def file_inputs(object_info: Mapping[str, Any]) -> FileInputs:
    offered: dict[str, frozenset[str]] = {}
    choices: set[str] = set()
    prefixes: dict[str, str] = {}
    for class_type, name, spec in specs_of(object_info):
        options = _options(spec)
        listed = choices_of(spec) or []
        if _takes_upload(options):
            texts = (each for each in listed if isinstance(each, str))
            offered[f"{class_type}.{name}"] = frozenset(texts)
        elif listed or spec[:1] == ["COMBO"]:
            choices.add(f"{class_type}.{name}")
        if name == PREFIX:
            prefixes[class_type] = str(options.get("default") or PREFIX_USUAL)
    return FileInputs(offered, frozenset(choices), prefixes, JOIN in object_info)


def _options(spec: list[Any]) -> Mapping[str, Any]:
    return spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}


def _takes_upload(options: Mapping[str, Any]) -> bool:
    """`image_upload`, `video_upload`, `audio_upload` … or a folder that it lists."""
    marks = (key for key in options if key.endswith("upload") or key == "image_folder")
    return any(options[key] for key in marks)


def foreign_files(
    prompt: Mapping[str, Any], known: FileInputs, own: frozenset[str]
) -> Iterator[tuple[str, str, str]]:
    """Node, input and text of what names a file that is not the job's and not there for everyone."""
    for node_id, node in prompt.items():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        for name, value in (inputs if isinstance(inputs, Mapping) else {}).items():
            if not isinstance(value, str) or not value or value in own:
                continue
            if _is_foreign(f"{node.get('class_type')}.{name}", value, known):
                yield node_id, name, value


def _is_foreign(place: str, value: str, known: FileInputs) -> bool:
    if place in known.offered:
        return value not in known.offered[place] or value.startswith(ROOT)
    return place in known.choices and _ANNOTATED.search(value) is not None


def refuse(node_id: str, name: str, value: str) -> InvalidInput:
    return InvalidInput(
        f"Node {node_id}, input {name}: {value!r} is no file of this job.",
        hint="A property of type image, video or audio takes a file.",
    )


def placed(prompt: Mapping[str, Any], folder: str, known: FileInputs) -> dict[str, Any]:
    """A new prompt whose nodes save into the folder; each prefix keeps its readable end."""
    new = dict(prompt)
    for node_id, node in prompt.items():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        if not isinstance(inputs, Mapping):
            continue
        prefix = inputs.get(PREFIX, known.prefixes.get(str(node.get("class_type"))))
        inside: Any
        if isinstance(prefix, str):
            inside = f"{folder}/{_relative(prefix)}"
        elif isinstance(prefix, list) and known.can_join:
            inside, new[f"{node_id}.{PREFIX}"] = [f"{node_id}.{PREFIX}", 0], _join(folder, prefix)
        else:
            continue
        new[node_id] = {**node, "inputs": {**inputs, PREFIX: inside}}
    return new


def _join(folder: str, link: list[Any]) -> dict[str, Any]:
    return {
        "class_type": JOIN,
        "inputs": {"string_a": f"{folder}/", "string_b": link, "delimiter": ""},
    }


def _relative(prefix: str) -> str:
    """Without a way out of the folder."""
    parts = (part for part in prefix.replace("\\", "/").split("/") if part.strip(". "))
    return "/".join(parts) or PREFIX_USUAL
