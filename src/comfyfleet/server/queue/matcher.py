"""Matches waiters with queued jobs. Each round probes the lanes, decides and claims jobs. More
rounds follow for the remaining waiters.

FairShare implements start-time fair queueing between lanes, in memory. A rank is a virtual time
within its lane and can't be compared with the ranks of other lanes. If they were compared, a lane
with 100,000 older jobs would starve the others.
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
# Maximum number of unknown model sets that are read after a round.
UNKNOWN_READ_MAX = 100

# A function that returns the requirements of a dispatch's prompt, or None if they are no longer
# available.
FindNeeds = Callable[[int], Awaitable[WorkflowRequirements | None]]
NOTHING = WorkflowRequirements()


class ModelSetCache:
    """Caches the requirements of jobs by model set: their models, and the node types of gateway
    prompts.

    The requirements are recorded when a job is enqueued in this process. Those of other jobs are
    read once.
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
        """Whether the waiter's backend meets the requirements of a model set. Returns True if the
        set is unknown.
        """
        if waiter.offer is None or model_set is None or model_set not in self._kept:
            return True
        return not self._lacks(waiter.offer, model_set)

    def judge(
        self, waiters: Sequence[Waiter], candidates: Iterable[DispatchCandidate]
    ) -> tuple[list[Waiter], dict[str, int]]:
        """Returns the waiters with the model sets that their backends can't run, and a dispatch for
        each unknown model set.

        A job with an unknown model set is not given to workers whose backends have reported their
        models.
        """
        dispatch_by_set = {
            candidate.model_set: candidate.id for candidate in candidates if candidate.model_set
        }
        offers = {waiter.offer.key: waiter.offer for waiter in waiters if waiter.offer}
        if not dispatch_by_set or not offers:
            return list(waiters), {}
        unknown = {
            name: dispatch_id
            for name, dispatch_id in dispatch_by_set.items()
            if name not in self._kept
        }
        lacking = {
            key: frozenset(
                name for name in dispatch_by_set if name in unknown or self._lacks(offer, name)
            )
            for key, offer in offers.items()
        }
        if not any(lacking.values()):
            return list(waiters), {}
        judged = [
            replace(waiter, lacking=lacking[waiter.offer.key]) if waiter.offer else waiter
            for waiter in waiters
        ]
        return judged, unknown

    async def read(self, unknown: dict[str, int]) -> None:
        """Reads the requirements of unknown model sets. If a database is unavailable, its sets stay
        unknown.
        """
        for model_set, dispatch_id in list(unknown.items())[:UNKNOWN_READ_MAX]:
            with contextlib.suppress(Unavailable):
                needs = None if self.find is None else await self.find(dispatch_id)
                self.note(model_set, needs or NOTHING)

    def _lacks(self, offer: BackendOffer, model_set: str) -> bool:
        needs = self._kept[model_set]
        return bool(offer.lacks(needs.node_types, needs.models))


LANES_REMEMBERED_MAX = 10_000  # lanes whose counts are kept


