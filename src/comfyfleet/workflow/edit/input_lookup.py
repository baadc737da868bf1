"""Finds the input that a name such as `3.seed`, `Main sampler.seed` or `KSampler.seed` refers to,
using the nodes of a prompt and the server's declarations of their classes. Also formats values and
names for messages."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from comfyfleet.errors import InvalidInput, InvalidWorkflow
from comfyfleet.workflow.model import ObjectInfo
from comfyfleet.workflow.object_info import AUTOGROW, DYNAMIC_COMBO, DYNAMIC_GROUP

TEXT_CHARACTERS_MAX = 60
NUMBER_BITS_MAX = 256  # Python refuses to print integers with thousands of digits
CLOSEST_MAX = 3
LISTED_MAX = 8  # up to this number of names, messages list all of them instead of the closest ones
COMPARED_NAMES_MAX = 5_000
COMPARED_CHARACTERS_MAX = 100
CLOSENESS_MIN = 0.5


def shown_value(value: Any) -> str:
    """Returns a value as JSON for a message. The result is never long and never nested."""
    match value:
        case str():
            return quoted(value)
        case bool() | None:
            return json.dumps(value)
        case int() if value.bit_length() > NUMBER_BITS_MAX:
            return "a number of many digits"
        case dict():
            return shown_value(value["__value__"]) if set(value) == {"__value__"} else "an object"
        case list():
            return f"a list of {len(value)}"
        case _:
            return str(value)


def quoted(text: str) -> str:
    cut = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[: TEXT_CHARACTERS_MAX - 1]}…"
    text = json.dumps(cut, ensure_ascii=False)
    # Replace lone surrogates, which can't be printed, and control characters, which a terminal
    # would interpret.
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def listed(names: Iterable[str], total: int) -> str:
    some = list(names)
    more = f" and {total - len(some)} more" if total > len(some) else ""
    return ", ".join(some) + more


def closest(name_or_part: str, names: Sequence[str]) -> list[str]:
    """Returns the names that the user most likely meant, best match first."""
    key = name_or_part[:COMPARED_CHARACTERS_MAX].lower()
    by_key: dict[str, str] = {}
    for name in names[:COMPARED_NAMES_MAX]:
        by_key.setdefault(name[:COMPARED_CHARACTERS_MAX].lower(), name)
    inside = [known for known in by_key if key and (key in known)]
    alike = get_close_matches(key, by_key, n=CLOSEST_MAX, cutoff=CLOSENESS_MIN)
    # A name that contains the input is the better hint, because people leave out folders and
    # extensions.
    keys = dict.fromkeys([*(known for known in alike if known in inside), *inside, *alike])
    return [by_key[known] for known in keys][:CLOSEST_MAX]


def hint(requested: str, names: Sequence[str], what: str = "known") -> str:
    """Returns a list of known names to append to a message about an unknown name: all names if
    there are few, otherwise the closest ones."""
    if not names:
        return ""
    if len(names) <= LISTED_MAX:
        return f"; {what}: " + listed(map(quoted, names), len(names))
    near = closest(requested, names)
    return "; closest: " + ", ".join(map(quoted, near)) if near else ""


BRANCH_DEPTH_MAX = 20
_NOTHING: Mapping[str, Any] = {}

Link = tuple[str, int]  # id of the source node, and the index of its output


class PromptEntry(NamedTuple):
    """A node of a prompt. `info` is its class in object_info, empty if the class is unknown."""

    id: str
    class_name: str
    title: str
    inputs: Mapping[str, Any]
    info: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Returns a name such as `3 KSampler "Main sampler"`. A title equal to the class name is
        omitted."""
        new = self.title not in ("", self.class_name, self.info.get("display_name"))
        return f"{self.id} {self.class_name}" + (f" {quoted(self.title)}" if new else "")

    @property
    def outputs(self) -> tuple[str, ...]:
        outputs = self.info.get("output")
        return tuple(map(_type_name, outputs)) if isinstance(outputs, list) else ()

    def declared(self) -> dict[str, Any]:
        """Returns the inputs that the node has with its current values, as `[type or choices,
        options]` by name."""
        return dict(_declared(_table(self.info, "input"), "", self.inputs, BRANCH_DEPTH_MAX))

    def link(self, name: str) -> Link | None:
        return as_link(self.inputs.get(name))


def as_link(value: Any) -> Link | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    origin, slot = value
    return (str(origin), slot) if isinstance(origin, str | int) and isinstance(slot, int) else None


def read_entries(prompt: Mapping[str, Any], object_info: ObjectInfo) -> dict[str, PromptEntry]:
    return {key: read_entry(key, raw, object_info) for key, raw in prompt.items()}


