"""Wrong keys are slowed down by address; the right key never is."""

import asyncio

import pytest

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.http.middleware import (
    FORGET_SECONDS,
    FREE_TRIES,
    SECONDS_MAX,
    WAITING_PER_ADDRESS_MAX,
    WrongKeyThrottle,
)


class Slow:
    """Notes how long it was to sleep, and can be made to wait until it is let go."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.leave_admission = asyncio.Event()
        self.leave_admission.set()
        self.now = 0.0

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.leave_admission.wait()


async def tried(wrong: WrongKeyThrottle, count: int, address: str = "10.0.0.1") -> None:
    for _ in range(count):
        await wrong.delay(address)


async def test_each_wrong_key_takes_longer_up_to_a_limit() -> None:
    slow = Slow()
    wrong = WrongKeyThrottle(slow)
    await tried(wrong, FREE_TRIES)
    assert slow.slept == [], "people mistype"
    await tried(wrong, 12)
    assert slow.slept == sorted(slow.slept)
    assert slow.slept[-1] == SECONDS_MAX


async def test_other_addresses_are_not_slowed_down_and_all_is_forgotten_in_time() -> None:
    slow = Slow()
    wrong = WrongKeyThrottle(slow, clock=lambda: slow.now)
    await tried(wrong, FREE_TRIES + 1)
    await tried(wrong, 1, address="10.0.0.2")
    assert len(slow.slept) == 1
    slow.now = FORGET_SECONDS + 1
    await tried(wrong, 1)
    assert len(slow.slept) == 1


async def test_a_flood_of_wrong_keys_keeps_no_key_out_that_was_right_lately() -> None:
    slow = Slow()
    wrong = WrongKeyThrottle(slow)
    await tried(wrong, FREE_TRIES)
    wrong.note_valid("right")
    slow.leave_admission.clear()
    flood = [asyncio.create_task(wrong.delay("10.0.0.1")) for _ in range(WAITING_PER_ADDRESS_MAX)]
    await asyncio.sleep(0)
    wrong.admit("10.0.0.1", "right")
    wrong.admit("10.0.0.2", "unknown")
    with pytest.raises(TooManyCalls):
        wrong.admit("10.0.0.1", "unknown")
    slow.leave_admission.set()
    await asyncio.gather(*flood)
    wrong.admit("10.0.0.1", "unknown")
