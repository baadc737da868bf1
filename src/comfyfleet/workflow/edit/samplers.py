"""Finds the samplers of a prompt, and the nodes that provide their prompts, sizes, seeds and
models.

Nodes are recognized by the types of their inputs and outputs, never by class.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from comfyfleet.workflow.edit.input_lookup import Place, PromptEntry
from comfyfleet.workflow.edit.prompt_flow import Flow, Origin, number_source, own_name, side_of
from comfyfleet.workflow.node_inputs import input_spec

PART_TYPES = ("NOISE", "GUIDER", "SAMPLER", "SIGMAS")


class SamplerRole(NamedTuple):
    """A set of inputs with the same meaning, for example the integers `seed` and `noise_seed`."""

    names: Collection[str]
    types: Collection[str]


def conditioned(flow: Flow) -> list[PromptEntry]:
    """Returns the nodes that consume conditioning: samplers and guiders, or else any node that
    takes conditioning."""
    return flow.once("conditioned", _find_conditioned)


def _find_conditioned(flow: Flow) -> list[PromptEntry]:
    # A prompt that only previews an intermediate result and saves nothing needs no sampler,
    # although it contains one.
    ends = _takers(flow, flow.needed.values()) or _takers(flow, flow.entries.values())
    sampling = [
        entry for entry in ends if "GUIDER" in entry.outputs or flow.inputs_of(entry, "LATENT")
    ]
    # A sampler without a prompt prepares something for other samplers, such as a depth map.
    with_texts = [
        entry
        for entry in sampling
        if any(flow.inputs_of(one, "STRING") for one in encoders(flow, entry))
    ]
    return with_texts or sampling or ends


def encoders(flow: Flow, end: PromptEntry) -> Iterator[PromptEntry]:
    """Yields the nodes that the conditioning of a sampler or guider comes from."""
    for name in flow.linked(end, "CONDITIONING"):
        yield from (one.entry for one in flow.ends(flow.origin(end, name), "CONDITIONING"))


def _takers(flow: Flow, entries: Iterable[PromptEntry]) -> list[PromptEntry]:
    return [
        entry
        for entry in entries
        if flow.linked(entry, "CONDITIONING") and not {"CONDITIONING", "MODEL"} & {*entry.outputs}
    ]


def samplers(flow: Flow) -> list[PromptEntry]:
    return flow.once("samplers", _find_samplers)


def _find_samplers(flow: Flow) -> list[PromptEntry]:
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
    samplers_by_id = {entry.id: entry for entry in (*ends, *guided) if entry.id not in guiders}
    return list(samplers_by_id.values())


def parts(flow: Flow, sampler: PromptEntry) -> Iterator[PromptEntry]:
    """Yields the sampler and the nodes that provide its noise, guider, method and sigmas."""
    yield sampler
    for kind in PART_TYPES:
        for name in flow.linked(sampler, kind):
            yield from (origin.entry for origin in flow.chain(flow.origin(sampler, name), kind))


def models(flow: Flow, sampler: PromptEntry) -> Iterator[PromptEntry]:
    """Yields the nodes that the sampler's model comes from and passes through."""
    for part in parts(flow, sampler):
        for name in flow.linked(part, "MODEL"):
            yield from (origin.entry for origin in flow.chain(flow.origin(part, name), "MODEL"))


def places_in(flow: Flow, entry: PromptEntry, role: SamplerRole) -> list[Place]:
    return [
        Place(entry.id, name)
        for name in flow.inputs_of(entry, *role.types)
        if own_name(name) in role.names
    ]


def role_of_samplers(flow: Flow, role: SamplerRole) -> list[Place]:
    """Returns the inputs with a role in samplers and their parts. If these have none, returns all
    inputs whose names match the role.
    """
    places = [
        place
        for sampler in samplers(flow)
        for part in parts(flow, sampler)
        for place in places_in(flow, part, role)
    ]
    return unique(places or role_anywhere(flow, role))


def role_anywhere(flow: Flow, role: SamplerRole) -> list[Place]:
    return [place for entry in flow.needed.values() for place in places_in(flow, entry, role)]


def latent_origins(flow: Flow, sampler: PromptEntry) -> Iterator[Origin]:
    """Yields the origins of the latents that the sampler starts from. Samplers in between are
    passed through."""
    for name in flow.linked(sampler, "LATENT"):
        yield from flow.ends(flow.origin(sampler, name), "LATENT")


