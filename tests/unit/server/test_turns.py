"""Who wants much takes turns with the others, and does not keep them waiting for all of it."""

import asyncio
import threading
from contextlib import suppress

import pytest

from comfyfleet.errors import TooManyCalls
from comfyfleet.server.media import small_pictures
from comfyfleet.server.turns import FairThreads, FairTurns


async def take(turns: FairTurns, who: str, order: list[str]) -> None:
    async with turns.turn(who):
        order.append(who)
        await asyncio.sleep(0)


async def test_who_comes_after_many_of_another_is_next_but_one() -> None:
    turns, order = FairTurns(1, waiting_each_max=20), list[str]()
    many = [asyncio.create_task(take(turns, "many", order)) for _ in range(20)]
    await asyncio.sleep(0)
    few = [asyncio.create_task(take(turns, "few", order)) for _ in range(2)]
    await asyncio.gather(*many, *few)
    assert order[:7].count("few") == 2
    assert len(order) == 22


@pytest.mark.parametrize("at", range(6))
async def test_a_turn_that_is_given_up_goes_to_the_next(at: int) -> None:
    """Whether it waits, has just been called or is at work."""
    turns, order = FairTurns(2, waiting_each_max=20), list[str]()
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


async def test_who_waits_for_too_many_is_refused_and_nobody_else() -> None:
    turns, order = FairTurns(1, waiting_each_max=2), list[str]()
    given = [asyncio.create_task(take(turns, who, order)) for who in "aaaaab"]
    ended = await asyncio.gather(*given, return_exceptions=True)
    assert [type(each) for each in ended if each] == [TooManyCalls, TooManyCalls]
    assert sorted(order) == ["a", "a", "a", "b"]
    async with asyncio.timeout(1), turns.turn("a"):
        pass


async def test_long_work_of_one_keeps_neither_files_nor_others_waiting() -> None:
    threads, ends, done = (
        FairThreads("test", 2, waiting_each_max=20),
        threading.Event(),
        list[str](),
    )

    def work(who: str) -> None:
        ends.wait(10)
        done.append(who)

    async with asyncio.TaskGroup() as group:
        for _ in range(2 + 20):
            group.create_task(threads.run("many", lambda: work("many")))
        await asyncio.sleep(0)
        with pytest.raises(TooManyCalls):
            await threads.run("many", lambda: work("many"))
        group.create_task(threads.run("one", lambda: work("one")))
        async with asyncio.timeout(5):  # as files are read
            await asyncio.gather(*(asyncio.to_thread(int) for _ in range(50)))
        ends.set()
    assert "one" in done[:6]


def test_pictures_of_a_tenant_take_turns_by_its_id() -> None:
    assert small_pictures.tenant_of("tenants/a/files/b/c.png") == "a"
    assert small_pictures.tenant_of("x") == "x"