class FairShare:
    """Counts how many jobs of each lane were leased. If the counts are lost, only one round is
    unfair.
    """

    def __init__(self) -> None:
        self._time = 0.0
        self._finished: dict[QueueLane, float] = {}

    def starts(self, lanes: Iterable[QueueLane]) -> Mapping[QueueLane, float]:
        """Returns the virtual start time of each lane. A lane that was empty starts at the current
        virtual time, without credit or debt.
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
        # The virtual time is that of the lane that is furthest behind among the lanes just served.
        self._time = max(self._time, min(self._finished[lane] for lane in counted) - 1)


ROUNDS_MAX = 5  # rounds of matching per batch of waiters
# Limits for the number of rows that a probe reads from each lane.
PROBE_ROWS_MIN = 8
PROBE_ROWS_MAX = 512
PASSED_REMEMBERED_MAX = 10_000  # passed jobs that are kept in memory


@dataclass(slots=True)
class Matches:
    """The result of matching: leases by the index of their waiter, and whether and when to try
    again.

    The permissions of a waiter in `refused` have changed since they were read, so it must poll
    again.
    """

    leases: dict[int, DispatchLease] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    has_more: bool = False
    has_fresh: bool = False  # whether a job is too new for workers that would only prefetch it
    # seconds after which a job that is reserved for other workers may be given to these waiters
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
        # when each job was first passed by a later job because of its model
        self._passed_since: dict[int, datetime] = {}

    async def give(self, waiters: Sequence[Waiter]) -> Matches:
        """Leases at most one job to each waiter. Each gets the best job that is available now."""
        matches = Matches()
        claimed_elsewhere: set[int] = set()
        deeper = 1
        without: frozenset[str] = frozenset()
        for _ in range(ROUNDS_MAX):
            remaining = [
                index
                for index, waiter in enumerate(waiters)
                if waiter.lanes and index not in matches.leases and index not in matches.refused
            ]
            if not remaining:
                break
            step = _Round(self, [waiters[index] for index in remaining], claimed_elsewhere, deeper)
            step.without = without
            leases, refused = await self._hot.lease(
                step.probe(), step.choose, seconds=self._lease_seconds
            )
            for lease in leases:
                index = remaining[step.chosen.pop(lease.dispatch_id)]
                matches.leases[index] = lease
                self._note(lease, waiters[index])
            matches.refused |= {remaining[step.chosen.pop(dispatch_id)] for dispatch_id in refused}
            matches.has_fresh |= step.has_fresh
            matches.held_seconds = step.held_seconds
            self._fair_share.given(lease.lane for lease in leases)
            # Chosen jobs that were not leased have been leased by other processes. They are
            # excluded from the next round.
            claimed_elsewhere |= step.chosen.keys()
            is_short = len(leases) + len(refused) < len(remaining)
            matches.has_more = is_short and bool(step.chosen or refused or (step.cut and leases))
            if is_short and step.unknown:
                await self.model_sets.read(step.unknown)
            if not is_short or not (step.chosen or refused or step.cut or step.unknown):
                break
            # The next probe skips jobs that none of these waiters can run, because there may be
            # suitable jobs behind them.
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
        """Records when jobs were first passed. The times are only kept in memory, so they start
        again after a restart.
        """
        for dispatch_id in passed:
            self._passed_since.setdefault(dispatch_id, now)
        while len(self._passed_since) > PASSED_REMEMBERED_MAX:
            del self._passed_since[next(iter(self._passed_since))]


class _Round:
    """A probe of the lanes, and the choice of jobs from its candidates."""

    def __init__(
        self, matcher: Matcher, waiters: Sequence[Waiter], claimed_elsewhere: set[int], deeper: int
    ) -> None:
        self._matcher = matcher
        self._waiters = waiters
        self._claimed_elsewhere = claimed_elsewhere
        self._lanes = sorted(frozenset().union(*{waiter.lanes for waiter in waiters}))
        self._limit = self._depth(deeper)
        self.without: frozenset[str] = frozenset()
        self.unknown: dict[str, int] = {}  # a dispatch for each unknown model set
        self.lacked_by_all: frozenset[str] = frozenset()
        self.chosen: dict[int, int] = {}  # dispatch id → index of the waiter
        self.cut: frozenset[QueueLane] = frozenset()
        self.has_fresh = False
        self.held_seconds: float | None = None

    def _depth(self, deeper: int) -> int:
        """Returns the number of rows to read from each lane. They must suffice for all waiters, but
        fewer are read per lane if there are many lanes.
        """
        needed = len(self._waiters) + len(self._claimed_elsewhere)
        if any(waiter.models_loaded for waiter in self._waiters):
            needed += AFFINITY_WINDOW
        lanes = max(1, len(self._lanes))
        per_lane = needed if lanes <= 2 else max(PROBE_ROWS_MIN, 2 * needed // lanes)
        return min(per_lane * deeper, PROBE_ROWS_MAX)

    def probe(self) -> Probe:
        affinities = {name for waiter in self._waiters for name in waiter.affinities}
        return Probe(self._lanes, sorted(affinities), self._limit, sorted(self.without))

    def choose(self, candidates: list[DispatchCandidate]) -> list[Claim]:
        matcher = self._matcher
        by_lane = group_by_lane(candidates)
        self.cut = frozenset(lane for lane, rows in by_lane.items() if len(rows) >= self._limit)
        now = matcher._clock()
        self._waiters, self.unknown = matcher.model_sets.judge(self._waiters, candidates)
        lacked = frozenset.intersection(*(waiter.lacking for waiter in self._waiters))
        self.lacked_by_all = lacked - self.unknown.keys()
        choices, passed, self.has_fresh, self.held_seconds = match_waiters(
            candidates,
            self._waiters,
            now=now,
            starts=matcher._fair_share.starts(by_lane),
            cut=self.cut,
            elsewhere=self._claimed_elsewhere,
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
