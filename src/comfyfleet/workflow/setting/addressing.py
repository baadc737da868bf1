"""Which input of which node is meant by `3.seed`, `Main sampler.seed` or `KSampler.seed`.

Titles and input names may both hold dots, so only the prompt tells where the node's name ends: every split is tried.
An id goes before a title, a title before a class.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.setting.entries import Entry
from comfyfleet.workflow.setting.wording import LISTED_MAX, closest, hint, listed, quoted, shown

SPLITS_MAX = 50


class Place(NamedTuple):
    node_id: str
    input: str


class ExposedInput(NamedTuple):
    """An input that a subgraph shows on its instance, and one input of a node inside that it feeds.

    `label` is what the author called it and the editor shows; `name` is its name in the file."""

    instance_id: str
    title: str
    name: str
    label: str
    place: Place

    def is_called(self, *names: str) -> bool:
        own = {self.name.casefold(), self.label.casefold()}
        return not own.isdisjoint(name.casefold() for name in names)


class Directory:
    """Nodes by id, title and class. Made once for all assignments: none of these can change by them."""

    def __init__(self, entries: Mapping[str, Entry], exposed: Sequence[ExposedInput] = ()) -> None:
        self.entries = entries
        self._exposed: dict[str, list[ExposedInput]] = {}
        for each in exposed:
            for name in {each.instance_id, each.title}:
                self._exposed.setdefault(name, []).append(each)
        self._titles = _grouped((entry.title, entry) for entry in entries.values())
        self._classes = _grouped((entry.class_name, entry) for entry in entries.values())

    def named(self, name: str) -> Sequence[Entry]:
        if name in self.entries:
            return [self.entries[name]]
        return self._titles.get(name) or self._classes.get(name) or ()

    def exposed(self, name: str) -> Sequence[ExposedInput]:
        """What an instance of a subgraph shows; by the id or the title of the instance."""
        return self._exposed.get(name, ())

    def names(self) -> list[str]:
        return [*self._titles, *self._classes, *self.entries, *self._exposed]

    def candidates(self, name: str) -> str:
        near = closest(name, self.names())
        if not near:
            return _some_nodes(list(self.entries.values()), "the prompt has")
        found = {entry.id: entry for one in near for entry in self.named(one)}
        instances = [one for one in near if one in self._exposed and not self.named(one)]
        names = [*(entry.name for entry in found.values()), *map(quoted, instances)]
        return f"; closest: {listed(names[:LISTED_MAX], len(names))}"


def find_places(
    directory: Directory, entries: Mapping[str, Entry], target: str
) -> tuple[Place, ...]:
    """The inputs that a target means: one of a node, or all that an input of a subgraph feeds."""
    try:
        return (find_place(directory, entries, target),)
    except InvalidInput:
        exposed = _exposed_places(directory, target)
        if not exposed:
            raise
        return exposed


def _exposed_places(directory: Directory, target: str) -> tuple[Place, ...]:
    for name, input_name in _splits(target):
        shown = directory.exposed(name)
        found = [each for each in shown if each.is_called(input_name)]
        instances = {(each.instance_id, each.name): None for each in found}
        if len(instances) > 1:
            texts = [f"{one}.{own}" for one, own in instances]
            some = listed(texts[:LISTED_MAX], len(texts))
            raise InvalidInput(f"{quoted(target)} is ambiguous: {some}")
        if found:
            return tuple(each.place for each in found)
        if shown and not directory.named(name):
            labels = list(dict.fromkeys(each.label for each in shown))
            missing = f"the subgraph {quoted(name)} shows no input {quoted(input_name)}"
            raise InvalidInput(missing + hint(input_name, labels, "it shows"))
    return ()


def find_place(directory: Directory, entries: Mapping[str, Entry], target: str) -> Place:
    """`entries` are the nodes as they are by now: an assignment before may have brought inputs."""
    named = [(name, input_name, directory.named(name)) for name, input_name in _splits(target)]
    places = {
        Place(entry.id, input_name): None
        for _, input_name, nodes in named
        for entry in nodes
        if has_input(entries[entry.id], input_name)
    }
    if len(places) == 1:
        return next(iter(places))
    if places:
        raise InvalidInput(f"{quoted(target)} is ambiguous: {_some_places(entries, list(places))}")
    known = next(((name, input_name, nodes) for name, input_name, nodes in named if nodes), None)
    if known is None:
        raise InvalidInput(_unknown_node(directory, target, [name for name, *_ in named]))
    raise InvalidInput(_unknown_input(entries[known[2][0].id], known[1]))


def has_input(entry: Entry, name: str) -> bool:
    return name in entry.inputs or name in entry.declared()


def _splits(target: str) -> Iterator[tuple[str, str]]:
    """The longest node name first."""
    end = len(target)
    for _ in range(SPLITS_MAX):
        end = target.rfind(".", 0, end)
        if end < 0:
            return
        yield target[:end].strip(), target[end + 1 :].strip()


def _unknown_node(directory: Directory, target: str, names: Sequence[str]) -> str:
    if not names:
        return f"{quoted(target)} names no input: write node.input, such as 3.seed"
    # The split at the first dot would give most of a dotted title away, the last most of a dotted input name.
    return f"no node has the id, title or class {quoted(names[0])}{directory.candidates(names[0])}"


def _unknown_input(entry: Entry, name: str) -> str:
    names = list(dict.fromkeys([*entry.declared(), *entry.inputs]))
    return f"{entry.name} has no input {quoted(name)}" + hint(name, names, "it has")


def _some_nodes(entries: Sequence[Entry], what: str) -> str:
    if not entries:
        return "; the prompt has no nodes"
    return f"; {what}: " + listed((entry.name for entry in entries[:LISTED_MAX]), len(entries))


def _some_places(entries: Mapping[str, Entry], places: Sequence[Place]) -> str:
    texts = [
        f"{place.node_id}.{place.input} ({entries[place.node_id].name}, now {_now(entries, place)})"
        for place in places[:LISTED_MAX]
    ]
    return listed(texts, len(places))


def _now(entries: Mapping[str, Entry], place: Place) -> str:
    entry = entries[place.node_id]
    link = entry.link(place.input)
    return f"linked to {link[0]}" if link else shown(entry.inputs.get(place.input))


def _grouped(pairs: Iterable[tuple[str, Entry]]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for name, entry in pairs:
        if name:
            groups.setdefault(name, []).append(entry)
    return groups
