"""The text that a person means by "the prompt": what the encoder reads that feeds `positive` of a sampler."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.flow import Flow, Origin, own_name, side_of
from comfyfleet.workflow.setting.sampling import conditioned, unique
from comfyfleet.workflow.specs import input_spec

POSITIVE, NEGATIVE = "positive", "negative"
# Texts beside the prompt that have a purpose of their own.
_OTHER_TEXTS = frozenset({"lyrics", "system_prompt"})
_TEXT_NAME = re.compile("text|prompt")
# What services call the text that they are given; the first pattern that any input fits is taken.
_ASKED = {
    POSITIVE: (re.compile("prompt"), re.compile("^(text|description|script)$")),
    NEGATIVE: (re.compile("negative.*(prompt|text)|^negative$"),),
}
# What titles call a text that a person rarely changes, and one that is there to be changed.
_FIXED_TITLE = re.compile(r"system|template", re.IGNORECASE)
_OWN_TITLE = re.compile(r"user|prompt|positive|negative", re.IGNORECASE)


class Texts(NamedTuple):
    positive: list[Place]
    negative: list[Place]


def prompt_texts(flow: Flow) -> Texts:
    """Where to write the positive and the negative prompt."""
    sides = [_encoded(flow, entry) for entry in conditioned(flow)]
    positive = unique([place for one in sides for place in one.positive])
    negative = unique([place for one in sides for place in one.negative])
    return Texts(
        positive or _asked(flow, POSITIVE),
        # A negative that is made from the positive text (zeroed out) has no text of its own.
        [place for place in negative if place not in positive] or _asked(flow, NEGATIVE),
    )


def _encoded(flow: Flow, end: Entry) -> Texts:
    # What is called empty is to stay so.
    names = [name for name in flow.linked(end, "CONDITIONING") if "empty" not in name]
    sides = {name: side_of(name) or _side_above(flow, flow.origin(end, name)) for name in names}
    against = [name for name in names if sides[name] == NEGATIVE]
    toward = [name for name in names if sides[name] == POSITIVE]
    toward = toward or [name for name in names if name not in against]
    negative = _texts_behind(flow, end, against, NEGATIVE)
    positive = _texts_behind(flow, end, toward, POSITIVE)
    # A guider with two positives gets the negative text for one of them.
    return Texts([place for place in positive if place not in negative] or positive, negative)


def _side_above(flow: Flow, start: Origin | None) -> str:
    """An input that doesn't say its side may be fed by an output that does."""
    sides = (side_of(origin.name) for origin in flow.chain(start, "CONDITIONING"))
    return next((side for side in sides if side), "")


def _texts_behind(flow: Flow, end: Entry, names: Sequence[str], side: str) -> list[Place]:
    return [
        source
        for name in names
        for place in _encoder_texts(flow, flow.origin(end, name), side)
        for source in text_sources(flow, place)
    ]


def _encoder_texts(flow: Flow, start: Origin | None, side: str) -> list[Place]:
    """Texts of the encoders at the far end; of nodes on the way only if there are none."""
    far = [
        place
        for origin in flow.ends(start, "CONDITIONING")
        for place in _texts_of(flow, origin.entry, side)
    ]
    if far:
        return far
    near = (_texts_of(flow, origin.entry, side) for origin in flow.chain(start, "CONDITIONING"))
    return next((places for places in near if places), [])


def _texts_of(flow: Flow, entry: Entry, side: str) -> list[Place]:
    """All of its texts if it has several encoders; of texts for both sides those of this side."""
    names = [name for name in flow.inputs_of(entry, "STRING") if own_name(name) not in _OTHER_TEXTS]
    own = [name for name in names if side_of(own_name(name)) == side]
    names = own or [name for name in names if not side_of(own_name(name))]
    return [Place(entry.id, name) for name in _most_textual(flow, entry, names)]


def _most_textual(flow: Flow, entry: Entry, names: Sequence[str]) -> Sequence[str]:
    options = {name: input_spec(name, flow.declared(entry)[name]).options for name in names}
    for sign in ("dynamicPrompts", "multiline"):
        found = [name for name in names if options[name].get(sign)]
        if found:
            return found
    return [name for name in names if _TEXT_NAME.search(own_name(name))]


def text_sources(flow: Flow, place: Place) -> list[Place]:
    """Where the text is written that comes in there: behind a link, the piece that is the person's own."""
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


def _pieces(flow: Flow, entry: Entry) -> Iterator[tuple[int, Place]]:
    """Its texts, and how likely each is the prompt: a node that is nothing but a text goes first."""
    alone = len(flow.declared(entry)) == 1
    for name in flow.texts_in(entry):
        if own_name(name) not in _OTHER_TEXTS:
            rank = 0 if alone else 1 if _TEXT_NAME.search(own_name(name)) else 2
            yield rank, Place(entry.id, name)


def _own_pieces(flow: Flow, places: Sequence[Place]) -> list[Place]:
    """Of several texts that are put together, the one whose title says so; else the last."""
    titles = {place: flow.entries[place.node_id].title for place in places}
    changed = [place for place in places if not _FIXED_TITLE.search(titles[place])] or places
    named = [place for place in changed if _OWN_TITLE.search(titles[place])] or changed
    return [named[-1]]


def _asked(flow: Flow, side: str) -> list[Place]:
    """Without a sampler: services that are given a text and make something of it."""
    for pattern in _ASKED[side]:
        found = [
            (entry, Place(entry.id, name))
            for entry in flow.needed.values()
            for name in _asked_names(flow, entry, pattern, side)
        ]
        makers = [pair for pair in found if {*pair[0].outputs} - {"STRING"}] or found
        if len(found) > 1 and all("CONDITIONING" in entry.outputs for entry, _ in makers):
            return []  # encoders that feed nothing: nobody knows which is which
        if makers:
            return unique([own for _, place in makers for own in text_sources(flow, place)])
    return []


def _asked_names(flow: Flow, entry: Entry, pattern: re.Pattern[str], side: str) -> list[str]:
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
