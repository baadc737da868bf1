"""Decides which waiter gets which job. Pure: it maps candidates and waiters to matches.

Candidates are ordered by priority, then by fair share between lanes, then by fair rank and age
within a lane. Every waiter takes jobs from the front. A waiter may look a little further ahead for
a job whose model it has loaded.
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

# Number of jobs that are searched for one whose model the waiter has loaded.
AFFINITY_WINDOW = 32
# Maximum number of fair-share rounds that a job may be taken early because its model is loaded.
RANK_ROUNDS_AHEAD = 1


class Match(NamedTuple):
    candidate: DispatchCandidate
    waiter: int  # index of the waiter


class MatchDecision(NamedTuple):
    choices: list[Match]
    passed: frozenset[int]  # ids of jobs that were passed by a later job because of its model
    # Whether a new job was withheld from workers that would only prefetch it.
    has_fresh: bool = False
    # Seconds after which a job that is reserved for other workers may be given to the remaining
    # waiters.
    held_seconds: float | None = None


# A candidate's sort key: negative priority, position by the lane's fair share, id.
OrderKey = tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class MatchRules:
    """Limits on how long a job may be passed by other jobs, or held for other workers.

    A job may be passed by others for half of the maximum wait. The other half is for the jobs that
    were passed together with it and now run first, and for the time until a worker is free.

    The time counts from the first pass instead of the time of queuing. Otherwise, in a long
    backlog, all jobs would soon be too old to be passed. Models would then be switched for every
    job, and all jobs would wait longer.
    """

    affinity_max_wait: timedelta = timedelta(seconds=60)
    # How long a new job is reserved for its preferred worker, which had a free slot when the job
    # was submitted.
    preferred_max_wait: timedelta = timedelta(seconds=0.3)
    prefetch_after: timedelta = timedelta()  # how long a new job is reserved for idle workers
    window: int = AFFINITY_WINDOW
    costs: SwitchCosts = field(default_factory=SwitchCosts)


DEFAULT_RULES = MatchRules()


class MatchView(NamedTuple):
    """The state that decides which jobs may pass others."""

    now: datetime
    passed_since: Mapping[int, datetime]
    rules: MatchRules
    ahead: Mapping[int, int]  # number of earlier jobs with the same model, by job

    def may_pass(self, waiter: Waiter, candidate: DispatchCandidate) -> bool:
        """Whether jobs whose model the waiter has loaded may still pass this job."""
        most = self.rules.costs.passed_max(
            waiter.fleet_id,
            waiter.models_loaded[0],
            candidate.model_key,
            self.rules.affinity_max_wait,
        )
        since = self.passed_since.get(candidate.id)
        return bool(most) if since is None else self.now - since < most / 2

    def is_still_loaded(self, waiter: Waiter, model_key: str | None) -> bool:
        """Whether a model that the waiter used earlier still counts as loaded. Once the cost of
        switching back is known, only the current model counts.
        """
        if model_key is None or model_key not in waiter.models_loaded:
            return False
        return waiter.fleet_id is None or not self.rules.costs.knows(waiter.fleet_id, model_key)

    def held_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is withheld from this waiter. During that time, the job
        is reserved for workers that have its model loaded, or for its preferred worker.
        """
        return self.preferred_for(waiter, candidate) or self._held_by_model(waiter, candidate)

    def preferred_for(self, waiter: Waiter, candidate: DispatchCandidate) -> timedelta:
        """Returns how much longer the job is reserved for its preferred worker.

        A waiter that would only prefetch the job isn't preferred, even if it is that worker.
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
    """Matches each waiter with at most one job. `cut` contains the lanes whose jobs were only
    partly read.

    Jobs in `elsewhere` are claimed by other processes. They still count for the order: in a cut
    lane, jobs that were not read may follow them and come before jobs of other lanes.
    """
    order = complete_prefix(sort_candidates(candidates, starts), cut)
    if elsewhere:
        order = [candidate for candidate in order if candidate.id not in elsewhere]
    remaining = order
    view = MatchView(now, passed_since, rules, _ahead(order) if rules.costs.estimates else {})
    preferences = [waiter_rank(waiter) for waiter in waiters]
    preferred = sorted(range(len(waiters)), key=preferences.__getitem__)
    choices: list[Match] = []
    has_fresh = False
    for _, equals in groupby(preferred, key=lambda index: preferences[index][:2]):
        if choices:
            chosen_ids = {choice.candidate.id for choice in choices}
            remaining = [candidate for candidate in remaining if candidate.id not in chosen_ids]
        if not remaining:
            break
        indexes = list(equals)
        if waiters[indexes[0]].is_prefetch:
            old = [
                candidate
                for candidate in remaining
                if now - candidate.queued_at >= rules.prefetch_after
            ]
            has_fresh, remaining = has_fresh or len(old) < len(remaining), old
        choices += _serve(remaining, waiters, indexes, view)
    passed, held = _passed(order, choices, waiters), _held_seconds(order, choices, waiters, view)
    return MatchDecision(choices, passed, has_fresh, held)


def _ahead(order: Iterable[DispatchCandidate]) -> dict[int, int]:
    seen: Counter[str | None] = Counter()
    counts = {}
    for candidate in order:
        counts[candidate.id] = seen[candidate.model_key]
        seen[candidate.model_key] += 1
    return counts


def _passed(
    order: Sequence[DispatchCandidate], choices: Sequence[Match], waiters: Sequence[Waiter]
) -> frozenset[int]:
    """Returns the ids of the jobs that were passed by later ones. The result may include jobs that
    the worker couldn't run anyway, because this isn't checked.
    """
    by_model = {
        choice.candidate.id
        for choice in choices
        if choice.candidate.model_key in waiters[choice.waiter].models_loaded
    }
    if not by_model:
        return frozenset()
    last = max(place for place, candidate in enumerate(order) if candidate.id in by_model)
    chosen_ids = {choice.candidate.id for choice in choices}
    return frozenset(candidate.id for candidate in order[:last] if candidate.id not in chosen_ids)


def _held_seconds(
    order: Sequence[DispatchCandidate],
    choices: Sequence[Match],
    waiters: Sequence[Waiter],
    view: MatchView,
) -> float | None:
    """Returns how many seconds waiters without a job should wait before they retry, or None if no
    job is withheld from them.
    """
    window = order[: view.rules.window]
    may_hold = view.rules.costs.estimates or any(
        candidate.preferred_worker_id for candidate in window
    )
    if not may_hold or len(choices) == len(waiters):
        return None
    served = {choice.waiter for choice in choices}
    chosen_ids = {choice.candidate.id for choice in choices}
    idle = [waiter for index, waiter in enumerate(waiters) if index not in served]
    remaining = [candidate for candidate in window if candidate.id not in chosen_ids]
    held = (
        view.held_for(waiter, candidate)
        for candidate in remaining
        for waiter in idle
        if candidate.lane in waiter.lanes
    )
    return min((duration.total_seconds() for duration in held if duration), default=None)


def _serve(
    remaining: list[DispatchCandidate],
    waiters: Sequence[Waiter],
    equals: list[int],
    view: MatchView,
) -> list[Match]:
    """Matches workers with the same load. Workers that have a suitable model loaded come first."""
    warm = [index for index in equals if waiters[index].models_loaded]
    if not warm:
        return _match_in_order(remaining, waiters, equals, view)
    choices = _match_by_model(remaining, waiters, warm, view)
    chosen_ids = {choice.candidate.id for choice in choices}
    served = {choice.waiter for choice in choices}
    rest = [candidate for candidate in remaining if candidate.id not in chosen_ids]
    idle = [index for index in equals if index not in served]
    return choices + _match_in_order(rest, waiters, idle, view)


def sort_candidates(
    candidates: Iterable[DispatchCandidate], starts: Mapping[QueueLane, float]
) -> list[tuple[OrderKey, DispatchCandidate]]:
    """Sorts candidates of all lanes and returns them with their sort keys. Ranks are only
    comparable within a lane, so lanes are merged by position.
    """
    placed = []
    for lane, line in group_by_lane(candidates).items():
        line.sort(key=_in_lane)
        priority, place, start = None, 0.0, starts.get(lane, 0.0)
        for candidate in line:
            if candidate.priority != priority:
                priority, place = candidate.priority, start
            placed.append(((-candidate.priority, place, candidate.id), candidate))
            place += 1
    placed.sort(key=itemgetter(0))
    return placed


def group_by_lane(
    candidates: Iterable[DispatchCandidate],
) -> dict[QueueLane, list[DispatchCandidate]]:
    """Groups candidates by lane. Successive candidates usually share a lane object, so the lane
    rarely has to be hashed.
    """
    lines: dict[QueueLane, list[DispatchCandidate]] = {}
    lane: QueueLane | None = None
    for candidate in candidates:
        if candidate.lane is not lane:
            lane = candidate.lane
            line = lines.setdefault(lane, [])
        line.append(candidate)
    return lines


def _in_lane(candidate: DispatchCandidate) -> tuple[int, int, int]:
    return (-candidate.priority, candidate.rank, candidate.id)


def complete_prefix(
    order: list[tuple[OrderKey, DispatchCandidate]], cut: Collection[QueueLane]
) -> list[DispatchCandidate]:
    """Returns the part of the order that is certain. It ends where the first cut lane runs out of
    candidates, because jobs of that lane that were not read may come next.
    """
    unseen = set(cut)
    end = len(order)
    for place in range(len(order) - 1, -1, -1):
        if not unseen:
            break
        lane = order[place][1].lane
        if lane in unseen:
            unseen.discard(lane)
            end = place + 1
    return [candidate for _, candidate in order[:end]]


def waiter_rank(waiter: Waiter) -> tuple[bool, int, int, int]:
    """Returns a waiter's sort key. Waiters with a low load come first. Among equal loads, waiters
    with few lanes come first, because they have fewer jobs to choose from. After that, more free
    GPU memory decides.

    A worker that would only prefetch a job comes after all workers that would run it immediately.
    """
    return (waiter.is_prefetch, waiter.load, len(waiter.lanes), -waiter.free_gpu_memory_bytes)


def may_take(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    if candidate.lane not in waiter.lanes or candidate.model_set in waiter.lacking:
        return False
    if candidate.backend_affinity and candidate.backend_affinity not in waiter.affinities:
        return False
    return not is_avoided(waiter, candidate, now)


def is_avoided(waiter: Waiter, candidate: DispatchCandidate, now: datetime) -> bool:
    """Whether the worker has just failed to run this job, so that another worker should get it. A
    worker that is alone isn't avoided.
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
        chosen = _first_able(line, served, waiters, candidate, view)
        if chosen is not None:
            served.add(chosen)
            choices.append(Match(candidate, chosen))
    return choices


