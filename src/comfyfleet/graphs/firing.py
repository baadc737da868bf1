"""What arrives at an execution, and what the nodes that need no job make of it."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from comfyfleet.graphs.draft import Draft
from comfyfleet.graphs.model import (
    FALSE_PORT,
    INPUT_PORT,
    ITEM_PORT,
    OUTPUT_PORT,
    TRUE_PORT,
    VALUE_PORT,
    ConditionNode,
    Connection,
    FanOutMode,
    FanOutNode,
    InputNode,
    MergeMode,
    MergeNode,
    Node,
    WorkflowNode,
    port_number,
)
from comfyfleet.graphs.ports import value_for
from comfyfleet.graphs.runs import Key, Status
from comfyfleet.graphs.verdicts import MISSING, Missing, follow, judge


class Dead:
    """Stands for a value that will never come: its source was skipped, or another port fired."""


DEAD = Dead()
NOT_REACHED = "nothing that feeds it came about"


class Fired(NamedTuple):
    """It is done, and these ports give something."""

    outputs: Mapping[str, Any]
    inputs: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[Any, ...]:
        # Where a node hands on what came in, both are the same; both are written down.
        return (self.outputs, self.inputs)


class Wanting(NamedTuple):
    """A job must do it, with these properties."""

    properties: Mapping[str, Any]

    @property
    def values(self) -> tuple[Any, ...]:
        return (self.properties,)


class Skipped(NamedTuple):
    reason: str


class Impossible(NamedTuple):
    message: str


Firing: TypeAlias = Fired | Wanting | Skipped | Impossible


def fire(draft: Draft, key: Key) -> Firing:
    """All that feeds an execution is decided: what becomes of it."""
    node = draft.plan.node(key.node)
    if isinstance(node, InputNode):
        return Fired({VALUE_PORT: draft.was.inputs.get(node.id, node.default)})
    if isinstance(node, MergeNode):
        return _merge(draft, key, node)
    arrived = {
        each.target.port: arrival(draft, each, key) for each in draft.plan.shape.incoming[key.node]
    }
    return _unfed(draft, key, arrived) or _work(draft, node, arrived)


def arrival(draft: Draft, connection: Connection, key: Key) -> Any:
    """The value at the source; DEAD if none will come, MISSING if its path leads nowhere."""
    source = connection.source
    depth = len(draft.plan.scope(source.node))
    record = draft.record(Key(source.node, key.at[:depth]))
    if record.status != Status.DONE or record.outputs is None or source.port not in record.outputs:
        return DEAD
    value = record.outputs[source.port]
    if source.port == ITEM_PORT and len(key.at) > depth:
        value = value[key.at[depth]]
    return follow(value, source.path)


def _unfed(draft: Draft, key: Key, arrived: Mapping[str, Any]) -> Skipped | Impossible | None:
    dead = [port for port, value in arrived.items() if value is DEAD]
    needed = draft.plan.needed[key.node]
    if dead and (len(dead) == len(arrived) or not needed.isdisjoint(dead)):
        return Skipped(NOT_REACHED)
    for port, value in arrived.items():
        if value is MISSING and port in needed:
            return Impossible(f"nothing arrives at {port}: {_source(draft, key, port)} is missing")
    return None


def _source(draft: Draft, key: Key, port: str) -> str:
    incoming = draft.plan.shape.incoming[key.node]
    return next(str(each.source) for each in incoming if each.target.port == port)


def _work(draft: Draft, node: Node, arrived: Mapping[str, Any]) -> Firing:
    match node:
        case WorkflowNode():
            return _properties(draft, node, arrived)
        case ConditionNode(expression=expression):
            verdict = judge(expression, arrived[INPUT_PORT])
            port = TRUE_PORT if verdict.value else FALSE_PORT
            return Fired({port: arrived[INPUT_PORT]}, arrived, verdict.notes)
        case FanOutNode(mode=FanOutMode.BROADCAST):
            return Fired(dict.fromkeys(node.outputs, arrived[INPUT_PORT]), arrived)
        case FanOutNode():
            return _distribute(node, arrived[node.input_port])
    return Fired(arrived, arrived)


def _properties(draft: Draft, node: WorkflowNode, arrived: Mapping[str, Any]) -> Firing:
    """What is not given is left to the workflow's own default."""
    properties = dict(node.properties)
    for port, value in arrived.items():
        if isinstance(value, Dead | Missing):
            continue
        fitting = value_for(draft.plan.wanted_type(node.id, port), value)
        if fitting is MISSING:
            wanted = draft.plan.wanted_type(node.id, port)
            return Impossible(f"{_source(draft, Key(node.id), port)} has no {wanted} for {port}")
        properties[port] = fitting
    return Wanting(properties)


def _distribute(node: FanOutNode, value: Any) -> Firing:
    items = value.get("items") if isinstance(value, Mapping) else value
    if not isinstance(items, list | tuple):
        return Impossible("items is not a list")
    if len(items) > node.max_items:
        return Impossible(
            f"{len(items):,} items are more than max_items allows ({node.max_items:,})"
        )
    if node.per_item:
        return Fired({ITEM_PORT: list(items)})
    chunks = zip(node.outputs, _chunks(items, node.output_count), strict=True)
    # A port with nothing on it doesn't fire: an empty job is of use to nobody.
    return Fired({port: {"items": chunk} for port, chunk in chunks if chunk})


def _chunks(items: Sequence[Any], count: int) -> list[list[Any]]:
    """In order, none longer than another by more than one."""
    size, longer = divmod(len(items), count)
    ends = [number * size + min(number, longer) for number in range(count + 1)]
    return [list(items[start:end]) for start, end in pairwise(ends)]


def _merge(draft: Draft, key: Key, node: MergeNode) -> Firing:
    """What was skipped is left out. Over no items at all the result is empty, and still a result."""
    if node.over is not None:
        if draft.record(Key(node.over, key.at)).status != Status.DONE:
            return Skipped(NOT_REACHED)
        places = [Key(key.node, (*key.at, n)) for n in range(draft.width(node.over, key.at))]
    else:
        places = [key]
    incoming = sorted(
        draft.plan.shape.incoming[key.node], key=lambda each: port_number(each.target.port) or 0
    )
    arrived = [arrival(draft, each, place) for place in places for each in incoming]
    alive = [value for value in arrived if not isinstance(value, Dead | Missing)]
    if not alive and node.over is None:
        return Skipped(NOT_REACHED)
    if node.mode == MergeMode.COLLECT:
        return Fired({OUTPUT_PORT: {"merged": alive, "count": len(alive)}})
    return Fired({OUTPUT_PORT: {"images": [each for value in alive for each in _pictures(value)]}})


def _pictures(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if "file_id" in value:
            yield value
        else:
            yield from value.get("images") or ()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _pictures(each)
    elif isinstance(value, str):
        yield value
