"""Manages the polls that wait for a job, grouped by the lanes and backends of their workers, and
the heartbeats that wait for an order.
"""

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

MODELS_PER_WAITER_MAX = 8  # maximum number of loaded models that a waiter is indexed by
SHORTLIST_PER_GROUP_MAX = 64  # requests of a group that are woken together
_numbers = count()


class PollRequest:
    """A waiting poll, with its waiter, its deadline, and the future that receives the lease."""

    __slots__ = ("deadline", "future", "is_being_served", "key", "looked_at", "timer", "waiter")

    def __init__(
        self, waiter: Waiter, future: "asyncio.Future[DispatchLease | None]", deadline: float
    ):
        self.waiter = waiter
        self.future = future
        self.deadline = deadline
        # When the worker's permissions were last read, according to the event loop's clock.
        self.looked_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.is_being_served = False  # whether a statement that may lease a job for it is running
        # The sort key. It is only set when the request must wait, because most polls get a job
        # immediately.
        self.key: tuple[float, ...] = ()

    def set_order_key(self) -> None:
        """Sets the sort key. Among equal requests, the one that has waited the longest comes
        first.
        """
        self.key = (*waiter_rank(self.waiter), next(_numbers))

    def __lt__(self, other: "PollRequest") -> bool:
        return self.key < other.key


# The properties that all waiters of a group share: their lanes and the key of their backends'
# offers.
GroupKey: TypeAlias = tuple[frozenset[QueueLane], str | None]


def group_key(waiter: Waiter) -> GroupKey:
    return waiter.lanes, waiter.offer.key if waiter.offer else None


class WaiterGroup:
    """The requests of workers that may run the same lanes on equivalent backends."""

    __slots__ = ("best", "by_model", "kind")

    def __init__(self, kind: GroupKey) -> None:
        self.kind = kind
        self.best: list[PollRequest] = []
        self.by_model: dict[str, list[PollRequest]] = {}

    def add(self, request: PollRequest) -> None:
        insort(self.best, request)
        for model in request.waiter.models_loaded[:MODELS_PER_WAITER_MAX]:
            insort(self.by_model.setdefault(model, []), request)

    def remove(self, request: PollRequest) -> None:
        _remove_request(self.best, request)
        for model in request.waiter.models_loaded[:MODELS_PER_WAITER_MAX]:
            _remove_request(self.by_model[model], request)
            if not self.by_model[model]:
                del self.by_model[model]

    def first(self, count_max: int) -> Iterator[PollRequest]:
        """Yields up to `count_max` of the best requests by load, and up to `count_max` of the best
        requests for each loaded model.
        """
        for line in (self.best, *self.by_model.values()):
            yield from islice(
                (request for request in line if not request.is_being_served), count_max
            )


def _remove_request(line: list[PollRequest], request: PollRequest) -> None:
    del line[bisect_left(line, request)]


class WaiterPool:
    """The waiting polls of a process, indexed by lane, loaded model and affinity."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, WaiterGroup] = {}
        self._by_lane: dict[QueueLane, set[GroupKey]] = {}
        self._by_affinity: dict[str, set[PollRequest]] = {}
        self._all: set[PollRequest] = set()
        self._prefetching: dict[str, PollRequest] = {}  # the latest prefetch request by worker

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request: PollRequest) -> bool:
        return request in self._all

    def __iter__(self) -> Iterator[PollRequest]:
        return iter(list(self._all))

    def add(self, request: PollRequest) -> None:
        request.set_order_key()
        kind = group_key(request.waiter)
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = WaiterGroup(kind)
            for lane in request.waiter.lanes:
                self._by_lane.setdefault(lane, set()).add(kind)
        group.add(request)
        for affinity in request.waiter.affinities:
            self._by_affinity.setdefault(affinity, set()).add(request)
        self._all.add(request)
        if request.waiter.is_prefetch:
            self._prefetching[request.waiter.worker_id] = request

    def discard(self, request: PollRequest) -> None:
        if request not in self._all:
            return
        self._all.discard(request)
        if self.prefetching(request.waiter.worker_id) is request:
            del self._prefetching[request.waiter.worker_id]
        group = self._groups[group_key(request.waiter)]
        group.remove(request)
        if not group.best:
            self._remove_group(group)
        for affinity in request.waiter.affinities:
            self._by_affinity[affinity].discard(request)
            if not self._by_affinity[affinity]:
                del self._by_affinity[affinity]

    def _remove_group(self, group: WaiterGroup) -> None:
        del self._groups[group.kind]
        for lane in group.kind[0]:
            self._by_lane[lane].discard(group.kind)
            if not self._by_lane[lane]:
                del self._by_lane[lane]

    def prefetching(self, worker_id: str) -> PollRequest | None:
        """Returns the worker's waiting poll for a job to prefetch, if any."""
        return self._prefetching.get(worker_id)

    def lanes(self) -> Iterable[QueueLane]:
        return self._by_lane.keys()

    def has_waiter_for(self, lanes: Iterable[QueueLane]) -> bool:
        return any(lane in self._by_lane for lane in lanes)

    def waited_affinities(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._by_affinity]

    def shortlist(
        self, jobs_by_lane: Counter[QueueLane], affinities: Iterable[str] = ()
    ) -> list[PollRequest]:
        """Returns the requests to wake: the best ones for the jobs that have arrived in these lanes
        or are bound to these affinities.

        A group covers several lanes, so as many of its requests are woken as jobs have arrived in
        all of these lanes. Otherwise, only its first request would be woken for two jobs, and the
        second job would be given to a worker that only prefetches it.
        """
        requests: dict[PollRequest, None] = {}
        jobs_of: Counter[GroupKey] = Counter()
        for lane, jobs in jobs_by_lane.items():
            for kind in self._by_lane.get(lane, ()):
                jobs_of[kind] += jobs
        for kind, jobs in jobs_of.items():
            most = min(jobs, SHORTLIST_PER_GROUP_MAX)
            requests |= dict.fromkeys(self._groups[kind].first(most))
        for affinity in affinities:
            free = [
                request
                for request in self._by_affinity.get(affinity, ())
                if not request.is_being_served
            ]
            requests |= dict.fromkeys(nsmallest(SHORTLIST_PER_GROUP_MAX, free))
        return list(requests)


# The subject of an order: a dispatch id or a worker id.
Subject: TypeAlias = int | str


class HeartbeatWaiters:
    """Heartbeats that wait for an order to their dispatch or worker."""

    def __init__(self) -> None:
        self._waiting: dict[Subject, set[asyncio.Event]] = {}

    @contextmanager
    def waiting(self, *subjects: Subject) -> Iterator[asyncio.Event]:
        """Yields an event that is set when there is an order for any of the subjects."""
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
        """Sets the events of these subjects. None means all subjects."""
        for subject in list(self._waiting) if subjects is None else subjects:
            for event in self._waiting.get(subject, ()):
                event.set()
