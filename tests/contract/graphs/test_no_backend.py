"""A node that nobody can run says so: when it is checked and priced, while it waits, and in the end."""

from datetime import datetime, timedelta
from pathlib import Path

from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import Play, graph, node, output, play_on, statuses

from comfyfleet.clock import utc_now
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.apply import LoadedRun
from comfyfleet.server.graphs.run import Choice, ExecutionKey, GraphRunStatus, job_id

NOBODY = "NoBackendAvailable: no backend can run draw at the moment"
ABLE = {"node_types": ["EmptyImage", "LoadImage", "SaveImage"]}


class Clock:
    def __init__(self) -> None:
        self.by = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self.by


def one(**fields: object) -> dict[str, object]:
    return graph([node("first", **fields), output()], "first.output > result.value")


async def later(play: Play, clock: Clock, kept: LoadedRun, seconds: float) -> LoadedRun:
    clock.by += timedelta(seconds=seconds)
    await play.judge()
    await play.sweep()
    return await play.now(kept)


async def test_what_nobody_can_run_is_a_warning_when_it_is_checked_and_priced(
    databases: Databases, tmp_path: Path
) -> None:
    async with play_on(databases, tmp_path, workers=()) as play:
        found, _ = await actions.check_document(play.graphs, one())
        assert found.problems == ()
        assert [(each.code, each.node, each.message) for each in found.warnings] == [
            ("no_backend", "first", NOBODY)
        ]
        made = await actions.create_graph(play.graphs, play.owner, one())
        priced = await actions.quote_run(play.graphs, play.owner, made.id, {})
        assert priced.warnings == found.warnings
        # One that lacks a node type can't run it either.
        await play.yard.register("bad", backend={"node_types": ["SaveImage"]})
        found, _ = await actions.check_document(play.graphs, one())
        assert [each.code for each in found.warnings] == ["no_backend"]
        await play.yard.register("good", backend=ABLE)
        found, _ = await actions.check_document(play.graphs, one())
        assert found.warnings == ()


