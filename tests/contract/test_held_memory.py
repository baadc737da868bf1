"""What a control plane holds does not grow with the jobs that go through it."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.databases.factory import Databases
from tests.support.server.control_plane import plane_on
from tests.support.server.customers import Customer, EffectSetup, effect_setup_on
from tests.support.server.fleet import WorkerClient

ROUNDS_FIRST, ROUNDS_MORE = 1, 2
PROGRESS = {"percent": 50, "node": "3", "preview": "data:image/png;base64," + "A" * 1000}


async def test_nothing_that_is_held_grows_with_jobs(databases: Databases, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"calls_per_second": 10_000, "calls_at_once": 10_000}
    async with (
        plane_on(databases, tmp_path, **settings) as plane,
        effect_setup_on(plane) as effect_setup,
        effect_setup.fleet_setup.worker("w1") as worker,
    ):
        customer = await effect_setup.customer(tokens=10_000)
        apps = [each._transport.app.state for each in (customer.client, worker.client)]  # type: ignore[attr-defined]
        for _ in range(ROUNDS_FIRST):
            await each_end(effect_setup, customer, worker)
        await plane.context.deferred.flush()
        before = sizes({"plane": plane, "apps": apps})
        for _ in range(ROUNDS_MORE):
            await each_end(effect_setup, customer, worker)
        await plane.context.deferred.flush()
        after = sizes({"plane": plane, "apps": apps})
    grown = {name: (before[name], size) for name, size in after.items() if size > before[name]}
    assert not grown
    assert before["plane.context.caches.queue_depth._counts"] > 0  # they were looked at


async def each_end(effect_setup: EffectSetup, customer: Customer, worker: WorkerClient) -> None:
    """A job for each way in which a lease ends; each is looked at while it runs."""
    for end in ("complete", "fail", "requeue", "cancel", "refused"):
        job_id = await customer.job(effect_setup.draw)
        job = await worker.job()
        await customer.get(f"ai-jobs/{job_id}")  # nothing is told of it yet
        beat = await worker.call_for(job, "heartbeat", started=True, progress=PROGRESS)
        assert beat.status_code == 200, beat.text
        assert (await customer.get(f"ai-jobs/{job_id}"))["progress"] == 50
        if end == "complete":
            assert (await worker.deliver(job)).status_code == 200
        elif end == "fail":
            assert (await worker.call_for(job, "fail", error="out of memory")).status_code == 200
        elif end == "requeue":
            back = await worker.call_for(job, "requeue", reason="shutdown")
            assert back.status_code == 200, back.text
            assert (await worker.deliver(await worker.job())).status_code == 200
        else:
            await customer.client.delete(f"/api/ai-jobs/{job_id}")
            if end == "cancel":
                told = await worker.call_for(job, "heartbeat", progress=PROGRESS)
                assert told.json()["cancelled"]
            else:
                assert (await worker.deliver(job)).status_code == 409


def sizes(roots: Mapping[str, Any]) -> Counter[str]:
    """How many entries containers have, by the names that lead to them through objects of ours."""
    found, seen, left = Counter[str](), set[int](), deque(roots.items())
    while left:
        path, each = left.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, dict | list | tuple | set | frozenset | deque):
            found[path] += len(each)
            inner = [*each, *each.values()] if isinstance(each, dict) else each
            left += [(f"{path}[]", one) for one in inner]
        elif type(each).__module__.startswith(("comfyfleet", "starlette.datastructures")):
            left += [(f"{path}.{name}", value) for name, value in _attributes(each)]
    return found


def _attributes(each: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(each, "__dict__", {}).items()
    for kind in type(each).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(each, name):
                yield name, getattr(each, name)
