"""Recognizes outages of a database, and logs only the start and the end of each outage.

During an outage, each use of the database raises Unavailable. A note on the error marks the outage
as logged, so that sweeps, relays, streams and requests log their own failures only at DEBUG.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from comfyfleet.errors import LOGGED, FleetError, StoreFull, Unavailable, is_full_disk, is_logged
from comfyfleet.server.db.errors import is_caused_by_disconnect, log_level_of

outage_logger = logging.getLogger("comfyfleet.server.db.database")
# An outage is over after this many seconds without a lost connection. After a restart of the
# database, new connections work immediately, while connections that were lost during the outage are
# still being detected one by one.
SETTLE_SECONDS = 3.0


class OutageLog:
    """Logs a single line for the start and for the end of each outage of a database."""

    def __init__(self, name: str, settle_seconds: float = SETTLE_SECONDS) -> None:
        self.part = ""  # The name of this database in `Unavailable` errors.
        self._name = name
        self._settle_seconds = settle_seconds
        self._is_away = False
        self._away_since = 0.0
        self._has_ended = False
        self._ending: asyncio.TimerHandle | None = None

    @property
    def _label(self) -> str:
        return f"{self.part} ({self._name})" if self.part else f"database {self._name}"

    @property
    def is_away(self) -> bool:
        """Checks whether the last call failed. Returns False as soon as the database responds."""
        return self._is_away and self._ending is None

    @property
    def seconds_away(self) -> float:
        """Returns the duration of the current outage in seconds, or 0 without an outage."""
        return time.monotonic() - self._away_since if self._is_away else 0.0

    @property
    def has_ended(self) -> bool:
        """Checks whether an outage has ended since the last call of `forget_end`."""
        return self._has_ended

    def forget_end(self) -> None:
        self._has_ended = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self.note_loss(error)
            raise
        self.note_success()

    def note_loss(self, error: Unavailable) -> None:
        """Logs an outage. Ignores an error that is already logged, which happens if another
        database caused it inside a transaction of this one.
        """
        if is_logged(error):
            return
        error.add_note(LOGGED)
        error.part = self.part
        self._keep_open()
        if not self._is_away:
            self._is_away, self._away_since = True, time.monotonic()
            outage_logger.warning("%s is unavailable: %s", self._label, error.message)

    def note_success(self) -> None:
        if self._is_away and self._ending is None:
            loop = asyncio.get_running_loop()
            self._ending = loop.call_later(self._settle_seconds, self._end)

    def close(self) -> None:
        if self._ending is not None:
            self._end()

    def _keep_open(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None

    def _end(self) -> None:
        self._keep_open()
        self._is_away, self._has_ended = False, True
        outage_logger.warning("%s is available again", self._label)


def as_unavailable(error: BaseException) -> Unavailable | None:
    """Converts errors such as a lost connection or a full disk to Unavailable, even if they are in
    an exception group. Returns None for other errors.
    """
    if isinstance(error, Unavailable):
        return error
    if is_full_disk(error):
        return StoreFull(f"a disk of this control plane is full: {error}")
    if isinstance(error, BaseExceptionGroup):
        causes = [as_unavailable(inner) for inner in error.exceptions]
        return causes[0] if all(causes) else None
    if isinstance(error, Exception) and is_caused_by_disconnect(error):
        return Unavailable(f"the connection to the database was lost: {error}")
    return None


@contextmanager
def lost_as_unavailable() -> Iterator[None]:
    """Converts errors of lost connections to Unavailable for code that uses a driver directly."""
    try:
        yield
    except Exception as error:
        away = as_unavailable(error)
        if away is None or away is error:
            raise
        raise away from error


@contextmanager
def errors_logged(what: str) -> Iterator[None]:
    """Logs an error and continues, so that one failure doesn't block the rest."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 — logged, whatever it is
        log_failure(outage_logger, error, "%s", what)


def log_failure(
    logger: logging.Logger, error: BaseException, message: str, *values: object
) -> None:
    """Logs the failure of background work that will be retried.

    Failures due to a logged outage are logged at DEBUG only. Other expected errors are logged in
    one line, and bugs with a traceback.
    """
    known = error if isinstance(error, FleetError) else as_unavailable(error)
    if known is None:
        logger.error(message, *values, exc_info=error)
    else:
        logger.log(log_level_of(known), "%s: %s", message % values, known.message)
