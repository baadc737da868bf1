"""Matches waiters with queued jobs: probes the lanes, decides, claims, and repeats for the
remaining waiters.

FairShare implements start-time fair queueing over lanes in memory. A rank is a virtual time within
its own lane and can't be compared with another lane's. Otherwise, a lane with 100,000 older jobs
would starve the others.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.clock import Clock
from comfyfleet.errors import Unavailable
from comfyfleet.server.fleets.model import BackendOffer, WorkflowRequirements
from comfyfleet.server.queue.decide import (
    AFFINITY_WINDOW,
    Match,
    MatchRules,
    group_by_lane,
    match_waiters,
)
from comfyfleet.server.queue.model import DispatchCandidate, DispatchLease, QueueLane, Waiter
from comfyfleet.server.queue.store import Claim, Probe, QueueStore
from comfyfleet.server.queue.switch_costs import SwitchCosts
from comfyfleet.settings import Settings

MODEL_SETS_KEPT_MAX = 10_000
UNKNOWN_READ_MAX = 100

# Returns the requirements of a dispatch's prompt, or None if they can no longer be determined.
FindNeeds = Callable[[int], Awaitable[WorkflowRequirements | None]]
NOTHING = WorkflowRequirements()


class ModelSetCache:
    """The requirements of jobs by model set: their models, and the node types of open prompts.

    They are recorded when a job is enqueued here, and read once for jobs of other processes.
    """

    def __init__(self) -> None:
        self.find: FindNeeds | None = None
        self._kept: OrderedDict[str, WorkflowRequirements] = OrderedDict()

    def __contains__(self, model_set: str) -> bool:
        return model_set in self._kept

    def note(self, model_set: str, needs: WorkflowRequirements) -> None:
        self._kept[model_set] = needs
        if len(self._kept) > MODEL_SETS_KEPT_MAX:
            self._kept.popitem(last=False)

    def may_run(self, waiter: Waiter, model_set: str | None) -> bool:
        """Whether the waiter's backend meets the model set's requirements. Returns True while the
        set is unknown.
        """
        if waiter.offer is None or model_set is None or model_set not in self._kept:
            return True
        return not self._lacks(waiter.offer, model_set)

    def judge(
        self, waiters: Sequence[Waiter], candidates: Iterable[DispatchCandidate]
    ) -> tuple[list[Waiter], dict[str, int]]:
        """Returns the waiters with the model sets they lack, and one dispatch of each unknown model
        set.

        A job of an unknown set is not given to workers whose backends have reported their models.
        """
        wanted = {each.model_set: each.id for each in candidates if each.model_set}
        offers = {each.offer.key: each.offer for each in waiters if each.offer}
        if not wanted or not offers:
            return list(waiters), {}
        unknown = {
            name: dispatch_id for name, dispatch_id in wanted.items() if name not in self._kept
        }
        lacking = {
            key: frozenset(name for name in wanted if name in unknown or self._lacks(offer, name))
            for key, offer in offers.items()
        }
        if not any(lacking.values()):
            return list(waiters), {}
        judged = [
            replace(each, lacking=lacking[each.offer.key]) if each.offer else each
            for each in waiters
        ]
        return judged, unknown

    async def read(self, unknown: dict[str, int]) -> None:
        """Reads model sets. If a database is unavailable, its sets stay unknown."""
        for model_set, dispatch_id in list(unknown.items())[:UNKNOWN_READ_MAX]:
            with contextlib.suppress(Unavailable):
                found = None if self.find is None else await self.find(dispatch_id)
                self.note(model_set, found or NOTHING)

    def _lacks(self, offer: BackendOffer, model_set: str) -> bool:
        needs = self._kept[model_set]
        return bool(offer.lacks(needs.node_types, needs.models))


LANES_REMEMBERED_MAX = 10_000


class FairShare:
    """Counts the jobs that each lane was given. If the counts are lost, only one round of fairness
    is lost.
    """

    def __init__(self) -> None:
        self._time = 0.0
        self._finished: dict[QueueLane, float] = {}

    def starts(self, lanes: Iterable[QueueLane]) -> Mapping[QueueLane, float]:
        """Returns each lane's virtual start. A lane that was empty starts at the current virtual
        time, without credit or debt.
        """
        return {lane: max(self._time, self._finished.get(lane, 0.0)) for lane in lanes}

    def given(self, lanes: Iterable[QueueLane]) -> None:
        if len(self._finished) > LANES_REMEMBERED_MAX:
            self._finished.clear()
        counted = Counter(lanes)
        if not counted:
            return
        for lane, count in counted.items():
            self._finished[lane] = max(self._time, self._finished.get(lane, 0.0)) + count
        # Virtual time is the position of the lane that is furthest behind among those just served.
        self._time = max(self._time, min(self._finished[lane] for lane in counted) - 1)


ROUNDS_MAX = 5
PROBE_ROWS_MIN = 8
PROBE_ROWS_MAX = 512
PASSED_REMEMBERED_MAX = 10_000


@dataclass(slots=True)
class Matches:
    """Leases by the index of their waiter, and whether more jobs may be available.

    A waiter in `refused` has orders that its caller has not seen, so it must poll again.
    """

    leases: dict[int, DispatchLease] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    has_more: bool = False
    has_fresh: bool = False  # a job is too new for workers that would only prefetch it
    # seconds after which a job that is held for other workers may go to these
    held_seconds: float | None = None


class Matcher:
    def __init__(
        self, hot: QueueStore, *, settings: Settings, clock: Clock, new_token: Callable[[], UUID]
    ) -> None:
        self._hot = hot
        self._lease_seconds = settings.lease_seconds
        self.switch_costs = SwitchCosts()
        self._rules = MatchRules(
            timedelta(seconds=settings.affinity_max_wait_seconds),
            prefetch_after=timedelta(seconds=settings.prefetch_after_seconds),
            costs=self.switch_costs,
        )
        self._clock = clock
        self._new_token = new_token
        self._fair_share = FairShare()
        self.model_sets = ModelSetCache()
        self._passed_since: dict[
            int, datetime
        ] = {}  # jobs that others went before, by their models

    async def give(self, waiters: Sequence[Waiter]) -> Matches:
        """Leases at most one job to each waiter, the best one at this moment."""
        matches = Matches()
        in_other_hands: set[int] = set()
        deeper = 1
        without: frozenset[str] = frozenset()
        for _ in range(ROUNDS_MAX):
            left = [
                index
                for index, waiter in enumerate(waiters)
                if waiter.lanes and index not in matches.leases and index not in matches.refused
            ]
            if not left:
                break
            step = _Round(self, [waiters[index] for index in left], in_other_hands, deeper)
            step.without = without
            leases, refused = await self._hot.lease(
                step.probe(), step.choose, seconds=self._lease_seconds
            )
            for lease in leases:
                index = left[step.chosen.pop(lease.dispatch_id)]
                matches.leases[index] = lease
                self._note(lease, waiters[index])
            matches.refused |= {left[step.chosen.pop(each)] for each in refused}
            matches.has_fresh |= step.has_fresh
            matches.held_seconds = step.held_seconds
            self._fair_share.given(lease.lane for lease in leases)
            # Chosen jobs that were not claimed were taken by others. Another probe would find them
            # again.
            in_other_hands |= step.chosen.keys()
            is_short = len(leases) + len(refused) < len(left)
            matches.has_more = is_short and bool(step.chosen or refused or (step.cut and leases))
            if is_short and step.unknown:
                await self.model_sets.read(step.unknown)
            if not is_short or not (step.chosen or refused or step.cut or step.unknown):
                break
            # Behind jobs that none of these waiters can run, there may be others.
            without |= step.lacked_by_all
            deeper *= 2
        return matches

    def _note(self, lease: DispatchLease, waiter: Waiter) -> None:
        self._passed_since.pop(lease.dispatch_id, None)
        if waiter.fleet_id is not None and lease.model_key is not None:
            self.switch_costs.warm.given(
                lease.worker_id, waiter.fleet_id, lease.model_key, self._clock()
            )

    def _note_passed(self, passed: Iterable[int], now: datetime) -> None:
        """Records since when jobs have been passed. The times are only kept in memory and start
        again after a restart.
        """
        for dispatch_id in passed:
            self._passed_since.setdefault(dispatch_id, now)
        while len(self._passed_since) > PASSED_REMEMBERED_MAX:
            del self._passed_since[next(iter(self._passed_since))]


class _Round:
    """One probe of the lanes, the choice made from it, and its results."""

    def __init__(
        self, matcher: Matcher, waiters: Sequence[Waiter], in_other_hands: set[int], deeper: int
    ) -> None:
        self._matcher = matcher
        self._waiters = waiters
        self._in_other_hands = in_other_hands
        self._lanes = sorted(frozenset().union(*{waiter.lanes for waiter in waiters}))
        self._limit = self._depth(deeper)
        self.without: frozenset[str] = frozenset()
        self.unknown: dict[str, int] = {}  # one dispatch by model set
        self.lacked_by_all: frozenset[str] = frozenset()
        self.chosen: dict[int, int] = {}  # dispatch id → index of the waiter
        self.cut: frozenset[QueueLane] = frozenset()
        self.has_fresh = False
        self.held_seconds: float | None = None

    def _depth(self, deeper: int) -> int:
        """Returns how many rows to read from each lane: enough for all waiters, but fewer per lane
        if there are many lanes.
        """
        wanted = len(self._waiters) + len(self._in_other_hands)
        if any(waiter.models_loaded for waiter in self._waiters):
            wanted += AFFINITY_WINDOW
        lanes = max(1, len(self._lanes))
        each = wanted if lanes <= 2 else max(PROBE_ROWS_MIN, 2 * wanted // lanes)
        return min(each * deeper, PROBE_ROWS_MAX)

    def probe(self) -> Probe:
        affinities = {name for waiter in self._waiters for name in waiter.affinities}
        return Probe(self._lanes, sorted(affinities), self._limit, sorted(self.without))

    def choose(self, found: list[DispatchCandidate]) -> list[Claim]:
        matcher = self._matcher
        read = group_by_lane(found)
        self.cut = frozenset(lane for lane, rows in read.items() if len(rows) >= self._limit)
        now = matcher._clock()
        self._waiters, self.unknown = matcher.model_sets.judge(self._waiters, found)
        lacked = frozenset.intersection(*(each.lacking for each in self._waiters))
        self.lacked_by_all = lacked - self.unknown.keys()
        choices, passed, self.has_fresh, self.held_seconds = match_waiters(
            found,
            self._waiters,
            now=now,
            starts=matcher._fair_share.starts(read),
            cut=self.cut,
            elsewhere=self._in_other_hands,
            passed_since=matcher._passed_since,
            rules=matcher._rules,
        )
        matcher._note_passed(passed, now)
        self.chosen = {choice.candidate.id: choice.waiter for choice in choices}
        return [self._claim(choice) for choice in choices]

    def _claim(self, choice: Match) -> Claim:
        waiter = self._waiters[choice.waiter]
        token = self._matcher._new_token()
        return Claim(
            choice.candidate,
            token,
            waiter.worker_id,
            waiter.is_prefetch,
            waiter.key_hash,
            waiter.held_max,
        )
