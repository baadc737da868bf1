"""Decides which waiter gets which job. Pure: it maps candidates and waiters to matches.

Candidates are in one order: priority, then fair share between lanes, then fair rank and age within
a lane. Every waiter takes jobs from the front. A waiter that has a job's model loaded may look a
little ahead.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby, islice
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from comfyfleet.server.queue.model import DispatchCandidate, QueueLane, Waiter
from comfyfleet.server.queue.switch_costs import SwitchCosts

AFFINITY_WINDOW = 32
RANK_ROUNDS_AHEAD = 1


class Match(NamedTuple):
    candidate: DispatchCandidate
    waiter: int  # its index among the waiters


class MatchDecision(NamedTuple):
    choices: list[Match]
    passed: frozenset[int]  # jobs that another job passed because of its model
    has_fresh: bool = False  # a job was withheld from workers that would only prefetch it
    # Seconds after which a job that is reserved for workers with its model may go to the remaining
    # waiters.
    held_seconds: float | None = None


# A candidate's place in the order: priority, turn of the lane, id.
OrderKey = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class MatchRules:
    """Limits for passing and holding jobs.

    A job is passed for half of the longest wait; the rest is for those passed with it, which then
    all have their turn, and for a worker to become free.

    The time is counted from when it was first passed, not from when it was queued: with a long
    backlog all jobs would soon be too old and models would be switched for every job, which makes
    everybody wait longer.
    """

    affinity_max_wait: timedelta = timedelta(seconds=60)
    # How long a new job is reserved for the idle worker of its client's previous prompt.
    preferred_max_wait: timedelta = timedelta(seconds=0.3)
    prefetch_after: timedelta = timedelta()  # how long a new job is reserved for idle workers
    window: int = AFFINITY_WINDOW
    costs: SwitchCosts = field(default_factory=SwitchCosts)


DEFAULT_RULES = MatchRules()


class MatchView(NamedTuple):
    """The state that decides which job may pass which."""

    now: datetime
    passed_since: Mapping[int, datetime]
    rules: MatchRules
    ahead: Mapping[int, int]  # the number of earlier jobs with the same model by job

    def may_pass(self, waiter: Waiter, candidate: DispatchCandidate) -> bool:
        """Whether jobs whose model the waiter has loaded may still pass this one."""
        most = self.rules.costs.passed_max(
            waiter.fleet_id,
            waiter.models_loaded[0],
            candidate.model_key,
            self.rules.affinity_max_wait,
        )
        since = self.passed_since.get(candidate.id)
        return bool(most) if since is None else self.now - since < most / 2

    def is_still_loaded(self, waiter: Waiter, model_key: str | None) -> bool:
        """Whether a model still counts as loaded after another one was used. It does until
        switching back is known to be free.
        """
        if model_key is None or model_key not in waiter.models_loaded:
            return False
        return waiter.fleet_id is None or not self.rules.costs.knows(waiter.fleet_id, model_key)

    def held_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is reserved for workers that have its model, or for the
        worker of its client's previous prompt. This waiter is not one of them.
        """
        return self.preferred_for(waiter, candidate) or self._held_by_model(waiter, candidate)

    def preferred_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is reserved for the worker of its client's previous
        prompt.

        That worker is preferred only while it is idle, and not if it would run the job after
        another one.
        """
        preferred = candidate.preferred_worker_id
        if preferred is None or (preferred == waiter.worker_id and not waiter.is_prefetch):
            return timedelta()
        most = candidate.queued_at + self.rules.preferred_max_wait
        return max(timedelta(), most - self.now)

    def _held_by_model(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        if not self.rules.costs.estimates or candidate.model_key in waiter.models_loaded[:1]:
            return timedelta()
        if candidate.backend_affinity:
            return timedelta()
        ahead = self.ahead.get(candidate.id, 0)
        most = self.rules.costs.held_max(waiter.fleet_id, candidate.model_key, ahead)
        most = min(most, self.rules.affinity_max_wait)
        return max(timedelta(), candidate.queued_at + most - self.now)


def match_waiters(
    candidates: Iterable[DispatchCandidate],
    waiters: Sequence[Waiter],
    *,
    now: datetime,
    starts: Mapping[QueueLane, float],
    cut: Collection[QueueLane] = (),
    elsewhere: Collection[int] = (),
    passed_since: Mapping[int, datetime] = MappingProxyType({}),
    rules: MatchRules = DEFAULT_RULES,
) -> MatchDecision:
    """Matches at most one job with each waiter. `cut` are lanes that hold more than was read of
    them.

    Jobs in `elsewhere` are claimed by others. They still take part in the order: behind one, in a
    lane that is cut, may stand a job that comes before those of other lanes.
    """
    order = complete_prefix(sort_candidates(candidates, starts), cut)
    if elsewhere:
        order = [each for each in order if each.id not in elsewhere]
    left = order
    view = MatchView(now, passed_since, rules, _ahead(order) if rules.costs.estimates else {})
    preferences = [waiter_rank(waiter) for waiter in waiters]
    preferred = sorted(range(len(waiters)), key=preferences.__getitem__)
    choices: list[Match] = []
    has_fresh = False
    for _, equals in groupby(preferred, key=lambda index: preferences[index][:2]):
        if choices:
            taken = {choice.candidate.id for choice in choices}
            left = [each for each in left if each.id not in taken]
        if not left:
            break
        indexes = list(equals)
        if waiters[indexes[0]].is_prefetch:
            old = [each for each in left if now - each.queued_at >= rules.prefetch_after]
            has_fresh, left = has_fresh or len(old) < len(left), old
        choices += _serve(left, waiters, indexes, view)
    passed, held = _passed(order, choices, waiters), _held_seconds(order, choices, waiters, view)
    return MatchDecision(choices, passed, has_fresh, held)


def _ahead(order: Iterable[DispatchCandidate]) -> dict[int, int]:
    seen: Counter[str | None] = Counter()
    found = {}
    for each in order:
        found[each.id] = seen[each.model_key]
        seen[each.model_key] += 1
    return found


def _passed(
    order: Sequence[DispatchCandidate], choices: Sequence[Match], waiters: Sequence[Waiter]
) -> frozenset[int]:
    """Returns the jobs that were passed. There may be too many of them, because it isn't checked
    whether the worker could run them.
    """
    by_model = {
        choice.candidate.id
        for choice in choices
        if choice.candidate.model_key in waiters[choice.waiter].models_loaded
    }
    if not by_model:
        return frozenset()
    last = max(place for place, each in enumerate(order) if each.id in by_model)
    taken = {choice.candidate.id for choice in choices}
    return frozenset(each.id for each in order[:last] if each.id not in taken)


def _held_seconds(
    order: Sequence[DispatchCandidate],
    choices: Sequence[Match],
    waiters: Sequence[Waiter],
    view: MatchView,
) -> float | None:
    """Returns the seconds after which waiters without a job should retry, if a job is withheld from
    them.
    """
    window = order[: view.rules.window]
    may_hold = view.rules.costs.estimates or any(
        candidate.preferred_worker_id for candidate in window
    )
    if not may_hold or len(choices) == len(waiters):
        return None
    served, taken = (
        {candidate.waiter for candidate in choices},
        {candidate.candidate.id for candidate in choices},
    )
    idle = [waiter for index, waiter in enumerate(waiters) if index not in served]
    left = [candidate for candidate in window if candidate.id not in taken]
    held = (
        view.held_for(waiter, candidate)
        for candidate in left
        for waiter in idle
        if candidate.lane in waiter.lanes
    )
    return min((candidate.total_seconds() for candidate in held if candidate), default=None)


def _serve(
    left: list[DispatchCandidate],
    waiters: Sequence[Waiter],
    equals: list[int],
    view: MatchView,
) -> list[Match]:
    """Matches workers of equal load, first those that have a suitable model loaded, then the
    others.
    """
    warm = [index for index in equals if waiters[index].models_loaded]
    if not warm:
        return _match_in_order(left, waiters, equals, view)
    choices = _match_by_model(left, waiters, warm, view)
    taken = {choice.candidate.id for choice in choices}
    served = {choice.waiter for choice in choices}
    rest = [each for each in left if each.id not in taken]
    idle = [index for index in equals if index not in served]
    return choices + _match_in_order(rest, waiters, idle, view)


def sort_candidates(
    candidates: Iterable[DispatchCandidate], starts: Mapping[QueueLane, float]
) -> list[tuple[OrderKey, DispatchCandidate]]:
    """Sorts candidates of all lanes. Ranks are only comparable within a lane, so positions are
    compared between lanes.
    """
    placed = []
    for lane, line in group_by_lane(candidates).items():
        line.sort(key=_in_lane)
        priority, place, start = None, 0.0, starts.get(lane, 0.0)
        for each in line:
            if each.priority != priority:
                priority, place = each.priority, start
            placed.append(((-each.priority, place, each.id), each))
            place += 1
    placed.sort(key=itemgetter(0))
    return placed


def group_by_lane(
    candidates: Iterable[DispatchCandidate],
) -> dict[QueueLane, list[DispatchCandidate]]:
    """Groups candidates by lane. Successive candidates usually share the same lane object, which
    saves hashing it.
    """
    lines: dict[QueueLane, list[DispatchCandidate]] = {}
    lane: QueueLane | None = None
    for each in candidates:
        if each.lane is not lane:
            lane = each.lane
            line = lines.setdefault(lane, [])
        line.append(each)
    return lines


def _in_lane(candidate: DispatchCandidate) -> tuple[int, int, int]:
    return (-candidate.priority, candidate.rank, candidate.id)


def complete_prefix(
    order: list[tuple[OrderKey, DispatchCandidate]], cut: Collection[QueueLane]
) -> list[DispatchCandidate]:
    """Returns the part of the order that unread candidates can't precede."""
    unseen = set(cut)
    end = len(order)
    for place in range(len(order) - 1, -1, -1):
        if not unseen:
            break
        lane = order[place][1].lane
        if lane in unseen:
            unseen.discard(lane)
            end = place + 1
    return [each for _, each in order[:end]]


