"""Workers that wait for a job, grouped by what they may run, best first; and heartbeats that wait for an order."""

import asyncio
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from heapq import nsmallest
from itertools import count, islice
from typing import TypeAlias

from comfyfleet.server.queue.decide import waiter_rank
from comfyfleet.server.queue.model import DispatchLease, QueueLane, Waiter

MODELS_PER_WAITER_MAX = 8
SHORTLIST_PER_GROUP_MAX = 64
_numbers = count()


class PollRequest:
    """One who asks, and the place where the answer goes."""

    __slots__ = ("deadline", "future", "in_hand", "key", "looked_at", "timer", "waiter")

    def __init__(
        self, waiter: Waiter, future: "asyncio.Future[DispatchLease | None]", deadline: float
    ):
        self.waiter = waiter
        self.future = future
        self.deadline = deadline
        self.looked_at = 0.0  # by the loop's time: when its worker's rights were read last
        self.timer: asyncio.TimerHandle | None = None
        self.in_hand = False  # a statement that may give it a job is on its way
        self.key: tuple[float, ...] = ()  # when it has to wait: most get a job at once

    def set_order_key(self) -> None:
        """Among equals, whoever has waited longest."""
        self.key = (*waiter_rank(self.waiter), next(_numbers))

    def __lt__(self, other: "PollRequest") -> bool:
        return self.key < other.key


# Whom a line is for: the lanes, and what the backends offer.
GroupKey: TypeAlias = tuple[frozenset[QueueLane], str | None]


def group_key(waiter: Waiter) -> GroupKey:
    return waiter.lanes, waiter.offer.key if waiter.offer else None


class WaiterGroup:
    """Those who may run exactly the same lanes, on backends that offer the same."""

    __slots__ = ("best", "by_model", "kind")

    def __init__(self, kind: GroupKey) -> None:
        self.kind = kind
        self.best: list[PollRequest] = []
        self.by_model: dict[str, list[PollRequest]] = {}

    def add(self, asked: PollRequest) -> None:
        insort(self.best, asked)
        for model in asked.waiter.models_loaded[:MODELS_PER_WAITER_MAX]:
            insort(self.by_model.setdefault(model, []), asked)

    def remove(self, asked: PollRequest) -> None:
        _remove_request(self.best, asked)
        for model in asked.waiter.models_loaded[:MODELS_PER_WAITER_MAX]:
            _remove_request(self.by_model[model], asked)
            if not self.by_model[model]:
                del self.by_model[model]

    def first(self, wanted: int) -> Iterator[PollRequest]:
        """The best, whatever the job needs: by load, and per model that might be asked for."""
        for line in (self.best, *self.by_model.values()):
            yield from islice((asked for asked in line if not asked.in_hand), wanted)


def _remove_request(line: list[PollRequest], asked: PollRequest) -> None:
    del line[bisect_left(line, asked)]


class WaiterPool:
    def __init__(self) -> None:
        self._lines: dict[GroupKey, WaiterGroup] = {}
        self._by_lane: dict[QueueLane, set[GroupKey]] = {}
        self._by_affinity: dict[str, set[PollRequest]] = {}
        self._all: set[PollRequest] = set()
        self._prefetching: dict[str, PollRequest] = {}  # by worker; its latest

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, asked: PollRequest) -> bool:
        return asked in self._all

    def __iter__(self) -> Iterator[PollRequest]:
        return iter(list(self._all))

    def add(self, asked: PollRequest) -> None:
        asked.set_order_key()
        kind = group_key(asked.waiter)
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = WaiterGroup(kind)
            for lane in asked.waiter.lanes:
                self._by_lane.setdefault(lane, set()).add(kind)
        line.add(asked)
        for affinity in asked.waiter.affinities:
            self._by_affinity.setdefault(affinity, set()).add(asked)
        self._all.add(asked)
        if asked.waiter.is_prefetch:
            self._prefetching[asked.waiter.worker_id] = asked

    def discard(self, asked: PollRequest) -> None:
        if asked not in self._all:
            return
        self._all.discard(asked)
        if self.prefetching(asked.waiter.worker_id) is asked:
            del self._prefetching[asked.waiter.worker_id]
        line = self._lines[group_key(asked.waiter)]
        line.remove(asked)
        if not line.best:
            self._forget(line)
        for affinity in asked.waiter.affinities:
            self._by_affinity[affinity].discard(asked)
            if not self._by_affinity[affinity]:
                del self._by_affinity[affinity]

    def _forget(self, line: WaiterGroup) -> None:
        del self._lines[line.kind]
        for lane in line.kind[0]:
            self._by_lane[lane].discard(line.kind)
            if not self._by_lane[lane]:
                del self._by_lane[lane]

    def prefetching(self, worker_id: str) -> PollRequest | None:
        """The worker's wait for a job that it would not run at once."""
        return self._prefetching.get(worker_id)

    def lanes(self) -> Iterable[QueueLane]:
        return self._by_lane.keys()

    def has_waiter_for(self, lanes: Iterable[QueueLane]) -> bool:
        return any(lane in self._by_lane for lane in lanes)

    def waited_affinities(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._by_affinity]

    def shortlist(
        self, wanted: Counter[QueueLane], affinities: Iterable[str] = ()
    ) -> list[PollRequest]:
        """Those among whom the best for each arriving job is; nobody else is disturbed.

        A line stands for several lanes: as many are called as jobs have come into any of them, or
        the first of a line would be called for two jobs, and the other job be left for a prefetch.
        """
        found: dict[PollRequest, None] = {}
        jobs_of: Counter[GroupKey] = Counter()
        for lane, jobs in wanted.items():
            for kind in self._by_lane.get(lane, ()):
                jobs_of[kind] += jobs
        for kind, jobs in jobs_of.items():
            most = min(jobs, SHORTLIST_PER_GROUP_MAX)
            found |= dict.fromkeys(self._lines[kind].first(most))
        for affinity in affinities:
            those = [each for each in self._by_affinity.get(affinity, ()) if not each.in_hand]
            found |= dict.fromkeys(nsmallest(SHORTLIST_PER_GROUP_MAX, those))
        return list(found)

    def another(self, waiter: Waiter) -> bool:
        """Somebody else, who would run it now, waits for a job that this one could get."""
        entitled = {kind for lane in waiter.lanes for kind in self._by_lane.get(lane, ())}
        firsts = (asked for kind in entitled for asked in self._lines[kind].best[:2])
        return any(
            asked.waiter.worker_id != waiter.worker_id and not asked.waiter.is_prefetch
            for asked in firsts
        )


# The id of a dispatch, or of a worker.
Subject: TypeAlias = int | str


class HeartbeatWaiters:
    def __init__(self) -> None:
        self._waiting: dict[Subject, set[asyncio.Event]] = {}

    @contextmanager
    def waiting(self, *subjects: Subject) -> Iterator[asyncio.Event]:
        """The event is set when something is pushed about any of the subjects."""
        event = asyncio.Event()
        for subject in subjects:
            self._waiting.setdefault(subject, set()).add(event)
        try:
            yield event
        finally:
            for subject in subjects:
                self._waiting[subject].discard(event)
                if not self._waiting[subject]:
                    del self._waiting[subject]

    def push(self, subjects: Iterable[Subject] | None) -> None:
        """None: to all."""
        for subject in list(self._waiting) if subjects is None else subjects:
            for event in self._waiting.get(subject, ()):
                event.set()
