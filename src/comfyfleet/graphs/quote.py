"""What a run may cost and how long it may take, told before it is started.

With few conditions every combination of their answers is looked at; with many, the least is what
runs whatever they say, and the most is everything.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

from comfyfleet.graphs.model import (
    FALSE_PORT,
    TRUE_PORT,
    ConditionNode,
    Connection,
    FanOutNode,
    InputNode,
    MergeNode,
    Problem,
)
from comfyfleet.graphs.plan import Plan
from comfyfleet.graphs.verdicts import MISSING, follow

CONDITIONS_MAX = 8


@dataclass(frozen=True, slots=True)
class Quote:
    tokens_min: int
    tokens_max: int
    jobs_min: int
    jobs_max: int
    seconds_min: float
    seconds_max: float
    unknown_durations: tuple[str, ...] = ()  # workflows that nobody has timed; counted as 0 s
    warnings: tuple[Problem, ...] = ()  # what nobody could run just now


class _Sum(NamedTuple):
    tokens: int
    jobs: int
    seconds: float


def quote(plan: Plan, inputs: Mapping[str, Any] | None = None, *, side_by_side: int = 1) -> Quote:
    """`side_by_side`: how many jobs of the run can be worked on at a time."""
    least, most = _widths(plan, inputs or {})
    parallel = max(1, side_by_side)
    ways = [_alive(plan, fires) for fires in _answers(plan)]
    if len(_conditions(plan)) > CONDITIONS_MAX:
        low_ways, high_ways = [_alive(plan, {})], [set(plan.shape.order)]
    else:
        low_ways = high_ways = ways
    low = [_sum(plan, way, least, parallel) for way in low_ways]
    high = [_sum(plan, way, most, parallel) for way in high_ways]
    return Quote(
        tokens_min=min(each.tokens for each in low),
        tokens_max=max(each.tokens for each in high),
        jobs_min=min(each.jobs for each in low),
        jobs_max=max(each.jobs for each in high),
        seconds_min=min(each.seconds for each in low),
        seconds_max=max(each.seconds for each in high),
        unknown_durations=_unknown(plan),
    )


def _conditions(plan: Plan) -> list[str]:
    return [node for node in plan.shape.order if isinstance(plan.node(node), ConditionNode)]


def _answers(plan: Plan) -> Iterator[dict[str, frozenset[str]]]:
    """Which ports fire, for each combination of what the conditions may say."""
    conditions = _conditions(plan)[:CONDITIONS_MAX]
    ports = (frozenset({TRUE_PORT}), frozenset({FALSE_PORT}))
    for answers in product(ports, repeat=len(conditions)):
        yield dict(zip(conditions, answers, strict=True))


def _alive(plan: Plan, fires: Mapping[str, frozenset[str]]) -> set[str]:
    """The nodes that run, if every condition fires the ports given; none: neither is certain."""
    alive: set[str] = set()
    for node in plan.shape.order:
        if _runs(plan, node, alive, fires):
            alive.add(node)
    return alive


def _runs(plan: Plan, node: str, alive: set[str], fires: Mapping[str, frozenset[str]]) -> bool:
    found = plan.node(node)
    if isinstance(found, MergeNode) and found.over is not None:
        return found.over in alive
    incoming = plan.shape.incoming[node]
    fed = {each.target.port for each in incoming if _feeds(plan, each, alive, fires)}
    if incoming and not fed:
        return False
    return all(
        each.target.port in fed for each in incoming if each.target.port in plan.needed[node]
    )


def _feeds(
    plan: Plan, each: Connection, alive: set[str], fires: Mapping[str, frozenset[str]]
) -> bool:
    if each.source.node not in alive:
        return False
    if not isinstance(plan.node(each.source.node), ConditionNode):
        return True
    return each.source.port in fires.get(each.source.node, frozenset())


def _sum(plan: Plan, alive: Iterable[str], widths: Mapping[str, int], parallel: int) -> _Sum:
    tokens, jobs, work = 0, 0, 0.0
    ready: dict[str, float] = {}
    running = set(alive)
    for node in plan.shape.order:
        if node not in running:
            continue
        times = prod(widths[each] for each in plan.scope(node))
        facts = plan.workflows.get(node)
        seconds = (facts.typical_seconds or 0.0) if facts else 0.0
        begin = max((ready.get(each, 0.0) for each in plan.shape.sources[node]), default=0.0)
        ready[node] = begin + (seconds if times else 0.0)
        if facts is not None:
            tokens, jobs, work = (
                tokens + times * facts.price_tokens,
                jobs + times,
                work + times * seconds,
            )
    return _Sum(tokens, jobs, max([work / parallel, *ready.values()]))


def _widths(plan: Plan, inputs: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """How many items each fan-out has, at least and at most; the same where the list is known."""
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    for node in plan.graph.nodes.values():
        if isinstance(node, FanOutNode) and node.per_item:
            known = _known_width(plan, node, inputs)
            least[node.id] = 0 if known is None else known
            most[node.id] = node.max_items if known is None else min(known, node.max_items)
    return least, most


def _known_width(plan: Plan, node: FanOutNode, inputs: Mapping[str, Any]) -> int | None:
    source = next((each.source for each in plan.shape.incoming[node.id]), None)
    given = plan.graph.nodes[source.node] if source else None
    if source is None or not isinstance(given, InputNode):
        return None
    value = follow(inputs.get(given.id, given.default), source.path)
    items = value.get("items", MISSING) if isinstance(value, Mapping) else value
    return len(items) if isinstance(items, list | tuple) else None


def _unknown(plan: Plan) -> tuple[str, ...]:
    facts = plan.workflows.values()
    return tuple(sorted({each.slug for each in facts if each.typical_seconds is None}))
