"""Who gets which job. Pure: candidates and waiters in, choices out.

Candidates stand in one order: priority, then the lanes' turns, then fair rank and age inside a
lane. Every waiter takes from the front; one that has a job's model loaded may look a little ahead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from comfyfleet.dispatch.model import Candidate, Lane, Waiter

AFFINITY_WINDOW = 32
RANK_ROUNDS_AHEAD = 1


class Choice(NamedTuple):
    candidate: Candidate
    waiter: int  # its index among the waiters


class Ordered(NamedTuple):
    """A candidate and its place in the one order."""

    key: tuple[int, float, int]
    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Rules:
    affinity_max_wait: timedelta = timedelta(seconds=60)
    window: int = AFFINITY_WINDOW


DEFAULT_RULES = Rules()


def choose(
    candidates: Iterable[Candidate],
    waiters: Sequence[Waiter],
    *,
    now: datetime,
    starts: Mapping[Lane, float],
    cut: frozenset[Lane] = frozenset(),
    rules: Rules = DEFAULT_RULES,
) -> list[Choice]:
    """At most one job per waiter. `cut` are lanes that hold more than was read of them."""
    left = [each.candidate for each in known_order(in_order(candidates, starts), cut)]
    preferred = sorted(range(len(waiters)), key=lambda index: preference(waiters[index]))
    choices: list[Choice] = []
    for _, equals in groupby(preferred, key=lambda index: preference(waiters[index])[:2]):
        if not left:
            break
        made = _serve(left, waiters, list(equals), now=now, rules=rules)
        taken = {choice.candidate.id for choice in made}
        left = [each for each in left if each.id not in taken]
        choices += made
    return choices


def _serve(
    left: list[Candidate],
    waiters: Sequence[Waiter],
    equals: list[int],
    *,
    now: datetime,
    rules: Rules,
) -> list[Choice]:
    """Among workers with the same load: first those with a model that is wanted, then the others."""
    warm = [index for index in equals if waiters[index].models_loaded]
    if not warm:
        return _from_the_front(left, waiters, equals, now)
    choices = _by_model(left, waiters, warm, now=now, rules=rules)
    taken = {choice.candidate.id for choice in choices}
    served = {choice.waiter for choice in choices}
    rest = [each for each in left if each.id not in taken]
    idle = [index for index in equals if index not in served]
    return choices + _from_the_front(rest, waiters, idle, now)


def in_order(candidates: Iterable[Candidate], starts: Mapping[Lane, float]) -> list[Ordered]:
    """Ranks are times of one lane and say nothing about another: between lanes, places count."""
    by_lane = sorted(candidates, key=lambda each: (each.lane, -each.priority, each.rank, each.id))
    placed = []
    for (lane, priority), group in groupby(by_lane, key=lambda each: (each.lane, each.priority)):
        start = starts.get(lane, 0.0)
        for place, candidate in enumerate(group):
            placed.append(Ordered((-priority, start + place, candidate.id), candidate))
    placed.sort(key=itemgetter(0))
    return placed


def known_order(order: list[Ordered], cut: frozenset[Lane]) -> list[Ordered]:
    """The part of the order that nothing unread can belong to."""
    if not cut:
        return order
    last: dict[Lane, tuple[int, float, int]] = {}
    for each in order:
        if each.candidate.lane in cut:
            last[each.candidate.lane] = each.key
    end = min(last.values(), default=None)
    return order if end is None else [each for each in order if each.key <= end]


def preference(waiter: Waiter) -> tuple[bool, int, int, int]:
    """Least loaded, then the one with fewer lanes (others have more to choose from), then memory.

    A worker that would only hold the job until its turn comes after all that would run it now.
    """
    return (waiter.is_prefetch, waiter.load, len(waiter.lanes), -waiter.free_gpu_memory_bytes)


def may_take(waiter: Waiter, candidate: Candidate, now: datetime) -> bool:
    if candidate.lane not in waiter.lanes:
        return False
    if candidate.backend_affinity and candidate.backend_affinity not in waiter.affinities:
        return False
    return not is_avoided(waiter, candidate, now)


def is_avoided(waiter: Waiter, candidate: Candidate, now: datetime) -> bool:
    """Its backend has just failed with this job; another worker is to try, if there is one."""
    if candidate.avoid_worker_id != waiter.worker_id or waiter.is_alone:
        return False
    return candidate.avoid_until is not None and now < candidate.avoid_until


def _from_the_front(
    candidates: Sequence[Candidate], waiters: Sequence[Waiter], idle: list[int], now: datetime
) -> list[Choice]:
    choices = []
    lines: dict[Lane, list[int]] = {}
    left = set(idle)
    for candidate in candidates:
        if not left:
            break
        line = lines.get(candidate.lane)
        if line is None:
            line = [index for index in reversed(idle) if candidate.lane in waiters[index].lanes]
            lines[candidate.lane] = line
        found = _first(line, left, lambda index: may_take(waiters[index], candidate, now))  # noqa: B023
        if found is not None:
            left.discard(found)
            choices.append(Choice(candidate, found))
    return choices


def _first(line: list[int], left: set[int], fits: Callable[[int], bool]) -> int | None:
    """The best of a line, whose best stands last; those that have a job already leave it."""
    while line and line[-1] not in left:
        line.pop()
    return next((index for index in reversed(line) if index in left and fits(index)), None)


def _by_model(
    left: Sequence[Candidate],
    waiters: Sequence[Waiter],
    warm: list[int],
    *,
    now: datetime,
    rules: Rules,
) -> list[Choice]:
    """Jobs for workers that have the model loaded. Heads that nobody matches stay for the rest."""
    choices: list[Choice] = []
    taken: set[int] = set()
    for index in warm:
        waiter = waiters[index]
        mine = [each for each in left if each.id not in taken and may_take(waiter, each, now)]
        best = best_by_model(mine, waiter, now=now, rules=rules)
        if best is not None:
            taken.add(best.id)
            choices.append(Choice(best, index))
    return choices


def best_by_model(
    mine: Sequence[Candidate], waiter: Waiter, *, now: datetime, rules: Rules
) -> Candidate | None:
    """The heavy model first, then the exact set, then the order; None if no model matches."""
    fitting = [
        each for each in reachable(mine, now, rules) if each.model_key in waiter.models_loaded
    ]
    if not fitting:
        return None
    exact = (each for each in fitting if waiter.model_set and each.model_set == waiter.model_set)
    return next(exact, fitting[0])


def reachable(mine: Sequence[Candidate], now: datetime, rules: Rules) -> list[Candidate]:
    """How far a worker may look past the head: never past a priority, a round or the longest wait."""
    rounds: dict[Lane, int] = {}
    found = []
    for each in mine[: rules.window + 1]:
        if each.priority != mine[0].priority:
            break
        if each.rank <= rounds.setdefault(each.lane, each.rank) + RANK_ROUNDS_AHEAD:
            found.append(each)
        if now - each.queued_at >= rules.affinity_max_wait:
            break
    return found
