"""The run log has one start, one end and one history record for each prompt, however often reports are repeated."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from tests.support.databases.factory import Databases
from tests.support.jobs.context import waiter
from tests.support.jobs.gateway_runs import ONE, OTHER, Scene, done, executed, made, scene_on

from comfyfleet.api.worker import Complete, Fail, UnheardReport
from comfyfleet.api.worker import Job as Handed
from comfyfleet.errors import LeaseLost
from comfyfleet.server.db import Tx
from comfyfleet.server.db.tenant_tables import gateway_files, run_events
from comfyfleet.server.jobs import files, finish
from comfyfleet.server.jobs import submit as job_submit
from comfyfleet.server.jobs.files import TakenOutputs, report_live, take_outputs
from comfyfleet.server.jobs.lease import lease_next
from comfyfleet.server.jobs.model import Failure, JobStatus
from comfyfleet.server.queue.model import RequeueReason
from comfyfleet.server.run_log import service as run_log
from comfyfleet.server.run_log.model import Cursor, LoggedEvents, LogLook, LogPage, cursor_at

START: tuple[str, dict[str, Any]] = ("execution_start", {"prompt_id": "x"})
CACHED: tuple[str, dict[str, Any]] = ("execution_cached", {"prompt_id": "x", "nodes": []})
SUCCESS: tuple[str, dict[str, Any]] = ("execution_success", {"prompt_id": "x"})
ENDS = {"execution_success", "execution_error", "execution_interrupted"}
AT_ONCE = 20


def executing(node: str) -> tuple[str, dict[str, Any]]:
    return "executing", {"node": node, "prompt_id": "x"}


@pytest.fixture
async def scene(databases: Databases, tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_on(databases, tmp_path) as scene:
        yield scene


async def kinds_of(scene: Scene, lease: Handed) -> list[str]:
    rows = await scene.rows(run_events, lease.job_id)
    rows.sort(key=lambda row: row.id)
    return [kind for row in rows for kind, _ in row.events]


async def require_one_of_each(scene: Scene, lease: Handed) -> None:
    count = Counter(await kinds_of(scene, lease))
    assert count["execution_start"] == 1
    assert sum(count[kind] for kind in ENDS) == 1
    rows = await scene.rows(run_events, lease.job_id)
    assert len([row for row in rows if row.record is not None]) == 1


async def names_of(scene: Scene, lease: Handed) -> list[str]:
    return sorted(row.path for row in await scene.rows(gateway_files, lease.job_id))


async def test_a_repeated_report_is_logged_once(scene: Scene) -> None:
    lease = await scene.lease()
    for _ in range(3):
        await report_live(scene.whole, scene.key(lease), [START, executing("1")], report=7)
    assert await kinds_of(scene, lease) == ["execution_start", "executing"]
    await report_live(scene.whole, scene.key(lease), [executing("1")], report=8)
    assert await kinds_of(scene, lease) == ["execution_start", "executing", "executing"]


@pytest.mark.parametrize("number", [1, None], ids=["numbered", "unnumbered"])
async def test_reports_that_arrive_at_once_name_a_file_once(
    scene: Scene, number: int | None
) -> None:
    lease, output = await scene.lease(), made(ONE)
    await scene.upload(lease, output, ONE)
    events = [START, executed(output)]
    reports = (
        report_live(scene.whole, scene.key(lease), events, [output], report=number)
        for _ in range(AT_ONCE)
    )
    # One that copies its file after another has deleted the source is refused, and the worker repeats it.
    results = await asyncio.gather(*reports, return_exceptions=True)
    assert None in results
    assert await names_of(scene, lease) == ["x_00001_.png"]
    assert (await kinds_of(scene, lease)).count("execution_start") == 1
    if number is not None:
        assert await scene.names_told(lease.job_id) == ["x_00001_.png"]
    job = await scene.complete(lease, output)
    assert len(job.outputs) == len(await scene.files_of(lease.job_id)) == 1
    assert await names_of(scene, lease) == ["x_00001_.png"]
    await require_one_of_each(scene, lease)
    await scene.require_tidy()


async def test_the_file_of_an_earlier_report_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may have been told of it when an equal report, which has copied the file, too, is logged."""
    lease, output = await scene.lease(), made(ONE)
    await scene.upload(lease, output, ONE)
    report = partial(report_live, scene.whole, scene.key(lease), [executed(output)], [output])
    has_taken, may_go_on = asyncio.Event(), asyncio.Event()

    async def take_and_wait(*arguments: Any) -> TakenOutputs:
        taken = await take_outputs(*arguments)
        has_taken.set()
        await may_go_on.wait()
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(files, "take_outputs", take_and_wait)
        late = asyncio.create_task(report())
        await has_taken.wait()
    await report()
    (told,) = await scene.rows(gateway_files, lease.job_id)
    may_go_on.set()
    await late
    (row,) = await scene.rows(gateway_files, lease.job_id)
    assert row.file_id == told.file_id
    await scene.complete(lease, output)
    await scene.require_tidy()


