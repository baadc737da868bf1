"""Checks whether a prompt contains a registered workflow. This module does no I/O.

Only node types and links count, not values. A workflow is contained if one of its results, with all
nodes before it, is somewhere in the prompt. Its registered output node makes its only result.
Without one, each of its output nodes makes a result.

ComfyUI's nodes that only compute values from values don't count, because a prompt can have the
values instead. Extra nodes, outputs and links make no difference. A prompt may also share a node
that the workflow has twice, or repeat a node that the workflow shares, because the result is the
same. Any output node matches any other one, and any slot of a growing input matches its other
slots. A node
inserted between two nodes of the workflow makes it a different workflow."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from comfyfleet.protocol.validation import DEPENDENT, GROWING, Prompt, is_link
from comfyfleet.server.gateway.offers import ObjectInfo, upload_inputs
from comfyfleet.server.gateway.policy import core_nodes
from comfyfleet.workflow.object_info import DYNAMIC_GROUP

# Limit for comparisons of workflow nodes with prompt nodes, for one prompt and all workflows.
COMPARISONS_MAX = 500_000
ANY_OUTPUT = "(output)"
# Types that a widget can hold.
VALUE_TYPES = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})


class PatternLink(NamedTuple):
    """A link of a workflow.

    With `is_prefix`, any input whose name starts with `input` matches. This is used for the slots
    of a growing input, and for all inputs of an output node.
    """

    input: str
    source: str
    slot: float
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """The nodes of a prompt by type. Every output node is also listed as ANY_OUTPUT."""

    links: Mapping[str, Mapping[str, tuple[str, float]]]  # node → input → (source, slot)
    by_type: Mapping[str, Sequence[str]]
    link_counts: Mapping[str, int]  # number of links by node type


class PatternNode(NamedTuple):
    id: str
    type: str
    links: tuple[PatternLink, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The nodes that make a workflow's results, each after its sources."""

    nodes: tuple[PatternNode, ...]
    results: Mapping[str, frozenset[str]]  # output node → the types of it and all nodes before it

    def comparisons(self, prompt: IndexedPrompt) -> int:
        """Returns an upper bound for the comparisons in `is_contained`.

        This is 0 if the prompt lacks a node type for every result.
        """
        if not any(types <= prompt.by_type.keys() for types in self.results.values()):
            return 0
        return sum(_comparisons(node, prompt) for node in self.nodes)


def _comparisons(node: PatternNode, prompt: IndexedPrompt) -> int:
    """Counts comparisons. An `is_prefix` link is compared with all links of the prompt's nodes."""
    prefixes = sum(link.is_prefix for link in node.links)
    exact = len(prompt.by_type.get(node.type, ())) * (1 + len(node.links) - prefixes)
    return exact + prefixes * prompt.link_counts.get(node.type, 0)


def index_prompt(prompt: Prompt, object_info: ObjectInfo) -> IndexedPrompt:
    by_type: defaultdict[str, list[str]] = defaultdict(list)
    for node_id, node in prompt.items():
        class_type = _type_of(node)
        by_type[class_type].append(node_id)
        if _is_output(class_type, object_info):
            by_type[ANY_OUTPUT].append(node_id)
    links = {
        node_id: {name: (source, slot) for name, source, slot in _links(node)}
        for node_id, node in prompt.items()
    }
    link_counts = {
        class_type: sum(len(links[node_id]) for node_id in ids)
        for class_type, ids in by_type.items()
    }
    return IndexedPrompt(links, dict(by_type), link_counts)


def pattern_of(
    prompt: Prompt, object_info: ObjectInfo, output_node_id: str | None = None
) -> Pattern | None:
    """Returns the pattern of a workflow's prompt, or None if it has no results or has a cycle."""
    all_nodes = {
        node_id: _pattern_node(node_id, prompt[node_id], object_info)
        for node_id in _in_order(prompt)
    }
    nodes = _without_values(all_nodes, prompt, object_info)
    parts = _parts_of_results(nodes, prompt, object_info, output_node_id)
    if not parts:
        return None
    needed = set().union(*parts.values())
    return Pattern(
        tuple(node for node_id, node in nodes.items() if node_id in needed),
        {
            output: frozenset(nodes[node_id].type for node_id in part)
            for output, part in parts.items()
        },
    )


def _without_values(
    nodes: Mapping[str, PatternNode], prompt: Prompt, object_info: ObjectInfo
) -> Mapping[str, PatternNode]:
    """Removes links to nodes that only compute values, unless an output loses all its links."""
    values: set[str] = set()
    left: dict[str, PatternNode] = {}
    for node_id, node in nodes.items():
        links = tuple(link for link in node.links if link.source not in values)
        if not links and _computes_values(_type_of(prompt[node_id]), object_info):
            values.add(node_id)
        is_any_output = node.type == ANY_OUTPUT
        left[node_id] = node if is_any_output and not links else node._replace(links=links)
    return left


def _computes_values(class_type: str, object_info: ObjectInfo) -> bool:
    info = object_info.get(class_type, {})
    outputs = info.get("output")
    if class_type not in core_nodes() or not outputs or info.get("output_node"):
        return False
    return all(map(_is_value_type, [*outputs, *_input_types(info.get("input"))]))