def waiter_rank(waiter: Waiter) -> tuple[bool, int, int, int]:
    """Orders waiters by load, then by number of lanes, because others have more jobs to choose
    from, then by memory.

    A worker that would only prefetch the job comes after all workers that would run it now.
    """
    return (waiter.is_prefetch, waiter.load, len(waiter.lanes), -waiter.free_gpu_memory_bytes)


def may_take(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    if candidate.lane not in waiter.lanes or candidate.model_set in waiter.lacking:
        return False
    if candidate.backend_affinity and candidate.backend_affinity not in waiter.affinities:
        return False
    return not is_avoided(waiter, candidate, now)


def is_avoided(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    """Whether the worker's backend has just failed with this job, so that another worker should try
    it, if there is one.
    """
    if candidate.avoid_worker_id != waiter.worker_id or waiter.is_alone:
        return False
    return candidate.avoid_until is not None and now < candidate.avoid_until


def _match_in_order(
    candidates: Sequence[DispatchCandidate],
    waiters: Sequence[Waiter],
    idle: list[int],
    view: MatchView,
) -> list[Match]:
    choices: list[Match] = []
    served: set[int] = set()
    lines = _WaiterLines(waiters, idle)
    for candidate in candidates:
        if len(choices) == len(idle):
            break
        line = lines.of(candidate.lane)
        while line and line[-1] in served:
            line.pop()
        found = _first_able(line, served, waiters, candidate, view)
        if found is not None:
            served.add(found)
            choices.append(Match(candidate, found))
    return choices


class _WaiterLines:
    """Waiters by lane, the best one last. If all of them may run the same lanes, they share one
    list.
    """

    def __init__(self, waiters: Sequence[Waiter], idle: Sequence[int]) -> None:
        self._waiters = waiters
        self._idle = idle[::-1]
        self._sets = {waiters[index].lanes for index in idle}
        self._lines: dict[QueueLane, list[int]] = {}
        self._all = list(self._idle)

    def of(self, lane: QueueLane) -> list[int]:
        line = self._lines.get(lane)
        if line is None:
            able = {lanes for lanes in self._sets if lane in lanes}
            is_all = len(able) == len(self._sets)
            line = self._all if is_all else self._able(able)
            self._lines[lane] = line
        return line

    def _able(self, able: set[frozenset[QueueLane]]) -> list[int]:
        return [index for index in self._idle if self._waiters[index].lanes in able]


def _first_able(
    line: list[int],
    served: set[int],
    waiters: Sequence[Waiter],
    candidate: DispatchCandidate,
    view: MatchView,
) -> int | None:
    """Takes the best waiter for a candidate from a list that has the best one last."""
    if not line:
        return None
    best = waiters[line[-1]]
    is_anybodys = candidate.backend_affinity is None and candidate.avoid_worker_id is None
    is_able = is_anybodys and candidate.model_set not in best.lacking
    if is_able and not view.held_for(best, candidate):
        return line[-1]
    return next(
        (
            index
            for index in reversed(line)
            if index not in served
            and may_take(waiters[index], candidate, view.now)
            and not view.held_for(waiters[index], candidate)
        ),
        None,
    )


def _match_by_model(
    left: Sequence[DispatchCandidate],
    waiters: Sequence[Waiter],
    warm: list[int],
    view: MatchView,
) -> list[Match]:
    """Matches jobs with workers that have the model loaded. Other jobs remain."""
    choices: list[Match] = []
    matched_ids: set[int] = set()
    for index in warm:
        waiter = waiters[index]
        mine = (
            each
            for each in left
            if each.id not in matched_ids
            and may_take(waiter, each, view.now)
            and not view.preferred_for(waiter, each)
        )
        best = best_by_model(mine, waiter, view)
        if best is not None:
            matched_ids.add(best.id)
            choices.append(Match(best, index))
    return choices


def best_by_model(
    mine: Iterable[DispatchCandidate], waiter: Waiter, view: MatchView
) -> DispatchCandidate | None:
    """Picks a job with the exact model set if there is one, then one with the heavy model of the
    last run, then one with a model that was used before.
    """
    current = before = None
    for candidate in iter_reachable(mine, waiter, view):
        if view.rules.costs.is_free(waiter.fleet_id, candidate.model_key):
            continue  # a loaded model is no advantage, so the first worker may run the job
        if candidate.model_key == waiter.models_loaded[0]:
            if not waiter.model_set or candidate.model_set == waiter.model_set:
                return candidate
            current = current or candidate
        elif view.is_still_loaded(waiter, candidate.model_key):
            before = before or candidate
    return current or before


def iter_reachable(
    mine: Iterable[DispatchCandidate], waiter: Waiter, view: MatchView
) -> Iterator[DispatchCandidate]:
    """Iterates over the jobs that a worker may look at past the head. It never passes a priority, a
    round or the longest wait.
    """
    rounds: dict[QueueLane, int] = {}
    priority: int | None = None
    for each in islice(mine, view.rules.window + 1):
        if priority is None:
            priority = each.priority
        if each.priority != priority:
            break
        if each.rank <= rounds.setdefault(each.lane, each.rank) + RANK_ROUNDS_AHEAD:
            yield each
        if not view.may_pass(waiter, each):
            break