async def test_completes_that_arrive_at_once_end_the_prompt_once(scene: Scene) -> None:
    lease, output = await scene.lease(), made(ONE)
    await scene.upload(lease, output, ONE)
    word = done(lease, output).model_copy(update={"events": (START, executed(output), SUCCESS)})
    results = await asyncio.gather(
        *(finish.complete(scene.whole, word) for _ in range(AT_ONCE)), return_exceptions=True
    )
    assert {each.status for each in results if not isinstance(each, BaseException)} == {"completed"}
    assert await names_of(scene, lease) == ["x_00001_.png"]
    await require_one_of_each(scene, lease)
    await scene.require_tidy()


async def test_a_final_report_that_repeats_the_end_ends_the_prompt_once(scene: Scene) -> None:
    lease = await scene.lease()
    word = done(lease).model_copy(update={"events": (START, SUCCESS, SUCCESS)})
    await finish.complete(scene.whole, word)
    assert await kinds_of(scene, lease) == ["execution_start", "execution_success"]
    await require_one_of_each(scene, lease)


async def test_failures_that_arrive_at_once_end_the_prompt_once(scene: Scene) -> None:
    lease = await scene.lease()
    word = Fail(
        dispatch_id=lease.dispatch_id,
        lease_token=lease.lease_token,
        error="no",
        events=(START, ("execution_error", {"prompt_id": "x"})),
    )
    key = (lease.dispatch_id, lease.lease_token, Failure("no"))
    await asyncio.gather(
        *(finish.fail(scene.whole, *key, message=word) for _ in range(AT_ONCE)),
        return_exceptions=True,
    )
    await require_one_of_each(scene, lease)


async def test_a_late_report_changes_nothing(scene: Scene) -> None:
    lease, output = await scene.lease(), made(ONE)
    await scene.report(lease)
    await report_live(scene.whole, scene.key(lease), [START], report=1)
    await scene.complete(lease, output)
    before = await kinds_of(scene, lease)
    await report_live(scene.whole, scene.key(lease), [START, executing("1")], report=2)
    await report_live(scene.whole, scene.key(lease), [executed(output)], [output])
    await scene.complete(lease, output)
    assert await kinds_of(scene, lease) == before
    await require_one_of_each(scene, lease)
    assert await names_of(scene, lease) == ["x_00001_.png"]


async def test_a_later_attempt_of_another_worker_continues_the_run(scene: Scene) -> None:
    first = await scene.lease()
    opening = [START, CACHED, executing("1")]
    await report_live(scene.whole, scene.key(first), opening, report=1)
    await finish.requeue(
        scene.whole, first.dispatch_id, first.lease_token, RequeueReason.SPOT, worker_id="w"
    )
    second = await lease_next(scene.whole, waiter("w2"), wait_seconds=0)
    assert second is not None
    # Both workers number their reports from 1.
    await report_live(scene.whole, scene.key(second), opening, report=1)
    await report_live(scene.whole, scene.key(first), opening, report=2)
    output = made(ONE)
    await scene.upload(second, output, ONE)
    word = done(second, output).model_copy(update={"events": (START, executed(output), SUCCESS)})
    await finish.complete(scene.whole, word)
    assert await kinds_of(scene, second) == [
        "execution_start",
        "execution_cached",
        "executing",
        "executing",
        "executed",
        "execution_success",
    ]
    await require_one_of_each(scene, second)


async def test_an_attempt_that_ends_in_a_heartbeat_does_not_end_the_prompt(scene: Scene) -> None:
    lease = await scene.lease()
    error: tuple[str, dict[str, Any]] = ("execution_error", {"prompt_id": "x"})
    await report_live(scene.whole, scene.key(lease), [START, error], report=1)
    assert await kinds_of(scene, lease) == ["execution_start"]
    await finish.requeue(
        scene.whole, lease.dispatch_id, lease.lease_token, RequeueReason.SPOT, worker_id="w"
    )
    again = await scene.lease_again()
    await scene.complete(again)
    assert (await kinds_of(scene, again))[-1] == "execution_success"
    await require_one_of_each(scene, again)


