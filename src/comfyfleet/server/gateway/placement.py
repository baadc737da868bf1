"""Decides which backends can run a prompt, and chooses its fleet and its workflow.

A prompt is validated against the object_info of each backend separately. If no backend can run it,
the response contains ComfyUI's own errors, with the choices of all backends.
"""

import asyncio
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from random import Random
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

from comfyfleet.api.sizes import is_larger, is_small
from comfyfleet.api.values import is_plain_line
from comfyfleet.errors import FleetError
from comfyfleet.protocol.http import json_text
from comfyfleet.protocol.payloads import RefusedPrompt
from comfyfleet.protocol.validation import (
    WRAPPED,
    Fault,
    Prompt,
    PromptValidation,
    fault,
    is_link,
    missing_type_fault,
    validate,
)
from comfyfleet.server.app import ControlPlane
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.catalog.model import RegisteredWorkflow, WorkflowVersion
from comfyfleet.server.catalog.payload import RandomSource, build_marked_prompt
from comfyfleet.server.fleets import service as fleets
from comfyfleet.server.fleets.model import Fleet, WorkflowRequirements, requirements_of
from comfyfleet.server.gateway.containment import (
    COMPARISONS_MAX,
    IndexedPrompt,
    Pattern,
    index_prompt,
    is_contained,
    pattern_of,
)
from comfyfleet.server.gateway.offers import (
    FilesByKind,
    LatestCache,
    ObjectInfo,
    Offer,
    OfferedBackend,
    OfferedNodes,
    choices_of,
    input_spec,
    offer_cache,
)
from comfyfleet.server.gateway.policy import PREFIX, core_nodes
from comfyfleet.server.jobs.caches import TtlCache
from comfyfleet.server.queue import service as dispatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class PromptMatch:
    """The validation result of a prompt, and the backends to which it applies. These are the
    backends that can run the largest number of the prompt's outputs.
    """

    verdict: PromptValidation
    nodes: OfferedNodes
    backends: Sequence[OfferedBackend]

    @property
    def fleets(self) -> list[Fleet]:
        """The fleets with an online worker, or all fleets if no worker is online."""
        online = [backend for backend in self.backends if backend.is_online]
        return list(
            {backend.fleet.id: backend.fleet for backend in online or self.backends}.values()
        )


def match_prompt(
    offer: Offer, prompt: Prompt, targets: Collection[str] | None, files: FilesByKind
) -> PromptMatch:
    """Returns the backends that can run the prompt. Raises RefusedPrompt if no backend can run it.

    If the prompt only fails the declared checks of custom nodes, the backends decide, because only
    they know whether a node waives its checks.
    """
    _require_backends(offer)
    _require_fitting_size(offer, prompt)
    _require_short_ids(prompt)
    _require_plain_prefixes(prompt)
    _require_types(offer, prompt)
    backends = _allowing(offer, prompt)
    verdicts_by_hash = _verdicts(backends, prompt, targets, files)
    best = _most_outputs(verdicts_by_hash)
    if not best:
        verdicts = [verdict for verdict, _ in verdicts_by_hash.values()]
        if all(node["class_type"] in core_nodes() for node in prompt.values()):
            raise _refusal(offer, prompt, targets, files, verdicts)
        verdicts_by_hash = _verdicts(backends, prompt, targets, files, is_lenient=True)
        best = _most_outputs(verdicts_by_hash)
        if not best:
            raise _refusal(offer, prompt, targets, files, verdicts)
    verdict, nodes = next(
        entry for entry in verdicts_by_hash.values() if len(entry[0].outputs) == best
    )
    _require_unwrapped(prompt, verdict.prompt)
    alike = {
        content_hash
        for content_hash, (other, its_nodes) in verdicts_by_hash.items()
        if other.outputs == verdict.outputs and _is_same_prompt(verdict, nodes, other, its_nodes)
    }
    return PromptMatch(verdict, nodes, [backend for backend in backends if backend.hash in alike])