def role_of_latents(flow: Flow, role: SamplerRole) -> list[Place]:
    """Returns the places of a role in the nodes that create latents. Without a sampler, any node
    with a size counts."""
    sampling = samplers(flow)
    origins = (origin for sampler in sampling for origin in latent_origins(flow, sampler))
    places = [place for origin in origins for place in places_in(flow, origin.entry, role)]
    if sampling:
        return unique(places)
    return [place for entry in _sized(flow) for place in places_in(flow, entry, role)]


def _sized(flow: Flow) -> Iterator[PromptEntry]:
    for entry in flow.needed.values():
        if {"width", "height"} <= {own_name(name) for name in flow.inputs_of(entry, "INT")}:
            yield entry


def role_of_sources(flow: Flow, role: SamplerRole) -> list[Place]:
    """Returns the places of a role in the nodes that create latents and encode prompts. Without a
    sampler, any node with a string input counts."""
    if not samplers(flow):
        text_nodes = (entry for entry in flow.needed.values() if flow.inputs_of(entry, "STRING"))
        return [place for entry in text_nodes for place in places_in(flow, entry, role)]
    texts = (one for entry in conditioned(flow) for one in encoders(flow, entry))
    places = [place for entry in texts for place in places_in(flow, entry, role)]
    return unique([*role_of_latents(flow, role), *places])


def seeds(flow: Flow, role: SamplerRole) -> list[Place]:
    """Returns the seeds that have an effect. A sampler that continues another sampler's work adds
    no noise, so its seed has no effect."""
    places = role_of_samplers(flow, role)
    noisy = [
        place
        for place in places
        if flow.entries[place.node_id].inputs.get("add_noise") not in ("disable", False)
    ]
    return noisy or places


def unique(places: Collection[Place]) -> list[Place]:
    return list(dict.fromkeys(places))


class LatentSize(NamedTuple):
    width: Place
    height: Place


def size_places(flow: Flow) -> list[LatentSize]:
    sampling = samplers(flow)
    makers = [size for sampler in sampling for size in _made_for(flow, sampler)]
    unique_sizes = dict.fromkeys(makers or ([] if sampling else _only_size(flow)))
    sizes = list(unique_sizes)
    followers = [
        follower
        for sampler in sampling
        for follower in _size_followers(flow, sampler)
        if follower not in unique_sizes
    ]
    return [
        *sizes,
        *(
            follower
            for follower in followers
            if any(_alike(flow, follower, size) for size in sizes)
        ),
    ]


def _made_for(flow: Flow, sampler: PromptEntry) -> Iterator[LatentSize]:
    for origin in latent_origins(flow, sampler):
        size = _size_of(flow, origin.entry) or _image_size(flow, origin.entry)
        if size is not None:
            yield _sources(flow, size)


def _size_of(flow: Flow, entry: PromptEntry) -> LatentSize | None:
    names = flow.inputs_of(entry, "INT")
    for name in names:
        prefix = name.removesuffix("width")
        if prefix != name and prefix[-1:] in ("", ".") and f"{prefix}height" in names:
            return LatentSize(Place(entry.id, name), Place(entry.id, f"{prefix}height"))
    return None


def _image_size(flow: Flow, entry: PromptEntry) -> LatentSize | None:
    """Returns the size from the nearest node that sets it, or None if another sampler made the
    image."""
    images = list(_images_behind(flow, entry, "IMAGE"))
    if any(flow.linked(image, "LATENT") for image in images):
        return None
    return _nearest(flow, images)


def _images_behind(flow: Flow, entry: PromptEntry, *kinds: str) -> Iterator[PromptEntry]:
    for name in flow.linked(entry, "IMAGE"):
        yield from (one.entry for one in flow.chain(flow.origin(entry, name), *kinds))


def _nearest(flow: Flow, entries: Iterable[PromptEntry]) -> LatentSize | None:
    sizes = (_size_of(flow, entry) for entry in entries)
    return next((size for size in sizes if size), None)