@pytest.mark.parametrize("has_arrived", [True, False])
async def test_the_end_brings_a_report_whose_answer_was_lost(
    scene: Scene, has_arrived: bool
) -> None:
    lease = await scene.lease()
    unheard = UnheardReport(number=5, events=(START, executing("1")))
    if has_arrived:
        await report_live(scene.whole, scene.key(lease), unheard.events, report=5)
    word = Complete(
        dispatch_id=lease.dispatch_id,
        lease_token=lease.lease_token,
        events=(executing("2"), SUCCESS),
        report=6,
        unheard=unheard,
        history={},
    )
    await finish.complete(scene.whole, word)
    assert await kinds_of(scene, lease) == [
        "execution_start",
        "executing",
        "executing",
        "execution_success",
    ]


async def test_a_cancelled_prompt_ends_once(scene: Scene) -> None:
    lease = await scene.lease()
    await report_live(scene.whole, scene.key(lease), [START], report=1)

    async def cancel() -> None:
        await job_submit.cancel_job(scene.whole, scene.tenant_id, lease.job_id)

    async def complete() -> None:
        await finish.complete(scene.whole, done(lease))

    acts = [act() for _ in range(5) for act in (cancel, complete)]
    results = await asyncio.gather(*acts, return_exceptions=True)
    errors = {type(each) for each in results if each is not None}
    assert errors <= {LeaseLost}
    await require_one_of_each(scene, lease)


async def test_the_log_of_a_job_that_ended_elsewhere_stays(scene: Scene) -> None:
    lease = await scene.lease()
    await scene.complete(lease)
    before = await kinds_of(scene, lease)
    with pytest.raises(LeaseLost):
        await finish.fail(scene.whole, lease.dispatch_id, lease.lease_token, Failure("no"))
    assert await kinds_of(scene, lease) == before
    assert (await scene.rows(run_events, lease.job_id))[-1].record["status"]["completed"]


def ordered(client_id: str = "c") -> dict[str, Any]:
    return {"gateway": {"client_id": client_id, "in_order": True}}


async def starts_of(scene: Scene, lease: Handed) -> list[int | None]:
    """For each row of a prompt, the row that started its attempt."""
    async with scene.whole.tenant(scene.tenant_id) as tx:
        rows, _ = await run_log.events_of_job(tx, scene.tenant_id, lease.job_id)
    places = {row.id: place for place, row in enumerate(rows)}
    return [None if row.start_id is None else places[row.start_id] for row in rows]


async def requeue(scene: Scene, lease: Handed) -> None:
    await finish.requeue(
        scene.whole, lease.dispatch_id, lease.lease_token, RequeueReason.SPOT, worker_id="w"
    )


async def test_each_attempt_begins_with_its_first_row(scene: Scene) -> None:
    first = await scene.lease(**ordered())
    for number, event in enumerate([START, executing("1")]):
        await report_live(scene.whole, scene.key(first), [event], report=number)
    await requeue(scene, first)
    second = await scene.lease_again()
    # The client has seen its start, so this row is empty.
    await report_live(scene.whole, scene.key(second), [START], report=3)
    await scene.complete(second)
    assert await starts_of(scene, second) == [0, 0, 2, 2]


@pytest.mark.parametrize("gateway", [{}, {"client_id": None, "in_order": True}], ids=str)
async def test_a_prompt_that_is_not_shown_in_order_has_no_attempts(
    scene: Scene, gateway: dict[str, Any]
) -> None:
    lease = await scene.lease(gateway=gateway)
    await report_live(scene.whole, scene.key(lease), [START], report=1)
    await scene.complete(lease)
    assert await starts_of(scene, lease) == [None, None]


async def test_the_end_of_a_cancelled_run_belongs_to_its_attempt(scene: Scene) -> None:
    lease = await scene.lease(**ordered())
    await report_live(scene.whole, scene.key(lease), [START], report=1)
    await job_submit.cancel_job(scene.whole, scene.tenant_id, lease.job_id)
    assert await starts_of(scene, lease) == [0, 0]