def _input_types(groups: object) -> Iterator[object]:
    told = groups if isinstance(groups, Mapping) else {}
    for inputs in (told.get(group) for group in ("required", "optional")):
        for spec in inputs.values() if isinstance(inputs, Mapping) else ():
            yield spec[0] if isinstance(spec, list) and spec else None


def _is_value_type(kind: object) -> bool:
    is_choice = isinstance(kind, list)
    return is_choice or (isinstance(kind, str) and VALUE_TYPES.issuperset(kind.split(",")))


def _parts_of_results(
    nodes: Mapping[str, PatternNode],
    prompt: Prompt,
    object_info: ObjectInfo,
    output_node_id: str | None,
) -> Mapping[str, set[str]]:
    """Returns the ids of the nodes that each result needs, including its output node."""
    if output_node_id is not None and output_node_id in nodes:
        return {output_node_id: _part_of(output_node_id, nodes)}
    parts = {
        node_id: _part_of(node_id, nodes)
        for node_id in nodes
        if _is_output(_type_of(prompt[node_id]), object_info)
    }
    results = {
        output: part
        for output, part in parts.items()
        if not _shows_uploads_only(output, part, prompt, object_info)
    }
    return results or parts


def _part_of(output: str, nodes: Mapping[str, PatternNode]) -> set[str]:
    part: set[str] = set()
    left = [output]
    while left:
        node_id = left.pop()
        if node_id not in part:
            part.add(node_id)
            left += [link.source for link in nodes[node_id].links]
    return part


def _shows_uploads_only(
    output: str, part: Collection[str], prompt: Prompt, object_info: ObjectInfo
) -> bool:
    """Checks whether an output only shows uploaded files, which doesn't count as a result."""
    if object_info.get(_type_of(prompt[output]), {}).get("output"):
        return False  # the output node produces something itself
    before = [object_info.get(_type_of(prompt[each]), {}) for each in part if each != output]
    return bool(before) and all(map(upload_inputs, before))


def _pattern_node(node_id: str, node: Mapping[str, Any], object_info: ObjectInfo) -> PatternNode:
    class_type = _type_of(node)
    found = list(_links(node))
    if found and _is_output(class_type, object_info):
        links = (PatternLink("", source, slot, is_prefix=True) for _, source, slot in found)
        return PatternNode(node_id, ANY_OUTPUT, tuple(links))
    growing = tuple(_growing_inputs(object_info.get(class_type, {}).get("input")))
    links = (_pattern_link(*each, growing) for each in found)
    return PatternNode(node_id, class_type, tuple(links))


def _pattern_link(name: str, source: str, slot: float, growing: Sequence[str]) -> PatternLink:
    prefix = next((each for each in growing if name.startswith(each)), None)
    if prefix is None:
        return PatternLink(name, source, slot)
    return PatternLink(prefix, source, slot, is_prefix=True)


def _growing_inputs(groups: object, prefix: str = "") -> Iterator[str]:
    """Yields the prefix of the slot or row names of each growing input, such as `images.`."""
    for inputs in groups.values() if isinstance(groups, Mapping) else ():
        for name, spec in inputs.items() if isinstance(inputs, Mapping) else ():
            inner = f"{prefix}{name}."
            match spec:
                case [kind, *_] if kind in (GROWING, DYNAMIC_GROUP):
                    yield inner
                case [kind, {"options": [*options]}] if kind == DEPENDENT:
                    for option in options:
                        if isinstance(option, Mapping):
                            yield from _growing_inputs(option.get("inputs"), inner)


def is_contained(pattern: Pattern, prompt: IndexedPrompt) -> bool:
    """Checks whether the prompt contains the workflow. `Pattern.comparisons` bounds the work."""
    matches: dict[str, set[str]] = {}
    for node in pattern.nodes:
        matches[node.id] = {
            candidate
            for candidate in prompt.by_type.get(node.type, ())
            if all(_has_link(prompt.links[candidate], link, matches) for link in node.links)
        }
    return any(matches[output] for output in pattern.results)


def _has_link(
    links: Mapping[str, tuple[str, float]],
    wanted: PatternLink,
    matches: Mapping[str, Collection[str]],
) -> bool:
    there: Iterable[tuple[str, float]]
    if wanted.is_prefix:
        there = (link for name, link in links.items() if name.startswith(wanted.input))
    else:
        there = [links[wanted.input]] if wanted.input in links else ()
    return any(slot == wanted.slot and source in matches[wanted.source] for source, slot in there)


def _in_order(prompt: Prompt) -> list[str]:
    """Returns all node ids, each after its sources; empty for a cycle or a missing source."""
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


def _type_of(node: Mapping[str, Any]) -> str:
    return str(node.get("class_type"))


def _is_output(class_type: str, object_info: ObjectInfo) -> bool:
    return bool(object_info.get(class_type, {}).get("output_node"))


def _links(node: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, value in (node.get("inputs") or {}).items():
        if is_link(value):
            yield name, value[0], value[1]