def read_entry(key: str, raw: Any, object_info: ObjectInfo) -> PromptEntry:
    inputs = raw.get("inputs", _NOTHING) if isinstance(raw, dict) else None
    if not isinstance(inputs, dict):
        raise InvalidWorkflow(
            f"node {shown_value(key)} of the prompt has no `inputs` object: {shown_value(raw)}"
        )
    class_name = raw.get("class_type")
    class_name = class_name if isinstance(class_name, str) else ""
    info = object_info.get(class_name)
    info = info if isinstance(info, dict) else _NOTHING
    return PromptEntry(key, class_name, _title(raw, info), inputs, info)


def missing_required(entry: PromptEntry) -> list[str]:
    """Returns the required inputs that a node lacks. Growing groups are skipped, because they may
    be empty."""
    required = _table(_table(entry.info, "input"), "required")
    return [
        name
        for name, declared in required.items()
        if name not in entry.inputs
        and _kind_and_options(declared)[0] not in (AUTOGROW, DYNAMIC_GROUP)
    ]


def _title(raw: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Returns the title that the editor shows. A node without its own title shows the name of its
    class."""
    title = _table(raw, "_meta").get("title")
    name = title if isinstance(title, str) and title else info.get("display_name")
    return name if isinstance(name, str) else ""


def _declared(
    sections: Mapping[str, Any], prefix: str, inputs: Mapping[str, Any], depth_left: int
) -> Iterator[tuple[str, Any]]:
    """Yields the declared inputs. A choice with branches adds the inputs of the chosen branch,
    named `<choice>.<input>`."""
    for section in ("required", "optional"):
        for own_name, declared in _table(sections, section).items():
            name = f"{prefix}{own_name}"
            kind, options = _kind_and_options(declared)
            if kind not in (AUTOGROW, DYNAMIC_GROUP):
                yield name, declared
            if depth_left == 0:
                continue
            if kind == DYNAMIC_COMBO:
                branch = _branch(options, inputs.get(name))
                yield from _declared(branch, f"{name}.", inputs, depth_left - 1)
            elif kind in (AUTOGROW, DYNAMIC_GROUP):
                yield from _grown(name, options, inputs)


def _branch(options: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    branches = options.get("options")
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, dict) and branch.get("key") == key:
            return _table(branch, "inputs")
    return _NOTHING


def _grown(
    group: str, options: Mapping[str, Any], inputs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields the inputs of a growing group that occur in the prompt. The name of each input begins
    with the name of the field that declares it."""
    template = _table(options, "template")
    template = _table(template, "input") or template
    fields = {**_table(template, "required"), **_table(template, "optional")}
    for name in inputs:
        if not name.startswith(f"{group}."):
            continue
        own_name = name.rsplit(".", 1)[-1]
        matching = [field for field in fields if own_name.startswith(field)] or list(fields)[:1]
        if matching:
            yield name, fields[matching[0]]


def _kind_and_options(declared: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(declared, list | tuple) or not declared:
        return None, _NOTHING
    options = declared[1] if len(declared) > 1 and isinstance(declared[1], dict) else _NOTHING
    return declared[0] if isinstance(declared[0], str) else None, options


def _table(source: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = source.get(key)
    return value if isinstance(value, dict) else _NOTHING


def _type_name(output: Any) -> str:
    return output if isinstance(output, str) else "COMBO"


SPLITS_MAX = 50


class Place(NamedTuple):
    node_id: str
    input: str


class ExposedInput(NamedTuple):
    """An input that a subgraph exposes on its instance, and one inner input that it feeds.

    `label` is the author's name for it, which the editor shows. `name` is its name in the file.
    """

    instance_id: str
    title: str
    name: str
    label: str
    place: Place

    def is_called(self, *names: str) -> bool:
        own = {self.name.casefold(), self.label.casefold()}
        return not own.isdisjoint(name.casefold() for name in names)


class NodeIndex:
    """Indexes nodes by id, title and class.

    One index serves all assignments, because assignments don't change ids, titles or classes.
    """

    def __init__(
        self, entries: Mapping[str, PromptEntry], exposed: Sequence[ExposedInput] = ()
    ) -> None:
        self.entries = entries
        self._exposed: dict[str, list[ExposedInput]] = {}
        for entry in exposed:
            for name in {entry.instance_id, entry.title}:
                self._exposed.setdefault(name, []).append(entry)
        self._titles = _grouped((entry.title, entry) for entry in entries.values())
        self._classes = _grouped((entry.class_name, entry) for entry in entries.values())

    def named(self, name: str) -> Sequence[PromptEntry]:
        if name in self.entries:
            return [self.entries[name]]
        return self._titles.get(name) or self._classes.get(name) or ()

    def exposed(self, name: str) -> Sequence[ExposedInput]:
        """Returns the inputs that a subgraph instance exposes, by the id or title of the
        instance."""
        return self._exposed.get(name, ())

    def names(self) -> list[str]:
        return [*self._titles, *self._classes, *self.entries, *self._exposed]

    def candidates(self, name: str) -> str:
        near = closest(name, self.names())
        if not near:
            return _some_nodes(list(self.entries.values()), "the prompt has")
        nodes_by_id = {entry.id: entry for one in near for entry in self.named(one)}
        instances = [one for one in near if one in self._exposed and not self.named(one)]
        names = [*(entry.name for entry in nodes_by_id.values()), *map(quoted, instances)]
        return f"; closest: {listed(names[:LISTED_MAX], len(names))}"


def find_places(
    directory: NodeIndex, entries: Mapping[str, PromptEntry], target: str
) -> tuple[Place, ...]:
    """Returns the inputs that a target names: one input of a node, or all inputs that an exposed
    input of a subgraph feeds."""
    try:
        return (find_place(directory, entries, target),)
    except InvalidInput:
        exposed = _exposed_places(directory, target)
        if not exposed:
            raise
        return exposed


def _exposed_places(directory: NodeIndex, target: str) -> tuple[Place, ...]:
    for name, input_name in _splits(target):
        inputs = directory.exposed(name)
        matching = [entry for entry in inputs if entry.is_called(input_name)]
        instances = {(entry.instance_id, entry.name): None for entry in matching}
        if len(instances) > 1:
            texts = [f"{one}.{own}" for one, own in instances]
            some = listed(texts[:LISTED_MAX], len(texts))
            raise InvalidInput(f"{quoted(target)} is ambiguous: {some}")
        if matching:
            return tuple(entry.place for entry in matching)
        if inputs and not directory.named(name):
            labels = list(dict.fromkeys(entry.label for entry in inputs))
            missing = f"the subgraph {quoted(name)} exposes no input {quoted(input_name)}"
            raise InvalidInput(missing + hint(input_name, labels, "it exposes"))
    return ()


def find_place(directory: NodeIndex, entries: Mapping[str, PromptEntry], target: str) -> Place:
    """Returns the one input that a target names.

    `entries` are the current nodes, since an earlier assignment may have added inputs.
    """
    splits = [(name, input_name, directory.named(name)) for name, input_name in _splits(target)]
    places = {
        Place(entry.id, input_name): None
        for _, input_name, nodes in splits
        for entry in nodes
        if has_input(entries[entry.id], input_name)
    }
    if len(places) == 1:
        return next(iter(places))
    if places:
        raise InvalidInput(f"{quoted(target)} is ambiguous: {_some_places(entries, list(places))}")
    match = next(((name, input_name, nodes) for name, input_name, nodes in splits if nodes), None)
    if match is None:
        raise InvalidInput(_unknown_node(directory, target, [name for name, *_ in splits]))
    raise InvalidInput(_unknown_input(entries[match[2][0].id], match[1]))


def has_input(entry: PromptEntry, name: str) -> bool:
    return name in entry.inputs or name in entry.declared()


def _splits(target: str) -> Iterator[tuple[str, str]]:
    """Yields the target split at each dot, the longest node name first."""
    end = len(target)
    for _ in range(SPLITS_MAX):
        end = target.rfind(".", 0, end)
        if end < 0:
            return
        yield target[:end].strip(), target[end + 1 :].strip()


def _unknown_node(directory: NodeIndex, target: str, names: Sequence[str]) -> str:
    if not names:
        return f"{quoted(target)} doesn't name an input; use node.input, such as 3.seed"
    # Report the longest node name: a shorter one would cut off most of a title that contains dots.
    return f"no node has the id, title or class {quoted(names[0])}{directory.candidates(names[0])}"


def _unknown_input(entry: PromptEntry, name: str) -> str:
    names = list(dict.fromkeys([*entry.declared(), *entry.inputs]))
    return f"{entry.name} has no input {quoted(name)}" + hint(name, names, "it has")


def _some_nodes(entries: Sequence[PromptEntry], what: str) -> str:
    if not entries:
        return "; the prompt has no nodes"
    return f"; {what}: " + listed((entry.name for entry in entries[:LISTED_MAX]), len(entries))


def _some_places(entries: Mapping[str, PromptEntry], places: Sequence[Place]) -> str:
    texts = [
        f"{place.node_id}.{place.input} ({entries[place.node_id].name}, now {_now(entries, place)})"
        for place in places[:LISTED_MAX]
    ]
    return listed(texts, len(places))


def _now(entries: Mapping[str, PromptEntry], place: Place) -> str:
    entry = entries[place.node_id]
    link = entry.link(place.input)
    return f"linked to {link[0]}" if link else shown_value(entry.inputs.get(place.input))


def _grouped(pairs: Iterable[tuple[str, PromptEntry]]) -> dict[str, list[PromptEntry]]:
    groups: dict[str, list[PromptEntry]] = {}
    for name, entry in pairs:
        if name:
            groups.setdefault(name, []).append(entry)
    return groups