async def test_the_end_of_a_prompt_that_no_worker_has_stands_for_itself(scene: Scene) -> None:
    """Its attempt is over, and its client may see another prompt since."""
    lease = await scene.lease(**ordered())
    await report_live(scene.whole, scene.key(lease), [START], report=1)
    await requeue(scene, lease)
    await job_submit.cancel_job(scene.whole, scene.tenant_id, lease.job_id)
    assert await starts_of(scene, lease) == [0, 1]


async def read_in_order(scene: Scene, cursor: Cursor, *, to_id: int) -> list[LoggedEvents]:
    async with scene.whole.tenant(scene.tenant_id) as tx:
        page = await run_log.events_in_order(
            tx, scene.tenant_id, scene.user_id, "c", cursor, to_id=to_id
        )
    return page.rows


async def last_id(scene: Scene) -> int:
    async with scene.whole.tenant(scene.tenant_id) as tx:
        return await run_log.last_id(tx, scene.tenant_id, scene.user_id)


async def test_the_log_is_read_by_attempt_from_any_place(scene: Scene) -> None:
    first, second = await scene.lease(**ordered()), await scene.lease(**ordered())
    other = await scene.lease(**ordered("another client"))
    plain = await scene.lease()
    for number in range(2):
        for lease in (first, second, other, plain):
            await report_live(
                scene.whole, scene.key(lease), [executing(str(number))], report=number
            )
    to_id = await last_id(scene)
    rows = await read_in_order(scene, cursor_at(0), to_id=to_id)
    assert [row.job_id for row in rows] == [first.job_id] * 2 + [second.job_id] * 2
    for place, row in enumerate(rows):
        after = Cursor(seen=to_id, start_id=row.start_id or 0, row=row.id, floor=0)
        assert await read_in_order(scene, after, to_id=to_id) == rows[place + 1 :]
    # Up to the floor everything was sent; after `to_id` nothing is read.
    assert await read_in_order(scene, cursor_at(rows[2].id), to_id=to_id) == [rows[1], rows[3]]
    assert await read_in_order(scene, cursor_at(0), to_id=rows[1].id - 1) == [rows[0], rows[2]]


async def is_over(scene: Scene, start_id: int, *, to_id: int) -> bool:
    async with scene.whole.tenant(scene.tenant_id) as tx:
        return await run_log.is_attempt_over(tx, scene.tenant_id, start_id, to_id=to_id)


async def test_an_attempt_is_over_when_its_lease_has_ended_and_all_was_read(scene: Scene) -> None:
    lease = await scene.lease(**ordered())
    await report_live(scene.whole, scene.key(lease), [START], report=1)
    start = await last_id(scene)
    await report_live(scene.whole, scene.key(lease), [executing("1")], report=2)
    assert not await is_over(scene, start, to_id=await last_id(scene))
    await requeue(scene, lease)
    assert not await is_over(scene, start, to_id=start)
    assert await is_over(scene, start, to_id=await last_id(scene))
    await report_live(scene.whole, scene.key(await scene.lease_again()), [START], report=1)
    assert await is_over(scene, start, to_id=await last_id(scene))
    assert not await is_over(scene, await last_id(scene), to_id=await last_id(scene))


async def test_running_attempts_are_listed_as_they_started(scene: Scene) -> None:
    first, second = await scene.lease(**ordered()), await scene.lease(**ordered("d"))
    await scene.lease(**ordered())
    for lease in (second, first):
        await report_live(scene.whole, scene.key(lease), [START], report=1)

    async def running() -> list[tuple[UUID, str | None]]:
        async with scene.whole.tenant(scene.tenant_id) as tx:
            found = await run_log.running_attempts(tx, scene.tenant_id, scene.user_id)
        return [(each.job_id, each.client_id) for each in found]

    assert await running() == [(second.job_id, "d"), (first.job_id, "c")]
    await requeue(scene, second)
    assert await running() == [(first.job_id, "c")]


async def test_messages_stay_while_an_earlier_prompt_may_hold_them_back(scene: Scene) -> None:
    first = await scene.lease(**ordered())
    scene.clock.advance(seconds=1)
    held, plain = await scene.lease(**ordered()), await scene.lease()
    for lease in (held, plain):
        await report_live(scene.whole, scene.key(lease), [START], report=1)
        await scene.complete(lease)

    async def prune() -> None:
        async with scene.whole.pools["main"].transaction() as tx:
            await run_log.prune_live(tx, before=scene.clock() + timedelta(hours=1), limit=100)

    await prune()
    assert (len(await kinds_of(scene, held)), len(await kinds_of(scene, plain))) == (2, 1)
    await scene.complete(first)
    await prune()
    assert len(await kinds_of(scene, held)) == 1


