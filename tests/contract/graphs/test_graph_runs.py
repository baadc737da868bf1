"""Graph runs on either database: decided purely, kept truly, paid once."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from tests.support.databases.factory import Databases
from tests.support.jobs.graphs import (
    PRICE,
    graph,
    graph_setup_on,
    new_owner,
    node,
    output,
    statuses,
)

from comfyfleet.api.graphs import RunErrorCode
from comfyfleet.clock import utc_now
from comfyfleet.errors import Conflict, InsufficientTokens, InvalidInput, NotFound
from comfyfleet.server.catalog import service as catalog
from comfyfleet.server.graphs import actions
from comfyfleet.server.graphs.actions import NewGraphRun
from comfyfleet.server.graphs.run import Choice, ExecutionKey, GraphRunStatus

DIAMOND = graph(
    [node("top"), node("left"), node("right"), node("last"), output()],
    "top.output > left.like",
    "top.output > right.like",
    "left.output > last.like",
    "right.output > last.and_like",
    "last.output > result.value",
)


async def test_the_last_node_of_a_diamond_runs_once(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(DIAMOND)
        assert kept.run.status == GraphRunStatus.RUNNING
        done = await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
        assert len(done) == await graph_setup.count_jobs(run_kind="graph") == 4
        assert await graph_setup.balance() == 100 - 4 * PRICE
        await graph_setup.require_sound_ledger()
        made = (kept.head.outputs or {})["result"]
        assert (made["width"], made["height"], made["execution_time"]) == (64, 48, 1.5)
        assert len(made["images"]) == len(made["files"]) == 1


async def test_files_go_from_node_to_node_by_reference(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(DIAMOND)
        done = await graph_setup.work()
        last = next(job for job in done if len(job["assets"]) == 2)
        assert {each["name"] for each in last["assets"]} == {"like", "and_like"}
        kept = await graph_setup.now(kept)
        given = kept.run.record(ExecutionKey("last")).inputs or {}
        assert given["like"]["file_id"] != given["and_like"]["file_id"]


async def test_what_only_the_other_port_feeds_is_skipped(
    databases: Databases, tmp_path: Path
) -> None:
    document = graph(
        [
            node("top"),
            {"id": "large", "type": "condition", "condition": "output.width > 9000"},
            node("yes"),
            node("no"),
            {"id": "either", "type": "merge"},
            output(),
        ],
        "top.output > large.input",
        "large.true > yes.like",
        "large.false > no.like",
        "yes.output > either.input_0",
        "no.output > either.input_1",
        "either.output > result.value",
    )
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(document)
        await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
        assert statuses(kept)["yes"] == "skipped"
        assert (kept.run.outputs or {})["result"]["count"] == 1


FAN_OUT = graph(
    [
        {"id": "widths", "type": "input", "value_type": "integer[]"},
        {"id": "each", "type": "fanout", "mode": "distribute", "per_item": True},
        node("draw"),
        {"id": "all", "type": "merge", "over": "each"},
        output(),
    ],
    "widths.value > each.items",
    "each.item > draw.width",
    "draw.output > all.input_0",
    "all.output > result.value",
)


# How long the list is, no quote can know here.
UNKNOWN_WIDTH = graph(
    [
        *FAN_OUT["nodes"],
        {"id": "spread", "type": "fanout", "output_count": 1},
    ],
    "widths.value > spread.input",
    "spread.output_0 > each.items",
    "each.item > draw.width",
    "draw.output > all.input_0",
    "all.output > result.value",
)


async def test_at_most_five_jobs_of_a_fan_out_are_in_the_queue(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(FAN_OUT, inputs={"widths": list(range(64, 72))})
        assert await graph_setup.count_jobs(status="queued") == 5
        done = await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED
        assert [job["prompt"]["1"]["inputs"]["width"] for job in done] == list(range(64, 72))
        assert (kept.run.outputs or {})["result"]["count"] == 8


async def test_a_run_is_the_same_when_it_is_read_again(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(FAN_OUT, inputs={"widths": [64] * 7})
        await graph_setup.deliver(await graph_setup.workers["w1"].job())
        await graph_setup.sweep()
        in_memory = await graph_setup.now(kept)
        graph_setup.graphs.runs.drop(kept.head.id)
        read = await graph_setup.now(kept)
        assert read.run == in_memory.run
        assert read.plan == in_memory.plan


async def test_a_failed_node_fails_the_run_and_cancels_its_siblings(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(FAN_OUT, inputs={"widths": [64, 65, 66, 67, 68, 69, 70]})
        job = await graph_setup.workers["w1"].job()
        await graph_setup.workers["w1"].call_for(job, "fail", error="RuntimeError: no such colour")
        await graph_setup.sweep()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.FAILED
        assert kept.run.error is not None
        assert kept.run.error.message == "Node draw[0] failed: no such colour"
        assert kept.run.error.backend == "w1"
        await graph_setup.sweep()
        assert await graph_setup.count_dispatches("queued") == 0
        assert await graph_setup.balance() == 100
        assert "stopping" not in statuses(await graph_setup.now(kept)).values()


async def test_a_retry_uses_what_was_done(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(DIAMOND)
        await graph_setup.work(
            wanted=lambda job: "Error: broken" if len(job["assets"]) == 2 else None
        )
        kept = await graph_setup.now(kept)
        assert (kept.run.status, await graph_setup.count_jobs()) == (GraphRunStatus.FAILED, 4)
        kept = await actions.retry_graph_run(
            graph_setup.graphs, graph_setup.owner, kept.head.id, backend="worker:w1"
        )
        assert kept.run.status == GraphRunStatus.RUNNING
        done = await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
        assert len(done) == 1
        assert await graph_setup.balance() == 100 - 4 * PRICE
        with pytest.raises(Conflict):
            await actions.retry_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)


async def test_a_node_is_tried_again_as_often_as_it_says(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(
            graph([node("draw", retries=2), output()], "draw.output > result.value")
        )
        await graph_setup.work(wanted=lambda job: "Error: broken")
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.FAILED
        assert await graph_setup.count_jobs(status="failed") == 3
        assert await graph_setup.balance() == 100


async def test_cancel_stops_the_jobs(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(FAN_OUT, inputs={"widths": [64] * 7})
        job = await graph_setup.workers["w1"].job()
        kept = await actions.cancel_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
        assert kept.run.status == GraphRunStatus.CANCELLED
        beat = await graph_setup.workers["w1"].call_for(job, "heartbeat")
        assert beat.json()["cancelled"]
        await graph_setup.sweep()
        kept = await graph_setup.now(kept)
        assert set(statuses(kept).values()) == {"done", "cancelled"}
        assert await graph_setup.balance() == 100
        assert (
            await actions.cancel_graph_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
        ).run.status == "cancelled"


async def test_too_few_tokens_fail_the_node(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path, tokens=2 * PRICE + 1) as graph_setup:
        kept = await graph_setup.started(UNKNOWN_WIDTH, inputs={"widths": [64] * 3})
        assert kept.run.status == GraphRunStatus.FAILED
        assert kept.run.error is not None
        assert "Insufficient token balance" in kept.run.error.message
        assert kept.run.error.code == RunErrorCode.NO_TOKENS
        await graph_setup.sweep()
        assert await graph_setup.balance() == 2 * PRICE + 1
        await graph_setup.require_sound_ledger()


async def test_a_workflow_that_is_deactivated_during_a_run_fails_it_with_a_code(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(DIAMOND)
        job = (await graph_setup.workers["w1"].poll(wait_seconds=0))["job"]
        async with graph_setup.plane.central.transaction() as tx:
            workflow = await catalog.workflow_by_slug(tx, "draw")
            await catalog.deactivate_version(tx, workflow)
        graph_setup.graphs.environment._at = None
        await graph_setup.deliver(job)
        await graph_setup.sweep()
        error = (await graph_setup.now(kept)).run.error
        assert error is not None
        assert error.code == RunErrorCode.WITHDRAWN, error.message


async def test_nodes_that_may_fail_go_on_when_the_tokens_are_used_up(
    databases: Databases, tmp_path: Path
) -> None:
    document = {**UNKNOWN_WIDTH, "nodes": [dict(each) for each in UNKNOWN_WIDTH["nodes"]]}
    document["nodes"][2]["continue_on_error"] = True
    async with graph_setup_on(databases, tmp_path, tokens=2 * PRICE) as graph_setup:
        kept = await graph_setup.started(document, inputs={"widths": [64] * 12})
        await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
        assert (kept.run.outputs or {})["result"]["count"] == 2
        assert await graph_setup.balance() == 0


async def test_a_run_spends_no_more_than_it_may(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        wanted: dict[str, Any] = {"inputs": {"widths": [64] * 4}, "max_tokens": 2 * PRICE}
        kept = await graph_setup.started(UNKNOWN_WIDTH, **wanted)
        done = await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert (kept.run.status, len(done)) == (GraphRunStatus.FAILED, 2)
        assert await graph_setup.balance() == 100 - 2 * PRICE


async def test_a_retry_may_spend_more_and_uses_what_was_paid(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        wanted: dict[str, Any] = {"inputs": {"widths": [64] * 4}, "max_tokens": 2 * PRICE}
        kept = await graph_setup.started(UNKNOWN_WIDTH, **wanted)
        await graph_setup.work()
        kept = await actions.retry_graph_run(
            graph_setup.graphs, graph_setup.owner, kept.head.id, max_tokens=4 * PRICE
        )
        assert len(await graph_setup.work()) == 2
        graph_setup.graphs.runs.drop(kept.head.id)
        kept = await graph_setup.now(kept)
        assert (kept.run.status, kept.run.max_tokens) == (GraphRunStatus.COMPLETED, 4 * PRICE)
        assert await graph_setup.balance() == 100 - 4 * PRICE


async def test_what_cannot_be_paid_to_its_end_is_not_begun(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, tokens=3 * PRICE) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, FAN_OUT)
        with pytest.raises(Conflict) as refused:
            await graph_setup.run(made.id, inputs={"widths": [64] * 3}, max_tokens=2 * PRICE)
        assert refused.value.details["required_tokens"] == 3 * PRICE
        assert refused.value.details["max_tokens"] == 2 * PRICE
        with pytest.raises(InsufficientTokens) as unpaid:
            await graph_setup.run(made.id, inputs={"widths": [64] * 4})
        assert unpaid.value.details == {"required_tokens": 4 * PRICE, "balance": 3 * PRICE}
        assert (await graph_setup.count_jobs(), await graph_setup.balance()) == (0, 3 * PRICE)


def bound(fallback: str, worker: str = "w2") -> dict[str, object]:
    first = node("first", backend_affinity=f"worker:{worker}", fallback_strategy=fallback)
    return graph([first, output()], "first.output > result.value")


async def test_a_backend_that_is_offline_fails_the_node_without_a_fallback(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        await graph_setup.lose("w2")
        kept = await graph_setup.started(bound("none"))
        assert kept.run.error is not None
        assert kept.run.error.message == "Node first failed: Backend worker:w2 is offline"
        assert kept.run.error.alternatives == ("worker:w1",)


async def test_another_backend_is_selected_by_itself(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        await graph_setup.lose("w2")
        kept = await graph_setup.started(bound("auto_select"))
        assert len(await graph_setup.work("w1")) == 1
        assert (await graph_setup.now(kept)).run.status == GraphRunStatus.COMPLETED


@pytest.mark.parametrize("choice", [Choice.BACKEND, Choice.SKIP, Choice.FAIL, Choice.RETRY])
async def test_a_person_is_asked_and_answers_later(
    databases: Databases, tmp_path: Path, choice: Choice
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        await graph_setup.lose("w2")
        kept = await graph_setup.started(bound("ask_user"))
        assert kept.run.status == GraphRunStatus.WAITING_FOR_USER
        assert await graph_setup.count_jobs() == 0
        graph_setup.graphs.runs.drop(kept.head.id)
        with pytest.raises(InvalidInput):
            await graph_setup.answer(kept, "first", Choice.BACKEND, "worker:w2")
        with pytest.raises(Conflict):
            await graph_setup.answer(kept, "result", Choice.SKIP)
        kept = await graph_setup.answer(kept, "first", choice, "worker:w1")
        wanted = {
            Choice.BACKEND: GraphRunStatus.RUNNING,
            Choice.SKIP: GraphRunStatus.COMPLETED,
            Choice.FAIL: GraphRunStatus.FAILED,
            Choice.RETRY: GraphRunStatus.WAITING_FOR_USER,
        }
        assert kept.run.status == wanted[choice]
        if choice == Choice.BACKEND:
            assert len(await graph_setup.work("w1")) == 1
            assert (await graph_setup.now(kept)).run.status == GraphRunStatus.COMPLETED


async def test_an_answer_and_a_retry_take_the_bare_id_of_a_worker(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        await graph_setup.lose("w2")
        asked = await graph_setup.started(bound("ask_user", worker="w2"))
        await graph_setup.answer(asked, "first", Choice.BACKEND, "w1")
        failed = await graph_setup.started(bound("none", worker="w2"))
        await actions.retry_graph_run(
            graph_setup.graphs, graph_setup.owner, failed.head.id, backend="w1"
        )
        assert len(await graph_setup.work("w1")) == 2
        for kept in (asked, failed):
            assert (await graph_setup.now(kept)).run.status == GraphRunStatus.COMPLETED
        with pytest.raises(InvalidInput, match=r"backend .* was not found"):
            await actions.retry_graph_run(
                graph_setup.graphs, graph_setup.owner, failed.head.id, backend=""
            )


async def test_a_job_that_waits_for_a_worker_that_went_away_is_moved(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path, workers=("w1", "w2")) as graph_setup:
        kept = await graph_setup.started(bound("auto_select"))
        assert await graph_setup.work("w1") == []
        await graph_setup.lose("w2")
        await graph_setup.judge()
        await graph_setup.sweep()
        assert len(await graph_setup.work("w1")) == 1
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED
        assert await graph_setup.balance() == 100 - PRICE


async def test_a_job_that_takes_too_long_is_ended(databases: Databases, tmp_path: Path) -> None:
    late = timedelta()
    async with graph_setup_on(databases, tmp_path, clock=lambda: utc_now() + late) as graph_setup:
        kept = await graph_setup.started(
            graph([node("slow", timeout=30), output()], "slow.output > result.value")
        )
        await graph_setup.workers["w1"].job()
        await graph_setup.judge()
        assert (await graph_setup.now(kept)).run.status == GraphRunStatus.RUNNING
        late = timedelta(seconds=31)
        await graph_setup.judge()
        await graph_setup.sweep()
        kept = await graph_setup.now(kept)
        assert kept.run.error is not None
        assert kept.run.error.message == "Node slow failed: it took longer than 30 s"


async def test_the_same_key_starts_one_run(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, FAN_OUT)
        wanted = NewGraphRun({"widths": [64]}, idempotency_key="once")
        first, is_new = await actions.start_run(
            graph_setup.graphs, graph_setup.owner, made.id, wanted
        )
        again, is_new_again = await actions.start_run(
            graph_setup.graphs, graph_setup.owner, made.id, wanted
        )
        assert (is_new, is_new_again) == (True, False)
        assert first.head.id == again.head.id
        same = replace(wanted, version=1)
        assert (await actions.start_run(graph_setup.graphs, graph_setup.owner, made.id, same))[
            1
        ] is False
        for other in (
            replace(wanted, inputs={"widths": [65]}),
            replace(wanted, inputs={}),
            replace(wanted, max_tokens=5),
            replace(wanted, version=2),
        ):
            with pytest.raises(Conflict):
                await actions.start_run(graph_setup.graphs, graph_setup.owner, made.id, other)


async def test_the_same_key_for_two_things_at_once_starts_one_of_them(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, FAN_OUT)
        wanted = [
            NewGraphRun({"widths": [width]}, idempotency_key="once") for width in (64, 65, 64)
        ]
        outcomes = await asyncio.gather(
            *(
                actions.start_run(graph_setup.graphs, graph_setup.owner, made.id, each)
                for each in wanted
            ),
            return_exceptions=True,
        )
        new = 0
        for asked, outcome in zip(wanted, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, Conflict)
                continue
            kept, is_new = outcome
            new += is_new
            graph_setup.graphs.runs.drop(kept.head.id)
            stored = await actions.get_run(graph_setup.graphs, graph_setup.owner, kept.head.id)
            assert dict(stored.head.inputs) == dict(asked.inputs)
        assert new == 1


async def test_a_run_keeps_the_version_that_it_was_started_with(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, DIAMOND)
        kept = await graph_setup.run(made.id)
        newer = await actions.add_graph_version(
            graph_setup.graphs, graph_setup.owner, made.id, FAN_OUT
        )
        assert newer.version == 2
        graph_setup.graphs.runs.drop(kept.head.id)
        await graph_setup.work()
        kept = await graph_setup.now(kept)
        assert (kept.run.status, kept.head.graph_version) == (GraphRunStatus.COMPLETED, 1)
        old = await actions.get_graph(graph_setup.graphs, graph_setup.owner, made.id, 1)
        assert old.document["nodes"][0]["id"] == "top"


async def test_what_is_wrong_with_a_graph_is_told_at_once(
    databases: Databases, tmp_path: Path
) -> None:
    broken = graph(
        [node("a", workflow="nothing"), node("b", properties={"colour": 1}), output()],
        "a.output > result.value",
    )
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        with pytest.raises(InvalidInput) as caught:
            await actions.create_graph(graph_setup.graphs, graph_setup.owner, broken)
        codes = {each["code"] for each in caught.value.details["problems"]}
        assert codes >= {"unknown_workflow", "unknown_property", "unreachable_node"}


async def test_ids_of_another_tenant_are_not_there(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(DIAMOND)
        stranger = await new_owner(graph_setup.plane, 10)
        run_id, graph_id = kept.head.id, kept.head.graph_id
        for act in (
            actions.get_graph(graph_setup.graphs, stranger, graph_id),
            actions.add_graph_version(graph_setup.graphs, stranger, graph_id, DIAMOND),
            actions.start_run(graph_setup.graphs, stranger, graph_id, NewGraphRun({})),
            actions.quote_run(graph_setup.graphs, stranger, graph_id, {}),
            actions.get_run(graph_setup.graphs, stranger, run_id),
            actions.cancel_graph_run(graph_setup.graphs, stranger, run_id),
            actions.retry_graph_run(graph_setup.graphs, stranger, run_id),
            actions.get_live_run(graph_setup.graphs, stranger, uuid4()),
        ):
            with pytest.raises(NotFound):
                await act


async def test_a_file_of_another_tenant_is_refused(databases: Databases, tmp_path: Path) -> None:
    document = graph(
        [{"id": "photo", "type": "input", "value_type": "image"}, node("draw"), output()],
        "photo.value > draw.like",
        "draw.output > result.value",
    )
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        theirs = await graph_setup.fleet_setup.upload()  # of the tenant `default`
        with pytest.raises(InvalidInput):
            await graph_setup.started(document, inputs={"photo": theirs})


async def test_the_quote_tells_the_range(databases: Databases, tmp_path: Path) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        made = await actions.create_graph(graph_setup.graphs, graph_setup.owner, FAN_OUT)
        given = await actions.quote_run(
            graph_setup.graphs, graph_setup.owner, made.id, {"widths": [1, 2, 3]}
        )
        assert (given.tokens_min, given.tokens_max) == (3 * PRICE, 3 * PRICE)
        open_ = await actions.quote_run(graph_setup.graphs, graph_setup.owner, made.id, {})
        assert (open_.tokens_min, open_.tokens_max) == (0, 100 * PRICE)


TELLING = graph(
    [
        node("first"),
        {
            "id": "is_sure",
            "type": "condition",
            "condition": 'output.json > 100 AND output.text == "128" AND output.values.text == "128"',
        },
        node("wide", properties={"width": {"from": "first.output.json"}}),
        {"id": "words", "type": "output"},
        output(),
    ],
    "first.output > is_sure.input",
    "is_sure.true > wide.like",
    "first.output.text > words.value",
    "wide.output > result.value",
)


async def test_what_a_job_shows_decides_and_feeds_the_next(
    databases: Databases, tmp_path: Path
) -> None:
    async with graph_setup_on(databases, tmp_path) as graph_setup:
        kept = await graph_setup.started(TELLING)
        job = await graph_setup.workers["w1"].job()
        await graph_setup.deliver(job, values=[{"node_id": "9", "name": "text", "value": "128"}])
        await graph_setup.sweep()
        (second,) = await graph_setup.work()
        assert second["prompt"]["1"]["inputs"]["width"] == 128
        kept = await graph_setup.now(kept)
        assert kept.run.status == GraphRunStatus.COMPLETED, kept.run.error
        assert (kept.run.outputs or {})["words"] == "128"
