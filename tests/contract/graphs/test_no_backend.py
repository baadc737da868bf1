"""A node that nobody can run says so: when it is checked and priced, while it waits, and in the end."""

from datetime import datetime, timedelta
from pathlib import Path

from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import GraphSetup, graph, graph_setup_on, node, output, statuses

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


async def later(
    graph_setup: GraphSetup, clock: Clock, kept: LoadedRun, seconds: float
) -> LoadedRun:
    clock.by += timedelta(seconds=seconds)
    await graph_setup.judge()
    await graph_setup.sweep()
    return await graph_setup.now(kept)


async def test_what_nobody_can_run_is_a_warning_when_it_is_checked_and_priced(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=()) as graph_setup:
        found = (await actions.check_document(graph_setup.graphs, graph_setup.owner, one())).check
        assert found.problems == ()
        assert [(each.code, each.node, each.message) for each in found.warnings] == [
            ("no_backend", "first", NOBODY)
        ]
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, one())
        priced = await actions.quote_run(graph_setup.graphs, graph_setup.owner, made.id, {})
        assert priced.warnings == found.warnings
        # One that lacks a node type can't run it either.
        await graph_setup.fleet_setup.register("bad", backend={"node_types": ["SaveImage"]})
        found = (await actions.check_document(graph_setup.graphs, graph_setup.owner, one())).check
        assert [each.code for each in found.warnings] == ["no_backend"]
        await graph_setup.fleet_setup.register("good", backend=ABLE)
        found = (await actions.check_document(graph_setup.graphs, graph_setup.owner, one())).check
        assert found.warnings == ()


