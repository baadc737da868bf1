"""Requests to stop a worker, with their reasons and deadlines. They come from signals and from
notices about the machine."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from comfyfleet.signals import on_ending_signals
from comfyfleet.worker.platform import Notices

logger = logging.getLogger(__name__)

# Seconds reserved at the end of a shutdown for handing back unfinished jobs and deregistering. If
# the deadline is near, only this share of the remaining time is reserved.
RESERVE_SECONDS = 8.0
RESERVE_PART_MAX = 0.25
# Maximum seconds to wait for anything after a second stop request.
HURRY_SECONDS = 2.0
DEFAULT_NOTICE_SECONDS = {"rebalance": 3600.0, "spot": 110.0}
ShutdownReason: TypeAlias = Literal["shutdown", "spot", "rebalance"]


class StopRequest:
    """A stop request with its reason and deadline. The deadline can only move closer."""

    def __init__(
        self, changed: Callable[[], None] = lambda: None, *, is_logged: bool = True
    ) -> None:
        """Stores the callback that is called after each request. If `is_logged` is False, requests
        are not logged."""
        self.reason: ShutdownReason | None = None
        self.deadline = float("inf")  # monotonic time
        self.hurry_until = float("inf")
        self.reserve_seconds = RESERVE_SECONDS
        self.changed = changed
        self._is_logged = is_logged

    @property
    def asked(self) -> bool:
        return self.reason is not None

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def seconds_to(self, deadline: float) -> float:
        """Returns the seconds until a deadline of the monotonic clock. A second stop request
        shortens them."""
        return min(deadline, self.hurry_until) - time.monotonic()

    def ask(self, reason: ShutdownReason, seconds: float) -> None:
        if self.asked and seconds <= 0:
            self.hurry_until = min(self.hurry_until, time.monotonic() + HURRY_SECONDS)
        self.reason = reason if self.reason in (None, "rebalance") else self.reason
        self.deadline = min(self.deadline, time.monotonic() + max(0.0, seconds))
        self.reserve_seconds = min(RESERVE_SECONDS, RESERVE_PART_MAX * max(0.0, seconds))
        if self._is_logged:
            extra = {"reason": reason, "seconds": round(seconds)}
            logger.info("stopping; no more jobs will be taken", extra=extra)
        self.changed()


async def stop_on_notices(notices: Notices, stop: StopRequest) -> None:
    async for notice in notices.notices():
        seconds = DEFAULT_NOTICE_SECONDS[notice.kind]
        if notice.at is not None:
            seconds = (notice.at - datetime.now(UTC)).total_seconds()
        stop.ask(notice.kind, seconds)


def stop_on_signals(stop: StopRequest, grace_seconds: float) -> AbstractContextManager[None]:
    """Stops the worker on signals. The first signal allows the grace time, and the second one stops
    it immediately."""
    return on_ending_signals(lambda _: stop.ask("shutdown", 0.0 if stop.asked else grace_seconds))
