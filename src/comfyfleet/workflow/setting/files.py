"""The files that a prompt reads: models, and pictures, videos and sounds that are handed in."""

from comfyfleet.workflow.nodetypes import DYNAMIC_COMBO
from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.flow import Flow, own_name
from comfyfleet.workflow.setting.sampling import (
    Role,
    models,
    role_anywhere,
    role_of_sources,
    samplers,
    unique,
)
from comfyfleet.workflow.specs import input_spec

_SERVICE_MODEL = Role(("model", "model_name"), ("COMBO", DYNAMIC_COMBO))
_MODEL_NAMES = ("ckpt", "checkpoint", "unet", "model", "gguf")


def media_places(flow: Flow, kind: str, *flags: str) -> list[Place]:
    """Inputs for an uploaded file of that kind; where none is declared so, those that are called like it.

    Those that give a mask alone count only if there is nothing else.
    """
    found = [
        (entry, Place(entry.id, name))
        for entry in flow.needed.values()
        for name in flow.inputs_of(entry, "COMBO")
        if any(input_spec(name, flow.declared(entry)[name]).options.get(flag) for flag in flags)
    ]
    whole = [place for entry, place in found if set(entry.outputs) != {"MASK"}]
    return whole or [place for _, place in found] or role_anywhere(flow, _named_file(kind))


def _named_file(kind: str) -> Role:
    return Role((kind,), ("COMBO", "STRING"))


def model_places(flow: Flow) -> list[Place]:
    """Of the loaders whose model the samplers use; without a sampler what services let choose."""
    if not samplers(flow):
        return role_of_sources(flow, _SERVICE_MODEL)
    places = [
        place
        for entry in _model_chain(flow)
        if not flow.linked(entry, "MODEL")
        for place in _file_places(flow, entry, _MODEL_NAMES)[:1]
    ]
    return unique(places)


def lora_places(flow: Flow) -> list[Place]:
    return unique(
        [place for entry in _model_chain(flow) for place in _file_places(flow, entry, ("lora",))]
    )


def _model_chain(flow: Flow) -> list[Entry]:
    chains = (entry for sampler in samplers(flow) for entry in models(flow, sampler))
    return list({entry.id: entry for entry in chains}.values())


def _file_places(flow: Flow, entry: Entry, names: tuple[str, ...]) -> list[Place]:
    return [
        Place(entry.id, name)
        for name in flow.inputs_of(entry, "COMBO")
        if any(part in own_name(name).lower() for part in names)
    ]
