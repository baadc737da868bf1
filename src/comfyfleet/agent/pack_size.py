"""How many ComfyUIs share a GPU, decided look by look. Pure.

One more is tried while there is a backlog and room in the GPU's memory; it stays if the GPU then
finishes more jobs a minute, and goes again if not. One goes when there is too little to do, and
when memory ran out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

MOST = 8


@dataclass(frozen=True, slots=True)
class Rules:
    """`most`: never more on one GPU."""

    most: int = MOST
    look_seconds: float = 5.0
    # What is measured lasts at least so long, and so many jobs.
    window_seconds: float = 120.0
    window_jobs: int = 24
    # Of the looks in a window: so many found jobs waiting behind those that run.
    backlog_share: float = 0.8
    gain_min: float = 0.1
    memory_margin: float = 0.1
    spare_seconds: float = 300.0
    start_seconds_max: float = 600.0
    # A size that brought nothing, or found no room, is thought of again after that.
    retry_seconds: float = 1800.0
    memory_retry_seconds: float = 6 * 3600.0


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of one GPU at one moment.

    `ready`: ComfyUIs that take jobs; of these, `full` have one more job waiting behind what runs, and
    `idle` have none. `leaving`: those that end. `finished`, `out_of_memory`: how often, ever.
    """

    at: float
    ready: int
    leaving: int
    full: int
    idle: int
    finished: int
    out_of_memory: int
    memory_used: int | None
    memory_total: int | None


class Move(StrEnum):
    ADD = "add"
    REMOVE = "remove"
    KEEP = "keep"


class Reason(StrEnum):
    BACKLOG = "backlog"
    GAIN = "gain"
    NO_GAIN = "no_gain"
    NO_MEMORY = "no_memory"
    OUT_OF_MEMORY = "out_of_memory"
    SPARE = "spare"
    NOT_STARTED = "not_started"


class Decision(NamedTuple):
    """`size`: how many there are to be now. Rates are jobs a minute."""

    move: Move
    reason: Reason
    size: int
    rate: float | None = None
    rate_before: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """A measurement: since when, from how many finished jobs on."""

    since: float
    finished: int
    looks: int = 0
    full_looks: int = 0
    memory_used_max: int | None = None

    def seen(self, look: Look) -> "Window":
        used = [each for each in (self.memory_used_max, look.memory_used) if each is not None]
        return replace(
            self,
            looks=self.looks + 1,
            full_looks=self.full_looks + (0 < look.ready == look.full),
            memory_used_max=max(used, default=None),
        )

    def is_over(self, look: Look, rules: Rules) -> bool:
        return (
            look.at - self.since >= rules.window_seconds
            and look.finished - self.finished >= rules.window_jobs
        )

    def rate(self, look: Look) -> float:
        return 60.0 * (look.finished - self.finished) / max(look.at - self.since, 1e-9)


@dataclass(frozen=True, slots=True)
class Size:
    """`rate_before`: jobs a minute with one fewer; set while the newest is on trial.

    `barred`: sizes that are not tried, and until when.
    """

    wanted: int = 1
    rate_before: float | None = None
    window: Window | None = None
    spare_since: float | None = None
    unsettled_since: float | None = None
    out_of_memory: int = 0
    barred: Mapping[int, float] = field(default_factory=dict)

    def resized(self, wanted: int, *, rate_before: float | None = None) -> "Size":
        """Everything is measured anew."""
        return Size(wanted, rate_before, out_of_memory=self.out_of_memory, barred=dict(self.barred))

    def barring(self, size: int, until: float) -> "Size":
        until = max(until, self.barred.get(size, until))
        return replace(self, barred={**self.barred, size: until})

    def is_barred(self, size: int, at: float) -> bool:
        return self.barred.get(size, float("-inf")) > at


def decide(size: Size, look: Look, rules: Rules) -> tuple[Size, Decision | None]:
    """The next state, and what is to be done, if anything."""
    if look.out_of_memory > size.out_of_memory:
        return _out_of_memory(replace(size, out_of_memory=look.out_of_memory), look, rules)
    if look.leaving or look.ready != size.wanted:
        return _unsettled(size, look, rules)
    spare_since = (
        None if not look.idle else look.at if size.spare_since is None else size.spare_since
    )
    window = (size.window or Window(look.at, look.finished)).seen(look)
    size = replace(size, spare_since=spare_since, unsettled_since=None, window=window)
    if size.wanted > 1 and spare_since is not None and look.at - spare_since >= rules.spare_seconds:
        return _removed(size, Reason.SPARE)
    if window.is_over(look, rules):
        return _judged(size, window, look, rules)
    return size, None


def _out_of_memory(size: Size, look: Look, rules: Rules) -> tuple[Size, Decision | None]:
    """One that is leaving already was enough, until it has gone."""
    barred = size.barring(size.wanted + (size.wanted == 1), look.at + rules.memory_retry_seconds)
    if look.leaving or size.wanted == 1:
        return replace(barred, window=None), None
    return _removed(barred, Reason.OUT_OF_MEMORY)


def _unsettled(size: Size, look: Look, rules: Rules) -> tuple[Size, Decision | None]:
    """One starts, ends, or is ill: nothing can be measured."""
    since = look.at if size.unsettled_since is None else size.unsettled_since
    size = replace(size, window=None, spare_since=None, unsettled_since=since)
    is_late = look.at - since >= rules.start_seconds_max
    if is_late and not look.leaving and look.ready < size.wanted and size.wanted > 1:
        barred = size.barring(size.wanted, look.at + rules.retry_seconds)
        return _removed(barred, Reason.NOT_STARTED)
    return size, None


def _judged(size: Size, window: Window, look: Look, rules: Rules) -> tuple[Size, Decision | None]:
    rate, again = window.rate(look), replace(size, window=None)
    if window.full_looks < rules.backlog_share * window.looks:
        return again, None  # there are as many finished jobs as come: that tells nothing
    if size.rate_before is not None:
        return _tried(again, size.rate_before, rate, look, rules)
    more = size.wanted + 1
    if more > rules.most or size.is_barred(more, look.at):
        return again, None
    used, total = window.memory_used_max, look.memory_total
    if not has_room(used, total, size.wanted, rules.memory_margin):
        barred = again.barring(more, look.at + rules.retry_seconds)
        decision = Decision(Move.KEEP, Reason.NO_MEMORY, size.wanted, rate, None, used, total)
        return barred, decision
    decision = Decision(Move.ADD, Reason.BACKLOG, more, rate, None, used, total)
    return again.resized(more, rate_before=rate), decision


def _tried(
    size: Size, before: float, rate: float, look: Look, rules: Rules
) -> tuple[Size, Decision | None]:
    if rate >= before * (1 + rules.gain_min):
        decision = Decision(Move.KEEP, Reason.GAIN, size.wanted, rate, before)
        return replace(size, rate_before=None), decision
    barred = size.barring(size.wanted, look.at + rules.retry_seconds)
    return _removed(barred, Reason.NO_GAIN, rate, before)


def has_room(used: int | None, total: int | None, size: int, margin: float) -> bool:
    """For one more that takes as much as each of the others, by their share of all that is used."""
    if used is None or total is None or size < 1:
        return False
    return used + used / size * (1 + margin) <= total


def _removed(
    size: Size, reason: Reason, rate: float | None = None, before: float | None = None
) -> tuple[Size, Decision]:
    fewer = size.resized(size.wanted - 1)
    return fewer, Decision(Move.REMOVE, reason, fewer.wanted, rate, before)
