"""Runs that begin with the results of an earlier one: nothing kept is run or paid again, and files stay as long as needed."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import update
from tests.contract.graphs.test_graph_webhooks import listen, told
from tests.contract.graphs.test_reuse import Reuse, reuse_on
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.graphs import PRICE, graph, new_owner, node, output, statuses

from comfyfleet.errors import Conflict, InsufficientTokens, InvalidInput, NotFound
from comfyfleet.server.db.tenant_tables import graph_runs
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import Owner
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun
from comfyfleet.server.graphs.rerun_actions import NewRerun, rerun_graph_run
from comfyfleet.server.graphs.run import ExecutionKey, GraphRunStatus, job_id
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.maintenance.retention import expire_old
from comfyfleet.server.media import service as media

LINE = graph(
    [
        {"id": "width", "type": "input", "value_type": "integer", "default": 64},
        {"id": "photo", "type": "input", "value_type": "image", "required": False},
        node("first"),
        node("second"),
        node("third"),
        output(),
    ],
    "width.value > first.width",
    "photo.value > first.like",
    "first.output > second.like",
    "second.output > third.like",
    "third.output > result.value",
)
FIRST, SECOND, THIRD = (ExecutionKey(each) for each in ("first", "second", "third"))
FAILS = {"code": "bad", "message": "out of paint", "retryable": False}


async def rerun(setup: Reuse, run: LoadedRun, start: str | None = None, **more: Any) -> LoadedRun:
    wanted = NewRerun(start, **more)
    made, is_new = await rerun_graph_run(setup.graphs, setup.owner, run.head.id, wanted)
    assert is_new
    return made


async def done(setup: Reuse, run: LoadedRun) -> LoadedRun:
    """Returns the run once its jobs have run, as another process reads it."""
    await setup.work()
    setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
    return await setup.now(run)


async def refused(setup: Reuse, run: LoadedRun, start: str | None = None, **more: Any) -> Exception:
    """Returns why a rerun is refused; nothing has changed then."""
    async with setup.plane.pools["main"].read() as tx:
        before = len((await tx.execute(graph_runs.select())).all())
    paid = await setup.balance()
    with pytest.raises((Conflict, InvalidInput, NotFound, InsufficientTokens)) as error:
        await rerun(setup, run, start, **more)
    async with setup.plane.pools["main"].read() as tx:
        assert len((await tx.execute(graph_runs.select())).all()) == before
    assert await setup.balance() == paid
    return error.value


async def test_what_is_before_the_node_is_neither_run_nor_paid_again(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, jobs = await setup.ended(LINE)
        assert jobs == 3
        again = await done(setup, await rerun(setup, run, "second"))
        assert again.run.status == GraphRunStatus.COMPLETED
        assert again.run.tokens == 2 * PRICE
        assert await setup.count_jobs() == 5
        assert await setup.balance() == 1000 - 5 * PRICE
        assert await setup.ledger_lines() == 1 + 2 * 5
        assert again.head.rerun_of == run.head.id
        assert (again.head.rerun or {})["from"] == "second"
        record = again.run.record(FIRST)
        assert record.outputs == run.run.record(FIRST).outputs
        assert record.reused_from == {
            "job_id": str(job_id(run.run.id, FIRST, 1)),
            "run_id": str(run.run.id),
        }
        assert again.run.record(SECOND).reused_from is None
        listed = await actions.list_runs(setup.graphs, setup.owner, rerun_of=run.head.id, limit=10)
        assert [(each.id, each.rerun_of) for each in listed] == [(again.head.id, run.head.id)]
        await setup.require_sound_ledger()


async def test_a_failed_and_a_cancelled_run_are_taken_up(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run = await setup.started(LINE)
        await setup.work(wanted=lambda job: FAILS if job["job_id"] == str(job_id(run.run.id, SECOND, 1)) else None)  # fmt: skip
        run = await setup.now(run)
        assert run.run.status == GraphRunStatus.FAILED
        again = await rerun(setup, run)
        assert (statuses(again)["first"], statuses(again)["second"]) == ("done", "queued")
        await actions.cancel_graph_run(setup.graphs, setup.owner, again.head.id)
        await setup.sweep()
        third = await done(setup, await rerun(setup, await setup.now(again)))
        assert third.run.status == GraphRunStatus.COMPLETED
        assert third.run.tokens == 2 * PRICE
        source = third.run.record(FIRST).reused_from
        assert source is not None
        assert source["run_id"] == str(run.run.id)
        # Once for each job that was completed: the failed and the cancelled ones were refunded.
        assert await setup.balance() == 1000 - 3 * PRICE
        await setup.require_sound_ledger()


async def test_a_changed_input_property_or_version_runs_what_depends_on_it(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        again = await done(setup, await rerun(setup, run, inputs={"width": 65}))
        assert (again.run.tokens, again.head.inputs) == (3 * PRICE, {"width": 65})
        again = await done(setup, await rerun(setup, run, values={"third.width": 70}))
        assert again.run.tokens == PRICE
        assert (again.run.record(THIRD).inputs or {})["width"] == 70
        assert again.head.graph_version == 1
        # What was set for that run stays set in a run from it.
        twice = await done(setup, await rerun(setup, again, "third"))
        assert (twice.run.record(THIRD).inputs or {})["width"] == 70
        changed = json.loads(json.dumps(LINE))
        changed["nodes"][3]["properties"] = {"width": 80}
        changed["nodes"][2]["retries"] = 2
        await actions.add_graph_version(setup.graphs, setup.owner, run.head.graph_id, changed)
        again = await done(setup, await rerun(setup, run, version=2))
        assert (again.run.tokens, again.head.graph_version) == (2 * PRICE, 2)
        assert (again.run.record(SECOND).inputs or {})["width"] == 80
        await setup.require_sound_ledger()


async def test_a_newer_workflow_does_not_take_results_away(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        old = run.plan.workflows["first"]
        made = await setup.fleet_setup.register_workflow(
            "draw",
            document={"1": {"class_type": "EmptyImage", "inputs": {"width": 9, "height": 9}}, "3": {"class_type": "LoadImage", "inputs": {"image": "a.png"}}, "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "new"}}},
            properties=[
                {"name": "width", "type": "integer", "binding": "1.width", "default": 64},
                {"name": "like", "type": "image", "binding": "3.image", "required": False},
            ],
            output_node_id="2",
            price_tokens=PRICE + 1,
        )  # fmt: skip
        assert made.status_code in (200, 201), made.text
        again = await done(setup, await rerun(setup, run, "third"))
        assert again.plan.workflows["third"].version == old.version + 1
        assert again.run.tokens == PRICE + 1, "at the price of today"


async def test_files_that_are_gone_are_refused_by_the_name_of_their_node(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path, retention_days=30) as setup:
        photo = await setup.photo(b"cat")
        run, _ = await setup.ended(LINE, inputs={"photo": photo})
        (made,) = run.run.record(SECOND).outputs["output"]["files"]  # type: ignore[index]
        async with setup.plane.pools["main"].transaction() as tx:
            await media.delete_file(tx, setup.owner.tenant_id, UUID(made["file_id"]))
        error = await refused(setup, run, "third")
        assert isinstance(error, Conflict)
        assert "files of second have expired or were deleted" in error.message
        assert error.details["nodes"] == ["second"]
        # From there, nothing lacks; nobody reads the photo again, so it may be gone.
        async with setup.plane.pools["main"].transaction() as tx:
            await media.delete_file(tx, setup.owner.tenant_id, UUID(photo))
        again = await done(setup, await rerun(setup, run, "second"))
        assert again.run.status == GraphRunStatus.COMPLETED
        error = await refused(setup, run, "first")
        assert isinstance(error, Conflict)
        assert error.details["nodes"] == ["photo"]


async def test_kept_files_stay_as_long_as_the_new_run_needs_them(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path, retention_days=30) as setup:
        run, _ = await setup.ended(LINE)
        (made,) = run.run.record(FIRST).outputs["output"]["files"]  # type: ignore[index]
        await setup.age(29)
        again = await rerun(setup, run, "second")
        await setup.age(29)  # since it was taken
        async with setup.plane.pools["main"].transaction() as tx:
            await tx.execute(
                update(graph_runs)
                .where(graph_runs.c.id == run.head.id)
                .values(ended_at=run.head.created_at.replace(year=2000))
            )
        await expire_old(setup.plane.context)
        await setup.age(40)
        await expire_old(setup.plane.context)
        async with setup.plane.pools["main"].read() as tx:
            assert await media.get_file(tx, setup.owner.tenant_id, UUID(made["file_id"]))
        assert (await setup.now(run)).head.is_expired
        again = await done(setup, again)
        assert again.run.status == GraphRunStatus.COMPLETED
        error = await refused(setup, run, "second")
        assert isinstance(error, Conflict)
        assert "the run has expired" in error.message
        long_ago = run.head.created_at.replace(year=2000)
        async with setup.plane.pools["main"].transaction() as tx:
            await tx.execute(update(graph_runs).values(ended_at=long_ago))
        await expire_old(setup.plane.context)
        expired = (await setup.now(again)).head
        assert (expired.rerun_of, expired.rerun) == (run.head.id, None), "what was set is gone"


async def test_what_cannot_be_run_again_is_refused_and_changes_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path, tokens=5 * PRICE) as setup:
        run = await setup.started(LINE)
        error = await refused(setup, run, "first")
        assert isinstance(error, Conflict)
        assert "only a finished run can be rerun" in error.message
        run = await done(setup, run)
        for wanted, kind, said in (
            ({}, Conflict, "all nodes already have results"),
            ({"inputs": {"width": 64}}, Conflict, "all nodes already have results"),
            ({"start": "paint"}, InvalidInput, "no node 'paint'"),
            ({"values": {"paint.width": 1}}, InvalidInput, "unknown node"),
            ({"values": {"first.colour": 1}}, InvalidInput, "colour"),
            ({"values": {"first.width": "wide"}}, InvalidInput, "width"),
            ({"inputs": {"colour": 1}}, InvalidInput, "no input 'colour'"),
            ({"inputs": {"width": "wide"}}, InvalidInput, "must be of type integer"),
            ({"inputs": {"photo": str(uuid4())}}, InvalidInput, "was not found"),
            ({"version": 7}, NotFound, "version 7"),
            ({"start": "first", "max_tokens": 2}, Conflict, "more than its limit of 2"),
            ({"start": "first"}, InsufficientTokens, ""),
        ):
            error = await refused(setup, run, **wanted)
            assert isinstance(error, kind), (wanted, error)
            assert said in error.message, (wanted, error)
        again = await done(setup, await rerun(setup, run, "second"))
        assert again.run.status == GraphRunStatus.COMPLETED, "two jobs can be paid"
        assert await setup.balance() == 0


async def test_a_bound_may_be_raised_and_is_kept_otherwise(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended({**LINE, "max_tokens": 3 * PRICE})
        kept = await rerun(setup, run, "third")
        assert kept.run.max_tokens == 3 * PRICE
        raised = await rerun(setup, run, "third", max_tokens=50)
        assert raised.run.max_tokens == 50
        own, _ = await setup.ended(LINE, max_tokens=4 * PRICE)
        assert (await rerun(setup, own, "third")).run.max_tokens == 4 * PRICE


async def test_a_run_of_somebody_else_is_unknown(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        mine = setup.owner
        colleague = Owner(mine.tenant_id, uuid4())
        for other in (await new_owner(setup.plane, 100), colleague):
            setup.owner = other
            error = await refused(setup, run, "second")
            assert isinstance(error, NotFound)
            made_up = run._replace(head=replace(run.head, id=uuid4()))
            also = await refused(setup, made_up, "second")
            ids = (str(run.head.id), str(made_up.head.id))
            assert str(error).replace(ids[0], "") == str(also).replace(ids[1], "")


async def test_the_same_key_gives_the_same_run(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        wanted = NewRerun("second", {"width": 64}, idempotency_key="once")
        calls = (rerun_graph_run(setup.graphs, setup.owner, run.head.id, wanted) for _ in range(4))
        made = await asyncio.gather(*calls)
        assert len({each.head.id for each, _ in made}) == 1
        assert [is_new for _, is_new in made].count(True) == 1
        await setup.work()
        assert await setup.count_jobs() == 5
        with pytest.raises(Conflict, match="already used for a different request"):
            await rerun_graph_run(setup.graphs, setup.owner, run.head.id, replace(wanted, start="third"))  # fmt: skip
        again, is_new = await rerun_graph_run(setup.graphs, setup.owner, run.head.id, wanted)
        assert (again.run.status, is_new) == (GraphRunStatus.COMPLETED, False)


async def test_a_run_that_is_retried_meanwhile_is_read_again(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run = await setup.started(LINE)
        await setup.work(wanted=lambda job: FAILS)
        run = await setup.now(run)
        assert run.run.status == GraphRunStatus.FAILED
        fuse, other = Fuse(), GraphContext(setup.plane.context)

        async def retry() -> None:
            await actions.retry_graph_run(other, setup.owner, run.head.id)

        fuse.meanwhile = retry
        refusals: list[str] = []
        for steps in range(60):
            fuse.left = steps
            cut = GraphContext(fused(setup.plane.context, fuse))
            try:
                await rerun_graph_run(cut, setup.owner, run.head.id, NewRerun("first"))
            except Conflict as error:
                refusals.append(error.message)
            was_used = fuse.left is None
            fuse.left = None
            await setup.work(wanted=lambda job: FAILS)
            assert (await setup.now(run)).run.status == GraphRunStatus.FAILED
            if not was_used:
                break
        assert len(refusals) > 1
        assert all("only a finished run can be rerun" in each for each in refusals)
        await setup.require_sound_ledger()
        assert await setup.balance() == 1000


async def test_a_rerun_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        fuse, jobs = Fuse(), 3
        for steps in range(150):
            wanted = NewRerun("third", idempotency_key=f"cut-{steps}")
            cut = GraphContext(fused(setup.plane.context, fuse))
            fuse.left = steps
            try:
                await rerun_graph_run(cut, setup.owner, run.head.id, wanted)
                is_whole = True
            except ProcessDied:
                is_whole = False
            fuse.left = None
            setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
            await flush_due(setup.plane.context, setup.plane.pools["main"], limit=100)
            await setup.judge()
            again, _ = await rerun_graph_run(setup.graphs, setup.owner, run.head.id, wanted)
            again, jobs = await done(setup, again), jobs + 1
            assert again.run.status == GraphRunStatus.COMPLETED, again.run.error
            assert (again.run.tokens, await setup.count_jobs()) == (PRICE, jobs)
            assert await setup.balance() == 1000 - jobs * PRICE
            if is_whole:
                break
        else:
            pytest.fail("the start has no end")
        assert steps > 10
        await setup.require_sound_ledger()


async def test_a_run_that_is_over_at_once_is_told_to_webhooks(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        await listen(setup)
        again = await rerun(setup, run, "result")
        assert again.run.status == GraphRunStatus.COMPLETED
        assert again.run.outputs == run.run.outputs
        assert again.head.ended_at is not None
        [(event, payload)] = await told(setup)
        assert (event, payload["run_id"], payload["tokens"]) == ("graph_run.ended", str(again.head.id), 0)  # fmt: skip


async def test_a_graph_that_was_deleted_can_be_run_again_as_it_was(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        run, _ = await setup.ended(LINE)
        await actions.delete_graph(setup.graphs, setup.owner, run.head.graph_id)
        again = await done(setup, await rerun(setup, run, "third"))
        assert again.run.status == GraphRunStatus.COMPLETED