# Validation results by the hash of the object_info, with the node types that were used.
Verdicts: TypeAlias = Mapping[str, tuple[PromptValidation, OfferedNodes]]


def _verdicts(
    backends: Iterable[OfferedBackend],
    prompt: Prompt,
    targets: Collection[str] | None,
    files: FilesByKind,
    *,
    is_lenient: bool = False,
) -> Verdicts:
    verdicts_by_hash: dict[str, tuple[PromptValidation, OfferedNodes]] = {}
    for backend in backends:
        if backend.hash not in verdicts_by_hash:
            nodes = OfferedNodes(backend.object_info, files, is_lenient=is_lenient)
            verdict = validate(prompt, nodes=nodes, targets=targets, follows_all=True)
            verdicts_by_hash[backend.hash] = verdict, nodes
    return verdicts_by_hash


def _most_outputs(verdicts: Verdicts) -> int:
    return max((len(verdict.outputs) for verdict, _ in verdicts.values()), default=0)


def _is_same_prompt(
    verdict: PromptValidation, nodes: OfferedNodes, other: PromptValidation, others: OfferedNodes
) -> bool:
    """Checks whether two backends would receive the same prompt with the same files. Without this
    check, one backend's declaration would decide which values are files on the other one."""
    types = {node["class_type"] for node in verdict.prompt.values()}
    return verdict.prompt == other.prompt and all(
        nodes[class_type].uploads == others[class_type].uploads for class_type in types
    )


def _require_backends(offer: Offer) -> None:
    if not offer.backends:
        raise RefusedPrompt(
            fault(
                "no_backend_available",
                "No worker is available for this prompt",
                "No fleet accepts prompts of this user, or none of its workers has reached its "
                "backend yet. The logs of the workers and of `comfyfleet up` show for which "
                "backends they are waiting.",
            ),
            {},
        )


def _require_fitting_size(offer: Offer, prompt: Prompt) -> None:
    """Refuses a prompt that is too large for every fleet. This happens before its strings are
    processed.
    """
    most = max(backend.terms.prompt_bytes_max for backend in offer.backends)
    if is_larger(prompt, bytes_max=most):
        details = f"the limit is {most:,} bytes"
        raise RefusedPrompt(fault(TOO_LARGE, "Prompt is too large", details), {})


NODE_ID_CHARACTERS_MAX = 200
PREFIX_CHARACTERS_MAX = 1_000


def _require_short_ids(prompt: Prompt) -> None:
    for node_id in prompt:
        if len(node_id) > NODE_ID_CHARACTERS_MAX:
            message = f"A node id can have at most {NODE_ID_CHARACTERS_MAX} characters"
            raise RefusedPrompt(fault("invalid_node_id", message, f"{node_id[:40]}…"), {})


def _require_plain_prefixes(prompt: Prompt) -> None:
    """Refuses filename prefixes that aren't valid in a filename. The prompt would fail in each
    attempt.
    """
    for node_id, node in prompt.items():
        prefix = (node.get("inputs") or {}).get(PREFIX)
        text = prefix.get(WRAPPED) if isinstance(prefix, dict) else prefix
        if not isinstance(text, str):
            continue
        if len(text) > PREFIX_CHARACTERS_MAX:
            message = f"{PREFIX} must have at most {PREFIX_CHARACTERS_MAX:,} characters"
        elif not is_plain_line(text):
            message = f"{PREFIX} must not contain control characters, such as line breaks"
        else:
            continue
        raise RefusedPrompt(fault("invalid_filename_prefix", message, f"Node ID '#{node_id}'"), {})


def _require_unwrapped(given: Prompt, read: Prompt) -> None:
    """Refuses nested wrappers and wrapped links. ComfyUI removes only one wrapper from a value. The
    backend would then read the rest as another wrapper, or as a link that wasn't validated here.
    Wrapped strings and numbers are harmless.
    """
    for node_id, node in read.items():
        for name, value in node.get("inputs", {}).items():
            before = given[node_id]["inputs"].get(name)
            if not _is_wrapped(before):
                continue
            unwrapped = before[WRAPPED] if value == before else value
            if is_link(unwrapped) or _is_wrapped(unwrapped):
                message = f"Input '{name[:40]}' wraps a link or another wrapped value"
                details = f"Node ID '#{node_id}'"
                raise RefusedPrompt(
                    fault("invalid_input_type", message, details, node_id=node_id), {}
                )


