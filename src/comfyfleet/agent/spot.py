"""Notices that this machine will be taken away: EC2's spot interruptions and rebalance advice."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from comfyfleet.agent.metadata import Metadata, NoMetadata

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
# Not on EC2, as far as can be seen: a machine may also be quicker than its metadata service.
ABSENT_LOOK_SECONDS = 60.0
ACTION, REBALANCE = "spot/instance-action", "events/recommendations/rebalance"
Kind: TypeAlias = Literal["spot", "rebalance"]
Contact: TypeAlias = Literal["unknown", "absent", "there", "lost"]


@dataclass(frozen=True, slots=True)
class Notice:
    """`at`: when the machine goes, where that is told; rebalance advice has no such moment."""

    kind: Kind
    at: datetime | None = None


class SpotWatch:
    """Looks at the metadata service until it is closed; never raises because of an answer."""

    def __init__(
        self,
        metadata: Metadata,
        *,
        look_seconds: float = LOOK_SECONDS,
        absent_look_seconds: float = ABSENT_LOOK_SECONDS,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._metadata = metadata
        self._look_seconds = look_seconds
        self._absent_look_seconds = absent_look_seconds
        self._pause = pause
        self._contact: Contact = "unknown"
        self._unread: set[str] = set()

    async def notices(self) -> AsyncIterator[Notice]:
        """Each notice once; a spot notice again when its time has changed."""
        told: set[Notice] = set()
        while True:
            for notice in await self._look():
                if notice not in told:
                    told.add(notice)
                    yield notice
            is_ec2 = self._contact in ("there", "lost")
            await self._pause(self._look_seconds if is_ec2 else self._absent_look_seconds)

    async def _look(self) -> tuple[Notice, ...]:
        try:
            found = (
                self._read(ACTION, await self._metadata.get(ACTION), parse_action),
                self._read(REBALANCE, await self._metadata.get(REBALANCE), parse_rebalance),
            )
        except NoMetadata as error:
            self._note_absent(error)
            return ()
        self._note_present()
        return tuple(notice for notice in found if notice)

    def _read(
        self, path: str, text: str | None, parse: Callable[[str], Notice | None]
    ) -> Notice | None:
        if text is None:
            self._unread.discard(path)
            return None
        notice = parse(text)
        if notice is None and path not in self._unread:
            self._unread.add(path)
            logger.warning("EC2 metadata: %s can't be read: %.200r", path, text)
        return notice

    def _note_absent(self, error: NoMetadata) -> None:
        if self._contact == "there":
            logger.warning("EC2 metadata don't answer any more, still asking: %s", error)
            self._contact = "lost"
        elif self._contact == "unknown":
            logger.info("no EC2 metadata here, so no spot notices: %s", error)
            self._contact = "absent"

    def _note_present(self) -> None:
        if self._contact != "there":
            logger.info("watching EC2 metadata for spot notices")
            self._contact = "there"


def parse_action(text: str) -> Notice | None:
    """`{"action": "terminate", "time": "…Z"}`. Whatever the action, the machine stops working."""
    found = _mapping(text)
    action = found.get("action")
    if not isinstance(action, str) or action in ("", "none"):
        return None
    return Notice("spot", _moment(found.get("time")))


def parse_rebalance(text: str) -> Notice | None:
    """`{"noticeTime": "…Z"}`: when the advice was given, which is no deadline."""
    return Notice("rebalance") if _moment(_mapping(text).get("noticeTime")) else None


def _mapping(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _moment(value: object) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else None
        return moment and _in_utc(moment)
    except (ValueError, OverflowError):
        return None


def _in_utc(moment: datetime) -> datetime:
    """Without a zone it is meant as UTC, as everything there."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
