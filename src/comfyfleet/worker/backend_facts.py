"""The facts about a backend that a worker reports to the control plane. All functions are pure."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from comfyfleet.api.worker import (
    OBJECT_INFO_BYTES_MAX,
    BackendFacts,
    BackendSystem,
    object_info_hash,
)
from comfyfleet.comfy import Description

MODEL_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".onnx", ".pkl")
ENGINE_ARGUMENTS = ["comfyfleet engine"]


def backend_facts(description: Description, *, is_cloud: bool = False) -> BackendFacts:
    gpus = [device for device in description.devices if device.kind != "cpu"]
    object_info = description.object_info
    reported = shared_object_info(object_info)
    size = len(object_info_bytes(reported))
    return BackendFacts(
        kind="Comfy Cloud" if is_cloud else _kind(description.system_stats),
        version=description.version,
        system=_system(description.system_stats),
        gpu=gpus[0].name if gpus else None,
        gpu_memory_bytes=gpus[0].memory_bytes if gpus else None,
        node_types=tuple(sorted(object_info)),
        model_files=dict(_model_files(object_info)),
        object_info_hash=object_info_hash(reported),
        object_info_size=size if size <= OBJECT_INFO_BYTES_MAX else None,
    )


def shared_object_info(object_info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object_info without the files that were uploaded to this backend.

    Other users must not see those files, and each upload would change the hash of the node types.
    """
    return {name: _without_uploads(entry) for name, entry in object_info.items()}


def object_info_bytes(object_info: Mapping[str, Any]) -> bytes:
    """Returns the JSON text to upload. Keeps the backend's order of keys, because clients use it to
    match values with inputs.
    """
    return json.dumps(object_info, separators=(",", ":"), ensure_ascii=False).encode()


def _without_uploads(entry: Any) -> Any:
    inputs = entry.get("input") if isinstance(entry, Mapping) else None
    if not isinstance(inputs, Mapping):
        return entry
    groups = {
        group: {name: _without_files(spec) for name, spec in specs.items()}
        for group, specs in inputs.items()
        if isinstance(specs, Mapping)
    }
    return {**entry, "input": {**inputs, **groups}}


def _without_files(spec: Any) -> Any:
    if not isinstance(spec, list) or not spec or not takes_upload(input_options(spec)):
        return spec
    if isinstance(spec[0], list):
        return [[], *spec[1:]]
    has_list = isinstance(spec[1].get("options"), list)
    return [spec[0], {**spec[1], "options": []}, *spec[2:]] if has_list else spec


def _system(system_stats: Mapping[str, Any]) -> BackendSystem | None:
    """Returns the backend's versions, or None if the data doesn't have ComfyUI's format."""
    try:
        return BackendSystem.model_validate(system_stats.get("system"))
    except ValidationError:
        return None


def _kind(system_stats: Mapping[str, Any]) -> str:
    system = system_stats.get("system")
    arguments = system.get("argv") if isinstance(system, Mapping) else None
    return "comfyfleet engine" if arguments == ENGINE_ARGUMENTS else "ComfyUI"


def _model_files(object_info: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields each input that offers model files, with these files."""
    for class_type, name, spec in input_specs(object_info):
        choices = file_choices(spec)
        files = tuple(choice for choice in choices or () if is_model_file(choice))
        if files or choices == []:
            yield f"{class_type}.{name}", files


def input_specs(object_info: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Any]]]:
    """Yields the node type, name and declaration of every input. Inputs with an unknown format are
    left out."""
    for class_type, declared in sorted(object_info.items()):
        inputs = declared.get("input") if isinstance(declared, Mapping) else None
        for group in ("required", "optional"):
            specs = inputs.get(group) if isinstance(inputs, Mapping) else None
            for name, spec in (specs if isinstance(specs, Mapping) else {}).items():
                if isinstance(spec, list) and spec:
                    yield class_type, name, spec


def file_choices(spec: list[Any]) -> list[Any] | None:
    """Returns the choices of an input declared as `[[…], {}]` (the old form) or `["COMBO",
    {"options": […]}]`, or None if it has none."""
    if isinstance(spec[0], list):
        return spec[0]
    options = spec[1].get("options") if len(spec) > 1 and isinstance(spec[1], Mapping) else None
    return options if isinstance(options, list) else None


def input_options(spec: list[Any]) -> Mapping[str, Any]:
    return spec[1] if len(spec) > 1 and isinstance(spec[1], Mapping) else {}


def takes_upload(options: Mapping[str, Any]) -> bool:
    """Checks whether the input's options enable uploads (`image_upload`, `video_upload` and so on)
    or name a folder (`image_folder`).
    """
    marks = (key for key in options if key.endswith("upload") or key == "image_folder")
    return any(options[key] for key in marks)


def is_model_file(choice: Any) -> bool:
    return isinstance(choice, str) and choice.lower().endswith(MODEL_ENDINGS)
