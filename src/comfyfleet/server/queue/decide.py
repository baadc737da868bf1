"""Decides which waiter gets which job. Pure: candidates and waiters in, matches out.

Candidates stand in one order: priority, then fair share between lanes, then fair rank and age inside a lane.
Every waiter takes from the front; one that has a job's model loaded may look a little ahead.
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
    passed: frozenset[int]  # jobs before which another went because of its model
    has_fresh: bool = False  # a job was kept from those who would only prefetch it
    # After so long, a job that is left to workers with its model may go to those left over here.
    held_seconds: float | None = None


# A candidate's place in the one order: priority, turn of the lane, id.
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
    # So long a new job is left to the idle worker of its client's previous prompt.
    preferred_max_wait: timedelta = timedelta(seconds=0.3)
    prefetch_after: timedelta = timedelta()  # so long a new job is left to those who are idle
    window: int = AFFINITY_WINDOW
    costs: SwitchCosts = field(default_factory=SwitchCosts)


DEFAULT_RULES = MatchRules()


class MatchView(NamedTuple):
    """What is known when the matcher decides which job may pass which."""

    now: datetime
    passed_since: Mapping[int, datetime]
    rules: MatchRules
    ahead: Mapping[int, int]  # job → how many with its model stand before it

    def may_pass(self, waiter: Waiter, candidate: DispatchCandidate) -> bool:
        """Whether jobs whose model the waiter has loaded may still go before this one."""
        most = self.rules.costs.passed_max(
            waiter.fleet_id,
            waiter.models_loaded[0],
            candidate.model_key,
            self.rules.affinity_max_wait,
        )
        since = self.passed_since.get(candidate.id)
        return bool(most) if since is None else self.now - since < most / 2

    def is_still_loaded(self, waiter: Waiter, model_key: str | None) -> bool:
        """Whether a model that another has followed counts as loaded: yes, until switching back is
        known to be free.
        """
        if model_key is None or model_key not in waiter.models_loaded:
            return False
        return waiter.fleet_id is None or not self.rules.costs.knows(waiter.fleet_id, model_key)

    def held_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is left to workers that have its model, or to the worker
        of its client's previous prompt; this waiter is none of them.
        """
        return self.preferred_for(waiter, candidate) or self._held_by_model(waiter, candidate)

    def preferred_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is left to the worker of its client's previous prompt.

        That worker is preferred while it is idle, and not to run the job after another one.
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
    """Returns the jobs that were passed. Perhaps too many: whether the worker could run them isn't
    checked.
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
    """Returns after how many seconds the waiters without a job should retry, if a job is held from
    them.
    """
    window = order[: view.rules.window]
    may_hold = view.rules.costs.estimates or any(each.preferred_worker_id for each in window)
    if not may_hold or len(choices) == len(waiters):
        return None
    served, taken = {each.waiter for each in choices}, {each.candidate.id for each in choices}
    idle = [waiter for index, waiter in enumerate(waiters) if index not in served]
    left = [each for each in window if each.id not in taken]
    held = (
        view.held_for(waiter, each) for each in left for waiter in idle if each.lane in waiter.lanes
    )
    return min((each.total_seconds() for each in held if each), default=None)


def _serve(
    left: list[DispatchCandidate],
    waiters: Sequence[Waiter],
    equals: list[int],
    view: MatchView,
) -> list[Match]:
    """Matches workers of equal load: first those that have a wanted model loaded, then the others."""
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
    """Sorts candidates of all lanes. Ranks are times of one lane, so positions are compared between
    lanes.
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
    """Groups candidates by lane. They mostly come lane by lane with the same object, which saves
    hashing it.
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
    """Returns the part of the order that no unread candidate can belong to."""
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
    """Orders waiters by load, then fewer lanes (others have more to choose from), then memory.

    A worker that would only prefetch the job comes after all that would run it now.
    """
    return (waiter.is_prefetch, waiter.load, len(waiter.lanes), -waiter.free_gpu_memory_bytes)


def may_take(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    if candidate.lane not in waiter.lanes or candidate.model_set in waiter.lacking:
        return False
    if candidate.backend_affinity and candidate.backend_affinity not in waiter.affinities:
        return False
    return not is_avoided(waiter, candidate, now)


def is_avoided(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    """Whether its backend has just failed with this job, so that another worker should try it, if
    there is one.
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
    """Waiters by lane, the best last. If all may run the same lanes they share one list."""

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
    """Takes the best waiter for a candidate from a list whose best stands last."""
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
    """Matches jobs with workers that have the model loaded. Jobs that nobody matches are left over."""
    choices: list[Match] = []
    taken: set[int] = set()
    for index in warm:
        waiter = waiters[index]
        mine = (
            each
            for each in left
            if each.id not in taken
            and may_take(waiter, each, view.now)
            and not view.preferred_for(waiter, each)
        )
        best = best_by_model(mine, waiter, view)
        if best is not None:
            taken.add(best.id)
            choices.append(Match(best, index))
    return choices


def best_by_model(
    mine: Iterable[DispatchCandidate], waiter: Waiter, view: MatchView
) -> DispatchCandidate | None:
    """Picks the exact model set first, then the heavy model of the last run, then one used before
    it.
    """
    current = before = None
    for each in iter_reachable(mine, waiter, view):
        if view.rules.costs.is_free(waiter.fleet_id, each.model_key):
            continue  # to have it loaded is no advantage: whoever is first may run it
        if each.model_key == waiter.models_loaded[0]:
            if not waiter.model_set or each.model_set == waiter.model_set:
                return each
            current = current or each
        elif view.is_still_loaded(waiter, each.model_key):
            before = before or each
    return current or before


def iter_reachable(
    mine: Iterable[DispatchCandidate], waiter: Waiter, view: MatchView
) -> Iterator[DispatchCandidate]:
    """Iterates how far a worker may look past the head: never past a priority, a round or the
    longest wait.
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