def _sources(flow: Flow, size: LatentSize) -> LatentSize:
    """Returns the inputs that hold both numbers. If the numbers are measured from an image, returns
    the inputs that set the size of that image."""
    sources = LatentSize(*(number_source(flow, place, scaled=True) for place in size))
    origin = flow.origin(flow.entries[sources.width.node_id], sources.width.input)
    if origin is None:
        return sources
    measured = _nearest(flow, _images_behind(flow, origin.entry, "IMAGE", "LATENT"))
    if measured is None:
        return sources
    return LatentSize(*(number_source(flow, place, scaled=True) for place in measured))


def _size_followers(flow: Flow, sampler: PromptEntry) -> Iterator[LatentSize]:
    """Yields the sizes of schedulers and model settings that depend on the size."""
    nodes = (*parts(flow, sampler), *models(flow, sampler))
    for entry in {entry.id: entry for entry in nodes}.values():
        size = _size_of(flow, entry)
        if size is not None:
            yield _sources(flow, size)


def _alike(flow: Flow, one: LatentSize, other: LatentSize) -> bool:
    return [_value(flow, place) for place in one] == [_value(flow, place) for place in other]


def _value(flow: Flow, place: Place) -> object:
    return flow.entries[place.node_id].inputs.get(place.input)


def _only_size(flow: Flow) -> list[LatentSize]:
    """Returns the only size in a prompt without a sampler, preferably one of a node that takes no
    image."""
    sized = {
        size: entry for entry in flow.needed.values() if (size := _size_of(flow, entry)) is not None
    }
    fresh = [size for size, entry in sized.items() if not flow.linked(entry, "IMAGE")]
    few = fresh or list(sized)
    return [_sources(flow, size) for size in few] if len(few) == 1 else []


POSITIVE, NEGATIVE = "positive", "negative"
# Names of strings with a different purpose than the prompt.
_OTHER_TEXTS = frozenset({"lyrics", "system_prompt"})
_TEXT_NAME = re.compile("text|prompt")
# How services name their prompt inputs. The first pattern that matches any input is used.
_TEXT_NAMES = {
    POSITIVE: (re.compile("prompt"), re.compile("^(text|description|script)$")),
    NEGATIVE: (re.compile("negative.*(prompt|text)|^negative$"),),
}
# Titles of strings that users rarely change, and of strings that users are expected to change.
_FIXED_TITLE = re.compile(r"system|template", re.IGNORECASE)
_OWN_TITLE = re.compile(r"user|prompt|positive|negative", re.IGNORECASE)


class PromptTexts(NamedTuple):
    positive: list[Place]
    negative: list[Place]


def prompt_texts(flow: Flow) -> PromptTexts:
    """Returns the inputs for the positive and the negative prompt."""
    context = [_encoded(flow, entry) for entry in conditioned(flow)]
    positive = unique([place for one in context for place in one.positive])
    negative = unique([place for one in context for place in one.negative])
    return PromptTexts(
        positive or _service_texts(flow, POSITIVE),
        # A negative conditioning that is derived from the positive text (zeroed out) has no text of
        # its own.
        [place for place in negative if place not in positive] or _service_texts(flow, NEGATIVE),
    )


def _encoded(flow: Flow, end: PromptEntry) -> PromptTexts:
    # An input whose name contains "empty" should remain empty.
    names = [name for name in flow.linked(end, "CONDITIONING") if "empty" not in name]
    context = {name: side_of(name) or _side_above(flow, flow.origin(end, name)) for name in names}
    against = [name for name in names if context[name] == NEGATIVE]
    toward = [name for name in names if context[name] == POSITIVE]
    toward = toward or [name for name in names if name not in against]
    negative = _texts_behind(flow, end, against, NEGATIVE)
    positive = _texts_behind(flow, end, toward, POSITIVE)
    # A guider with two positive conditionings uses the negative text for one of them.
    return PromptTexts([place for place in positive if place not in negative] or positive, negative)


def _side_above(flow: Flow, start: Origin | None) -> str:
    """Derives the side of an input from the outputs that feed it, because the input's name doesn't
    reveal it.
    """
    context = (side_of(origin.name) for origin in flow.chain(start, "CONDITIONING"))
    return next((side for side in context if side), "")


def _texts_behind(flow: Flow, end: PromptEntry, names: Sequence[str], side: str) -> list[Place]:
    return [
        source
        for name in names
        for place in _encoder_texts(flow, flow.origin(end, name), side)
        for source in text_sources(flow, place)
    ]


