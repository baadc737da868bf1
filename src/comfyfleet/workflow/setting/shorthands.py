"""Values that every prompt has in one node or another: named by what they mean, found by following the graph."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.kernel.errors import InvalidInput, InvalidValue
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.setting.addressing import ExposedInput, Place
from comfyfleet.workflow.setting.assigning import Edit, all_in_one, edit_of
from comfyfleet.workflow.setting.changing import Change, change_input, with_entries
from comfyfleet.workflow.setting.entries import Entry, read_entries
from comfyfleet.workflow.setting.flow import Flow
from comfyfleet.workflow.setting.shorthandtable import SHORTHANDS, Several, Shorthand
from comfyfleet.workflow.setting.wording import LISTED_MAX, hint, listed, quoted, shown

_BY_NAME = {name: one for one in SHORTHANDS for name in (one.name, *one.aliases)}
_SIZE = re.compile(r"\s*(\d{1,6})\s*[x×*,]\s*(\d{1,6})\s*", re.IGNORECASE)


class _Outcome(NamedTuple):
    changes: Sequence[Change] = ()
    warnings: Sequence[str] = ()
    errors: Sequence[InvalidInput] = ()


def set_shorthands(
    prompt: Mapping[str, Any],
    object_info: ObjectInfo,
    values: Mapping[str, Any],
    *,
    check: bool = True,
    exposed: Sequence[ExposedInput] = (),
) -> Edit:
    """All that are found, or none if a value is wrong; what is not found is a warning. Where the
    graph doesn't tell, an input that a subgraph shows under the shorthand's name is meant."""
    entries = read_entries(prompt, object_info)
    outcomes: list[_Outcome] = []
    for name, value in values.items():
        # Sought before anything is set: the new width must not change whose height is meant.
        flow = Flow(dict(entries))
        for shorthand, part in _parts(_shorthand(name), value):
            outcomes.append(
                _apply(entries, _places(flow, shorthand, exposed), shorthand, part, check=check)
            )
            entries.update((change.entry.id, change.entry) for change in outcomes[-1].changes)
    errors = [error for outcome in outcomes for error in outcome.errors]
    if errors:
        raise all_in_one(errors)
    changes = [change for outcome in outcomes for change in outcome.changes]
    changed = with_entries(prompt, entries, {change.entry.id for change in changes})
    warnings = dict.fromkeys(text for outcome in outcomes for text in outcome.warnings)
    return edit_of(changed, changes, list(warnings))


def shorthand_places(
    prompt: Mapping[str, Any], object_info: ObjectInfo, name: str
) -> tuple[Place, ...]:
    """The inputs that a shorthand stands for in this prompt."""
    return tuple(_shorthand(name).find(Flow(read_entries(prompt, object_info))))


def _shorthand(name: str) -> Shorthand:
    if name not in _BY_NAME:
        raise InvalidInput(f"there is no shorthand {quoted(name)}" + hint(name, list(_BY_NAME)))
    return _BY_NAME[name]


def _parts(shorthand: Shorthand, value: Any) -> Iterator[tuple[Shorthand, Any]]:
    if shorthand.name != "size":
        yield shorthand, value
        return
    for side, length in zip(("width", "height"), _sides(value), strict=True):
        own = _BY_NAME[side]._replace(name=shorthand.name, help=shorthand.help, aliases=(side,))
        yield own, length


def _sides(value: Any) -> tuple[Any, Any]:
    if isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidValue(f"{shown(value)} is no size: write width x height, such as 1024x768")
    return int(match[1]), int(match[2])


def _places(flow: Flow, shorthand: Shorthand, exposed: Sequence[ExposedInput]) -> Sequence[Place]:
    names = (shorthand.name, *shorthand.aliases)
    return shorthand.find(flow) or [each.place for each in exposed if each.is_called(*names)]


def _apply(
    entries: Mapping[str, Entry],
    places: Sequence[Place],
    shorthand: Shorthand,
    value: Any,
    *,
    check: bool,
) -> _Outcome:
    if not places:
        return _Outcome(warnings=[f"{shorthand.name}: not set, nothing found ({shorthand.help})"])
    differ = _differ(entries, places)
    if differ and shorthand.several is Several.LEAVE:
        return _Outcome(warnings=[f"{shorthand.name}: {_found_several(entries, places)}"])
    warnings = list(_kept_beside(entries, shorthand, places))
    if differ and shorthand.several is Several.WARN:
        warnings.append(f"{shorthand.name}: {_set_several(places)}")
    checked = check and not shorthand.unlisted
    changes, errors = _change_all(entries, places, value, check=checked)
    return _Outcome(changes, warnings, errors)


def _change_all(
    entries: Mapping[str, Entry], places: Sequence[Place], value: Any, *, check: bool
) -> tuple[list[Change], list[InvalidInput]]:
    changed = dict(entries)
    changes: list[Change] = []
    errors: list[InvalidInput] = []
    for place in places:
        try:
            change = change_input(changed, place, value, check=check)
        except InvalidInput as error:
            errors.append(error)
        else:
            changed[place.node_id] = change.entry
            changes.append(change)
    return changes, errors


def _differ(entries: Mapping[str, Entry], places: Sequence[Place]) -> bool:
    values = [entries[place.node_id].inputs.get(place.input) for place in places]
    return any(value != values[0] for value in values)


def _found_several(entries: Mapping[str, Entry], places: Sequence[Place]) -> str:
    texts = [
        f"{place.node_id}.{place.input} (now {shown(entries[place.node_id].inputs.get(place.input))})"
        for place in places[:LISTED_MAX]
    ]
    return f"none set, because several could be meant; name one: {listed(texts, len(places))}"


def _set_several(places: Sequence[Place]) -> str:
    texts = [f"{place.node_id}.{place.input}" for place in places[:LISTED_MAX]]
    return f"set in {len(places)} places that held different values: {listed(texts, len(places))}"


def _kept_beside(
    entries: Mapping[str, Entry], shorthand: Shorthand, places: Sequence[Place]
) -> Iterator[str]:
    for place in places:
        entry = entries[place.node_id]
        names = [name for name in shorthand.beside if name in entry.inputs]
        if names:
            kept = " and ".join(f"{name} {shown(entry.inputs[name])}" for name in names)
            yield f"{shorthand.name}: {entry.name} keeps {kept}"