def _is_wrapped(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and WRAPPED in value


def _require_types(offer: Offer, prompt: Prompt) -> None:
    known: Mapping[str, Any] = _InstalledTypes(offer.backends)
    for node_id, node in prompt.items():
        if missing := missing_type_fault(node_id, node, known):
            raise RefusedPrompt(missing, {})


class _InstalledTypes(dict[str, Any]):
    """The node types of all backends, including denied types. Supports only the operator `in`."""

    def __init__(self, backends: Sequence[OfferedBackend]) -> None:
        super().__init__()
        self._backends = backends

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(
            name in backend.object_info for backend in self._backends
        )


def _allowing(offer: Offer, prompt: Prompt) -> list[OfferedBackend]:
    """Returns the backends of the fleets whose settings permit the prompt. Raises RefusedPrompt if
    no fleet permits it.
    """
    size = len(json_text(prompt))
    reasons = [(backend, _breach(offer, backend, prompt, size)) for backend in offer.backends]
    fitting = [backend for backend, reason in reasons if reason is None]
    if not fitting:
        # If one fleet denies a node type and the prompt is too large for another fleet, the denied
        # type is reported.
        breaches = [reason for _, reason in reasons if reason is not None]
        raise RefusedPrompt(min(breaches, key=lambda breach: breach["type"] == TOO_LARGE), {})
    return fitting


TOO_LARGE = "prompt_too_large"
NOT_ALLOWED = "node_type_not_allowed"


def _breach(offer: Offer, backend: OfferedBackend, prompt: Prompt, size: int) -> Fault | None:
    terms, policy = backend.terms, offer.policy(backend)
    if len(prompt) > terms.nodes_max:
        details = f"{len(prompt):,} nodes; the limit is {terms.nodes_max:,}"
        return fault(TOO_LARGE, "Prompt has too many nodes", details)
    if size > terms.prompt_bytes_max:
        details = f"{size:,} bytes; the limit is {terms.prompt_bytes_max:,}"
        return fault(TOO_LARGE, "Prompt is too large", details)
    judged: set[str] = set()
    for node_id, node in prompt.items():
        class_type = node["class_type"]
        if class_type in judged:
            continue
        judged.add(class_type)
        # If this backend lacks the type, another backend's entry is used, so that denied types are
        # reported before missing ones.
        reason = policy.refusal(class_type, _info_of(class_type, backend, offer))
        if reason is not None:
            return _not_allowed(node_id, node, reason)
    return None


def _info_of(class_type: str, first: OfferedBackend, offer: Offer) -> Mapping[str, Any]:
    infos = (backend.object_info.get(class_type) for backend in (first, *offer.backends))
    return next(info for info in infos if info is not None)


def _not_allowed(node_id: str, node: Mapping[str, Any], reason: str) -> Fault:
    class_type = node["class_type"]
    meta = node.get("_meta")
    title = meta.get("title", class_type) if isinstance(meta, Mapping) else class_type
    return fault(
        NOT_ALLOWED,
        f"Node '{title}' isn't allowed here. {reason}",
        f"Node ID '#{node_id}'",
        node_id=node_id,
        class_type=class_type,
        node_title=title,
        reason=reason,
    )


def _refusal(
    offer: Offer,
    prompt: Prompt,
    targets: Collection[str] | None,
    files: FilesByKind,
    verdicts: Sequence[PromptValidation],
) -> RefusedPrompt:
    """Returns the errors of a prompt that no backend can run. The prompt is validated against the
    node types of all backends together. If that finds no error, because each part could run on some
    backend, the errors of the backend with the fewest are returned.
    """
    known = OfferedNodes(offer.object_info, files)
    together = validate(prompt, nodes=known, targets=targets, follows_all=True)
    if together.error is None:
        together = min(verdicts, key=_faults)
    error = together.error or fault("prompt_no_outputs", "Prompt has no outputs")
    details = str(error.get("details", ""))[:DETAILS_CHARACTERS_MAX]
    return RefusedPrompt({**error, "details": details}, fitting_errors(together.node_errors or {}))


# Limits for the size of a refusal. Without them, a response could be hundreds of times as large as
# its prompt.
ERRORS_BYTES_MAX = 1024**2
DETAILS_CHARACTERS_MAX = 100_000


def fitting_errors(node_errors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first errors up to a total size, but at least one. The first one is shortened if
    it is too long.
    """
    errors: dict[str, Any] = {}
    free_bytes = ERRORS_BYTES_MAX
    for node_id, entry in node_errors.items():
        shown = entry if errors else {**entry, "errors": list(map(_short, entry["errors"]))}
        free_bytes -= len(node_id) + len(json_text(shown))
        if free_bytes < 0 and errors:
            break
        errors[node_id] = shown
    return errors


def _short(error: Fault) -> Fault:
    if len(json_text(error)) <= DETAILS_CHARACTERS_MAX:
        return error
    return fault(error["type"], error["message"][:1000], error["details"][:1000])


def _faults(verdict: PromptValidation) -> int:
    """Returns the number of errors. If a node type is missing, no other errors are reported, so a
    very high number is returned.
    """
    if not verdict.node_errors:
        return 1_000_000
    return sum(len(entry["errors"]) for entry in verdict.node_errors.values())


def needed_part(prompt: Prompt, outputs: Collection[str]) -> Prompt:
    """Returns the given output nodes and all nodes upstream of them. The other nodes are left out,
    because a backend would refuse them as well."""
    needed_ids: set[str] = set()
    pending = list(outputs)
    while pending:
        node_id = pending.pop()
        if node_id in needed_ids or node_id not in prompt:
            continue
        needed_ids.add(node_id)
        pending += [source for _, source, _ in _links(prompt[node_id])]
    return {node_id: node for node_id, node in prompt.items() if node_id in needed_ids}


def running_part(prompt: Prompt, object_info: ObjectInfo) -> Prompt:
    """Returns the part of a prompt that would run: all output nodes and the nodes upstream of
    them.
    """
    outputs = [
        node_id
        for node_id, node in prompt.items()
        if object_info.get(str(node.get("class_type")), {}).get("output_node")
    ]
    return needed_part(prompt, outputs)


def shape_of(prompt: Prompt) -> str | None:
    """Returns a hash of the node types and links. Prompts with equal types and links have the same
    hash. Returns None if the prompt has a cycle or a link to a missing node.
    """
    marks: dict[str, str] = {}
    for start in prompt:
        # The nodes on the current path, each with the sources that haven't been visited yet.
        path = {} if start in marks else {start: _sources(prompt[start])}
        while path:
            node_id, sources = next(reversed(path.items()))
            source = next((candidate for candidate in sources if candidate not in marks), None)
            if source is None:
                marks[node_id] = _mark(prompt[node_id], marks)
                del path[node_id]
            elif source in path or source not in prompt:
                return None
            else:
                path[source] = _sources(prompt[source])
    return hashlib.sha256("\n".join(sorted(marks.values())).encode()).hexdigest()


def _sources(node: Mapping[str, Any]) -> Iterator[str]:
    return iter([source for _, source, _ in _links(node)])


def _mark(node: Mapping[str, Any], marks: Mapping[str, str]) -> str:
    links = sorted((name, marks[source], slot) for name, source, slot in _links(node))
    text = json.dumps([node.get("class_type"), links])
    return hashlib.sha256(text.encode()).hexdigest()


def _links(node: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    inputs = node.get("inputs") or {}
    return [(name, value[0], value[1]) for name, value in inputs.items() if is_link(value)]


def most_similar_first(prompt: Prompt, others: Sequence[Prompt]) -> list[int]:
    """Returns the positions of the `others`, sorted by the number of values that they share with
    `prompt`, largest first. All prompts must have the same shape.
    """
    values = _values(prompt)
    common = [(values & _values(other)).total() for other in others]
    return sorted(range(len(others)), key=lambda position: -common[position])


def _values(prompt: Prompt) -> Counter[tuple[str, str, str]]:
    return Counter(
        (str(node.get("class_type")), name, json.dumps(value, sort_keys=True))
        for node in prompt.values()
        for name, value in (node.get("inputs") or {}).items()
        if not is_link(value)
    )


DEPTHS_FRESH = timedelta(seconds=1)
OFFERED_FRESH = timedelta(seconds=2)
CONVERTED_KEPT_MAX, PATTERNS_KEPT_MAX = 256, 2_000
# A prompt that needs more comparisons than this is compared in a thread, not in the event loop.
SMALL_COMPARISONS_MAX = 10_000
PROVIDER = "self_hosted"
KEY = "placement"


@dataclass(frozen=True)
class PromptPlacement:
    """The fleet and the workflow that were chosen for a prompt, and the prompt's minimum price."""

    fleet: Fleet
    workflow_id: int
    workflow_slug: str
    workflow_version: int
    least_price: int  # The highest price of the workflows that the prompt matches or contains.
    affinity: str | None = None  # Set if workers of other fleets also run the workflow's jobs.


@dataclass(frozen=True)
class OfferedWorkflows:
    workflows: Sequence[tuple[RegisteredWorkflow, WorkflowVersion]]
    assigned: Mapping[int, frozenset[int]]  # The ids of the assigned workflows by fleet id.


class ConvertedWorkflow(NamedTuple):
    """The prompt of a registered workflow and its shape."""

    prompt: Prompt
    shape: str | None


class PlacementCache:
    def __init__(self) -> None:
        # Numbers of queued and running jobs by workflow and stage, including the jobs that this
        # process has placed since the last read.
        self.depths: TtlCache[dict[tuple[int, str], int]] = TtlCache(DEPTHS_FRESH)
        self.offered: TtlCache[OfferedWorkflows] = TtlCache(OFFERED_FRESH)
        self.converted: LatestCache[ConvertedWorkflow | None] = LatestCache(CONVERTED_KEPT_MAX)
        self.patterns: LatestCache[Pattern | None] = LatestCache(PATTERNS_KEPT_MAX)


def _cache(plane: ControlPlane) -> PlacementCache:
    cache: PlacementCache = plane.context.caches.gateway.setdefault(KEY, PlacementCache())
    return cache


async def place_prompt(
    plane: ControlPlane, match: PromptMatch, prompt: Prompt, preferred_fleet_id: int | None = None
) -> PromptPlacement:
    """Places a prompt as the registered workflow with the same shape. If no workflow matches, the
    prompt runs as a fleet's open workflow, on the preferred fleet if possible.

    In both cases, the prompt costs at least as much as the most expensive workflow in it.
    """
    least_price = await _contained_price(plane, match, prompt)
    registered = await _find_registered(plane, match, prompt)
    if registered is not None:
        return replace(registered, least_price=max(registered.least_price, least_price))
    preferred = [fleet for fleet in match.fleets if fleet.id == preferred_fleet_id]
    fleet = await _least_busy(plane, preferred or match.fleets)
    workflow_id = fleet.open_workflow_id
    if workflow_id is None:
        async with plane.central.transaction() as tx:
            workflow_id = (await catalog.open_workflow_of(tx, fleet, now=plane.clock())).id
    return PromptPlacement(fleet, workflow_id, catalog.open_slug(fleet), 0, least_price)


async def _contained_price(plane: ControlPlane, match: PromptMatch, prompt: Prompt) -> int:
    """Returns the price of the most expensive registered workflow that the prompt contains, or 0 if
    it contains none. Raises RefusedPrompt if the search would need too many comparisons.
    """
    backend = match.backends[0]
    offered = await _offered(plane)
    priced = [
        (workflow, version) for workflow, version in offered.workflows if workflow.price_tokens
    ]
    if not priced:
        return 0
    indexed = index_prompt(prompt, backend.object_info)
    possible: list[tuple[int, Pattern]] = []
    comparisons = 0
    for workflow, version in priced:
        if not indexed.by_type.keys().isdisjoint(version.node_types):
            pattern = await _pattern(plane, version, backend)
            more = pattern.comparisons(indexed) if pattern else 0
            if pattern and more:
                possible.append((workflow.price_tokens or 0, pattern))
                comparisons += more
    _require_comparable(comparisons)
    possible.sort(key=lambda priced_pattern: -priced_pattern[0])
    work = partial(_highest_price, possible, indexed)
    if comparisons <= SMALL_COMPARISONS_MAX:
        return work()
    async with offer_cache(plane).large:
        return await asyncio.to_thread(work)


def _highest_price(possible: Sequence[tuple[int, Pattern]], indexed: IndexedPrompt) -> int:
    """Returns the price of the first pattern that the prompt contains, or 0 if it contains none.
    `possible` contains the patterns with their prices, highest price first.
    """
    return next((price for price, pattern in possible if is_contained(pattern, indexed)), 0)


def _require_comparable(comparisons: int) -> None:
    if comparisons > COMPARISONS_MAX:
        details = f"{comparisons:,} comparisons; the limit is {COMPARISONS_MAX:,}"
        message = "The prompt has too many nodes of types that registered workflows use"
        raise RefusedPrompt(fault(TOO_LARGE, message, details), {})


async def _pattern(
    plane: ControlPlane, version: WorkflowVersion, backend: OfferedBackend
) -> Pattern | None:
    async def make() -> Pattern | None:
        converted = await _converted(plane, version, backend)
        if converted is None:
            return None
        return pattern_of(converted.prompt, backend.object_info, version.output_node_id)

    key = (version.workflow_id, version.version, backend.hash)
    return await _cache(plane).patterns.get(key, make)


async def _offered(plane: ControlPlane) -> OfferedWorkflows:
    return await _cache(plane).offered.get(KEY, lambda: _read_offered(plane), now=plane.clock())


async def _find_registered(
    plane: ControlPlane, match: PromptMatch, prompt: Prompt
) -> PromptPlacement | None:
    """Finds the offered workflow that has the same shape as the prompt and that a matched fleet can
    run. If several match, uses the one that shares the most values with the prompt.
    """
    offered = await _offered(plane)
    types = {node["class_type"] for node in prompt.values()}
    alike = [
        (workflow, version)
        for workflow, version in offered.workflows
        if types <= set(version.node_types)
    ]
    shape = await _computed(plane, prompt, partial(shape_of, prompt)) if alike else None
    candidates: list[tuple[Prompt, RegisteredWorkflow, Fleet]] = []
    for workflow, version in alike:
        fleet = _fleet_with(offered, match, workflow, version)
        backend = match.backends[0]
        usual = None if fleet is None else await _converted(plane, version, backend)
        if fleet is not None and usual is not None and usual.shape == shape is not None:
            candidates.append((usual.prompt, workflow, fleet))
    if len(candidates) > 1:
        work = partial(most_similar_first, prompt, [usual for usual, _, _ in candidates])
        candidates = [candidates[position] for position in await _computed(plane, prompt, work)]
    for _, workflow, fleet in candidates:
        if await _has_worker(plane, workflow, fleet):
            return _registered(offered, workflow, fleet)
    return None


def _registered(
    offered: OfferedWorkflows, workflow: RegisteredWorkflow, fleet: Fleet
) -> PromptPlacement:
    fleet_ids = [fleet_id for fleet_id, ids in offered.assigned.items() if workflow.id in ids]
    return PromptPlacement(
        fleet,
        workflow.id,
        workflow.slug,
        workflow.version,
        workflow.price_tokens or 0,
        affinity=fleet.subject if fleet_ids != [fleet.id] else None,
    )


async def _read_offered(plane: ControlPlane) -> OfferedWorkflows:
    async with plane.central.read() as tx:
        workflows = await catalog.offered_workflows(tx)
        assigned = await fleets.assignments(tx) if workflows else {}
    ids = {
        fleet_id: frozenset(assignment.workflow_id for assignment in assignments)
        for fleet_id, assignments in assigned.items()
    }
    return OfferedWorkflows(workflows, ids)


def _fleet_with(
    offered: OfferedWorkflows,
    match: PromptMatch,
    workflow: RegisteredWorkflow,
    version: WorkflowVersion,
) -> Fleet | None:
    """Returns a matched fleet that runs the workflow and has a backend for both the workflow and
    this prompt.
    """
    fleet_ids = {fleet.id for fleet in match.fleets}
    needs = requirements_of(version.node_types, version.models, map(asdict, version.properties))
    for backend in match.backends:
        is_assigned = workflow.id in offered.assigned.get(backend.fleet.id, ())
        if backend.fleet.id in fleet_ids and is_assigned and _has_all(backend.object_info, needs):
            return backend.fleet
    return None


def _has_all(object_info: ObjectInfo, needs: WorkflowRequirements) -> bool:
    if not all(name in object_info for name in needs.node_types):
        return False
    for use in needs.models:
        class_type, _, name = use.input.partition(".")
        choices = choices_of(input_spec(object_info.get(class_type, {}), name))
        if choices is not None and use.file not in choices:
            return False
    return True


async def _converted(
    plane: ControlPlane, version: WorkflowVersion, backend: OfferedBackend
) -> ConvertedWorkflow | None:
    """Returns the part of the workflow's prompt that would run. Returns None if the workflow can't
    be converted.
    """

    async def convert() -> ConvertedWorkflow | None:
        try:
            document = await catalog.read_document(plane.store, version)
            chance = RandomSource(plane.clock(), Random(0))  # noqa: S311 - only links count
            whole = build_marked_prompt(version, document, backend.object_info, chance)
        except FleetError as error:
            logger.warning(
                "workflow %s can't be compared with prompts: %s",
                version.workflow_id,
                error.message,
            )
            return None
        prompt = running_part(whole, backend.object_info)
        return ConvertedWorkflow(prompt, shape_of(prompt))

    key = (version.workflow_id, version.version, backend.hash)
    return await _cache(plane).converted.get(key, convert)


async def _computed(plane: ControlPlane, prompt: Prompt, work: Callable[[], T]) -> T:
    """Runs a computation on a prompt, in a thread if the prompt is large."""
    if is_small(prompt):
        return work()
    async with offer_cache(plane).large:
        return await asyncio.to_thread(work)


async def _has_worker(plane: ControlPlane, workflow: RegisteredWorkflow, fleet: Fleet) -> bool:
    since = plane.clock() - timedelta(seconds=plane.settings.offline_after_seconds)
    lane = (workflow.id, fleet.stage, PROVIDER)
    abilities = plane.context.caches.eligibility
    async with plane.central.read() as tx:
        able = await fleets.find_two_workers(tx, [lane], seen_since=since, abilities=abilities)
    return bool(able)


async def _least_busy(plane: ControlPlane, able: Sequence[Fleet]) -> Fleet:
    """Returns the fleet with the fewest queued and running jobs. The first one wins a tie."""
    if len(able) == 1:
        return able[0]

    async def read() -> dict[tuple[int, str], int]:
        async with plane.central.read() as tx:
            by_lane = await dispatch.depths(tx)
        return {(lane[0], lane[1]): depth.queued + depth.leased for lane, depth in by_lane.items()}

    depths = await _cache(plane).depths.get(KEY, read, now=plane.clock())
    chosen = min(able, key=lambda fleet: depths.get(_lane(fleet), 0))
    depths[_lane(chosen)] = depths.get(_lane(chosen), 0) + 1
    return chosen


def _lane(fleet: Fleet) -> tuple[int, str]:
    return fleet.open_workflow_id or 0, fleet.stage
