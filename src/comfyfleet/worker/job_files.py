"""The files of a job on its backend: which files a prompt may name, how their names get into the
prompt, and which outputs are delivered.

Many tenants share a backend. A job's files are in a folder with an unguessable name, and a prompt
may not name files of another job.
"""

import asyncio
import mimetypes
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any
from uuid import UUID

from blake3 import blake3

from comfyfleet.api.values import NAME_CHARACTERS_MAX, Asset, OutputSlot, ShownValue, fitting
from comfyfleet.api.worker import Job
from comfyfleet.comfy import Backend, NodeProblem
from comfyfleet.comfy.backend import OutputFile, Outputs
from comfyfleet.errors import InvalidInput, PromptRefused
from comfyfleet.media import ENDINGS, sniff_type
from comfyfleet.worker.backend_facts import (
    file_choices,
    input_options,
    input_specs,
    takes_upload,
)
from comfyfleet.worker.settings import safe_name

ROOT = "comfyfleet"
FOLDER_CHARACTERS = 32
PREFIX = "filename_prefix"
PREFIX_DEFAULT = "ComfyUI"
JOIN, REPLACE = "StringConcatenate", "StringReplace"
WRAPPED = "__value__"
INPUT_NAME_CHARACTERS_MAX = 60
# Matches the end of a value like `cat.png [output]`, which names a file outside the input folder.
_ANNOTATED = re.compile(r"\[(input|output|temp)\]\s*$")
# For files of unknown types. Must not be an extension of model files.
UNKNOWN_ENDING = ".dat"


def job_folder(lease_token: UUID) -> str:
    """Returns the name of the job's folder. The name is derived from the lease token, so it doesn't
    change at a restart and can't be guessed by others."""
    return f"{ROOT}/{blake3(lease_token.bytes).hexdigest()[:FOLDER_CHARACTERS]}"


def input_name(name: str, first: bytes) -> str:
    """Returns an input's name on the backend.

    The extension depends on the content, not on the original name.
    """
    ending = ENDINGS.get(sniff_type(first) or "", UNKNOWN_ENDING)
    return f"{safe_name(name)[:INPUT_NAME_CHARACTERS_MAX]}{ending}"


def flat_name(folder: str, name: str) -> str:
    """Returns a file name that is as hard to guess as the folder, for loaders that don't accept
    subfolders."""
    return f"{folder.rpartition('/')[2]}-{name}"


def is_unlisted(error: PromptRefused, names: Iterable[str]) -> bool:
    """Checks whether a loader refused one of these files because the loader's list doesn't contain
    it."""
    details = error.details.get("problems") or ()
    problems = [problem for problem in details if isinstance(problem, NodeProblem)]
    own = set(names)
    return any(
        problem.kind == "value_not_in_list" and problem.received in own for problem in problems
    )


@dataclass(frozen=True, slots=True)
class BackendFileInputs:
    """The file inputs of a backend's node types. Inputs are named `Class.input`.

    `offered` maps inputs that accept uploads to the files that every tenant may use. `choices`
    contains all other inputs with a list of values. `prefixes` maps node types that save files to
    their default prefixes.
    """

    offered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    choices: frozenset[str] = frozenset()
    prefixes: Mapping[str, str] = field(default_factory=dict)
    can_join: bool = False  # whether there are nodes that join and replace strings


def find_file_inputs(object_info: Mapping[str, Any]) -> BackendFileInputs:
    offered: dict[str, frozenset[str]] = {}
    choices: set[str] = set()
    prefixes: dict[str, str] = {}
    for class_type, name, spec in input_specs(object_info):
        options = input_options(spec)
        listed = file_choices(spec) or []
        if takes_upload(options):
            texts = (value for value in listed if isinstance(value, str))
            offered[f"{class_type}.{name}"] = frozenset(texts)
        elif listed or spec[:1] == ["COMBO"]:
            choices.add(f"{class_type}.{name}")
        if name == PREFIX:
            prefixes[class_type] = str(options.get("default") or PREFIX_DEFAULT)
    can_join = JOIN in object_info and REPLACE in object_info
    return BackendFileInputs(offered, frozenset(choices), prefixes, can_join)