@pytest.mark.parametrize(
    "columns", [{"report": 1}, {"has_start": True}, {"has_end": True}, {"record": {}}], ids=str
)
async def test_the_database_refuses_a_second_row(scene: Scene, columns: dict[str, Any]) -> None:
    lease = await scene.lease()
    row = {
        "tenant_id": scene.tenant_id,
        "user_id": scene.user_id,
        "job_id": lease.job_id,
        "lease_number": 1,
        "prompt_id": "x",
        "events": [],
        "created_at": datetime(2026, 11, 15, tzinfo=UTC),
        **columns,
    }
    pool = scene.whole.pools["main"]
    async with pool.transaction() as tx:
        await tx.execute(insert(run_events).values(row))
    with pytest.raises(IntegrityError):
        async with pool.transaction() as tx:
            await tx.execute(insert(run_events).values(row))


async def test_the_second_file_of_a_run_takes_the_next_number(scene: Scene) -> None:
    lease = await scene.lease()
    both = [made(ONE, "a.png", 1), made(OTHER, "b.png", 2)]
    for number, (output, data) in enumerate(zip(both, (ONE, OTHER), strict=True)):
        await scene.upload(lease, output, data)
        for _ in range(2):
            await report_live(
                scene.whole, scene.key(lease), [executed(output)], [output], report=number
            )
    job = await scene.complete(lease, *both)
    assert job.status == JobStatus.COMPLETED
    assert await scene.names_told(lease.job_id) == ["x_00001_.png", "x_00002_.png"]
    assert await names_of(scene, lease) == ["x_00001_.png", "x_00002_.png"]


LARGE = "x" * 100_000


async def test_a_page_of_the_log_has_few_bytes_and_one_row_at_least(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of 200 rows, each with a picture, was more than the memory of a control plane."""
    monkeypatch.setattr("comfyfleet.server.run_log.store.PAGE_BYTES_MAX", 2 * len(LARGE))
    ordered_lease, plain = await scene.lease(**ordered()), await scene.lease()
    # Random, so that no database makes it small.
    pictures = [("comfyfleet_picture", {"base64": token_hex(len(LARGE) // 2)}) for _ in range(7)]
    for lease in (ordered_lease, plain):
        for number, picture in enumerate(pictures, start=1):
            await report_live(scene.whole, scene.key(lease), [picture], report=number)
    tenant_id, user_id, to_id = scene.tenant_id, scene.user_id, await last_id(scene)

    async def pages(read: Callable[[Tx, int], Awaitable[LogPage | LogLook]]) -> list[int]:
        sizes, after_id, has_more = list[int](), 0, True
        async with scene.whole.tenant(tenant_id) as tx:
            while has_more:
                page = await read(tx, after_id)
                sizes.append(len(page.rows))
                after_id, has_more = page.rows[-1].id, page.has_more
        return sizes

    async def in_order(tx: Tx, after_id: int) -> LogPage:
        start_id = (await run_log.events_of_job(tx, tenant_id, ordered_lease.job_id)).rows[0].id
        cursor = Cursor(after_id, start_id if after_id else 0, after_id, 0)
        return await run_log.events_in_order(tx, tenant_id, user_id, "c", cursor, to_id=to_id)

    readers: dict[str, Callable[[Tx, int], Awaitable[LogPage | LogLook]]] = {
        "of a user": lambda tx, after: run_log.look(tx, tenant_id, user_id, after_id=after),
        "in order": in_order,
        "of a client": lambda tx, after: run_log.events_of_client(
            tx, tenant_id, user_id, "c", after_id=after, to_id=to_id
        ),
        "of a job": lambda tx, after: run_log.events_of_job(
            tx, tenant_id, plain.job_id, after_id=after
        ),
    }
    for name, read in readers.items():
        sizes = await pages(read)
        assert sum(sizes) == (14 if name == "of a user" else 7), name
        assert max(sizes) <= 2, name
    async with scene.whole.tenant(tenant_id) as tx:
        assert await run_log.messages_of_job(tx, tenant_id, plain.job_id) == []
        assert await run_log.has_messages(tx, tenant_id, plain.job_id)
    monkeypatch.setattr("comfyfleet.server.run_log.store.PAGE_BYTES_MAX", 1)
    assert max(await pages(readers["of a user"])) == 1