class _WaiterLines:
    """The waiters of each lane, the best one last. Lanes that all waiters support share one
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
    """Returns the best waiter that may get the candidate, from a list that ends with the best
    one.
    """
    if not line:
        return None
    best = waiters[line[-1]]
    is_unbound = candidate.backend_affinity is None and candidate.avoid_worker_id is None
    is_able = is_unbound and candidate.model_set not in best.lacking
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
    remaining: Sequence[DispatchCandidate],
    waiters: Sequence[Waiter],
    warm: list[int],
    view: MatchView,
) -> list[Match]:
    """Matches workers with jobs whose models they have loaded. Other workers and jobs are not
    matched.
    """
    choices: list[Match] = []
    matched_ids: set[int] = set()
    for index in warm:
        waiter = waiters[index]
        mine = (
            candidate
            for candidate in remaining
            if candidate.id not in matched_ids
            and may_take(waiter, candidate, view.now)
            and not view.preferred_for(waiter, candidate)
        )
        best = best_by_model(mine, waiter, view)
        if best is not None:
            matched_ids.add(best.id)
            choices.append(Match(best, index))
    return choices


def best_by_model(
    mine: Iterable[DispatchCandidate], waiter: Waiter, view: MatchView
) -> DispatchCandidate | None:
    """Picks a job with the waiter's exact model set, or else one with the heavy model of its last
    run, or else one with a model that it used before.
    """
    current = before = None
    for candidate in iter_reachable(mine, waiter, view):
        if view.rules.costs.is_free(waiter.fleet_id, candidate.model_key):
            continue  # the switch is free, so any worker may run the job
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
    """Yields the jobs among which a worker may choose. They have the same priority and are at most
    RANK_ROUNDS_AHEAD rounds later than the first job of their lane. Jobs after one that has been
    passed for too long are left out.
    """
    rounds: dict[QueueLane, int] = {}
    priority: int | None = None
    for candidate in islice(mine, view.rules.window + 1):
        if priority is None:
            priority = candidate.priority
        if candidate.priority != priority:
            break
        first_rank = rounds.setdefault(candidate.lane, candidate.rank)
        if candidate.rank <= first_rank + RANK_ROUNDS_AHEAD:
            yield candidate
        if not view.may_pass(waiter, candidate):
            break