def foreign_files(
    prompt: Mapping[str, Any],
    known: BackendFileInputs,
    own: frozenset[str],
    *,
    is_strangers: bool = False,
) -> Iterator[tuple[str, str, str]]:
    """Yields the node, input and text of each value that names a foreign file, which is one that
    belongs neither to the job nor to all tenants.

    For a client's own prompt (`is_strangers`), also yields every other value of an upload input,
    such as one of the backend's own files or a link to another node.
    """
    for node_id, node in prompt.items():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        for name, wrapped in (inputs if isinstance(inputs, Mapping) else {}).items():
            value = _unwrapped(wrapped)
            if not value or (isinstance(value, str) and value in own):
                continue
            place = f"{node.get('class_type')}.{name}"
            if is_strangers and place in known.offered:
                yield node_id, name, str(value)
            elif isinstance(value, str) and _is_foreign(place, value, known):
                yield node_id, name, value


def _unwrapped(value: Any) -> Any:
    """Removes `__value__` wrappers from a value, because the backend removes them."""
    while isinstance(value, Mapping) and WRAPPED in value:
        value = value[WRAPPED]
    return value


def _is_foreign(place: str, value: str, known: BackendFileInputs) -> bool:
    if place in known.offered:
        return value not in known.offered[place] or value.startswith(ROOT)
    return place in known.choices and _ANNOTATED.search(value) is not None


def refuse_foreign_file(node_id: str, name: str, value: str) -> InvalidInput:
    return InvalidInput(
        f"Node {node_id}, input {name}: the file {value!r} doesn't belong to this job.",
        hint="Use a property of type image, video or audio to pass a file.",
    )


def with_output_folder(
    prompt: Mapping[str, Any],
    folder: str,
    known: BackendFileInputs,
    *,
    is_strangers: bool = False,
) -> dict[str, Any]:
    """Returns a new prompt whose nodes save into the folder. The original prefix is appended to the
    folder's name.

    Raises InvalidInput if a prefix in a client's own prompt can't be confined.
    """
    new = dict(prompt)
    for node_id, node in prompt.items():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        if not isinstance(inputs, Mapping):
            continue
        prefix = _unwrapped(inputs.get(PREFIX, known.prefixes.get(str(node.get("class_type")))))
        inside: Any
        if isinstance(prefix, str):
            inside = f"{folder}/{_relative(prefix)}"
        elif isinstance(prefix, list) and known.can_join:
            added = _joined(folder, prefix, f"{node_id}.{PREFIX}", prompt)
            inside = [next(iter(added)), 0]
            new |= added
        elif prefix is not None and is_strangers:
            raise InvalidInput(f"Node {node_id}: {PREFIX} must be a string.")
        else:
            continue
        new[node_id] = {**node, "inputs": {**inputs, PREFIX: inside}}
    return new


