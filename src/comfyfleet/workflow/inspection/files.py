"""The files that a workflow names: models, embeddings in its texts, and pictures and sounds it loads."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from comfyfleet.workflow.inspection.model import NamedFile
from comfyfleet.workflow.inspection.names import embeddings_in, is_model_file
from comfyfleet.workflow.inspection.takes import is_file_input, widgets_of_values
from comfyfleet.workflow.inspection.view import SeenNode
from comfyfleet.workflow.widgettypes import Widget

# Some packs keep a list of models, or a model with its strength, in one value.
VALUE_DEPTH_MAX = 4
_Key = tuple[str, str]  # kind and name
# What loaders offer when nothing shall be loaded.
NO_FILE = ("", "none", "None")


def named_files(nodes: Iterable[SeenNode], listed_models: Any = None) -> tuple[NamedFile, ...]:
    """`listed_models` are those that a workflow names as a whole, beside those of its nodes."""
    found: dict[_Key, NamedFile] = {}
    sources: list[tuple[Any, bool]] = [(listed_models, True)]
    for node in nodes:
        for file in _files_of(node):
            key = (file.kind, file.name)
            found[key] = _merged(found[key], file) if key in found else file
        sources.append((node.properties.get("models"), node.is_active))
    described = [
        replace(model, active=active)
        for source, active in sources
        for model in _described_models(source)
    ]
    return tuple(_with_descriptions(found, described).values())


def _files_of(node: SeenNode) -> Iterator[NamedFile]:
    widgets = widgets_of_values(node.type, node.values) if node.type else {}
    for name, value in node.values.items():
        address = f"{node.ref.id}.{name}"
        for file in _files_in(value, widgets.get(name)):
            yield replace(file, addresses=(address,), active=node.is_active)
    for value in node.unnamed_values:
        for file in _files_in(value, None):
            yield replace(file, active=node.is_active)


def _files_in(value: Any, widget: Widget | None) -> Iterator[NamedFile]:
    if isinstance(value, str):
        yield from _files_in_text(value, widget)
    else:
        for name in _models_inside(value, VALUE_DEPTH_MAX):
            yield NamedFile(name, "model")


def _models_inside(value: Any, depth_left: int) -> Iterator[str]:
    """Only models: a picture inside a value is what some node showed last."""
    if is_model_file(value):
        yield value
    elif isinstance(value, dict | list) and depth_left > 0:
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _models_inside(inner, depth_left - 1)


def _files_in_text(value: str, widget: Widget | None) -> Iterator[NamedFile]:
    present = _is_listed(value, widget)
    if is_model_file(value):
        yield NamedFile(value, "model", present=present)
    elif is_file_input(value, widget):
        if value not in NO_FILE:
            yield NamedFile(value, "input", present=present)
    else:
        for name in embeddings_in(value):
            yield NamedFile(name, "embedding")


def _is_listed(value: str, widget: Widget | None) -> bool | None:
    if widget is None or widget.choices is None or widget.kind == "remote":
        return None
    return value in widget.choices


def _merged(one: NamedFile, other: NamedFile) -> NamedFile:
    return replace(
        one,
        addresses=tuple(dict.fromkeys((*one.addresses, *other.addresses))),
        active=one.active or other.active,
        present=other.present if one.present is None else one.present,
    )


def _described_models(entries: Any) -> Iterator[NamedFile]:
    """Templates say where their models can be had."""
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            yield NamedFile(
                entry["name"], "model", directory=_text(entry, "directory"), url=_text(entry, "url")
            )


def _with_descriptions(
    found: Mapping[_Key, NamedFile], described: Iterable[NamedFile]
) -> dict[_Key, NamedFile]:
    """A description belongs to every value with that file name, in whatever folder it is there."""
    result = dict(found)
    keys: dict[str, list[_Key]] = {}
    for kind, name in found:
        if kind == "model":
            keys.setdefault(_file_name(name), []).append((kind, name))
    for model in described:
        own_keys = keys.setdefault(_file_name(model.name), [])
        for key in own_keys:
            file = result[key]
            result[key] = replace(
                file, directory=file.directory or model.directory, url=file.url or model.url
            )
        if not own_keys:
            own_keys.append((model.kind, model.name))
            result[(model.kind, model.name)] = model
    return result


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rpartition("/")[2]


def _text(entry: Mapping[str, Any], key: str) -> str | None:
    value = entry.get(key)
    return value if isinstance(value, str) and value else None
