"""The nodes that sample, and the parts that tell them how. Known by the types that they take and give, never by class."""

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.flow import Flow, Origin, own_name

PART_TYPES = ("NOISE", "GUIDER", "SAMPLER", "SIGMAS")


class Role(NamedTuple):
    """Inputs that mean the same: `seed` or `noise_seed`, whole numbers."""

    names: Collection[str]
    types: Collection[str]


def conditioned(flow: Flow) -> list[Entry]:
    """Where conditioning ends: samplers and guiders; if there are none, whatever else takes it."""
    # A prompt that shows something on the way but saves nothing needs no sampler, and yet has one.
    ends = _takers(flow, flow.needed.values()) or _takers(flow, flow.entries.values())
    sampling = [
        entry for entry in ends if "GUIDER" in entry.outputs or flow.inputs_of(entry, "LATENT")
    ]
    # A sampler that no text reaches prepares something for the others, such as a depth map.
    told = [
        entry
        for entry in sampling
        if any(flow.inputs_of(one, "STRING") for one in encoders(flow, entry))
    ]
    return told or sampling or ends


def encoders(flow: Flow, end: Entry) -> Iterator[Entry]:
    """Where the conditioning of a sampler or guider comes from."""
    for name in flow.linked(end, "CONDITIONING"):
        yield from (one.entry for one in flow.ends(flow.origin(end, name), "CONDITIONING"))


def _takers(flow: Flow, entries: Iterable[Entry]) -> list[Entry]:
    return [
        entry
        for entry in entries
        if flow.linked(entry, "CONDITIONING") and not {"CONDITIONING", "MODEL"} & {*entry.outputs}
    ]


def samplers(flow: Flow) -> list[Entry]:
    ends = conditioned(flow)
    guiders = {entry.id for entry in ends if "GUIDER" in entry.outputs}
    guided = [
        entry
        for entry in (flow.entries.values() if guiders else ())
        for name in flow.linked(entry, "GUIDER")
        if any(
            origin.entry.id in guiders for origin in flow.chain(flow.origin(entry, name), "GUIDER")
        )
    ]
    found = {entry.id: entry for entry in (*ends, *guided) if entry.id not in guiders}
    return list(found.values())


def parts(flow: Flow, sampler: Entry) -> Iterator[Entry]:
    """The sampler and what gives it noise, guidance, steps and method."""
    yield sampler
    for kind in PART_TYPES:
        for name in flow.linked(sampler, kind):
            yield from (origin.entry for origin in flow.chain(flow.origin(sampler, name), kind))


def models(flow: Flow, sampler: Entry) -> Iterator[Entry]:
    """What its model comes from and passes through."""
    for part in parts(flow, sampler):
        for name in flow.linked(part, "MODEL"):
            yield from (origin.entry for origin in flow.chain(flow.origin(part, name), "MODEL"))


def places_in(flow: Flow, entry: Entry, role: Role) -> list[Place]:
    return [
        Place(entry.id, name)
        for name in flow.inputs_of(entry, *role.types)
        if own_name(name) in role.names
    ]


def role_of_samplers(flow: Flow, role: Role) -> list[Place]:
    """In samplers and their parts; else wherever an input is called so."""
    found = [
        place
        for sampler in samplers(flow)
        for part in parts(flow, sampler)
        for place in places_in(flow, part, role)
    ]
    return unique(found or role_anywhere(flow, role))


def role_anywhere(flow: Flow, role: Role) -> list[Place]:
    return [place for entry in flow.needed.values() for place in places_in(flow, entry, role)]


def latent_origins(flow: Flow, sampler: Entry) -> Iterator[Origin]:
    """What makes the latents that the sampler starts from, however many samplers lie between."""
    for name in flow.linked(sampler, "LATENT"):
        yield from flow.ends(flow.origin(sampler, name), "LATENT")


def role_of_latents(flow: Flow, role: Role) -> list[Place]:
    """In what makes the latents; without a sampler in whatever has a size, too."""
    sampling = samplers(flow)
    origins = (origin for sampler in sampling for origin in latent_origins(flow, sampler))
    found = [place for origin in origins for place in places_in(flow, origin.entry, role)]
    if sampling:
        return unique(found)
    return [place for entry in _sized(flow) for place in places_in(flow, entry, role)]


def _sized(flow: Flow) -> Iterator[Entry]:
    for entry in flow.needed.values():
        if {"width", "height"} <= {own_name(name) for name in flow.inputs_of(entry, "INT")}:
            yield entry


def role_of_sources(flow: Flow, role: Role) -> list[Place]:
    """In what makes the latents and what encodes the texts; without a sampler in services that take a text."""
    if not samplers(flow):
        asked = (entry for entry in flow.needed.values() if flow.inputs_of(entry, "STRING"))
        return [place for entry in asked for place in places_in(flow, entry, role)]
    texts = (one for entry in conditioned(flow) for one in encoders(flow, entry))
    found = [place for entry in texts for place in places_in(flow, entry, role)]
    return unique([*role_of_latents(flow, role), *found])


def seeds(flow: Flow, role: Role) -> list[Place]:
    """A sampler that goes on where another stopped adds no noise: its seed doesn't matter."""
    found = role_of_samplers(flow, role)
    noisy = [
        place
        for place in found
        if flow.entries[place.node_id].inputs.get("add_noise") not in ("disable", False)
    ]
    return noisy or found


def unique(places: Collection[Place]) -> list[Place]:
    return list(dict.fromkeys(places))
