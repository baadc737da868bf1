"""The backend is never without a prompt while there are jobs, and never has more than it should."""

import asyncio
from pathlib import Path

import pytest
from tests.support.workers.memory_plane import JobFile, Plane, eventually
from tests.support.workers.prompts import passing, picture, steps
from tests.support.workers.workers import running_worker, settings_for

from comfyfleet.engine.serve import Served as Engine
from comfyfleet.worker import worker as worker_module

SLOW_STORE_SECONDS = 0.6


def depth(engine: Engine) -> int:
    running, waiting = engine.engine.queue.listed()
    return len(running) + len(waiting)


async def until_completed(plane: Plane, number: int) -> None:
    await eventually(lambda: plane.calls.count("complete") == number)


async def watch_depth(engine: Engine, seen: set[int]) -> None:
    while True:
        seen.add(depth(engine))
        await asyncio.sleep(0.002)


async def test_the_next_prompt_waits_behind_the_running_one_and_never_a_third(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    jobs = [plane.add(steps(4, 50)) for _ in range(6)]
    seen: set[int] = set()
    watching = asyncio.create_task(watch_depth(engine, seen))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: all(job.word for job in jobs))
    watching.cancel()
    assert max(seen) == 2
    assert all(poll.current_load <= 1 for poll in plane.polls)


async def test_with_two_at_once_there_are_three(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    jobs = [plane.add(steps(4, 50)) for _ in range(6)]
    seen: set[int] = set()
    watching = asyncio.create_task(watch_depth(engine, seen))
    async with running_worker(settings_for(plane, engine.url, tmp_path, max_concurrency=2)):
        await eventually(lambda: all(job.word for job in jobs))
    watching.cancel()
    assert max(seen) == 3


@pytest.mark.parametrize(("relieves", "idle_polls"), [(True, 1), (False, 2)])
async def test_a_poll_that_waits_goes_on_if_its_plane_knows_that_the_worker_is_idle(
    plane: Plane, engine: Engine, tmp_path: Path, *, relieves: bool, idle_polls: int
) -> None:
    plane.relieves = relieves
    first = plane.add(steps(4, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: first.started and len(plane.polls) == 2)
        await eventually(lambda: first.word and not list((tmp_path / "leases").iterdir()))
        if not relieves:
            await eventually(lambda: len(plane.polls) == 3)
        second = plane.add(steps(4, 50))
        await eventually(lambda: second.started)
        loads = [poll.current_load for poll in plane.polls]
        await eventually(lambda: second.word)
    assert loads.count(0) == idle_polls


async def test_outputs_go_up_while_the_next_prompt_runs(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.delays["store PUT"] = SLOW_STORE_SECONDS
    first, second = plane.add(steps(2, 50)), plane.add(steps(20, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: first.word)
        assert second.started
        assert not second.word
        await eventually(lambda: second.word)


async def test_inputs_of_the_next_job_are_uploaded_while_one_runs(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    first = plane.add(steps(30, 50))
    second = plane.add(passing(), files={"input": JobFile(b"x" * 1000, binding="1.file")})
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: depth(engine) == 2)
        assert not first.word
        assert not second.started
        await eventually(lambda: first.word and second.word)


async def test_uploads_behind_a_slow_line_do_not_pile_up(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    plane.delays["store PUT"] = SLOW_STORE_SECONDS
    jobs = [plane.add(steps(1, 1)) for _ in range(8)]
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: all(job.word for job in jobs))
    assert max(len(poll.held or ()) for poll in plane.polls) <= 4


async def test_a_worker_that_has_become_idle_says_so_at_once(
    plane: Plane, engine: Engine, tmp_path: Path
) -> None:
    """While it waits to prefetch, its job ends: for others it would be busy until its poll ends."""
    job = plane.add(steps(4, 50))
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        await eventually(lambda: any(poll.current_load for poll in plane.polls))
        await eventually(lambda: job.word and not plane.polls[-1].current_load)
        asked = len(plane.polls)
        another = plane.add(steps(1, 1))
        await eventually(lambda: another.word)
    assert len(plane.polls) - asked <= 2


async def test_a_job_that_comes_alone_is_delivered_before_another_is_prefetched(
    plane: Plane, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch would compete with its result, and mostly nothing is there to prefetch."""
    monkeypatch.setattr(worker_module, "BACKLOG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "ALONE_SECONDS", 3600.0)
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        for number in (1, 2, 3):
            await eventually(lambda: plane.waiting)
            plane.add(picture())
            await until_completed(plane, number)
    assert {poll.current_load for poll in plane.polls} == {0}


async def test_a_result_of_a_job_that_came_alone_goes_before_the_next_poll(
    plane: Plane, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "BACKLOG_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "ALONE_SECONDS", 3600.0)
    monkeypatch.setattr(worker_module, "IDLE_POLL_DELAY_SECONDS", 3600.0)
    async with running_worker(settings_for(plane, engine.url, tmp_path)):
        for number in (1, 2, 3):
            await eventually(lambda: plane.waiting)
            plane.add(picture())
            await until_completed(plane, number)
        await eventually(lambda: plane.waiting)
    calls = [call for call in plane.calls if call in ("poll", "complete")]
    assert calls == ["poll", "complete"] * 3 + ["poll"]
