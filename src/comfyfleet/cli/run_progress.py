"""How far a run is and how long it may still take, and who is told: a live display, lines for logs, or JSON for
programs."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from comfyfleet.cli.context import CliContext, printable
from comfyfleet.comfy import OutputValue
from comfyfleet.comfy.events import (
    Blocked,
    Cached,
    Event,
    NodeDone,
    NodeStarted,
    NodeText,
    Preview,
    Progress,
    Queued,
    Reconnected,
    Started,
    Succeeded,
)
from comfyfleet.errors import FleetError


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes that a run will execute, and their names; without any nothing is known of it."""

    names: Mapping[str, str]

    def name(self, node_id: str) -> str:
        """A node made by another one has an id that the prompt doesn't have."""
        return self.names.get(node_id) or f"node {node_id}"


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Where a run stands at `now`, in seconds of any clock."""

    plan: NodePlan
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


def plan_run(prompt: Mapping[str, Any], object_info: Mapping[str, Any]) -> NodePlan:
    """A server executes output nodes and what they need, nothing else."""
    return plan_from_outputs(
        prompt, [key for key, node in prompt.items() if _is_output(node, object_info)]
    )


def plan_from_outputs(prompt: Mapping[str, Any], outputs: Sequence[str]) -> NodePlan:
    pending = [key for key in outputs if key in prompt]
    needed = dict.fromkeys(pending)
    while pending:
        for value in prompt[pending.pop()].get("inputs", {}).values():
            source = _source(value)
            if source in prompt and source not in needed:
                needed[source] = None
                pending.append(source)
    return NodePlan({key: _name(key, prompt[key]) for key in prompt if key in needed})


def begin_estimate(plan: NodePlan, now: float) -> RunEstimate:
    return RunEstimate(plan, began=now, now=now)


def advance_estimate(estimate: RunEstimate, event: Event, now: float) -> RunEstimate:
    estimate = replace(estimate, now=now)
    match event:
        case Queued(ahead=ahead):
            return replace(estimate, ahead=ahead)
        case Started():
            return replace(estimate, started=now, ahead=None)
        case Cached(nodes=nodes):
            known = _known(estimate, nodes)
            return replace(estimate, done=estimate.done | known, reused=estimate.reused | known)
        case NodeStarted(display_id=node_id):
            return _at(estimate, node_id, now)
        case Progress(node_id=node_id, done=done, total=total):
            return replace(_at(estimate, node_id, now), steps_done=done, steps_total=total)
        case NodeDone(node_id=node_id):
            return replace(estimate, done=estimate.done | _known(estimate, [node_id]))
        case Succeeded():
            return replace(estimate, succeeded=True, current=None)
    return estimate


def _at(estimate: RunEstimate, node_id: str, now: float) -> RunEstimate:
    """Nodes run one after another: what ran before has ended, whether that was told or not."""
    if node_id == estimate.current:
        return estimate
    before = _known(estimate, [estimate.current] if estimate.current else [])
    return replace(
        estimate,
        done=estimate.done | before,
        current=node_id,
        current_began=now,
        steps_done=0.0,
        steps_total=0.0,
    )


def _known(estimate: RunEstimate, nodes: Sequence[str]) -> frozenset[str]:
    return frozenset(nodes) & estimate.plan.names.keys()


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


# So that a log of a long run stays readable.
STEPS_INTERVAL_SECONDS = 5.0
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")


class Reporter(AbstractContextManager["Reporter"], Protocol):
    """Everything is told in the order in which it happened."""

    def row(self, number: int, total: int, unit: str) -> None: ...
    def uploaded(self, path: Path, name: str) -> None: ...
    def submitted(self, run_id: str, target: str) -> None: ...
    def heard(self, event: Event, estimate: RunEstimate) -> None: ...
    def saved(self, path: Path, node_id: str) -> None: ...
    def shown(self, value: OutputValue) -> None: ...
    def failed(self, error: FleetError) -> None: ...


class JsonLines:
    """One JSON object per line on stdout; `event` tells which. Previews are told, not sent."""

    def __init__(self, context: CliContext) -> None:
        self._context = context
        self._row: dict[str, Any] = {}

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open."""

    def row(self, number: int, total: int, unit: str) -> None:
        self._row = {"row": number}

    def uploaded(self, path: Path, name: str) -> None:
        self._write("uploaded", {"path": str(path), "name": name})

    def submitted(self, run_id: str, target: str) -> None:
        self._write("submitted", {"run_id": run_id, "target": target})

    def heard(self, event: Event, estimate: RunEstimate) -> None:
        name = event_name(event)
        if isinstance(event, Preview):
            told: dict[str, Any] = {"run_id": event.run_id, "node_id": event.node_id}
            told |= {"content_type": event.content_type, "bytes": len(event.data)}
        else:
            told = asdict(event)
        self._write(name, told | {"fraction": estimate.fraction})

    def saved(self, path: Path, node_id: str) -> None:
        self._write("saved", {"path": str(path), "node_id": node_id})

    def shown(self, value: OutputValue) -> None:
        told = {"node_id": value.node_id, "name": value.key, "value": value.value}
        self._write("value", told)

    def failed(self, error: FleetError) -> None:
        self._write("error", {"code": error.code, "message": error.message})

    def _write(self, event: str, told: Mapping[str, Any]) -> None:
        line = json.dumps({"event": event, **self._row, **told}, ensure_ascii=False, default=str)
        self._context.stdout.write(line.encode() + b"\n")
        self._context.stdout.flush()


