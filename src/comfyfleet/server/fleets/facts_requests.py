"""Requests that workers read their backends' facts, even if they poll another control plane."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

from comfyfleet.api.worker import FACTS_TOKENS_MAX, FactsWanted

# Seconds until a request expires if its worker neither polls nor sends a heartbeat.
DELIVERY_SECONDS = 10.0
# Maximum number of workers in a message to other control planes.
NAMED_MAX = 30
SILENT_KEPT_MAX = 10_000
REPORTS_KEPT_MAX = 10_000
WANTED, REPORTED, CHANGED = "facts_wanted", "facts_reported", "facts_changed"


@dataclass
class _PendingRequest:
    until: float
    tokens: list[str] = field(default_factory=list)
    is_urgent: bool = False


@dataclass
class _Caller:
    missing: set[str]
    is_done: asyncio.Event = field(default_factory=asyncio.Event)


class FactsRequests:
    """Tracks requests and reports. `announce` notifies other control planes, and `end_polls` ends
    the polls of workers, so that they receive their requests.
    """

    def __init__(
        self,
        announce: Callable[[dict[str, Any]], None],
        end_polls: Callable[[Iterable[str]], None],
    ) -> None:
        self._announce = announce
        self._end_polls = end_polls
        self._pending: dict[str, _PendingRequest] = {}  # requests to deliver, by worker
        self._callers: dict[str, _Caller] = {}  # callers that wait for reports, by token
        self._silent: dict[str, None] = {}  # workers that did not respond to the last request
        self._changed: dict[int, float] = {}  # times of changes by fleet, from the monotonic clock
        self._reported_at: dict[str, float] = {}  # report times by worker, the oldest first

    async def ask(
        self, worker_ids: Collection[str], *, is_urgent: bool = False, seconds: float
    ) -> None:
        """Requests that these workers read their backends' facts. Waits until all have done so, or
        until `seconds` have passed.

        A worker that didn't respond in time still gets later requests. But callers don't wait for
        it until it has responded again.
        """
        token = uuid4().hex
        caller = self._callers[token] = _Caller(set(worker_ids) - self._silent.keys())
        try:
            self._order(sorted(worker_ids), token, is_urgent=is_urgent)
            if caller.missing:
                async with asyncio.timeout(seconds):
                    await caller.is_done.wait()
        except TimeoutError:
            self._silent |= dict.fromkeys(caller.missing)
            while len(self._silent) > SILENT_KEPT_MAX:
                del self._silent[next(iter(self._silent))]
        finally:
            del self._callers[token]

    def _order(self, worker_ids: Sequence[str], token: str, *, is_urgent: bool) -> None:
        for start in range(0, len(worker_ids), NAMED_MAX):
            named = worker_ids[start : start + NAMED_MAX]
            order = {"workers": named, "token": token, "is_urgent": is_urgent}
            self._want(order)
            self._announce({WANTED: order})

    def _want(self, order: Mapping[str, Any]) -> None:
        now = monotonic()
        # Requests expire, because workers that poll another control plane don't collect them here.
        self._pending = {
            name: request for name, request in self._pending.items() if request.until >= now
        }
        for worker_id in order["workers"]:
            request = self._pending.get(worker_id)
            if request is None:
                request = self._pending[worker_id] = _PendingRequest(now + DELIVERY_SECONDS)
            request.until = now + DELIVERY_SECONDS
            request.tokens = [*request.tokens, order["token"]][-FACTS_TOKENS_MAX:]
            request.is_urgent = request.is_urgent or order["is_urgent"]
        self._end_polls(order["workers"])

    def is_wanted(self, worker_id: str) -> bool:
        request = self._pending.get(worker_id)
        return request is not None and request.until >= monotonic()

    def take(self, worker_id: str) -> FactsWanted | None:
        """Removes and returns the pending request for a worker, or None. The caller sends it with
        its response to the worker.
        """
        request = self._pending.pop(worker_id, None)
        if request is None or request.until < monotonic():
            return None
        return FactsWanted(tokens=tuple(request.tokens), is_urgent=request.is_urgent)

    def reported(self, worker_id: str, tokens: Sequence[str]) -> None:
        """Records that a worker has read its backend's facts in response to these requests."""
        report = {"worker": worker_id, "tokens": list(tokens)}
        self._note(report)
        self._announce({REPORTED: report})

    def have_reported(self, worker_ids: Collection[str], *, since: float) -> bool:
        """Whether all these workers have reported to any control plane since a point in time.
        `since` is a time of this process's monotonic clock.
        """
        never = float("-inf")
        return all(self._reported_at.get(worker_id, never) >= since for worker_id in worker_ids)

    def _note(self, report: Mapping[str, Any]) -> None:
        self._silent.pop(report["worker"], None)
        self._reported_at.pop(report["worker"], None)
        self._reported_at[report["worker"]] = monotonic()
        if len(self._reported_at) > REPORTS_KEPT_MAX:
            del self._reported_at[next(iter(self._reported_at))]
        for token in report["tokens"]:
            caller = self._callers.get(token)
            if caller is not None:
                caller.missing.discard(report["worker"])
                if not caller.missing:
                    caller.is_done.set()

    def note_change(self, fleet_ids: Sequence[int]) -> None:
        """Records that a call may have changed the backends of these fleets."""
        self._changed |= dict.fromkeys(fleet_ids, monotonic())
        self._announce({CHANGED: list(fleet_ids)})

    def changed_at(self, fleet_id: int) -> float | None:
        """Returns the time of the last call that may have changed the fleet's backends, or None.
        The time is read from this process's monotonic clock.
        """
        return self._changed.get(fleet_id)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Handles a message from another control plane."""
        if WANTED in message:
            self._want(message[WANTED])
        if REPORTED in message:
            self._note(message[REPORTED])
        if CHANGED in message:
            self._changed |= dict.fromkeys(message[CHANGED], monotonic())
