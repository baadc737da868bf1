"""Checks whether a prompt contains a registered workflow. This module does no I/O.

Only node types and links are compared, not values. A prompt contains a workflow if it contains one
of the workflow's results together with all nodes upstream of it. The registered output node
produces the only result. Without a registered output node, each output node produces a result.

ComfyUI's nodes that only compute values from other values are ignored, because a prompt can contain
the values instead. Extra nodes, outputs and links make no difference. A prompt may share a node
that the workflow has twice, or repeat a node that the workflow shares, because the result is the
same.
All output nodes match each other, and so do all slots of a growing input. A node inserted between
two nodes of the workflow makes it a different workflow.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from comfyfleet.protocol.validation import DEPENDENT, GROWING, Prompt, is_link
from comfyfleet.server.gateway.offers import ObjectInfo, upload_inputs
from comfyfleet.server.gateway.policy import core_nodes
from comfyfleet.workflow.object_info import DYNAMIC_GROUP

# Maximum number of comparisons between a prompt's nodes and the nodes of all workflows.
COMPARISONS_MAX = 500_000
ANY_OUTPUT = "(output)"
# Types that a widget can hold.
VALUE_TYPES = frozenset({"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"})


class PatternLink(NamedTuple):
    """A link of a workflow.

    If `is_prefix` is set, every input whose name starts with `input` matches. This applies to the
    slots of a growing input and to all inputs of an output node.
    """

    input: str
    source: str
    slot: float
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class IndexedPrompt:
    """The nodes of a prompt by type. Every output node is also listed as ANY_OUTPUT."""

    links: Mapping[str, Mapping[str, tuple[str, float]]]  # (source, slot) by node and input
    by_type: Mapping[str, Sequence[str]]
    link_counts: Mapping[str, int]  # number of links by node type


class PatternNode(NamedTuple):
    id: str
    type: str
    links: tuple[PatternLink, ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The nodes that produce a workflow's results. Each node comes after its sources."""

    nodes: tuple[PatternNode, ...]
    # The types of each output node and of all nodes upstream of it, by the output node's id.
    results: Mapping[str, frozenset[str]]

    def comparisons(self, prompt: IndexedPrompt) -> int:
        """Returns the maximum number of comparisons in `is_contained`.

        Returns 0 if the prompt lacks at least one node type of every result.
        """
        if not any(types <= prompt.by_type.keys() for types in self.results.values()):
            return 0
        return sum(_comparisons(node, prompt) for node in self.nodes)


def _comparisons(node: PatternNode, prompt: IndexedPrompt) -> int:
    """Returns the maximum number of comparisons for one node of a workflow. An `is_prefix` link is
    compared with every link of every node of the same type in the prompt."""
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
    """Removes links whose source only computes values. An output node that would lose all its links
    keeps them."""
    values: set[str] = set()
    kept_nodes: dict[str, PatternNode] = {}
    for node_id, node in nodes.items():
        links = tuple(link for link in node.links if link.source not in values)
        if not links and _computes_values(_type_of(prompt[node_id]), object_info):
            values.add(node_id)
        is_any_output = node.type == ANY_OUTPUT
        kept_nodes[node_id] = node if is_any_output and not links else node._replace(links=links)
    return kept_nodes


def _computes_values(class_type: str, object_info: ObjectInfo) -> bool:
    info = object_info.get(class_type, {})
    outputs = info.get("output")
    if class_type not in core_nodes() or not outputs or info.get("output_node"):
        return False
    return all(map(_is_value_type, [*outputs, *_input_types(info.get("input"))]))


def _input_types(groups: object) -> Iterator[object]:
    inputs_by_group = groups if isinstance(groups, Mapping) else {}
    for inputs in (inputs_by_group.get(group) for group in ("required", "optional")):
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
    """Returns the ids of the nodes that each result requires, including its output node."""
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
    pending = [output]
    while pending:
        node_id = pending.pop()
        if node_id not in part:
            part.add(node_id)
            pending += [link.source for link in nodes[node_id].links]
    return part


def _shows_uploads_only(
    output: str, part: Collection[str], prompt: Prompt, object_info: ObjectInfo
) -> bool:
    """Checks whether an output only shows uploaded files, which doesn't count as a result."""
    if object_info.get(_type_of(prompt[output]), {}).get("output"):
        return False  # The output node also produces a value.
    upstream = [
        object_info.get(_type_of(prompt[node_id]), {}) for node_id in part if node_id != output
    ]
    return bool(upstream) and all(map(upload_inputs, upstream))


def _pattern_node(node_id: str, node: Mapping[str, Any], object_info: ObjectInfo) -> PatternNode:
    class_type = _type_of(node)
    inputs = list(_links(node))
    if inputs and _is_output(class_type, object_info):
        links = (PatternLink("", source, slot, is_prefix=True) for _, source, slot in inputs)
        return PatternNode(node_id, ANY_OUTPUT, tuple(links))
    growing = tuple(_growing_inputs(object_info.get(class_type, {}).get("input")))
    links = (_pattern_link(name, source, slot, growing) for name, source, slot in inputs)
    return PatternNode(node_id, class_type, tuple(links))


def _pattern_link(name: str, source: str, slot: float, growing: Sequence[str]) -> PatternLink:
    prefix = next((start for start in growing if name.startswith(start)), None)
    if prefix is None:
        return PatternLink(name, source, slot)
    return PatternLink(prefix, source, slot, is_prefix=True)


def _growing_inputs(groups: object, prefix: str = "") -> Iterator[str]:
    """Yields the prefix of the slot or row names of each growing input, for example `images.`."""
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
    """Checks whether the prompt contains the workflow. `Pattern.comparisons` limits the work."""
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
    pattern_link: PatternLink,
    matches: Mapping[str, Collection[str]],
) -> bool:
    candidates: Iterable[tuple[str, float]]
    if pattern_link.is_prefix:
        candidates = (link for name, link in links.items() if name.startswith(pattern_link.input))
    else:
        candidates = [links[pattern_link.input]] if pattern_link.input in links else ()
    return any(
        slot == pattern_link.slot and source in matches[pattern_link.source]
        for source, slot in candidates
    )


def _in_order(prompt: Prompt) -> list[str]:
    """Returns all node ids, each after its sources. Returns an empty list if the prompt has a cycle
    or a source is missing.
    """
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
            missing = next((source for source in sources[node_id] if source not in ordered), None)
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
