"""Long polls: who is woken, and what becomes of those who vanish."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from tests.support.jobs.dispatches import (
    add_workflows,
    audited,
    lane,
    leased,
    new,
    opened,
    parked,
    seen,
    submit,
    waiter,
)

from comfyfleet.errors import Unavailable
from comfyfleet.server.db import Database
from comfyfleet.server.queue.model import DispatchLease, DispatchStatus, Waiter
from comfyfleet.server.queue.queue import DispatchQueue
from comfyfleet.server.queue.store import ClaimResult
from comfyfleet.server.queue.waiters import PollRequest

Waits = dict[str, "asyncio.Task[DispatchLease | None]"]


@asynccontextmanager
async def waiting(queue: DispatchQueue, *who: Waiter, seconds: float = 20) -> AsyncIterator[Waits]:
    """Each waits in its own call, until the end of the block."""
    waits = {
        each.worker_id: asyncio.create_task(queue.lease(each, wait_seconds=seconds)) for each in who
    }
    await parked(queue, len(who))
    yield waits
    for each in waits.values():
        each.cancel()
    await asyncio.wait(waits.values())


async def only(waits: Waits) -> str:
    """The one who was woken; all others still wait."""
    async with asyncio.timeout(5):
        done, _ = await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.05)
    [name] = [name for name, wait in waits.items() if wait.done()]
    assert done.pop().result() is not None
    return name


async def put(db: Database, queue: DispatchQueue, **more: Any) -> int:
    [job] = await submit(db, new(**more))
    queue.arrived([job])
    return job.id


async def test_a_job_that_comes_wakes_exactly_one(central: Database) -> None:
    async with (
        opened(central) as queue,
        waiting(queue, *(waiter(f"gpu-{n}") for n in range(30))) as waits,
    ):
        await put(central, queue)
        await only(waits)
        assert queue.parked() == 29


async def test_whoever_has_waited_longest_is_first_among_equals(central: Database) -> None:
    async with (
        opened(central) as queue,
        waiting(queue, *(waiter(f"gpu-{n}") for n in range(5))) as waits,
    ):
        await put(central, queue)
        assert await only(waits) == "gpu-0"


@pytest.mark.parametrize(
    ("best", "others"),
    [
        ({"load": 0}, {"load": 1, "models_loaded": ("sdxl",), "free_gpu_memory_bytes": 9}),
        ({"models_loaded": ("sdxl",)}, {"models_loaded": ("flux",), "free_gpu_memory_bytes": 9}),
        ({"free_gpu_memory_bytes": 9}, {"free_gpu_memory_bytes": 8}),
        ({"load": 3}, {"load": 0, "is_prefetch": True}),
    ],
)
async def test_the_least_loaded_then_the_model_then_the_memory(
    central: Database, best: dict[str, Any], others: dict[str, Any]
) -> None:
    async with opened(central) as queue:
        others_first = [waiter(f"other-{n}", **others) for n in range(3)]
        async with waiting(queue, *others_first, waiter("best", **best)) as waits:
            await put(central, queue, model_key="sdxl")
            assert await only(waits) == "best"


async def test_only_the_entitled_are_woken(central: Database) -> None:
    async with opened(central) as queue:
        able = waiter("able", lanes=[lane(1), lane(2)], load=5)
        async with waiting(queue, waiter("unable", lanes=[lane(1)]), able) as waits:
            await put(central, queue, to=lane(2))
            assert await only(waits) == "able"


async def test_a_bound_job_wakes_its_worker(central: Database) -> None:
    async with (
        opened(central) as queue,
        waiting(queue, waiter("gpu-1"), waiter("gpu-2", load=4)) as waits,
    ):
        [job] = await submit(central, new(backend_affinity="worker:gpu-2"))
        queue.arrived([job])
        assert await only(waits) == "gpu-2"


async def test_three_jobs_at_once_wake_three(central: Database) -> None:
    async with (
        opened(central) as queue,
        waiting(queue, *(waiter(f"gpu-{n}") for n in range(10))) as waits,
    ):
        jobs = await submit(central, new(), new(), new())
        queue.arrived(jobs)
        async with asyncio.timeout(5):
            while sum(wait.done() for wait in waits.values()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert queue.parked() == 7


async def test_a_wait_ends_with_nothing_when_its_time_is_up(central: Database) -> None:
    async with opened(central) as queue:
        async with asyncio.timeout(5):
            assert await queue.lease(waiter(), wait_seconds=0.1) is None
        assert queue.waiting() == 0


async def test_a_lost_hint_costs_latency_and_no_job(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.server.queue.queue.RECHECK_SECONDS", 0.1)
    async with opened(central) as queue, background(queue):
        two = waiter("gpu-2")
        async with waiting(queue, waiter("gpu-1", lanes=[lane(2)]), two) as waits:
            await submit(central, new(backend_affinity="worker:gpu-2"), new(to=lane(2)))
            async with asyncio.timeout(5):
                await asyncio.wait(waits.values())
            assert all(wait.result() for wait in waits.values())


async def test_the_look_again_is_one_for_all_who_wait(
    central: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.server.queue.queue.RECHECK_SECONDS", 0.2)
    async with opened(central) as queue, background(queue):
        looks = counted(queue)
        async with waiting(queue, *(waiter(f"gpu-{n}") for n in range(100))):
            before = looks()
            for _ in range(2_000):
                if looks() - before >= 3:
                    break
                await asyncio.sleep(0.005)
            assert 3 <= looks() - before < 10, "not one for each"


def counted(queue: DispatchQueue) -> Callable[[], int]:
    """How often the lanes were looked into."""
    looks = 0
    lease = queue._hot.lease

    async def counting(*args: Any, **more: Any) -> ClaimResult:
        nonlocal looks
        looks += 1
        return await lease(*args, **more)

    queue._hot.lease = counting  # type: ignore[method-assign]
    return lambda: looks


@asynccontextmanager
async def background(queue: DispatchQueue) -> AsyncIterator[None]:
    running = asyncio.create_task(queue.run())
    try:
        yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_one_claim_per_arriving_job(central: Database) -> None:
    async with opened(central) as queue:
        looks = counted(queue)
        async with waiting(queue, *(waiter(f"gpu-{n}") for n in range(50))) as waits:
            before = looks()
            for arrived in range(1, 6):
                await put(central, queue)
                async with asyncio.timeout(5):
                    while sum(each.done() for each in waits.values()) < arrived:  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
            assert looks() - before == 5


async def test_a_waiter_that_vanishes_leaves_no_trace(central: Database) -> None:
    async with (
        opened(central) as queue,
        waiting(queue, waiter("gone"), waiter("there", load=2)) as waits,
    ):
        waits["gone"].cancel()
        await asyncio.sleep(0)
        job_id = await put(central, queue)
        async with asyncio.timeout(5):
            lease = await waits["there"]
    assert lease
    assert (lease.dispatch_id, lease.attempt, lease.number) == (job_id, 1, 1)


async def test_a_waiter_that_vanished_while_it_was_served_gives_the_lease_back(
    central: Database,
) -> None:
    [job] = await submit(central, new())
    async with opened(central) as queue:
        asked = asyncio.create_task(queue.lease(waiter("gone"), wait_seconds=5))
        claim = queue._hot.lease

        async def claim_and_vanish(*args: Any, **more: Any) -> ClaimResult:
            leases = await claim(*args, **more)
            asked.cancel()
            return leases

        queue._hot.lease = claim_and_vanish  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await asked
        queue._hot.lease = claim  # type: ignore[method-assign]
        async with asyncio.timeout(5):
            lease = await queue.lease(waiter("there"), wait_seconds=5)
    assert lease
    assert (lease.dispatch_id, lease.attempt, lease.number) == (job.id, 1, 2)
    assert await audited(central, job.id) == ["submit", "lease", "requeue", "lease"]
    assert (await seen(central, job.id)).requeues == 0


@pytest.mark.parametrize("tells_leases", [False, True])
async def test_a_lease_that_was_made_and_not_fetched_is_given_back(
    central: Database, *, tells_leases: bool
) -> None:
    """The answer is there, and in the same moment the caller is cancelled.

    Who tells its leases is not robbed: its next poll may have been answered with this one already.
    """
    [job] = await submit(central, new())
    async with opened(central) as queue:
        asker = waiter("gone", tells_leases=tells_leases)
        asked = asyncio.create_task(queue.lease(asker, wait_seconds=5))
        answer = queue._answer

        def answer_and_cancel(one: PollRequest, lease: DispatchLease | None) -> None:
            answer(one, lease)
            asked.cancel()

        queue._answer = answer_and_cancel  # type: ignore[assignment]
        with pytest.raises(asyncio.CancelledError):
            await asked
    row = await seen(central, job.id)
    wanted = (DispatchStatus.LEASED, 1) if tells_leases else (DispatchStatus.QUEUED, 0)
    assert (row.status, row.attempts) == wanted


async def test_a_dismissal_is_not_missed_by_one_who_is_about_to_wait(central: Database) -> None:
    async with opened(central) as queue:
        looked = queue.dismissals
        queue.dismiss(["gpu-1"])
        asking = queue.lease(waiter(), wait_seconds=20, as_of=looked)
        assert await asyncio.wait_for(asking, 5) is None
        async with waiting(queue, waiter()) as waits:
            assert not waits["gpu-1"].done(), "it looked after the dismissal"


async def test_those_dismissed_ask_anew(central: Database) -> None:
    async with opened(central) as queue, waiting(queue, waiter("gpu-1"), waiter("gpu-2")) as waits:
        queue.dismiss(["gpu-1"])
        async with asyncio.timeout(5):
            assert await waits["gpu-1"] is None
        assert not waits["gpu-2"].done()
        queue.dismiss()
        async with asyncio.timeout(5):
            assert await waits["gpu-2"] is None


async def test_prefetching_waits_until_nobody_else_does(central: Database) -> None:
    async with opened(central) as queue:
        busy = waiter("busy", is_prefetch=True)
        async with waiting(queue, waiter("idle", load=7)) as waits:
            await submit(central, new())  # nobody was told of it yet
            assert await queue.lease(busy, wait_seconds=0) is None
            assert (await waits["idle"]) is not None
        await submit(central, new())
        assert (await leased(queue, busy)).is_prefetched


async def test_a_database_that_is_away_is_told_to_those_who_ask(central: Database) -> None:
    async with opened(central) as queue:

        async def away(*args: Any, **more: Any) -> ClaimResult:
            raise Unavailable("away")

        lease, queue._hot.lease = queue._hot.lease, away  # type: ignore[method-assign]
        with pytest.raises(Unavailable):
            await queue.lease(waiter(), wait_seconds=5)
        queue._hot.lease = lease  # type: ignore[method-assign]
        await submit(central, new())
        await leased(queue)


async def test_a_worker_of_many_lanes_is_woken_by_any(central: Database) -> None:
    await add_workflows(central, *range(10, 60))
    async with opened(central) as queue:
        lanes = [lane(number) for number in range(10, 60)]
        async with waiting(queue, waiter(lanes=lanes)) as waits:
            await put(central, queue, to=lane(42))
            assert await only(waits) == "gpu-1"


async def test_an_error_without_waiting_polls_is_not_called_a_failed_batch(
    central: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lose(_queue: DispatchQueue) -> None:
        raise Unavailable("the database is away")

    monkeypatch.setattr(DispatchQueue, "_announce", lose)
    async with opened(central) as queue:
        [row] = await submit(central, new())
        queue.arrived([row])
    messages = [each.getMessage() for each in caplog.records if "database is away" in each.message]
    assert messages == ["new jobs could not be assigned to waiting workers: the database is away"]
