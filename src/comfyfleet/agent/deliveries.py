"""Outputs on their way to the store: PUT to URLs that a held lease can have renewed."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from comfyfleet.agent.beating import Heart
from comfyfleet.comfy.surroundings import Surroundings
from comfyfleet.kernel.errors import LimitExceeded, Unavailable
from comfyfleet.opened_files import opened
from comfyfleet.wire.files import OutputSlot, WantedOutput
from comfyfleet.wire.messages import Job

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1024 * 1024
# Files up to this size are sent from memory, and are not worth a change of threads to be removed before
# their lease ends.
SMALL_BYTES = 1024 * 1024
# URLs live 900 s where nobody says otherwise; one that expires in mid-upload is lost effort.
FRESH_SECONDS_MAX = 600.0
STORE_AWAY_SECONDS_MAX = 900.0
REFUSALS_MAX = 4
CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 120.0


def store_client() -> httpx.AsyncClient:
    """Has no headers of its own: the store must not see the worker's key."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx.Limits(keepalive_expiry=4.0),
    )


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """A file as it is delivered. `content`: of a small one."""

    path: Path
    size: int
    content_hash: str
    width: int | None = None
    height: int | None = None
    content: bytes | None = None


class Deliveries:
    """Of one lease."""

    def __init__(
        self,
        store: httpx.AsyncClient,
        heart: Heart,
        job: Job,
        surroundings: Surroundings | None = None,
    ) -> None:
        self._store = store
        self._heart = heart
        self._around = surroundings or Surroundings()
        self._slots = {slot.name: (slot, time.monotonic()) for slot in job.outputs}

    async def put(self, file: ReadyFile, *, name: str, content_type: str) -> None:
        """Raises Unavailable when the store takes nothing for long, LimitExceeded if too large."""
        wanted, refusals = WantedOutput(name=name, content_type=content_type), 0
        deadline = time.monotonic() + STORE_AWAY_SECONDS_MAX
        while True:
            slot = await self._slot(wanted)
            trouble, is_refusal = await self._attempt(slot, file, content_type)
            if trouble is None:
                return
            refusals += is_refusal
            # The next attempt asks for another URL: this one may have run out on the way.
            self._slots.pop(name, None)
            logger.warning("an output was not taken", extra={"output": name, "reason": trouble})
            if refusals >= REFUSALS_MAX or time.monotonic() > deadline:
                raise Unavailable(f"the store does not take {name}: {trouble}")
            if refusals != 1:
                await self._around.back_off(min(max(refusals, 2), 6))

    async def _slot(self, wanted: WantedOutput) -> OutputSlot:
        known = self._slots.get(wanted.name)
        if known is None or time.monotonic() - known[1] > FRESH_SECONDS_MAX:
            asked = time.monotonic()
            fresh = await self._heart.fresh_outputs([wanted])
            known = self._slots[wanted.name] = (fresh[wanted.name], asked)
        return known[0]

    async def _attempt(
        self, slot: OutputSlot, file: ReadyFile, content_type: str
    ) -> tuple[str | None, bool]:
        """What went wrong, without the URL, which is a secret; and whether the store said no."""
        headers = {"Content-Type": content_type, **_lowered(slot.headers)}
        headers = {**_lowered(headers), "content-length": str(file.size)}
        content = file.content if file.content is not None else _chunks(file.path)
        try:
            answer = await self._store.put(slot.url, content=content, headers=headers)
        except httpx.TransportError as error:
            return type(error).__name__, False
        if answer.status_code == 413:
            raise LimitExceeded(f"the output {slot.name!r} is larger than the store takes")
        if answer.is_success:
            return None, False
        return f"answered {answer.status_code}", answer.status_code < 500


def _lowered(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await opened(path) as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
            yield chunk
