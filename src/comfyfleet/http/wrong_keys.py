"""Wrong keys are answered ever more slowly, by the address that they come from.

The right key is never made to wait, whoever shares its address: only the answer to a wrong one is. While
very many wrong ones wait at an address, keys that nobody can guess are still looked up, and so are those
that were right lately; only what somebody may have made up, as an admin key, is told to come again.
In this process only: with n control planes there are n times as many tries.
"""

import asyncio
import re
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from comfyfleet.kernel.errors import TooManyCalls
from comfyfleet.kernel.keys import hashed

V = TypeVar("V")
FREE_TRIES = 20
FIRST_SECONDS, SECONDS_MAX = 0.05, 5.0
FORGET_SECONDS = 600.0
WAITING_PER_ADDRESS_MAX = 100
ADDRESSES_MAX = RIGHT_KEYS_MAX = 10_000
# 256 random bits, as all keys and secrets that we make: trying many of them leads nowhere.
_MADE_BY_US = re.compile(r"(?:bearer +)?(?:[a-z]{2,3}_)?[0-9a-f]{64}", re.I)


class WrongKeys:
    def __init__(
        self,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sleep = sleep
        self._clock = clock
        self._tries: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._right: OrderedDict[str, None] = OrderedDict()
        self._waiting: Counter[str] = Counter()

    def admit(self, address: str, key: str) -> None:
        """TooManyCalls: there is no telling now whether the key is right."""
        if self._is_full(address) and not self._may_be_right(key):
            raise _too_many()

    def note_right(self, key: str) -> None:
        _keep(self._right, hashed(key), None, RIGHT_KEYS_MAX)

    async def slow_down(self, address: str) -> None:
        """Before a wrong key is answered; others are served meanwhile. TooManyCalls: at once."""
        seconds = self._noted(address)
        if seconds == 0:
            return
        if self._is_full(address):
            raise _too_many()
        self._waiting[address] += 1
        try:
            await self._sleep(seconds)
        finally:
            self._waiting[address] -= 1
            self._waiting += Counter()  # forgets those where nobody waits

    def _is_full(self, address: str) -> bool:
        return self._waiting[address] >= WAITING_PER_ADDRESS_MAX

    def _may_be_right(self, key: str) -> bool:
        return bool(_MADE_BY_US.fullmatch(key)) or hashed(key) in self._right

    def _noted(self, address: str) -> float:
        now = self._clock()
        count, last = self._tries.get(address, (0, now))
        count = 1 if now - last > FORGET_SECONDS else count + 1
        _keep(self._tries, address, (count, now), ADDRESSES_MAX)
        beyond = count - FREE_TRIES
        return 0.0 if beyond <= 0 else min(SECONDS_MAX, FIRST_SECONDS * 2 ** min(beyond - 1, 20))


def _too_many() -> TooManyCalls:
    return TooManyCalls(
        "too many wrong keys come from this address", retry_after_seconds=int(SECONDS_MAX)
    )


def _keep(kept: OrderedDict[str, V], name: str, value: V, most: int) -> None:
    kept[name] = value
    kept.move_to_end(name)
    if len(kept) > most:
        kept.popitem(last=False)
