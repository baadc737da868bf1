"""A lease's last word: said at once, and noted only if nobody hears it; of a short run it is the only one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import httpx
import pytest
from tests.support.workers.memory_plane import eventually
from tests.unit.worker.test_failures import JOB

from comfyfleet.api.worker import Complete, Heartbeat, HeartbeatAnswer
from comfyfleet.comfy import Backend
from comfyfleet.worker import heartbeat
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


class HeardHeartbeats:
    """A control plane that answers each heartbeat."""

    def __init__(self) -> None:
        self.heard: list[Heartbeat] = []

    async def heartbeat(self, message: Heartbeat) -> HeartbeatAnswer:
        self.heard.append(message)
        return HeartbeatAnswer()


def beating(control: HeardHeartbeats, *, records_run: bool = True) -> HeartbeatLoop:
    async def read() -> None:
        return None

    return HeartbeatLoop(
        cast(ControlClient, control),
        JOB.model_copy(update={"records_run": records_run}),
        seconds=3600,
        reading=read,
        on_answer=lambda _: None,
        on_lost=lambda _: None,
    )


@pytest.mark.parametrize(("start_seconds", "heard"), [(3600.0, 0), (0.0, 1)])
async def test_a_recorded_run_that_ends_soon_needs_no_heartbeat(
    monkeypatch: pytest.MonkeyPatch, start_seconds: float, heard: int
) -> None:
    # As if it had been leased long ago, and waited behind another.
    monkeypatch.setattr(heartbeat, "RECORD_SECONDS_MIN", 0.0)
    monkeypatch.setattr(heartbeat, "START_SECONDS", start_seconds)
    control = HeardHeartbeats()
    loop = beating(control)
    task = asyncio.create_task(loop.beat())
    loop.set_filled_in({"1": {"image": "a.png"}})
    for _ in range(20):
        await asyncio.sleep(0)
    assert control.heard == []  # it waits: there is nothing to tell
    loop.start()
    if heard:
        await eventually(lambda: len(control.heard) == heard)
        assert control.heard[0].started
    else:
        for _ in range(20):
            await asyncio.sleep(0)
        assert control.heard == []
        assert loop.unreported == {"1": {"image": "a.png"}}
    task.cancel()


async def test_a_start_is_not_reported_before_a_short_run_would_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "START_SECONDS", 3600.0)
    control = HeardHeartbeats()
    loop = beating(control, records_run=False)
    task = asyncio.create_task(loop.beat())
    loop.set_filled_in({"1": {"image": "a.png"}})
    loop.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert control.heard == []
    assert loop.unreported == {"1": {"image": "a.png"}}
    task.cancel()
