"""A lease's last word: said at once, and noted only if nobody hears it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import httpx
import pytest
from tests.support.workers.memory_plane import eventually
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.worker import Complete
from comfyfleet.comfy import Backend
from comfyfleet.worker import lease_runner as holding_module
from comfyfleet.worker.control_client import ControlClient, FinalReport
from comfyfleet.worker.heartbeat import HeartbeatLoop
from comfyfleet.worker.journal import Journal, JournalEntry
from comfyfleet.worker.lease_runner import ActiveLease, LeaseDeps, LeaseRunner
from comfyfleet.worker.platform import AssetProvider

WORD = Complete(dispatch_id=JOB.dispatch_id, lease_token=JOB.lease_token)
nothing = cast(Backend, None)


@pytest.fixture
async def deps(tmp_path: Path) -> AsyncIterator[LeaseDeps]:
    journal = Journal(tmp_path / "state")
    journal.open()
    journal.write(JournalEntry(JOB))
    async with httpx.AsyncClient() as store:
        yield LeaseDeps(nothing, cast(AssetProvider, None), store, journal)


def ended_lease(deps: LeaseDeps, say: Callable[[FinalReport], Awaitable[object]]) -> LeaseRunner:
    lease, control, heartbeat_loop = (
        ActiveLease(JournalEntry(JOB, report=WORD)),
        cast(ControlClient, None),
        cast(HeartbeatLoop, None),
    )
    return LeaseRunner(lease, control, deps, lambda _: heartbeat_loop, lambda *_: None, say)


def noted(deps: LeaseDeps) -> list[FinalReport | None]:
    return [each.report for each in deps.journal.entries()]


async def test_a_word_that_is_heard_at_once_is_not_noted(deps: LeaseDeps) -> None:
    seen = []

    async def hear(report: FinalReport) -> None:
        seen.append((report, noted(deps)))

    await ended_lease(deps, hear).run()
    assert seen == [(WORD, [None])]
    assert noted(deps) == []


async def test_a_word_that_is_not_heard_soon_is_noted(
    deps: LeaseDeps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "JOURNAL_AFTER_SECONDS", 0.0)
    was_noted = asyncio.Event()
    lease_runner = ended_lease(deps, lambda _: was_noted.wait())
    held = asyncio.create_task(lease_runner.run())
    await eventually(lambda: noted(deps) == [WORD])
    was_noted.set()
    await held
    assert noted(deps) == []


async def test_a_worker_that_is_stopped_while_it_says_a_word_leaves_it_to_the_next(
    deps: LeaseDeps,
) -> None:
    begun = asyncio.Event()

    async def hear(_: FinalReport) -> None:
        begun.set()
        await asyncio.Event().wait()

    held = asyncio.create_task(ended_lease(deps, hear).run())
    await begun.wait()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    assert noted(deps) == [WORD]
