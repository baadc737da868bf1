"""A lease's last word: said at once, and noted only if nobody hears it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import httpx
import pytest
from tests.agentkit.plane import eventually
from tests.unit.agent.test_verdicts import JOB

from comfyfleet.agent import holding as holding_module
from comfyfleet.agent.beating import Heart
from comfyfleet.agent.control import Control, LastWord
from comfyfleet.agent.holding import Holding
from comfyfleet.agent.journal import Entry, Journal
from comfyfleet.agent.lease import Lease, Workshop
from comfyfleet.agent.ports import Assets
from comfyfleet.comfy import Backend
from comfyfleet.wire.messages import Complete

WORD = Complete(dispatch_id=JOB.dispatch_id, lease_token=JOB.lease_token)
nothing = cast(Backend, None)


@pytest.fixture
async def workshop(tmp_path: Path) -> AsyncIterator[Workshop]:
    journal = Journal(tmp_path / "state")
    journal.open()
    journal.write(Entry(JOB))
    async with httpx.AsyncClient() as store:
        yield Workshop(nothing, cast(Assets, None), store, journal)


def ended_lease(workshop: Workshop, say: Callable[[LastWord], Awaitable[object]]) -> Holding:
    lease, control, heart = Lease(Entry(JOB, word=WORD)), cast(Control, None), cast(Heart, None)
    return Holding(lease, control, workshop, lambda _: heart, lambda *_: None, say)


def noted(workshop: Workshop) -> list[LastWord | None]:
    return [each.word for each in workshop.journal.entries()]


async def test_a_word_that_is_heard_at_once_is_not_noted(workshop: Workshop) -> None:
    seen = []

    async def hear(word: LastWord) -> None:
        seen.append((word, noted(workshop)))

    await ended_lease(workshop, hear).hold()
    assert seen == [(WORD, [None])]
    assert noted(workshop) == []


async def test_a_word_that_is_not_heard_soon_is_noted(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "UNHEARD_SECONDS", 0.0)
    was_noted = asyncio.Event()
    holding = ended_lease(workshop, lambda _: was_noted.wait())
    held = asyncio.create_task(holding.hold())
    await eventually(lambda: noted(workshop) == [WORD])
    was_noted.set()
    await held
    assert noted(workshop) == []


async def test_a_worker_that_is_stopped_while_it_says_a_word_leaves_it_to_the_next(
    workshop: Workshop,
) -> None:
    begun = asyncio.Event()

    async def hear(_: LastWord) -> None:
        begun.set()
        await asyncio.Event().wait()

    held = asyncio.create_task(ended_lease(workshop, hear).hold())
    await begun.wait()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert noted(workshop) == [WORD]