def event_name(event: Event) -> str:
    """`NodeStarted` is `node_started`."""
    return _WORDS.sub("_", type(event).__name__).lower()


class PlainLines:
    """For logs and pipes: a line for each node, and now and then one for its steps."""

    def __init__(self, context: CliContext) -> None:
        self._context = context
        self._steps_said = 0.0

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is kept open."""

    def row(self, number: int, total: int, unit: str) -> None:
        self._context.say(f"{unit} {number} of {total}")

    def uploaded(self, path: Path, name: str) -> None:
        self._context.say(f"uploaded {path}" if path.name == name else f"uploaded {path} as {name}")

    def submitted(self, run_id: str, target: str) -> None:
        self._context.say(f"run {run_id} on {target}")

    def heard(self, event: Event, estimate: RunEstimate) -> None:
        if (line := self._line(event, estimate)) is not None:
            self._context.say(line)

    def saved(self, path: Path, node_id: str) -> None:
        """Said on stdout by the command."""

    def shown(self, value: OutputValue) -> None:
        """Said by the command."""

    def failed(self, error: FleetError) -> None:
        """Said by the command."""

    def _line(self, event: Event, estimate: RunEstimate) -> str | None:
        match event:
            case Progress(node_id=node_id, done=done, total=total):
                if estimate.now - self._steps_said < STEPS_INTERVAL_SECONDS:
                    return None
                self._steps_said = estimate.now
                return f"{estimate.plan.name(node_id)}: step {done:g} of {total:g}"
            case NodeStarted():
                self._steps_said = estimate.now
        return event_text(event, estimate)


def event_text(event: Event, estimate: RunEstimate) -> str | None:
    """An event in words, if it is worth a line."""
    match event:
        case Queued(ahead=ahead) if ahead:
            return f"waits in the queue, {ahead} ahead"
        case Started():
            return "started"
        case NodeStarted(display_id=node_id):
            whole = f" ({len(estimate.done) + 1} of {estimate.total})" if estimate.total else ""
            return f"{estimate.plan.name(node_id)}{whole}"
        case NodeText(node_id=node_id, text=text):
            return f"{estimate.plan.name(node_id)}: {text}"
        case Blocked(node_id=node_id, message=message):
            return f"{estimate.plan.name(node_id)} does not run: {message}"
        case Reconnected():
            return "the connection was lost and is there again"
        case Succeeded() if estimate.total and len(estimate.reused) == estimate.total:
            return "nothing to do: an earlier run had made it all"
    return None


REFRESH_PER_SECOND = 8
BAR_CHARACTERS = 28
NAME_CHARACTERS_MAX = 30
# These deserve a line that stays; everything else shows in the bars.
LASTING = (NodeText, Blocked, Reconnected)


class LiveDisplay:
    """Two bars, for the whole run and for its current node; a third one for a batch."""

    def __init__(self, context: CliContext, title: str) -> None:
        self._context = context
        self._title = title
        self._estimate = begin_estimate(NodePlan({}), context.clock())
        self._rows: tuple[int, int] | None = None
        self._unit = "row"
        self._doing = "preparing"
        self._live = Live(
            console=context.err,
            get_renderable=self._now,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def row(self, number: int, total: int, unit: str) -> None:
        self._rows, self._unit = (number, total), unit
        self._estimate = begin_estimate(NodePlan({}), self._context.clock())

    def uploaded(self, path: Path, name: str) -> None:
        self._doing = f"uploaded {path.name}"

    def submitted(self, run_id: str, target: str) -> None:
        self._doing = f"queued on {target}"

    def heard(self, event: Event, estimate: RunEstimate) -> None:
        self._estimate = estimate
        if isinstance(event, LASTING) and (line := event_text(event, estimate)):
            self._context.say(line)

    def saved(self, path: Path, node_id: str) -> None:
        self._doing = f"saved {path.name}"

    def shown(self, value: OutputValue) -> None:
        """Said by the command."""

    def failed(self, error: FleetError) -> None:
        """Said by the command."""

    def _now(self) -> RenderableType:
        estimate = self._estimate
        if not estimate.succeeded:
            estimate = replace(estimate, now=self._context.clock())
        rows, unit = self._rows, self._unit
        return render_progress(estimate, title=self._title, doing=self._doing, rows=rows, unit=unit)


def render_progress(
    estimate: RunEstimate,
    *,
    title: str,
    doing: str,
    rows: tuple[int, int] | None,
    unit: str = "row",
) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    if rows is not None:
        number, total = rows
        grid.add_row(
            Text("batch", style="bold"), _bar(number - 1, total), f"{unit} {number} of {total}"
        )
    grid.add_row(
        Text(_cut(title), style="bold"), _whole_bar(estimate), _whole_words(estimate, doing)
    )
    if estimate.current is not None and not estimate.succeeded:
        grid.add_row(*_node_row(estimate, estimate.current))
    return Group(grid)


def _whole_bar(estimate: RunEstimate) -> ProgressBar:
    if estimate.fraction is None:
        return ProgressBar(total=None, width=BAR_CHARACTERS, pulse=True)
    return _bar(estimate.fraction, 1.0)


def _whole_words(estimate: RunEstimate, doing: str) -> Text:
    if estimate.ahead:
        return Text(f"{estimate.ahead} ahead in the queue, {clock_time(estimate.seconds)}")
    if estimate.started is None:
        return Text(printable(doing))
    parts = [clock_time(estimate.seconds)]
    if estimate.total:
        parts.insert(0, f"{len(estimate.done)} of {estimate.total} nodes")
    if (left := estimate.seconds_left) is not None:
        parts.append(f"about {clock_time(left)} left")
    return Text(", ".join(parts))


def _node_row(estimate: RunEstimate, node_id: str) -> tuple[RenderableType, ...]:
    name = Text(_cut(estimate.plan.name(node_id)), style="cyan")
    if estimate.steps_total <= 0:
        return name, ProgressBar(total=None, width=BAR_CHARACTERS, pulse=True), Text("")
    words = f"step {estimate.steps_done:g} of {estimate.steps_total:g}"
    return name, _bar(estimate.steps_done, estimate.steps_total), Text(words)


def _bar(done: float, total: float) -> ProgressBar:
    return ProgressBar(total=total, completed=done, width=BAR_CHARACTERS)


def _cut(text: str) -> str:
    text = printable(text).replace("\n", " ")
    return text if len(text) <= NAME_CHARACTERS_MAX else f"{text[: NAME_CHARACTERS_MAX - 1]}…"


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
