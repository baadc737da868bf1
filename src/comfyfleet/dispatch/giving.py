"""One batch: look into the lanes, decide who gets what, and claim it; again for those left over."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from comfyfleet.dispatch.decide import AFFINITY_WINDOW, Choice, Rules, by_lane, choose
from comfyfleet.dispatch.model import Candidate, Lane, Lease, Waiter
from comfyfleet.dispatch.modelsets import ModelSets
from comfyfleet.dispatch.store.hot import Claim, HotStore, Probe
from comfyfleet.dispatch.switch_costs import SwitchCosts
from comfyfleet.dispatch.turns import Turns
from comfyfleet.kernel.clock import Clock
from comfyfleet.kernel.settings import Settings

PASSES_MAX = 5
PROBE_ROWS_MIN = 8
PROBE_ROWS_MAX = 512
PASSED_REMEMBERED_MAX = 10_000


@dataclass(slots=True)
class Given:
    """Leases by the index of the waiter who got them, and whether there might be more to give.

    Whoever is `refused` was given orders that its caller has not seen: it must look anew.
    """

    leases: dict[int, Lease] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    has_more: bool = False
    has_fresh: bool = False  # too new for those who would only prefetch it
    held_seconds: float | None = None  # after so long, a job held for others may go to them


class Giving:
    def __init__(
        self, hot: HotStore, *, settings: Settings, clock: Clock, new_token: Callable[[], UUID]
    ) -> None:
        self._hot = hot
        self._lease_seconds = settings.lease_seconds
        self.switch_costs = SwitchCosts()
        self._rules = Rules(
            timedelta(seconds=settings.affinity_max_wait_seconds),
            prefetch_after=timedelta(seconds=settings.prefetch_after_seconds),
            costs=self.switch_costs,
        )
        self._clock = clock
        self._new_token = new_token
        self._turns = Turns()
        self.model_sets = ModelSets()
        self._passed_since: dict[
            int, datetime
        ] = {}  # jobs that others went before, by their models

    async def give(self, waiters: Sequence[Waiter]) -> Given:
        """At most one lease per waiter, the best there is at this moment."""
        given = Given()
        in_other_hands: set[int] = set()
        deeper = 1
        without: frozenset[str] = frozenset()
        for _ in range(PASSES_MAX):
            left = [
                place
                for place, waiter in enumerate(waiters)
                if waiter.lanes and place not in given.leases and place not in given.refused
            ]
            if not left:
                break
            step = _Pass(self, [waiters[place] for place in left], in_other_hands, deeper)
            step.without = without
            leases, refused = await self._hot.lease(
                step.probe(), step.choose, seconds=self._lease_seconds
            )
            for lease in leases:
                place = left[step.chosen.pop(lease.dispatch_id)]
                given.leases[place] = lease
                self._note(lease, waiters[place])
            given.refused |= {left[step.chosen.pop(each)] for each in refused}
            given.has_fresh |= step.has_fresh
            given.held_seconds = step.held_seconds
            self._turns.given(lease.lane for lease in leases)
            # What was chosen and not won is in other hands: looking again would find it again.
            in_other_hands |= step.chosen.keys()
            is_short = len(leases) + len(refused) < len(left)
            given.has_more = is_short and bool(step.chosen or refused or (step.cut and leases))
            if is_short and step.unknown:
                await self.model_sets.read(step.unknown)
            if not is_short or not (step.chosen or refused or step.cut or step.unknown):
                break
            # Behind jobs that nobody of them can run there may be others.
            without |= step.lacked_by_all
            deeper *= 2
        return given

    def _note(self, lease: Lease, waiter: Waiter) -> None:
        self._passed_since.pop(lease.dispatch_id, None)
        if waiter.fleet_id is not None and lease.model_key is not None:
            self.switch_costs.warm.given(
                lease.worker_id, waiter.fleet_id, lease.model_key, self._clock()
            )

    def _remember(self, passed: Iterable[int], now: datetime) -> None:
        """In memory only: what is forgotten, or told to another process, is counted anew."""
        for dispatch_id in passed:
            self._passed_since.setdefault(dispatch_id, now)
        while len(self._passed_since) > PASSED_REMEMBERED_MAX:
            del self._passed_since[next(iter(self._passed_since))]


class _Pass:
    """What is known of one look into the lanes."""

    def __init__(
        self, giving: Giving, waiters: Sequence[Waiter], in_other_hands: set[int], deeper: int
    ) -> None:
        self._giving = giving
        self._waiters = waiters
        self._in_other_hands = in_other_hands
        self._lanes = sorted(frozenset().union(*{waiter.lanes for waiter in waiters}))
        self._limit = self._depth(deeper)
        self.without: frozenset[str] = frozenset()
        self.unknown: dict[str, int] = {}  # model set → a dispatch that has it
        self.lacked_by_all: frozenset[str] = frozenset()
        self.chosen: dict[int, int] = {}  # dispatch id → index of the waiter
        self.cut: frozenset[Lane] = frozenset()
        self.has_fresh = False
        self.held_seconds: float | None = None

    def _depth(self, deeper: int) -> int:
        """Enough rows of each lane for all who ask; with many lanes, each needs to give fewer."""
        wanted = len(self._waiters) + len(self._in_other_hands)
        if any(waiter.models_loaded for waiter in self._waiters):
            wanted += AFFINITY_WINDOW
        lanes = max(1, len(self._lanes))
        each = wanted if lanes <= 2 else max(PROBE_ROWS_MIN, 2 * wanted // lanes)
        return min(each * deeper, PROBE_ROWS_MAX)

    def probe(self) -> Probe:
        affinities = {name for waiter in self._waiters for name in waiter.affinities}
        return Probe(self._lanes, sorted(affinities), self._limit, sorted(self.without))

    def choose(self, found: list[Candidate]) -> list[Claim]:
        giving = self._giving
        read = by_lane(found)
        self.cut = frozenset(lane for lane, rows in read.items() if len(rows) >= self._limit)
        now = giving._clock()
        self._waiters, self.unknown = giving.model_sets.judge(self._waiters, found)
        lacked = frozenset.intersection(*(each.lacking for each in self._waiters))
        self.lacked_by_all = lacked - self.unknown.keys()
        choices, passed, self.has_fresh, self.held_seconds = choose(
            found,
            self._waiters,
            now=now,
            starts=giving._turns.starts(read),
            cut=self.cut,
            elsewhere=self._in_other_hands,
            passed_since=giving._passed_since,
            rules=giving._rules,
        )
        giving._remember(passed, now)
        self.chosen = {choice.candidate.id: choice.waiter for choice in choices}
        return [self._claim(choice) for choice in choices]

    def _claim(self, choice: Choice) -> Claim:
        waiter = self._waiters[choice.waiter]
        token = self._giving._new_token()
        return Claim(
            choice.candidate,
            token,
            waiter.worker_id,
            waiter.is_prefetch,
            waiter.key_hash,
            waiter.held_max,
        )
