"""Tells once that a database is away, and once that it is back, however many ask for it meanwhile."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from comfyfleet.kernel.errors import FleetError, Unavailable

logger = logging.getLogger(__name__)
TOLD = "the log tells of this outage"


class Outages:
    """Of one database."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_away = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self._note(error)
            raise
        if self._is_away:
            self._is_away = False
            logger.warning("database %s is back", self._name)

    def _note(self, error: Unavailable) -> None:
        """One that another database has raised, inside of a transaction here, is that one's."""
        if is_told(error):
            return
        error.add_note(TOLD)
        if not self._is_away:
            self._is_away = True
            logger.warning("database %s is away: %s", self._name, error.message)


def is_told(error: BaseException) -> bool:
    return TOLD in getattr(error, "__notes__", ())


def level_of(error: FleetError) -> int:
    """For whoever can't go on because of it: a line for each would hide the rest of the log."""
    return logging.DEBUG if is_told(error) else logging.WARNING