def _encoder_texts(flow: Flow, start: Origin | None, side: str) -> list[Place]:
    """Returns the prompts of the encoders at the far end. Nodes in between count only if these
    encoders have no prompts.
    """
    far = [
        place
        for origin in flow.ends(start, "CONDITIONING")
        for place in _texts_of(flow, origin.entry, side)
    ]
    if far:
        return far
    near = (_texts_of(flow, origin.entry, side) for origin in flow.chain(start, "CONDITIONING"))
    return next((places for places in near if places), [])


def _texts_of(flow: Flow, entry: PromptEntry, side: str) -> list[Place]:
    """Returns the string inputs of a node for one side. If no name mentions this side, returns all
    inputs that don't belong to the other side."""
    names = [name for name in flow.inputs_of(entry, "STRING") if own_name(name) not in _OTHER_TEXTS]
    matching = [name for name in names if side_of(own_name(name)) == side]
    names = matching or [name for name in names if not side_of(own_name(name))]
    return [Place(entry.id, name) for name in _most_textual(flow, entry, names)]


def _most_textual(flow: Flow, entry: PromptEntry, names: Sequence[str]) -> Sequence[str]:
    options = {name: input_spec(name, flow.declared(entry)[name]).options for name in names}
    for sign in ("dynamicPrompts", "multiline"):
        flagged = [name for name in names if options[name].get(sign)]
        if flagged:
            return flagged
    return [name for name in names if _TEXT_NAME.search(own_name(name))]


def text_sources(flow: Flow, place: Place) -> list[Place]:
    """Returns the inputs that hold an incoming text. If the text is linked, this is the part that a
    person wrote."""
    if not flow.is_linked(place):
        return [place]
    entry = flow.entries[place.node_id]
    ranked: dict[int, list[Place]] = {}
    for origin in flow.chain(flow.origin(entry, place.input), "STRING"):
        for rank, piece in _pieces(flow, origin.entry):
            ranked.setdefault(rank, []).append(piece)
    if not ranked:
        return [place]
    best = min(ranked)
    return _own_pieces(flow, unique(ranked[best])) if best == 0 else ranked[best][:1]


def _pieces(flow: Flow, entry: PromptEntry) -> Iterator[tuple[int, Place]]:
    """Yields the strings of a node with a rank. The most likely prompt has the lowest rank: the
    string of a node that holds nothing else."""
    alone = len(flow.declared(entry)) == 1
    for name in flow.texts_in(entry):
        if own_name(name) not in _OTHER_TEXTS:
            rank = 0 if alone else 1 if _TEXT_NAME.search(own_name(name)) else 2
            yield rank, Place(entry.id, name)


def _own_pieces(flow: Flow, places: Sequence[Place]) -> list[Place]:
    """Returns the place whose title suggests a prompt, out of several strings that are
    concatenated. Otherwise, returns the last one."""
    titles = {place: flow.entries[place.node_id].title for place in places}
    changed = [place for place in places if not _FIXED_TITLE.search(titles[place])] or places
    titled = [place for place in changed if _OWN_TITLE.search(titles[place])] or changed
    return [titled[-1]]


def _service_texts(flow: Flow, side: str) -> list[Place]:
    """Returns the prompts of services that generate something from a string. They are used if the
    prompt has no sampler."""
    for pattern in _TEXT_NAMES[side]:
        candidates = [
            (entry, Place(entry.id, name))
            for entry in flow.needed.values()
            for name in _names_like(flow, entry, pattern, side)
        ]
        makers = [pair for pair in candidates if {*pair[0].outputs} - {"STRING"}] or candidates
        if len(candidates) > 1 and all("CONDITIONING" in entry.outputs for entry, _ in makers):
            return []  # no link shows which encoder is for the positive prompt
        if makers:
            return unique([own for _, place in makers for own in text_sources(flow, place)])
    return []


def _names_like(flow: Flow, entry: PromptEntry, pattern: re.Pattern[str], side: str) -> list[str]:
    if not entry.outputs:
        return []
    names = [
        name
        for name in flow.inputs_of(entry, "STRING")
        if pattern.search(own_name(name))
        and own_name(name) not in _OTHER_TEXTS
        and side_of(own_name(name)) in ("", side)
    ]
    return [name for name in names if own_name(name) == "prompt"] or names
