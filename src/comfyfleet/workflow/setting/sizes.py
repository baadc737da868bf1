"""Width and height: those of the node that makes the latent, or the image behind it, that a sampler starts from."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.flow import Flow
from comfyfleet.workflow.setting.numbers import number_source
from comfyfleet.workflow.setting.sampling import latent_origins, models, parts, samplers


class Size(NamedTuple):
    width: Place
    height: Place


def size_places(flow: Flow) -> list[Size]:
    sampling = samplers(flow)
    makers = [size for sampler in sampling for size in _made_for(flow, sampler)]
    found = dict.fromkeys(makers or ([] if sampling else _only_size(flow)))
    sizes = list(found)
    mates = [mate for sampler in sampling for mate in _mates(flow, sampler) if mate not in found]
    return [*sizes, *(mate for mate in mates if any(_alike(flow, mate, size) for size in sizes))]


def _made_for(flow: Flow, sampler: Entry) -> Iterator[Size]:
    for origin in latent_origins(flow, sampler):
        size = _size_of(flow, origin.entry) or _image_size(flow, origin.entry)
        if size is not None:
            yield _sources(flow, size)


def _size_of(flow: Flow, entry: Entry) -> Size | None:
    names = flow.inputs_of(entry, "INT")
    for name in names:
        prefix = name.removesuffix("width")
        if prefix != name and prefix[-1:] in ("", ".") and f"{prefix}height" in names:
            return Size(Place(entry.id, name), Place(entry.id, f"{prefix}height"))
    return None


def _image_size(flow: Flow, entry: Entry) -> Size | None:
    """Of the nearest node that gives the image its size; None if another sampler made the image."""
    images = list(_images_behind(flow, entry, "IMAGE"))
    if any(flow.linked(image, "LATENT") for image in images):
        return None
    return _nearest(flow, images)


def _images_behind(flow: Flow, entry: Entry, *kinds: str) -> Iterator[Entry]:
    for name in flow.linked(entry, "IMAGE"):
        yield from (one.entry for one in flow.chain(flow.origin(entry, name), *kinds))


def _nearest(flow: Flow, entries: Iterable[Entry]) -> Size | None:
    sizes = (_size_of(flow, entry) for entry in entries)
    return next((size for size in sizes if size), None)


def _sources(flow: Flow, size: Size) -> Size:
    """Where both numbers are written; if they are measured from an image, where that gets its size."""
    sources = Size(*(number_source(flow, place, scaled=True) for place in size))
    origin = flow.origin(flow.entries[sources.width.node_id], sources.width.input)
    if origin is None:
        return sources
    measured = _nearest(flow, _images_behind(flow, origin.entry, "IMAGE", "LATENT"))
    if measured is None:
        return sources
    return Size(*(number_source(flow, place, scaled=True) for place in measured))


def _mates(flow: Flow, sampler: Entry) -> Iterator[Size]:
    """Schedulers and model settings that are told the size, too."""
    told = (*parts(flow, sampler), *models(flow, sampler))
    for entry in {entry.id: entry for entry in told}.values():
        size = _size_of(flow, entry)
        if size is not None:
            yield _sources(flow, size)


def _alike(flow: Flow, one: Size, other: Size) -> bool:
    return [_value(flow, place) for place in one] == [_value(flow, place) for place in other]


def _value(flow: Flow, place: Place) -> object:
    return flow.entries[place.node_id].inputs.get(place.input)


def _only_size(flow: Flow) -> list[Size]:
    """Without a sampler: the one node that has a size and makes its picture from nothing, or the one that has."""
    sized = {
        size: entry for entry in flow.needed.values() if (size := _size_of(flow, entry)) is not None
    }
    fresh = [size for size, entry in sized.items() if not flow.linked(entry, "IMAGE")]
    few = fresh or list(sized)
    return [_sources(flow, size) for size in few] if len(few) == 1 else []
