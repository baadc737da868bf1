"""Checks whether a prompt contains a registered workflow. Pure.

Only node types and links count, not values: a workflow is contained if each of its outputs, with all
nodes before it, is somewhere in the prompt. Extra nodes, outputs and links make no difference, nor
does it matter whether the prompt shares a node that the workflow has twice, or repeats one that it
shares: the result is the same. Any output node can stand for another one. A node inserted between
two nodes of the workflow makes it a different workflow."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from comfyfleet.protocol.validation import Prompt, is_link
from comfyfleet.server.gateway.offers import ObjectInfo

# Comparisons of a workflow's node with a prompt's node, for one prompt and all workflows together.
COMPARISONS_MAX = 500_000
ANY_OUTPUT = "(output)"


class PatternLink(NamedTuple):
    input: str  # empty for an output node, where any input will do
    source: str
    slot: float


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """The nodes of a prompt by type. Every output node is also listed as ANY_OUTPUT."""

    links: Mapping[str, Mapping[str, tuple[str, float]]]  # node → input → (source, slot)
    by_type: Mapping[str, Sequence[str]]


class PatternNode(NamedTuple):
    id: str
    type: str
    links: tuple[PatternLink, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The nodes of a workflow that run, each after the nodes that it takes from."""

    nodes: tuple[PatternNode, ...]
    types: frozenset[str]

    def comparisons(self, prompt: IndexedPrompt) -> int:
        """Returns an upper bound of the comparisons that `is_contained` makes; 0 if a type is
        missing."""
        if not self.types <= prompt.by_type.keys():
            return 0
        return sum(len(prompt.by_type[node.type]) * (1 + len(node.links)) for node in self.nodes)


def index_prompt(prompt: Prompt, object_info: ObjectInfo) -> IndexedPrompt:
    by_type: defaultdict[str, list[str]] = defaultdict(list)
    for node_id, node in prompt.items():
        class_type = str(node.get("class_type"))
        by_type[class_type].append(node_id)
        if _is_output(class_type, object_info):
            by_type[ANY_OUTPUT].append(node_id)
    links = {
        node_id: {name: (source, slot) for name, source, slot in _links(node)}
        for node_id, node in prompt.items()
    }
    return IndexedPrompt(links, dict(by_type))


def pattern_of(prompt: Prompt, object_info: ObjectInfo) -> Pattern | None:
    """Returns the pattern of a workflow's prompt; None if it has no nodes or a cycle."""
    ids = _in_order(prompt)
    if not ids:
        return None
    nodes = tuple(_pattern_node(node_id, prompt[node_id], object_info) for node_id in ids)
    return Pattern(nodes, frozenset(node.type for node in nodes))


def _pattern_node(node_id: str, node: Mapping[str, Any], object_info: ObjectInfo) -> PatternNode:
    class_type = str(node.get("class_type"))
    links = [PatternLink(name, source, slot) for name, source, slot in _links(node)]
    if not links or not _is_output(class_type, object_info):
        return PatternNode(node_id, class_type, tuple(links))
    return PatternNode(node_id, ANY_OUTPUT, tuple(link._replace(input="") for link in links))


def is_contained(pattern: Pattern, prompt: IndexedPrompt) -> bool:
    """Checks whether the prompt contains the workflow. See `Pattern.comparisons` for the work."""
    matches: dict[str, set[str]] = {}
    for node in pattern.nodes:
        found = {
            candidate
            for candidate in prompt.by_type.get(node.type, ())
            if all(_has_link(prompt.links[candidate], link, matches) for link in node.links)
        }
        if not found:
            return False
        matches[node.id] = found
    return True


def _has_link(
    links: Mapping[str, tuple[str, float]],
    wanted: PatternLink,
    matches: Mapping[str, Collection[str]],
) -> bool:
    there: Iterable[tuple[str, float]] = links.values()
    if wanted.input:
        there = [links[wanted.input]] if wanted.input in links else ()
    return any(slot == wanted.slot and source in matches[wanted.source] for source, slot in there)


def _in_order(prompt: Prompt) -> list[str]:
    """Returns the ids of all nodes, each after its sources; nothing if that is impossible."""
    sources = {
        node_id: [source for _, source, _ in _links(node)] for node_id, node in prompt.items()
    }
    ordered: dict[str, None] = {}
    for start in prompt:
        path = [start]
        while path:
            node_id = path[-1]
            if node_id not in sources or len(path) > len(prompt):
                return []
            missing = next((each for each in sources[node_id] if each not in ordered), None)
            if missing is None:
                ordered[path.pop()] = None
            else:
                path.append(missing)
    return list(ordered)


def _is_output(class_type: str, object_info: ObjectInfo) -> bool:
    return bool(object_info.get(class_type, {}).get("output_node"))


def _links(node: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, value in (node.get("inputs") or {}).items():
        if is_link(value):
            yield name, value[0], value[1]
