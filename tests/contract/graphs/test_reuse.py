"""Results that are taken again instead of run: only what is really the same, only one's own, and never paid twice."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import func, select, update
from tests.support.databases.factory import Databases
from tests.support.jobs.fuse import Fuse, ProcessDied, fused
from tests.support.jobs.graphs import (
    PRICE,
    GraphSetup,
    graph,
    graph_setup_on,
    new_owner,
    node,
    output,
)
from tests.unit.graphs.builders import EXAMPLES

from comfyfleet.api.documents import read_document
from comfyfleet.server.db.tenant_tables import ai_jobs, files, token_transactions
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun, Owner
from comfyfleet.server.graphs.apply import GraphContext, LoadedRun
from comfyfleet.server.graphs.run import ExecutionKey, GraphRunStatus, job_id
from comfyfleet.server.jobs.outbox import flush_due
from comfyfleet.server.maintenance.retention import expire_old
from comfyfleet.server.media import service as media
from comfyfleet.server.media.model import File, upload_key
from comfyfleet.server.tenants import wallet as ledger

SEEDED = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "color": 0}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "drawn"}},
}
SEEDS = [{"name": "seed", "type": "seed", "binding": "1.color"}]
LINE = graph(
    [
        {"id": "width", "type": "input", "value_type": "integer", "default": 64},
        {"id": "photo", "type": "input", "value_type": "image", "required": False},
        node("first"),
        node("then"),
        output(),
    ],
    "width.value > first.width",
    "photo.value > first.like",
    "first.output > then.like",
    "then.output > result.value",
    reuse=True,
)
FIRST, THEN = ExecutionKey("first"), ExecutionKey("then")


class Reuse(GraphSetup):
    """Workers deliver bytes that follow from the prompt and the inputs, as they would on a real backend."""

    async def deliver(self, job: dict[str, Any], worker: str = "w1", **more: Any) -> None:
        calling, slot = self.workers[worker], job["outputs"][0]
        assets = [(each["name"], each["content_hash"]) for each in job["assets"]]
        made_from = json.dumps([job["prompt"], assets], sort_keys=True).encode()
        # A result with the prompt's text in it would be refused.
        data = hashlib.sha256(made_from).digest()
        put = await calling.client.put(slot["url"], content=data, headers=slot["headers"])
        assert put.status_code in (200, 201), put.text
        said = {
            "name": slot["name"],
            "size": len(data),
            "content_type": "image/png",
            "filename": "drawn.png",
            "width": 640,
            "height": 480,
            "content_hash": hashlib.sha256(data).hexdigest(),
        }
        shown = [{"node_id": "9", "name": "score", "value": 0.5}]
        answer = await calling.call_for(
            job, "complete", outputs=[said], values=shown, execution_seconds=1.5, **more
        )
        assert answer.status_code == 200, answer.text

    async def ended(self, document: dict[str, Any], **wanted: Any) -> tuple[LoadedRun, int]:
        """Runs a graph to its end; returns it, and how many jobs that took."""
        before = await self.count_jobs()
        run = await self.started(document, **wanted)
        await self.work()
        run = await self.now(run)
        assert run.run.status == GraphRunStatus.COMPLETED, run.run.error
        return run, await self.count_jobs() - before

    async def photo(self, data: bytes, owner: Owner | None = None, **changes: Any) -> str:
        owner, file_id = owner or self.owner, uuid4()
        fields = {
            "path": upload_key(owner.tenant_id, file_id, "cat.png"),
            "filename": "cat.png",
            "mime_type": "image/png",
            "size": len(data),
            "content_hash": hashlib.sha256(data).hexdigest(),
            "created_at": self.plane.clock(),
            "user_id": owner.user_id,
            **changes,
        }
        file = File(file_id, owner.tenant_id, self.plane.store.disk, **fields)
        await self.plane.store.put(file.path, data, file.mime_type)
        async with self.plane.pools["main"].transaction() as tx:
            await media.add_file(tx, file)
        return str(file_id)

    async def ledger_lines(self) -> int:
        async with self.plane.pools["main"].read() as tx:
            return int(await tx.scalar(select(func.count()).select_from(token_transactions)) or 0)

    async def age(self, days: float) -> None:
        """Makes all files older, as if their owner had waited."""
        async with self.plane.pools["main"].transaction() as tx:
            for file_id, made, kept in await tx.execute(
                select(files.c.id, files.c.created_at, files.c.kept_from)
            ):
                older = timedelta(days=days)
                values = {"created_at": made - older, "kept_from": kept and kept - older}
                await tx.execute(update(files).where(files.c.id == file_id).values(values))


@asynccontextmanager
async def reuse_on(databases: Databases, folder: Path, **more: Any) -> AsyncIterator[Reuse]:
    async with graph_setup_on(databases, folder, tokens=more.pop("tokens", 1000), **more) as made:
        setup = Reuse(made.plane, made.fleet_setup, made.owner, made.workers)
        registered = await made.fleet_setup.register_workflow(
            "seeded", document=SEEDED, properties=SEEDS, output_node_id="2", price_tokens=PRICE
        )
        assert registered.status_code == 201, registered.text
        await made.fleet_setup.assign("invert", "draw", "seeded")
        yield setup


async def test_the_same_again_is_done_at_once_for_nothing(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        first, jobs = await setup.ended(LINE)
        assert jobs == 2
        paid, lines = await setup.balance(), await setup.ledger_lines()
        assert paid == 1000 - 2 * PRICE
        again = await setup.started(LINE)  # and no worker does anything
        assert again.run.status == GraphRunStatus.COMPLETED
        assert (again.run.tokens, first.run.tokens) == (0, 2 * PRICE)
        assert await setup.count_jobs() == 2
        assert (await setup.balance(), await setup.ledger_lines()) == (paid, lines)
        stored = await setup.now(again)
        for key in (FIRST, THEN):
            source = {"job_id": str(job_id(first.run.id, key, 1)), "run_id": str(first.run.id)}
            record = stored.run.record(key)
            assert record.reused_from == source
            assert record.outputs == first.run.record(key).outputs
        assert stored.run.record(THEN).outputs["output"]["values"] == {"score": 0.5}  # type: ignore[index]
        assert stored.run.outputs == first.run.outputs
        await setup.require_sound_ledger()


async def test_whatever_is_not_the_same_is_run(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        cat, dog = await setup.photo(b"cat"), await setup.photo(b"dog")
        usual: dict[str, Any] = {"width": 64, "photo": cat}
        assert (await setup.ended(LINE, inputs=usual))[1] == 2
        assert (await setup.ended(LINE, inputs=usual))[1] == 0
        # The same bytes in another file are the same; a value that is the default is, too.
        twin = await setup.photo(b"cat")
        assert (await setup.ended(LINE, inputs={"photo": twin}))[1] == 0
        assert (await setup.ended(LINE, inputs={**usual, "width": 65}))[1] == 2
        assert (await setup.ended(LINE, inputs={**usual, "photo": dog}))[1] == 2
        assert (await setup.ended(LINE, inputs={}))[1] == 2
        unknown = await setup.photo(b"cat", content_hash=None)
        # The first node can't be compared; the second gets the same bytes from it again, and can.
        assert (await setup.ended(LINE, inputs={"photo": unknown}))[1] == 2
        assert (await setup.ended(LINE, inputs={"photo": unknown}))[1] == 1
        assert (await setup.ended({**LINE, "reuse": False}, inputs=usual))[1] == 2
        await setup.require_sound_ledger()


async def test_another_version_of_the_workflow_is_run(databases: Databases, tmp_path: Path) -> None:
    alone = graph([node("first"), output()], "first.output > result.value", reuse=True)
    async with reuse_on(databases, tmp_path) as setup:
        assert (await setup.ended(alone))[1] == 1
        assert (await setup.ended(alone))[1] == 0
        async with setup.plane.pools["main"].transaction() as tx:
            await tx.execute(update(ai_jobs).values(workflow_version=9))
        assert (await setup.ended(alone))[1] == 0, "the fingerprint decides, which has the version"
        made = await setup.fleet_setup.register_workflow(
            "draw", document=SEEDED, properties=[], output_node_id="2", price_tokens=PRICE
        )
        assert made.status_code in (200, 201), made.text
        assert (await setup.ended(alone))[1] == 1
        assert (await setup.ended(alone))[1] == 0


async def test_only_ones_own_results_are_taken(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        mine = setup.owner
        await setup.ended(LINE)
        stranger = await new_owner(setup.plane, 100)
        colleague = Owner(mine.tenant_id, uuid4())
        async with setup.plane.pools["main"].transaction() as tx:
            await ledger.credit(
                tx, mine.tenant_id, colleague.user_id, 100, "paid", now=setup.plane.clock()
            )
        for other in (stranger, colleague):
            setup.owner = other
            run, jobs = await setup.ended(LINE)
            assert jobs == 2
            assert run.run.record(FIRST).reused_from is None
            assert (await setup.ended(LINE))[1] == 0
        setup.owner = mine
        assert (await setup.ended(LINE))[1] == 0


async def test_a_seed_left_to_chance_is_never_the_same(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:

        def drawing(**properties: Any) -> dict[str, Any]:
            drawn = node("first", workflow="seeded", properties=properties)
            return graph([drawn, output()], "first.output > result.value", reuse=True)

        assert [(await setup.ended(drawing()))[1] for _ in range(3)] == [1, 1, 1]
        assert [(await setup.ended(drawing(seed=7)))[1] for _ in range(3)] == [1, 0, 0]
        assert (await setup.ended(drawing(seed=8)))[1] == 1


async def test_files_that_are_gone_or_about_to_go_are_no_result(
    databases: Databases, tmp_path: Path
) -> None:
    alone = graph([node("first"), output()], "first.output > result.value", reuse=True)
    async with reuse_on(databases, tmp_path, retention_days=30) as setup:
        await setup.ended(alone)
        await setup.age(29)
        assert (await setup.ended(alone))[1] == 0
        # To be taken has begun their time anew.
        await setup.age(29)
        await expire_old(setup.plane.context)
        assert (await setup.ended(alone))[1] == 0
        await setup.age(29.999)
        assert (await setup.ended(alone))[1] == 1, "it would be gone in a minute"
        run, _ = await setup.ended(alone)
        (made,) = run.run.record(FIRST).outputs["output"]["files"]  # type: ignore[index]
        async with setup.plane.pools["main"].transaction() as tx:
            await media.delete_file(tx, setup.owner.tenant_id, UUID(made["file_id"]))
        assert (await setup.ended(alone))[1] == 1


async def test_files_stay_while_a_run_that_took_them_goes_on(
    databases: Databases, tmp_path: Path
) -> None:
    asks = {"backend_affinity": "worker:w2", "fallback_strategy": "ask_user", "reuse": False}
    async with reuse_on(databases, tmp_path, retention_days=30, workers=("w1", "w2")) as setup:
        waits = json.loads(json.dumps(LINE))
        waits["nodes"][3] |= asks
        await setup.ended(LINE)
        await setup.lose("w2")
        run = await setup.started(waits)
        assert run.run.status == GraphRunStatus.WAITING_FOR_USER
        (made,) = run.run.record(FIRST).outputs["output"]["files"]  # type: ignore[index]
        await setup.age(40)
        await expire_old(setup.plane.context)
        async with setup.plane.pools["main"].read() as tx:
            assert await media.get_file(tx, setup.owner.tenant_id, UUID(made["file_id"]))
        await actions.cancel_graph_run(setup.graphs, setup.owner, run.head.id)
        await expire_old(setup.plane.context)
        async with setup.plane.pools["main"].read() as tx:
            found = await media.find_existing(tx, setup.owner.tenant_id, [UUID(made["file_id"])])
        assert found == {}


async def test_a_failed_job_is_no_result_and_a_retry_looks_again(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        failed = await setup.started(LINE)
        await setup.work(wanted=lambda job: "out of paint")
        assert (await setup.now(failed)).run.status == GraphRunStatus.FAILED
        assert (await setup.ended(LINE))[1] == 2
        await actions.retry_graph_run(setup.graphs, setup.owner, failed.head.id)
        retried = await setup.now(failed)
        assert retried.run.status == GraphRunStatus.COMPLETED
        assert retried.run.tokens == 0
        await setup.require_sound_ledger()


async def test_what_is_there_needs_no_tokens(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path, tokens=2 * PRICE) as setup:
        await setup.ended(LINE)
        assert await setup.balance() == 0
        run, jobs = await setup.ended(LINE, max_tokens=0)
        assert (jobs, run.run.tokens) == (0, 0)
        run = await setup.started(LINE, inputs={"width": 70}, max_tokens=0)
        assert run.run.status == GraphRunStatus.FAILED
        assert run.run.error is not None
        assert "spent 0 of 0 tokens, and the next job costs 3" in run.run.error.message
        run = await setup.started(LINE, inputs={"width": 70})
        assert run.run.error is not None
        assert "Insufficient token balance" in run.run.error.message
        await setup.require_sound_ledger()


FAN_OUT = graph(
    [
        {"id": "widths", "type": "input", "value_type": "integer[]"},
        {"id": "each", "type": "fanout", "mode": "distribute", "per_item": True},
        node("first"),
        {"id": "all", "type": "merge", "over": "each"},
        output(),
    ],
    "widths.value > each.items",
    "each.item > first.width",
    "first.output > all.input_0",
    "all.output > result.value",
    reuse=True,
)


async def test_of_a_list_only_what_is_new_is_run(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        assert (await setup.ended(FAN_OUT, inputs={"widths": list(range(64, 80))}))[1] == 16
        run, jobs = await setup.ended(FAN_OUT, inputs={"widths": list(range(60, 84))})
        assert jobs == 8
        assert run.run.tokens == 8 * PRICE
        merged = (run.run.outputs or {})["result"]["merged"]
        hashes = [each["files"][0]["file_id"] for each in merged]
        assert len(set(hashes)) == 24
        # More than one step takes at a time, in one go.
        run = await setup.started(FAN_OUT, inputs={"widths": list(range(60, 84))})
        assert run.run.status == GraphRunStatus.COMPLETED
        assert await setup.balance() == 1000 - 24 * PRICE


async def test_two_runs_at_once_may_both_run_but_agree(
    databases: Databases, tmp_path: Path
) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        made = await actions.create_graph(setup.graphs, setup.owner, LINE)
        runs = await asyncio.gather(*(setup.run(made.id) for _ in range(4)))
        await setup.work()
        ended = [await setup.now(run) for run in runs]
        assert {run.run.status for run in ended} == {GraphRunStatus.COMPLETED}
        jobs = await setup.count_jobs()
        assert 2 <= jobs <= 8
        assert (
            await setup.balance()
            == 1000 - jobs * PRICE
            == 1000 - sum(run.run.tokens for run in ended)
        )
        again = await asyncio.gather(*(setup.run(made.id) for _ in range(4)))
        assert {run.run.status for run in again} == {GraphRunStatus.COMPLETED}
        assert await setup.count_jobs() == jobs
        await setup.require_sound_ledger()


async def test_a_reuse_may_be_cut_anywhere(databases: Databases, tmp_path: Path) -> None:
    async with reuse_on(databases, tmp_path) as setup:
        first, _ = await setup.ended(LINE)
        made = await actions.create_graph(setup.graphs, setup.owner, LINE)
        fuse, lines = Fuse(), await setup.ledger_lines()
        for steps in range(120):
            wanted = NewGraphRun({}, idempotency_key=f"cut-{steps}")
            cut = GraphContext(fused(setup.plane.context, fuse))
            fuse.left = steps
            try:
                await actions.start_run(cut, setup.owner, made.id, wanted)
                is_whole = True
            except ProcessDied:
                is_whole = False
            fuse.left = None
            setup.plane.__dict__["graphs"] = GraphContext(setup.plane.context)
            await flush_due(setup.plane.context, setup.plane.pools["main"], limit=100)
            await setup.judge()
            run, _ = await actions.start_run(setup.graphs, setup.owner, made.id, wanted)
            assert run.run.status == GraphRunStatus.COMPLETED
            assert run.run.outputs == first.run.outputs
            assert (run.run.tokens, await setup.count_jobs()) == (0, 2)
            if is_whole:
                break
        else:
            pytest.fail("the start has no end")
        assert steps > 5
        assert await setup.ledger_lines() == lines


@pytest.mark.parametrize("runs", [4, pytest.param(100, marks=pytest.mark.slow)])
async def test_of_an_album_only_what_has_changed_is_run(
    databases: Databases, tmp_path: Path, runs: int
) -> None:
    album = read_document((EXAMPLES / "graphs/album.yaml").read_text("utf-8"))
    entry = read_document((EXAMPLES / "properties.yaml").read_text("utf-8"))["soften"]
    soften = json.loads((EXAMPLES / "workflows/soften.json").read_text("utf-8"))
    async with reuse_on(databases, tmp_path, tokens=10_000) as setup:
        made = await setup.fleet_setup.register_workflow("soften", document=soften, **entry)
        assert made.status_code == 201, made.text
        await setup.fleet_setup.assign("invert", "draw", "seeded", "soften")
        price, total = entry["price_tokens"], 0
        photos = [await setup.photo(b"photo %d" % number) for number in range(5)]
        for number in range(runs):
            if number:
                photos[number % 5] = await setup.photo(b"another %d" % number)
            run, jobs = await setup.ended({**album, "reuse": True}, inputs={"photos": photos})
            assert jobs == (1 if number else 5)
            assert run.run.tokens == jobs * price
            total += jobs
            assert await setup.balance() == 10_000 - total * price
        assert len((run.run.outputs or {})["result"]) == 5
        assert await setup.ledger_lines() == 1 + 2 * total  # each is reserved and consumed, once
        await setup.require_sound_ledger()
        stranger = await new_owner(setup.plane, 10_000)
        setup.owner = replace(stranger)
        theirs = [await setup.photo(b"photo %d" % number) for number in range(5)]
        assert (await setup.ended({**album, "reuse": True}, inputs={"photos": theirs}))[1] == 5


async def test_inside_of_a_map_results_are_taken_too(databases: Databases, tmp_path: Path) -> None:
    drawing = {"workflow": "draw", "properties": {"width": "{{ item }}"}}
    mapped = graph(
        [
            {"id": "widths", "type": "input", "value_type": "integer[]"},
            {"id": "all", "type": "map", "over": "widths.value", "do": drawing, "at_once": 2},
            output(),
        ],
        "all.output > result.value",
        reuse=True,
    )
    async with reuse_on(databases, tmp_path) as setup:
        assert (await setup.ended(mapped, inputs={"widths": [64, 65, 66]}))[1] == 3
        run, jobs = await setup.ended(mapped, inputs={"widths": [66, 67, 64]})
        assert jobs == 1
        assert run.run.tokens == PRICE
        # A plain node of another graph has made the same, and so has a part of this one.
        assert (await setup.ended(FAN_OUT, inputs={"widths": [65, 67, 68]}))[1] == 1
