"""The models of a prompt: which it names, and which of them is the heavy one. Pure."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from comfyfleet.effects.model import Property, Version
from comfyfleet.fleets.offers import Missing, ModelUse, offer_of
from comfyfleet.wire.messages import BackendFacts
from comfyfleet.workflow.inspection.names import is_model_file

# By what loaders call the input that fills the GPU's memory; the surest first.
HEAVY_INPUTS = (
    ("ckpt_name", "unet_name"),
    ("checkpoint", "checkpoint_name", "diffusion_model", "diffusion_model_name", "gguf_name"),
    ("model_name", "model", "model_path"),
)
# Classes of loaders that call a light model `model_name`.
LIGHT_CLASSES = ("upscale", "lora", "vae", "clip", "controlnet", "style", "gligen", "photomaker")
KEY_CHARACTERS_MAX = 300
VALUE_DEPTH_MAX = 4


def models_of(prompt: Mapping[str, Any]) -> tuple[ModelUse, ...]:
    """In the order of the prompt, each once."""
    found = (
        ModelUse(f"{node.get('class_type', '')}.{name}", file)
        for node in prompt.values()
        for name, value in node.get("inputs", {}).items()
        for file in _files_in(value, VALUE_DEPTH_MAX)
    )
    return tuple(dict.fromkeys(found))


def models_chosen(
    properties: Iterable[Property], values: Mapping[str, Any]
) -> tuple[ModelUse, ...]:
    """Files that properties put into inputs; of an input its name alone is known here."""
    given = (
        (each.binding.rpartition(".")[2], _first(values.get(each.name), each.default))
        for each in properties
        if each.binding and not each.is_media
    )
    return tuple(ModelUse(name, value) for name, value in given if is_model_file(value))


def model_key(models: Iterable[ModelUse]) -> str | None:
    """The heavy model: what is worth not to be loaded twice."""
    uses = list(models)
    heavy = next((use for tier in HEAVY_INPUTS for use in uses if _is_heavy(use, tier)), None)
    chosen = heavy or next(iter(uses), None)
    if chosen is None:
        return None
    is_short = len(chosen.file) <= KEY_CHARACTERS_MAX
    return chosen.file if is_short else hashlib.sha256(chosen.file.encode()).hexdigest()


def model_set(models: Iterable[ModelUse]) -> str | None:
    """Equal for prompts that name the same files for the same inputs, in whatever order."""
    uses = sorted(set(models))
    return hashlib.sha256(json.dumps(uses).encode()).hexdigest() if uses else None


def missing_on(version: Version, facts: BackendFacts) -> Missing:
    """A model whose input the backend doesn't list is not held against it: nobody can tell."""
    return offer_of(facts).lacks(version.node_types, version.models)


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _is_heavy(use: ModelUse, tier: tuple[str, ...]) -> bool:
    class_name, _, name = use.input.partition(".")
    lowered = class_name.lower()
    is_light = any(word in lowered for word in LIGHT_CLASSES) and "checkpoint" not in lowered
    return name in tier and (not is_light or "ckpt_name" in tier)


def _files_in(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        if is_model_file(value):
            yield value
    elif depth and isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _files_in(inner, depth - 1)
