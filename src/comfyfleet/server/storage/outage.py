"""Logs the start and the end of an outage of the object store, once each: it is full, or can't be reached."""

import logging
import threading
import time

from comfyfleet.errors import LOGGED, StoreFull, Unavailable

logger = logging.getLogger(__name__)
# An outage is over when a call succeeds this many seconds after the last failure: on a full disk, small files often
# still fit.
SETTLE_SECONDS = 5.0


class StoreOutage:
    """Called from several threads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failed_at: float | None = None
        self._is_full = False

    @property
    def is_full(self) -> bool:
        return self._is_full

    def note_failure(self, error: Unavailable) -> None:
        error.add_note(LOGGED)
        with self._lock:
            is_new, self._failed_at = self._failed_at is None, time.monotonic()
            self._is_full = self._is_full or isinstance(error, StoreFull)
        if is_new:
            logger.error("%s can't be used: %s", self._name, error.message)

    def note_success(self, *, has_written: bool) -> None:
        """A read proves nothing about a store that is full."""
        if self._failed_at is None or (self._is_full and not has_written):
            return
        with self._lock:
            failed_at = self._failed_at
            if failed_at is None or time.monotonic() - failed_at < SETTLE_SECONDS:
                return
            self._failed_at, self._is_full = None, False
        logger.warning("%s can be used again", self._name)