async def test_a_job_that_nobody_can_run_fails_its_node_after_a_while(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with play_on(databases, tmp_path, workers=(), clock=clock) as play:
        kept = await play.started(one())
        assert statuses(kept) == {"first": "queued"}
        assert await actions.unservable_nodes(play.graphs, kept, kept.run) == {"first": NOBODY}
        kept = await later(play, clock, kept, 50)
        assert statuses(kept)["first"] == "queued"
        kept = await later(play, clock, kept, 11)
        assert kept.run.status == GraphRunStatus.FAILED
        assert kept.run.error is not None
        assert kept.run.error.message == f"Node first failed: {NOBODY}"
        assert await play.balance() == 100
        assert await play.count_jobs(status="cancelled") == 1
        await play.require_sound_ledger()


async def test_where_the_node_asks_a_person_decides(databases: Databases, tmp_path: Path) -> None:
    clock = Clock()
    async with play_on(databases, tmp_path, workers=(), clock=clock) as play:
        kept = await play.started(one(fallback_strategy="ask_user"))
        kept = await later(play, clock, kept, 61)
        assert kept.run.status == GraphRunStatus.WAITING_FOR_USER
        question = kept.run.record(ExecutionKey("first")).question
        assert question is not None
        assert question.message == NOBODY
        async with play.yard.worker("w1", backend=ABLE) as worker:
            play.workers["w1"] = worker
            play.graphs.environment._at = None
            await play.answer(kept, "first", Choice.RETRY)
            await play.work()
            kept = await play.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED


async def test_a_job_that_waits_behind_others_is_left_alone(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with play_on(databases, tmp_path, clock=clock) as play:
        kept = await play.started(one())
        for _ in range(3):
            clock.by += timedelta(seconds=40)
            await play.lose("w1", since=clock())  # seen just now, and busy
            await play.judge()
            await play.sweep()
        kept = await play.now(kept)
        assert statuses(kept)["first"] == "queued"
        await play.lose("w1")
        clock.by += timedelta(seconds=100)
        kept = await later(play, clock, kept, 0)
        assert kept.run.status == GraphRunStatus.FAILED


async def test_an_affinity_to_a_worker_that_is_gone_warns_unless_there_is_no_fallback(
    databases: Databases, tmp_path: Path
) -> None:
    async with play_on(databases, tmp_path) as play:
        gone = {"backend_affinity": "worker:gone"}
        for fallback in ("ask_user", "auto_select"):
            found, _ = await actions.check_document(
                play.graphs, one(fallback_strategy=fallback, **gone)
            )
            assert found.problems == ()
            assert [each.code for each in found.warnings] == ["unknown_backend"]
            kept = await play.started(one(fallback_strategy=fallback, **gone))
            assert kept.run.status in (GraphRunStatus.WAITING_FOR_USER, GraphRunStatus.RUNNING)
        found, _ = await actions.check_document(play.graphs, one(**gone))
        assert [each.code for each in found.problems] == ["unknown_backend"]


async def test_an_execution_names_its_job(databases: Databases, tmp_path: Path) -> None:
    async with play_on(databases, tmp_path) as play:
        kept = await play.started(one())
        job = await play.workers["w1"].job()
        assert job["job_id"] == str(job_id(kept.run.id, ExecutionKey("first"), 1))


PAINT = {
    "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "here.safetensors"}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "drawn"}},
}
MODEL = {"name": "model", "type": "text", "binding": "1.unet_name"}
PAINTER = {
    "node_types": ["UNETLoader", "SaveImage"],
    "model_files": {"UNETLoader.unet_name": ["here.safetensors"]},
}
NO_MODEL = "NoBackendAvailable: no backend can run paint at the moment"


async def add_paint(play: Play) -> None:
    made = await play.yard.register_workflow(
        "paint", document=PAINT, properties=[MODEL], output_node_id="2"
    )
    assert made.status_code == 201, made.text
    await play.yard.assign("draw", "paint")
    await play.yard.register("w1", backend=PAINTER)


async def test_a_model_that_nobody_has_fails_the_node_that_chose_it(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with play_on(databases, tmp_path, workers=(), clock=clock) as play:
        await add_paint(play)
        good = one(workflow="paint", properties={"model": "here.safetensors"})
        bad = one(workflow="paint", properties={"model": "gone.safetensors"})
        for document, codes in ((good, []), (bad, ["no_backend"])):
            found, _ = await actions.check_document(play.graphs, document)
            assert [each.code for each in found.warnings] == codes
        waits, fails = await play.started(good), await play.started(bad)
        assert await actions.unservable_nodes(play.graphs, waits, waits.run) == {}
        assert await actions.unservable_nodes(play.graphs, fails, fails.run) == {"first": NO_MODEL}
        for _ in range(2):
            await play.lose("w1", since=clock() + timedelta(seconds=31))  # seen just now, and busy
            fails = await later(play, clock, fails, 31)
        assert fails.run.status == GraphRunStatus.FAILED
        assert fails.run.error is not None
        assert fails.run.error.message == f"Node first failed: {NO_MODEL}"
        assert statuses(await play.now(waits))["first"] == "queued"


async def test_a_model_that_somebody_gets_in_time_is_used(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with play_on(databases, tmp_path, workers=(), clock=clock) as play:
        await add_paint(play)
        document = one(
            workflow="paint",
            properties={"model": "gone.safetensors"},
            fallback_strategy="ask_user",
        )
        kept = await play.started(document)
        kept = await later(play, clock, kept, 61)
        question = kept.run.record(ExecutionKey("first")).question
        assert question is not None
        assert question.message == NO_MODEL
        got = {**PAINTER, "model_files": {"UNETLoader.unet_name": ["gone.safetensors"]}}
        async with play.yard.worker("w2", backend=got) as worker:
            play.workers["w2"] = worker
            play.graphs.environment._at = None
            await play.answer(kept, "first", Choice.RETRY)
            await play.work("w2")
        assert (await play.now(kept)).run.status == GraphRunStatus.COMPLETED


async def test_a_model_that_an_effect_locks_counts_like_one_that_is_chosen(
    databases: Databases, tmp_path: Path
) -> None:
    async with play_on(databases, tmp_path, workers=()) as play:
        await add_paint(play)
        body = {
            "slug": "gone",
            "title": "Gone",
            "workflow_slug": "paint",
            "price_tokens": 1,
            "overrides": {"model": "gone.safetensors"},
            "locked": ["model"],
        }
        made = await play.yard.admin.post("/api/admin/effects", json=body)
        assert made.status_code == 201, made.text
        assert (await play.yard.admin.post("/api/admin/effects/gone/publish")).status_code == 200
        named = {"id": "first", "type": "workflow", "effect": "gone"}
        document = graph([named, output()], "first.output > result.value")
        found, _ = await actions.check_document(play.graphs, document)
        assert [each.code for each in found.warnings] == ["no_backend"]
