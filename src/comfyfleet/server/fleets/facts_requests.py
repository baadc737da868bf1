"""Requests to workers to read their backends' facts, at whichever control plane the workers
poll."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any
from uuid import uuid4

from comfyfleet.api.worker import FACTS_TOKENS_MAX, FactsWanted

# Seconds until a request expires if its worker doesn't poll or send a heartbeat.
DELIVERY_SECONDS = 10.0
# Maximum workers in one message to other control planes.
NAMED_MAX = 30
SILENT_KEPT_MAX = 10_000
REPORTS_KEPT_MAX = 10_000
WANTED, REPORTED, CHANGED = "facts_wanted", "facts_reported", "facts_changed"


@dataclass
class _Wanted:
    until: float
    tokens: list[str] = field(default_factory=list)
    is_urgent: bool = False


@dataclass
class _Asking:
    missing: set[str]
    is_done: asyncio.Event = field(default_factory=asyncio.Event)


class FactsRequests:
    """Tracks requests and reports. `announce` notifies other control planes, and `end_polls` ends
    workers' polls so that they get their requests."""

    def __init__(
        self,
        announce: Callable[[dict[str, Any]], None],
        end_polls: Callable[[Iterable[str]], None],
    ) -> None:
        self._announce = announce
        self._end_polls = end_polls
        self._wanted: dict[str, _Wanted] = {}  # by worker
        self._asking: dict[str, _Asking] = {}  # by token
        self._silent: dict[str, None] = {}  # workers that did not respond to the last request
        self._changed: dict[int, float] = {}  # by fleet, by the monotonic clock
        self._reported_at: dict[str, float] = {}  # report times by worker, oldest first

    async def ask(
        self, worker_ids: Collection[str], *, is_urgent: bool = False, seconds: float
    ) -> None:
        """Waits until these workers have read their backends' facts after this call, or until
        `seconds` have passed.

        A worker that didn't respond in time gets later requests too, but isn't waited for until it
        responds.
        """
        token = uuid4().hex
        asking = self._asking[token] = _Asking(set(worker_ids) - self._silent.keys())
        try:
            self._order(sorted(worker_ids), token, is_urgent=is_urgent)
            if asking.missing:
                async with asyncio.timeout(seconds):
                    await asking.is_done.wait()
        except TimeoutError:
            self._silent |= dict.fromkeys(asking.missing)
            while len(self._silent) > SILENT_KEPT_MAX:
                del self._silent[next(iter(self._silent))]
        finally:
            del self._asking[token]

    def _order(self, worker_ids: Sequence[str], token: str, *, is_urgent: bool) -> None:
        for start in range(0, len(worker_ids), NAMED_MAX):
            named = worker_ids[start : start + NAMED_MAX]
            order = {"workers": named, "token": token, "is_urgent": is_urgent}
            self._want(order)
            self._announce({WANTED: order})

    def _want(self, order: Mapping[str, Any]) -> None:
        now = monotonic()
        # Requests expire because workers that poll another control plane don't collect them here.
        self._wanted = {name: each for name, each in self._wanted.items() if each.until >= now}
        for worker_id in order["workers"]:
            wanted = self._wanted.get(worker_id)
            if wanted is None:
                wanted = self._wanted[worker_id] = _Wanted(now + DELIVERY_SECONDS)
            wanted.until = now + DELIVERY_SECONDS
            wanted.tokens = [*wanted.tokens, order["token"]][-FACTS_TOKENS_MAX:]
            wanted.is_urgent = wanted.is_urgent or order["is_urgent"]
        self._end_polls(order["workers"])

    def is_wanted(self, worker_id: str) -> bool:
        wanted = self._wanted.get(worker_id)
        return wanted is not None and wanted.until >= monotonic()

    def take(self, worker_id: str) -> FactsWanted | None:
        """Removes and returns the request for the next response to the worker, or None."""
        wanted = self._wanted.pop(worker_id, None)
        if wanted is None or wanted.until < monotonic():
            return None
        return FactsWanted(tokens=tuple(wanted.tokens), is_urgent=wanted.is_urgent)

    def reported(self, worker_id: str, tokens: Sequence[str]) -> None:
        """Notes that a worker has read its backend's facts after these requests."""
        report = {"worker": worker_id, "tokens": list(tokens)}
        self._note(report)
        self._announce({REPORTED: report})

    def have_reported(self, worker_ids: Collection[str], *, since: float) -> bool:
        """Checks whether all these workers have reported to any control plane since a time, by the
        monotonic clock of this process."""
        never = float("-inf")
        return all(self._reported_at.get(worker_id, never) >= since for worker_id in worker_ids)

    def _note(self, report: Mapping[str, Any]) -> None:
        self._silent.pop(report["worker"], None)
        self._reported_at.pop(report["worker"], None)
        self._reported_at[report["worker"]] = monotonic()
        if len(self._reported_at) > REPORTS_KEPT_MAX:
            del self._reported_at[next(iter(self._reported_at))]
        for token in report["tokens"]:
            asking = self._asking.get(token)
            if asking is not None:
                asking.missing.discard(report["worker"])
                if not asking.missing:
                    asking.is_done.set()

    def note_change(self, fleet_ids: Sequence[int]) -> None:
        """Notes that a call may have changed the backends of these fleets."""
        self._changed |= dict.fromkeys(fleet_ids, monotonic())
        self._announce({CHANGED: list(fleet_ids)})

    def changed_at(self, fleet_id: int) -> float | None:
        """Returns the time of the last such call, by the monotonic clock of this process."""
        return self._changed.get(fleet_id)

    def heard(self, message: Mapping[str, Any]) -> None:
        """Handles a message from another control plane."""
        if WANTED in message:
            self._want(message[WANTED])
        if REPORTED in message:
            self._note(message[REPORTED])
        if CHANGED in message:
            self._changed |= dict.fromkeys(message[CHANGED], monotonic())
