"""Tenants take turns at small pictures: whoever wants many does not keep others waiting for all of them."""

import asyncio
from contextlib import suppress

import pytest

from comfyfleet.server.media import small_pictures
from comfyfleet.server.media.small_pictures import TurnsByTenant


async def take(turns: TurnsByTenant, tenant: str, order: list[str]) -> None:
    async with turns.turn(tenant):
        order.append(tenant)
        await asyncio.sleep(0)


async def test_who_comes_after_many_of_another_is_next_but_one() -> None:
    turns, order = TurnsByTenant(1), list[str]()
    many = [asyncio.create_task(take(turns, "many", order)) for _ in range(20)]
    await asyncio.sleep(0)
    few = [asyncio.create_task(take(turns, "few", order)) for _ in range(2)]
    await asyncio.gather(*many, *few)
    assert order[:7].count("few") == 2
    assert len(order) == 22


@pytest.mark.parametrize("at", range(6))
async def test_a_turn_that_is_given_up_goes_to_the_next(at: int) -> None:
    """Whether it waits, has just been called or is at work."""
    turns, order = TurnsByTenant(2), list[str]()
    all_of_them = [asyncio.create_task(take(turns, str(each % 3), order)) for each in range(6)]
    for _ in range(at):
        await asyncio.sleep(0)
    for each in all_of_them[at : at + 2]:
        each.cancel()
    for each in all_of_them:
        with suppress(asyncio.CancelledError):
            await each
    async with asyncio.timeout(1), turns.turn("a"), turns.turn("b"):
        pass


def test_keys_of_a_tenant_are_known_by_their_beginning() -> None:
    assert small_pictures._tenant_of("tenants/a/files/b/c.png") == "tenants/a"
    assert small_pictures._tenant_of("x") == "x"
