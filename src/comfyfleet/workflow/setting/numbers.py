"""Where a number is written that reaches an input by a link."""

from comfyfleet.workflow.setting.addressing import Place
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.flow import Flow, Origin, own_name

CHAIN_MAX = 100
_NUMBERS = ("INT", "FLOAT")


def number_source(flow: Flow, place: Place, *, scaled: bool = False) -> Place:
    """The node that holds the number, or the input itself if there is no such node: its link then gives way.

    With `scaled` also behind a calculation: half the width is still told by the width.
    """
    current = place
    for _ in range(CHAIN_MAX):
        origin = flow.origin(flow.entries[current.node_id], current.input)
        if origin is None:
            return current
        above = _above(flow, origin, scaled=scaled)
        if above is None:
            break
        current = above
    return place


def _above(flow: Flow, origin: Origin, *, scaled: bool) -> Place | None:
    entry = origin.entry
    carriers = flow.carriers(origin, *_NUMBERS)
    own = [name for name in flow.inputs_of(entry, *_NUMBERS) if entry.link(name) is None]
    if len(carriers) == 1 and (scaled or not _calculates(flow, entry)):
        return Place(entry.id, carriers[0])
    named = [name for name in own if own_name(name) == origin.name]
    if len(named) == 1 or (not carriers and len(own) == 1):
        return Place(entry.id, (named or own)[0])
    return None


def _calculates(flow: Flow, entry: Entry) -> bool:
    """Something beside the number that comes in says what comes out; the formula `a` does not."""
    beside = [
        entry.inputs.get(name)
        for name in flow.inputs_of(entry, *_NUMBERS, "STRING", "COMBO")
        if entry.link(name) is None
    ]
    return any(not (isinstance(value, str) and value.strip().isidentifier()) for value in beside)
