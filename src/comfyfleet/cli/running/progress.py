"""How far a run is and how long it may still take: figures made of its events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comfyfleet.comfy.events import (
    Cached,
    Event,
    NodeDone,
    NodeStarted,
    Progress,
    Queued,
    Started,
    Succeeded,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes that a run will execute, and their names; without any nothing is known of it."""

    names: Mapping[str, str]

    def name(self, node_id: str) -> str:
        """A node made by another one has an id that the prompt doesn't have."""
        return self.names.get(node_id) or f"node {node_id}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a run stands at `now`, in seconds of any clock."""

    plan: Plan
    began: float
    now: float
    ahead: int | None = None
    started: float | None = None
    done: frozenset[str] = frozenset()
    reused: frozenset[str] = frozenset()
    current: str | None = None
    current_began: float = 0.0
    steps_done: float = 0.0
    steps_total: float = 0.0
    succeeded: bool = False

    @property
    def total(self) -> int:
        return len(self.plan.names)

    @property
    def fraction(self) -> float | None:
        """0 to 1; every node counts alike, the current one by its steps. None: nobody knows."""
        if self.succeeded:
            return 1.0
        if not self.total:
            return None
        return min(1.0, (len(self.done) + self._part_of_current) / self.total)

    @property
    def seconds(self) -> float:
        return self.now - (self.began if self.started is None else self.started)

    @property
    def seconds_left(self) -> float | None:
        """The current node at the pace of its steps, those behind it at the mean of those before.

        As long as none has ended only the current one is counted: it mostly is the long one.
        """
        if self.started is None or self.succeeded or not self.total:
            return None
        left_of_current = self._current_seconds_left()
        if left_of_current is None:
            return None
        behind = self.total - len(self.done) - (1 if self._counts_current else 0)
        return left_of_current + behind * (self._seconds_per_node or 0.0)

    @property
    def _counts_current(self) -> bool:
        return self.current in self.plan.names and self.current not in self.done

    @property
    def _part_of_current(self) -> float:
        if not self._counts_current or self.steps_total <= 0:
            return 0.0
        return min(1.0, self.steps_done / self.steps_total)

    @property
    def _seconds_per_node(self) -> float | None:
        executed = len(self.done - self.reused)
        if not executed or self.started is None:
            return None
        until = self.current_began if self._counts_current else self.now
        return (until - self.started) / executed

    def _current_seconds_left(self) -> float | None:
        if not self._counts_current:
            return None if self._seconds_per_node is None else 0.0
        spent, part = self.now - self.current_began, self._part_of_current
        if part > 0:
            return spent * (1 - part) / part
        pace = self._seconds_per_node
        return None if pace is None else max(0.0, pace - spent)


def plan_of(prompt: Mapping[str, Any], object_info: Mapping[str, Any]) -> Plan:
    """A server executes output nodes and what they need, nothing else."""
    return plan_from(prompt, [key for key, node in prompt.items() if _is_output(node, object_info)])


def plan_from(prompt: Mapping[str, Any], outputs: Sequence[str]) -> Plan:
    pending = [key for key in outputs if key in prompt]
    needed = dict.fromkeys(pending)
    while pending:
        for value in prompt[pending.pop()].get("inputs", {}).values():
            source = _source(value)
            if source in prompt and source not in needed:
                needed[source] = None
                pending.append(source)
    return Plan({key: _name(key, prompt[key]) for key in prompt if key in needed})


def begin(plan: Plan, now: float) -> Standing:
    return Standing(plan, began=now, now=now)


def advance(standing: Standing, event: Event, now: float) -> Standing:
    standing = replace(standing, now=now)
    match event:
        case Queued(ahead=ahead):
            return replace(standing, ahead=ahead)
        case Started():
            return replace(standing, started=now, ahead=None)
        case Cached(nodes=nodes):
            known = _known(standing, nodes)
            return replace(standing, done=standing.done | known, reused=standing.reused | known)
        case NodeStarted(display_id=node_id):
            return _at(standing, node_id, now)
        case Progress(node_id=node_id, done=done, total=total):
            return replace(_at(standing, node_id, now), steps_done=done, steps_total=total)
        case NodeDone(node_id=node_id):
            return replace(standing, done=standing.done | _known(standing, [node_id]))
        case Succeeded():
            return replace(standing, succeeded=True, current=None)
    return standing


def _at(standing: Standing, node_id: str, now: float) -> Standing:
    """Nodes run one after another: what ran before has ended, whether that was told or not."""
    if node_id == standing.current:
        return standing
    before = _known(standing, [standing.current] if standing.current else [])
    return replace(
        standing,
        done=standing.done | before,
        current=node_id,
        current_began=now,
        steps_done=0.0,
        steps_total=0.0,
    )


def _known(standing: Standing, nodes: Sequence[str]) -> frozenset[str]:
    return frozenset(nodes) & standing.plan.names.keys()


def _is_output(node: Mapping[str, Any], object_info: Mapping[str, Any]) -> bool:
    declared = object_info.get(node.get("class_type", ""))
    return bool(isinstance(declared, Mapping) and declared.get("output_node"))


def _source(value: Any) -> str:
    """The node that a link comes from; a link is `[node id, slot]`."""
    return str(value[0]) if isinstance(value, list) and len(value) == 2 else ""


def _name(node_id: str, node: Mapping[str, Any]) -> str:
    meta = node.get("_meta")
    title = meta.get("title") if isinstance(meta, Mapping) else None
    return str(title or node.get("class_type") or f"node {node_id}")