async def test_a_job_that_nobody_can_run_fails_its_node_after_a_while(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with graph_setup_on(databases, tmp_path, workers=(), clock=clock) as graph_setup:
        kept = await graph_setup.started(one())
        assert statuses(kept) == {"first": "queued"}
        assert await actions.unservable_nodes(graph_setup.graphs, kept, kept.run) == {
            "first": NOBODY
        }
        kept = await later(graph_setup, clock, kept, 50)
        assert statuses(kept)["first"] == "queued"
        kept = await later(graph_setup, clock, kept, 11)
        assert kept.run.status == GraphRunStatus.FAILED
        assert kept.run.error is not None
        assert kept.run.error.message == f"Node first failed: {NOBODY}"
        assert await graph_setup.balance() == 100
        assert await graph_setup.count_jobs(status="cancelled") == 1
        await graph_setup.require_sound_ledger()


async def test_where_the_node_asks_a_person_decides(databases: Databases, tmp_path: Path) -> None:
    clock = Clock()
    async with graph_setup_on(databases, tmp_path, workers=(), clock=clock) as graph_setup:
        kept = await graph_setup.started(one(fallback_strategy="ask_user"))
        kept = await later(graph_setup, clock, kept, 61)
        assert kept.run.status == GraphRunStatus.WAITING_FOR_USER
        question = kept.run.record(ExecutionKey("first")).question
        assert question is not None
        assert question.message == NOBODY
        async with graph_setup.fleet_setup.worker("w1", backend=ABLE) as worker:
            graph_setup.workers["w1"] = worker
            graph_setup.graphs.environment._at = None
            await graph_setup.answer(kept, "first", Choice.RETRY)
            await graph_setup.work()
            kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED


async def test_a_job_that_waits_behind_others_is_left_alone(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with graph_setup_on(databases, tmp_path, clock=clock) as graph_setup:
        kept = await graph_setup.started(one())
        for _ in range(3):
            clock.by += timedelta(seconds=40)
            await graph_setup.lose("w1", since=clock())  # seen just now, and busy
            await graph_setup.judge()
            await graph_setup.sweep()
        kept = await graph_setup.now(kept)
        assert statuses(kept)["first"] == "queued"
        await graph_setup.lose("w1")
        clock.by += timedelta(seconds=100)
        kept = await later(graph_setup, clock, kept, 0)
        assert kept.run.status == GraphRunStatus.FAILED


async def test_an_affinity_to_a_worker_that_is_gone_warns_unless_there_is_no_fallback(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        gone = {"backend_affinity": "worker:gone"}
        for fallback in ("ask_user", "auto_select"):
            document = one(fallback_strategy=fallback, **gone)
            checked = await actions.check_document(graph_setup.graphs, graph_setup.owner, document)
            found = checked.check
            assert found.problems == ()
            assert [each.code for each in found.warnings] == ["unknown_backend"]
            kept = await graph_setup.started(one(fallback_strategy=fallback, **gone))
            assert kept.run.status in (GraphRunStatus.WAITING_FOR_USER, GraphRunStatus.RUNNING)
        found = (
            await actions.check_document(graph_setup.graphs, graph_setup.owner, one(**gone))
        ).check
        assert [each.code for each in found.problems] == ["unknown_backend"]


async def test_an_execution_names_its_job(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(one())
        job = await graph_setup.workers["w1"].job()
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


async def add_paint(graph_setup: GraphSetup) -> None:
    made = await graph_setup.fleet_setup.register_workflow(
        "paint", document=PAINT, properties=[MODEL], output_node_id="2"
    )
    assert made.status_code == 201, made.text
    await graph_setup.fleet_setup.assign("draw", "paint")
    await graph_setup.fleet_setup.register("w1", backend=PAINTER)


async def test_a_model_that_nobody_has_fails_the_node_that_chose_it(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with graph_setup_on(databases, tmp_path, workers=(), clock=clock) as graph_setup:
        await add_paint(graph_setup)
        good = one(workflow="paint", properties={"model": "here.safetensors"})
        bad = one(workflow="paint", properties={"model": "gone.safetensors"})
        for document, codes in ((good, []), (bad, ["no_backend"])):
            found = (
                await actions.check_document(graph_setup.graphs, graph_setup.owner, document)
            ).check
            assert [each.code for each in found.warnings] == codes
        waits, fails = await graph_setup.started(good), await graph_setup.started(bad)
        assert await actions.unservable_nodes(graph_setup.graphs, waits, waits.run) == {}
        assert await actions.unservable_nodes(graph_setup.graphs, fails, fails.run) == {
            "first": NO_MODEL
        }
        for _ in range(2):
            await graph_setup.lose(
                "w1", since=clock() + timedelta(seconds=31)
            )  # seen just now, and busy
            fails = await later(graph_setup, clock, fails, 31)
        assert fails.run.status == GraphRunStatus.FAILED
        assert fails.run.error is not None
        assert fails.run.error.message == f"Node first failed: {NO_MODEL}"
        assert statuses(await graph_setup.now(waits))["first"] == "queued"


async def test_a_model_that_somebody_gets_in_time_is_used(
    databases: Databases, tmp_path: Path
) -> None:
    clock = Clock()
    async with graph_setup_on(databases, tmp_path, workers=(), clock=clock) as graph_setup:
        await add_paint(graph_setup)
        document = one(
            workflow="paint",
            properties={"model": "gone.safetensors"},
            fallback_strategy="ask_user",
        )
        kept = await graph_setup.started(document)
        kept = await later(graph_setup, clock, kept, 61)
        question = kept.run.record(ExecutionKey("first")).question
        assert question is not None
        assert question.message == NO_MODEL
        got = {**PAINTER, "model_files": {"UNETLoader.unet_name": ["gone.safetensors"]}}
        async with graph_setup.fleet_setup.worker("w2", backend=got) as worker:
            graph_setup.workers["w2"] = worker
            graph_setup.graphs.environment._at = None
            await graph_setup.answer(kept, "first", Choice.RETRY)
            await graph_setup.work("w2")
        assert (await graph_setup.now(kept)).run.status == GraphRunStatus.COMPLETED


async def test_a_model_that_an_effect_locks_counts_like_one_that_is_chosen(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=()) as graph_setup:
        await add_paint(graph_setup)
        body = {
            "slug": "gone",
            "title": "Gone",
            "workflow_slug": "paint",
            "price_tokens": 1,
            "overrides": {"model": "gone.safetensors"},
            "locked": ["model"],
        }
        made = await graph_setup.fleet_setup.admin.post("/api/admin/effects", json=body)
        assert made.status_code == 201, made.text
        assert (
            await graph_setup.fleet_setup.admin.post("/api/admin/effects/gone/publish")
        ).status_code == 200
        named = {"id": "first", "type": "workflow", "effect": "gone"}
        document = graph([named, output()], "first.output > result.value")
        found = (
            await actions.check_document(graph_setup.graphs, graph_setup.owner, document)
        ).check
        assert [each.code for each in found.warnings] == ["no_backend"]
