"""Follows the links of a prompt backwards, from a node's inputs to the nodes that feed them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from comfyfleet.errors import LimitExceeded
from comfyfleet.workflow.edit.input_lookup import Place, PromptEntry
from comfyfleet.workflow.model import ANY_TYPE
from comfyfleet.workflow.node_inputs import input_spec
from comfyfleet.workflow.object_info import MATCH_TYPE

STEPS_MAX = 500_000  # inputs examined per search; no known workflow needs 10,000
_GENERIC = frozenset({ANY_TYPE, "", MATCH_TYPE})


class Origin(NamedTuple):
    """An output of a node that feeds another node."""

    entry: PromptEntry
    slot: int

    @property
    def type(self) -> str:
        outputs = self.entry.outputs
        return outputs[self.slot] if 0 <= self.slot < len(outputs) else ""

    @property
    def name(self) -> str:
        names = self.entry.info.get("output_name")
        if not isinstance(names, list) or not 0 <= self.slot < len(names):
            return ""
        return str(names[self.slot])


class Flow:
    """The nodes of a prompt and their links. Create one object per search, because it limits the
    number of steps."""

    def __init__(self, entries: Mapping[str, PromptEntry]) -> None:
        self.entries = entries
        self._declared: dict[str, dict[str, Any]] = {}
        self._found: dict[str, list[PromptEntry]] = {}
        self._steps_left = STEPS_MAX
        self.needed = self._needed()

    def once(self, name: str, find: Callable[["Flow"], list[PromptEntry]]) -> list[PromptEntry]:
        """Returns the result of a search, which runs only once per prompt, even if several searches
        need it."""
        if name not in self._found:
            self._found[name] = find(self)
        return self._found[name]

    def declared(self, entry: PromptEntry) -> Mapping[str, Any]:
        if entry.id not in self._declared:
            self._declared[entry.id] = entry.declared()
        return self._declared[entry.id]

    def type_of(self, entry: PromptEntry, name: str) -> str:
        return input_spec(name, self.declared(entry).get(name)).type

    def inputs_of(self, entry: PromptEntry, *kinds: str) -> list[str]:
        """Returns the names of the inputs with these types, linked or not."""
        return [name for name in self.declared(entry) if self.type_of(entry, name) in kinds]

    def linked(self, entry: PromptEntry, *kinds: str) -> list[str]:
        """Returns the names of the linked inputs that receive these types."""
        return [
            name for name in entry.inputs if any(self._brings(entry, name, kind) for kind in kinds)
        ]

    def origin(self, entry: PromptEntry, name: str) -> Origin | None:
        link = entry.link(name)
        return Origin(self.entries[link[0]], link[1]) if link and link[0] in self.entries else None

    def carriers(self, origin: Origin, *kinds: str) -> list[str]:
        """Returns the names of the inputs that a node passes on to this output."""
        names = self._switched(origin.entry, self.linked(origin.entry, *kinds))
        side = side_of(origin.name)
        return [name for name in names if side_of(name) == side] or names if side else names

    def chain(self, start: Origin | None, *kinds: str) -> Iterator[Origin]:
        """Yields the start and the outputs that feed it with the same type, nearest first."""
        waiting = [start] if start else []
        seen = {(origin.entry.id, origin.slot) for origin in waiting}
        for origin in waiting:
            yield origin
            for name in self.carriers(origin, *kinds):
                above = self.origin(origin.entry, name)
                if above and (above.entry.id, above.slot) not in seen:
                    seen.add((above.entry.id, above.slot))
                    waiting.append(above)

    def ends(self, start: Origin | None, *kinds: str) -> list[Origin]:
        """Returns the outputs where the chain begins."""
        return [one for one in self.chain(start, *kinds) if not self.carriers(one, *kinds)]

    def is_linked(self, place: Place) -> bool:
        return self.entries[place.node_id].link(place.input) is not None

    def texts_in(self, entry: PromptEntry) -> list[str]:
        """Returns the names of the unlinked inputs that hold a string or could hold one."""
        names = [
            name
            for name, declared in self.declared(entry).items()
            if entry.link(name) is None and _holds_text(declared, entry.inputs.get(name))
        ]
        return self._switched(entry, names)

    def _brings(self, entry: PromptEntry, name: str, kind: str) -> bool:
        self._step()
        origin = self.origin(entry, name)
        if origin is None:
            return False
        types = self.type_of(entry, name).split(",") if name in self.declared(entry) else [ANY_TYPE]
        return kind in types if _GENERIC.isdisjoint(types) else kind == self._given_type(origin)

    def _given_type(self, origin: Origin) -> str:
        """Returns the type of an output. For a node that passes on any type, this is the type that
        it receives."""
        current: Origin | None = origin
        seen: set[str] = set()
        while current is not None and current.type in _GENERIC:
            if current.entry.id in seen or not current.entry.info:
                return ""
            seen.add(current.entry.id)
            self._step()
            current = self._passed_on(current.entry)
        return current.type if current else ""

    def _passed_on(self, entry: PromptEntry) -> Origin | None:
        names = [
            name
            for name, declared in self.declared(entry).items()
            if entry.link(name) and input_spec(name, declared).type in _GENERIC
        ]
        return next((self.origin(entry, name) for name in self._switched(entry, names)), None)

    def _switched(self, entry: PromptEntry, names: Sequence[str]) -> list[str]:
        """Returns only the selected one of two inputs that a boolean switches between, if its value
        is known."""
        context = {name: name.lower().endswith("true") for name in names if _is_switch_side(name)}
        if not context:
            return list(names)
        switches = self.inputs_of(entry, "BOOLEAN")
        chosen = self._boolean(entry, switches[0]) if len(switches) == 1 else None
        return [name for name in names if chosen is None or context.get(name, chosen) is chosen]

    def _boolean(self, entry: PromptEntry, name: str) -> bool | None:
        origin = self.origin(entry, name)
        if origin is not None:
            names = self.inputs_of(origin.entry, "BOOLEAN")
            if len(names) != 1 or len(origin.entry.inputs) != 1:
                return None
            entry, name = origin.entry, names[0]
        value = entry.inputs.get(name)
        return value if isinstance(value, bool) else None

    def _needed(self) -> Mapping[str, PromptEntry]:
        """Returns the nodes that output nodes need, or all nodes if there are no output nodes."""
        needed = {
            key: entry for key, entry in self.entries.items() if entry.info.get("output_node")
        }
        waiting = list(needed.values())
        for entry in waiting:
            for name in entry.inputs:
                origin = self.origin(entry, name)
                if origin is not None and origin.entry.id not in needed:
                    needed[origin.entry.id] = origin.entry
                    waiting.append(origin.entry)
        return {key: self.entries[key] for key in self.entries if key in needed} or self.entries

    def _step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise LimitExceeded(
                f"the search would examine more than {STEPS_MAX:,} inputs; use node.input=value instead",
                limit=STEPS_MAX,
            )


def side_of(name: str) -> str:
    """Returns the side that a name indicates: `positive`, `negative`, or an empty string."""
    lower = name.lower()
    for side, sign in (("negative", "-"), ("positive", "+")):
        if side in lower or lower.endswith(sign):
            return side
    return ""


def own_name(name: str) -> str:
    """Returns the last part of a name, for example `width` for `resize_type.width`."""
    return name.rsplit(".", 1)[-1]


def _holds_text(declared: Any, value: Any) -> bool:
    kind = input_spec("", declared).type
    return kind == "STRING" or (kind in _GENERIC and isinstance(value, str))


def _is_switch_side(name: str) -> bool:
    return name.lower().endswith(("true", "false"))


CHAIN_MAX = 100
_NUMBERS = ("INT", "FLOAT")


def number_source(flow: Flow, place: Place, *, scaled: bool = False) -> Place:
    """Finds the input that contains a linked number. Returns `place` if there is none, so that the
    value replaces the link.

    With `scaled`, also follows links through calculations: half the width still comes from the
    width.
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


def _calculates(flow: Flow, entry: PromptEntry) -> bool:
    """Checks whether another input also affects the result. A formula that is only a name, such as
    `a`, doesn't calculate."""
    beside = [
        entry.inputs.get(name)
        for name in flow.inputs_of(entry, *_NUMBERS, "STRING", "COMBO")
        if entry.link(name) is None
    ]
    return any(not (isinstance(value, str) and value.strip().isidentifier()) for value in beside)