def _joined(
    folder: str, link: list[Any], name: str, prompt: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Returns new nodes that prepend the folder to a string from another node. The node with the
    result comes first. The new ids don't occur in the prompt.
    """
    while name in prompt or f"{name}.inside" in prompt:
        name += "_"
    inside = {"string": link, "find": "..", "replace": "_"}
    joined = {"string_a": f"{folder}/", "string_b": [f"{name}.inside", 0], "delimiter": ""}
    return {
        name: {"class_type": JOIN, "inputs": joined},
        f"{name}.inside": {"class_type": REPLACE, "inputs": inside},
    }


def _relative(prefix: str) -> str:
    """Returns the prefix without parts that lead out of the folder."""
    parts = (part for part in prefix.replace("\\", "/").split("/") if part.strip(". "))
    return "/".join(parts) or PREFIX_DEFAULT


FOLDERS = ("input", "output", "temp")


class BackendFiles:
    """Checks and removes a job's files.

    `home` is the parent of the backend's folders, if it is on this machine.
    """

    def __init__(self, backend: Backend, home: Path | None = None) -> None:
        self.known = BackendFileInputs()
        self._backend = backend
        self._home = home

    def learn(self, object_info: Mapping[str, Any]) -> None:
        self.known = find_file_inputs(object_info)

    async def check(
        self, prompt: Mapping[str, Any], own: frozenset[str], *, is_strangers: bool = False
    ) -> None:
        """Raises InvalidInput if a prompt names a file that doesn't belong to its job.

        Fetches the node types again before raising, because the file may have been added recently.
        """
        if not any(foreign_files(prompt, self.known, own, is_strangers=is_strangers)):
            return
        described = await self._backend.describe()
        await asyncio.to_thread(self.learn, described.object_info)
        for foreign in foreign_files(prompt, self.known, own, is_strangers=is_strangers):
            raise refuse_foreign_file(*foreign)

    def remove(self, folder: str) -> None:
        """Removes all files of a job. This call blocks."""
        if self._home is None:
            return
        for parent in FOLDERS:
            shutil.rmtree(self._home / parent / folder, ignore_errors=True)
        for path in (self._home / "input").glob(flat_name(folder, "*")):
            path.unlink(missing_ok=True)


DEPTH_MAX = 64


def fill_prompt(
    prompt: Mapping[str, Any], names: Mapping[str, str], assets: tuple[Asset, ...]
) -> Any:
    """Returns a new prompt with the inputs filled in. `names` maps each asset to the value for a
    loader's input."""
    new: Any = dict(prompt)
    for asset in assets:
        value = names[asset.name]
        if asset.binding is not None:
            new = _bound(new, asset.binding, value)
        if asset.placeholder:
            new = _replaced(new, asset.placeholder, value, 0)
    return new


def changed_inputs(prompt: Mapping[str, Any], sent: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns, by node, the inputs that differ between the job's prompt and the one that was sent.
    Operators use them to see the prompt as it was sent."""
    changes: dict[str, dict[str, Any]] = {}
    for node_id, node in sent.items():
        before = prompt.get(node_id, {}).get("inputs", {})
        changed = {
            name: value
            for name, value in node.get("inputs", {}).items()
            if name not in before or before[name] != value
        }
        if changed:
            changes[node_id] = changed
    return changes


def _bound(prompt: Mapping[str, Any], binding: str, value: str) -> dict[str, Any]:
    node_id, name = _split(binding, prompt)
    node = prompt[node_id]
    inputs = {**node.get("inputs", {}), name: value}
    return {**prompt, node_id: {**node, "inputs": inputs}}


def _split(binding: str, prompt: Mapping[str, Any]) -> tuple[str, str]:
    """Splits a binding into node id and input name.

    Both may contain dots, so the prompt decides where the id ends.
    """
    parts = binding.split(".")
    for count in range(1, min(len(parts), DEPTH_MAX)):
        node_id, name = ".".join(parts[:count]), ".".join(parts[count:])
        if name and isinstance(prompt.get(node_id), Mapping):
            return node_id, name
    raise InvalidInput(f"the node of the binding {binding!r} isn't in the prompt", binding=binding)


def _replaced(value: Any, placeholder: str, name: str, depth: int) -> Any:
    """Replaces the placeholder wherever it occurs in a string."""
    if depth > DEPTH_MAX:
        raise InvalidInput(f"the prompt is nested more than {DEPTH_MAX} levels deep")
    if isinstance(value, str):
        return value.replace(placeholder, name)
    if isinstance(value, Mapping):
        return {key: _replaced(item, placeholder, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, placeholder, name, depth + 1) for item in value]
    return value


DEFAULT_TYPE = "application/octet-stream"
# Content types by extension. They take precedence over the operating system's types, which may
# differ or be missing.
KNOWN_TYPES = {
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".mp4": "video/mp4",
    ".webm": "video/webm",
    ".mkv": "video/x-matroska",
    ".flac": "audio/flac",
    ".opus": "audio/ogg",
    ".glb": "model/gltf-binary",
    ".safetensors": "application/octet-stream",
}


def choose_outputs(outputs: Outputs, output_node_id: str | None) -> tuple[OutputFile, ...]:
    """Returns the files of the named node, or of all nodes if none is named. Returns previews only
    if there are no other files."""
    own = [file for file in outputs.files if _is_of(file.node_id, output_node_id)]
    saved = [file for file in own if file.folder == "output"]
    return tuple(dict.fromkeys(saved or own))


def all_outputs(outputs: Outputs) -> tuple[OutputFile, ...]:
    """Returns all files including previews, each once even if several nodes show it."""
    files: dict[tuple[str, str, str], OutputFile] = {}
    for file in outputs.files:
        if file.folder in ("output", "temp"):
            files.setdefault((file.folder, file.subfolder, file.filename), file)
    return tuple(files.values())


def require_own_folder(file: OutputFile, job: Job) -> None:
    """Raises InvalidInput for a file in another job's folder or outside the backend's folders.

    The check is necessary because nodes choose the names in their results. A custom node may save
    into a fixed folder of its own.
    """
    path = PureWindowsPath(file.subfolder)  # accepts both kinds of slash
    parts = [part.lower() for part in path.parts]
    is_other_job = parts[:1] == [ROOT] and parts[:2] != job_folder(job.lease_token).split("/")
    if path.drive or path.root or ".." in parts or is_other_job:
        raise InvalidInput(f"The output {file.filename} isn't in a folder of this job.")


def own_subfolder(file: OutputFile, job: Job) -> str:
    """Returns the file's subfolder inside the job's own folder, without the private name of that
    folder."""
    return file.subfolder.replace("\\", "/").removeprefix(job_folder(job.lease_token)).strip("/")


def _is_of(node_id: str, parent_id: str | None) -> bool:
    """Checks whether `parent_id` is the node itself, or the subgraph or group that contains it. None
    stands for any node."""
    return parent_id is None or node_id == parent_id or node_id.startswith(f"{parent_id}:")


def content_type_of(filename: str, server_type: str) -> str:
    """Returns the content type for the file's extension. Falls back to the type that the server
    reports, which is often too general."""
    ending = PurePath(filename).suffix.lower()
    guessed = KNOWN_TYPES.get(ending) or mimetypes.guess_type(filename)[0]
    return guessed or server_type.partition(";")[0].strip() or DEFAULT_TYPE


def find_slot(slots: Sequence[OutputSlot], filenames: Sequence[str]) -> str | None:
    """Returns the lease's upload slot if its content type fits the output.

    The slot's URL is signed for one content type, which the store then reports for the file.
    """
    for slot in slots[:1] if filenames else ():
        types = {name.lower(): value for name, value in slot.headers.items()}
        made_for = types.get("content-type")
        if made_for is None or made_for == content_type_of(filenames[0], DEFAULT_TYPE):
            return slot.name
    return None


def has_values(outputs: Outputs, node_id: str) -> bool:
    """Checks whether a node produced values. Such a node doesn't need to produce files."""
    return any(_is_of(value.node_id, node_id) for value in outputs.values)


def choose_values(outputs: Outputs, output_node_id: str | None) -> tuple[ShownValue, ...]:
    """Returns the values that nodes showed, up to the size limit. The named node's values come
    first."""
    values = sorted(outputs.values, key=lambda value: not _is_of(value.node_id, output_node_id))
    shown = (
        ShownValue(
            node_id=value.node_id[:NAME_CHARACTERS_MAX],
            name=value.key[:NAME_CHARACTERS_MAX],
            value=value.value,
        )
        for value in values
    )
    return tuple(fitting(shown))
