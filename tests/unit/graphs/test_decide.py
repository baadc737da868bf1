"""What happens next in a run: one story for each thing that can happen."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.graphs.builders import WORKERS, document, node, work
from tests.unit.graphs.simulation import (
    RUN_ID,
    WORLD,
    Simulation,
    failures,
    picture,
    plan_for,
    started,
)

from comfyfleet.errors import Conflict
from comfyfleet.server.graphs.decide import new_run, next_actions
from comfyfleet.server.graphs.run import (
    AskUser,
    CancelJob,
    Choice,
    ExecutionKey,
    ExecutionStatus,
    FailNode,
    FailureCause,
    FinishRun,
    GraphRunState,
    GraphRunStatus,
    JobCancelled,
    JobDone,
    JobProgressed,
    JobStarted,
    QuestionAnswered,
    SkipNode,
    StartJob,
    job_id,
)

PHOTO = picture("photo")


def simulation(*nodes: dict[str, Any], links: tuple[str, ...], **more: Any) -> Simulation:
    run = GraphRunState(RUN_ID, {"photo": PHOTO}, max_tokens=more.pop("max_tokens", None))
    return Simulation(plan_for(document(*nodes, links=links, **more)), run)


def line(**fields: Any) -> Simulation:
    """photo → fix → then → result."""
    return simulation(
        node("photo", "input", value_type="image"), work("fix", **fields), work("then"), node("result", "output"),
        links=("photo.value > fix.input", "fix.output > then.input", "then.output > result.value"),
    )  # fmt: skip


def diamond(**fields: Any) -> Simulation:
    return simulation(
        node("photo", "input"), work("left", **fields), work("right"), work("last", "blend"), node("result", "output"),
        links=("photo.value > left.input", "photo.value > right.input", "left.output > last.left",
               "right.output > last.right", "last.output > result.value"),
    )  # fmt: skip


def test_one_job_follows_the_other_and_the_last_result_comes_out() -> None:
    s = line()
    assert started(s.start()) == ["fix"]
    assert started(s.done("fix")) == ["then"]
    (finish,) = s.done("then")
    assert isinstance(finish, FinishRun)
    assert finish.outputs["result"]["prompt_id"] == "then"
    assert s.run.status == GraphRunStatus.COMPLETED


def test_a_picture_is_handed_on_by_reference() -> None:
    s = line()
    (job,) = s.start()
    assert isinstance(job, StartJob)
    assert (job.workflow, job.version, job.properties) == ("fix", 2, {"input": PHOTO})
    assert job.values == {"input": "photo"}
    (job,) = s.done("fix")
    assert isinstance(job, StartJob)
    assert job.properties == {"input": picture("fix")}


def test_in_a_diamond_the_last_node_starts_once() -> None:
    s = diamond()
    assert started(s.start()) == ["left", "right"]
    assert started(s.done("right")) == []
    assert started(s.done("left")) == ["last"]


def test_the_same_decision_made_twice_starts_the_same_jobs() -> None:
    s = diamond()
    s.start()
    event = JobDone(ExecutionKey("left"), 1, {})
    assert next_actions(s.plan, s.run, [event], WORLD) == next_actions(
        s.plan, s.run, [event], WORLD
    )


def test_news_told_twice_changes_nothing() -> None:
    s = line()
    s.start()
    job = s.jobs[ExecutionKey("fix")]
    s.done("fix")
    before = s.run
    assert s.tell(JobDone(job.key, job.attempt, {"images": []})) == []
    assert s.run == before


def test_a_job_id_derives_from_run_node_index_and_attempt() -> None:
    ids = {
        job_id(RUN_ID, ExecutionKey(n, at), a)
        for n in "ab"
        for at in ((), (1,), (1, 1), (11,))
        for a in (1, 11)
    }
    assert len(ids) == 16
    assert job_id(RUN_ID, ExecutionKey("a", (1,)), 2) == job_id(RUN_ID, ExecutionKey("a", (1,)), 2)


def branch(condition: str = "output.width > 600", **fields: Any) -> Simulation:
    """draw → is_large → big or small → both → result."""
    return simulation(
        work("draw", "draw"), node("is_large", "condition", condition=condition), work("big"), work("small"),
        node("both", "merge", **fields), node("result", "output"),
        links=("draw.output > is_large.input", "is_large.true > big.input", "is_large.false > small.input",
               "small.output > both.input_1", "big.output > both.input_0", "both.output > result.value"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("width", "chosen", "other"), [(700, "big", "small"), (500, "small", "big")]
)
def test_a_condition_fires_one_port_and_what_only_the_other_feeds_is_skipped(
    width: int, chosen: str, other: str
) -> None:
    s = branch()
    s.start()
    actions = s.done("draw", width=width)
    assert started(actions) == [chosen]
    assert SkipNode(ExecutionKey(other), "a required input has no value") in actions
    (finish,) = s.done(chosen)
    assert isinstance(finish, FinishRun)
    assert finish.outputs["result"]["count"] == 1


def test_a_field_that_a_condition_misses_is_noted() -> None:
    s = branch("output.depth > 3")
    s.start()
    s.done("draw")
    assert s.run.record(ExecutionKey("is_large")).notes == ("output.depth is missing",)
    assert s.run.record(ExecutionKey("small")).status == ExecutionStatus.QUEUED


def test_a_merge_of_nothing_but_skipped_nodes_is_skipped() -> None:
    s = simulation(
        work("draw", "draw"), node("c", "condition", condition="output.width > 1"), work("x"), node("m", "merge"),
        node("result", "output"), node("other", "output"),
        links=("draw.output > c.input", "c.false > x.input", "x.output > m.input_0", "m.output > result.value",
               "c.true > other.value"),
    )  # fmt: skip
    s.start()
    actions = s.done("draw")
    assert [str(each.key) for each in actions if isinstance(each, SkipNode)] == ["x", "m", "result"]
    assert list(s.run.outputs or {}) == ["other"]


def test_a_node_that_can_do_without_a_skipped_input_runs_all_the_same() -> None:
    s = simulation(
        work("draw", "draw"), node("c", "condition", condition="output.width > 1"), work("x"), work("y", "blend"),
        node("result", "output"),
        links=("draw.output > c.input", "c.false > x.input", "x.output > y.left", "draw.output > y.right",
               "y.output > result.value"),
    )  # fmt: skip
    s.start()
    assert started(s.done("draw")) == ["y"]
    assert set(s.jobs[ExecutionKey("y")].properties) == {"right"}


def test_a_node_that_needs_what_was_skipped_is_skipped_though_something_else_arrives() -> None:
    s = simulation(
        work("draw", "draw"), node("c", "condition", condition="output.width > 1"), work("x"),
        node("m", "merge"), node("result", "output"),
        links=("draw.output > c.input", "c.false > x.input", "draw.output.prompt_id > x.text",
               "x.output > m.input_0", "draw.output > m.input_1", "m.output.count > result.value"),
    )  # fmt: skip
    s.start()
    assert SkipNode(ExecutionKey("x"), "a required input has no value") in s.done("draw")
    assert s.run.outputs == {"result": 1}


def many(**fields: Any) -> Simulation:
    """Each of the photos is fixed, and all are brought together."""
    return simulation(
        node("photos", "input"), node("each", "fanout", mode="distribute", per_item=True, max_items=10_000),
        work("fix", **fields), node("all", "merge", mode="concat_images", over="each"), node("result", "output"),
        links=("photos.value > each.items", "each.item > fix.input", "fix.output > all.input_0",
               "all.output.images > result.value"),
    )  # fmt: skip


def test_each_item_gets_a_job_and_the_order_is_that_of_the_items() -> None:
    s = many()
    assert started(s.start(photos=[picture(name) for name in "abc"])) == [
        "fix[0]",
        "fix[1]",
        "fix[2]",
    ]
    assert s.jobs[ExecutionKey("fix", (1,))].properties == {"input": picture("b")}
    for number in (2, 0, 1):
        s.done("fix", number)
    assert [each["file_id"] for each in (s.run.outputs or {})["result"]] == [
        "fix[0]",
        "fix[1]",
        "fix[2]",
    ]


def test_over_no_items_the_result_is_empty() -> None:
    s = many()
    s.start(photos=[])
    assert s.run.outputs == {"result": []}


def test_too_many_items_and_no_list_at_all_fail_the_run() -> None:
    for wrong, words in (([PHOTO] * 10_001, "max_items"), ("x", "not a list")):
        s = many()
        (failed,) = failures(s.start(photos=wrong))
        assert failed.error.node == "each"
        assert words in failed.error.message


def test_at_most_five_jobs_of_a_run_are_in_the_queue() -> None:
    s = many()
    assert len(started(s.start(photos=[PHOTO] * 12))) == 5
    assert s.run.record(ExecutionKey("fix", (5,))).status == ExecutionStatus.HELD
    assert started(s.done("fix", 3)) == ["fix[5]"]
    assert started(s.done("fix", 0)) == ["fix[6]"]


def test_what_has_the_higher_priority_is_held_for_a_shorter_time() -> None:
    s = simulation(
        *(work(f"n{k}", "draw", priority=k) for k in range(8)), node("m", "merge"), node("o", "output"),
        links=(*(f"n{k}.output > m.input_{k}" for k in range(8)), "m.output > o.value"),
    )  # fmt: skip
    assert started(s.start()) == ["n7", "n6", "n5", "n4", "n3"]


def test_the_priority_stays_within_the_tenants_range() -> None:
    s = line(priority=50)
    s.environment = replace(WORLD, priority_max=10)
    (job,) = s.start()
    assert isinstance(job, StartJob)
    assert job.priority == 10


def test_a_broadcast_gives_the_same_to_all_and_a_merge_orders_by_port() -> None:
    s = simulation(
        node("photo", "input"), node("f", "fanout", output_count=3), *(work(n) for n in "abc"),
        node("m", "merge"), node("o", "output"),
        links=("photo.value > f.input", "f.output_0 > a.input", "f.output_1 > b.input", "f.output_2 > c.input",
               "c.output > m.input_2", "a.output > m.input_0", "b.output > m.input_1", "m.output > o.value"),
    )  # fmt: skip
    assert started(s.start()) == ["a", "b", "c"]
    for name in "cab":
        s.done(name)
    merged = (s.run.outputs or {})["o"]
    assert [each["prompt_id"] for each in merged["merged"]] == ["a", "b", "c"]
    assert merged["count"] == 3


@pytest.mark.parametrize(
    ("items", "chunks"),
    [([1, 2, 3, 4, 5], [[1, 2], [3, 4], [5]]), ([1, 2], [[1], [2]]), ([], [])],
)
def test_a_list_is_distributed_in_chunks_and_an_empty_one_fires_nothing(
    items: list[int], chunks: list[list[int]]
) -> None:
    s = simulation(
        node("list", "input"), node("f", "fanout", mode="distribute", output_count=3),
        *(node(f"o{k}", "output") for k in range(3)),
        links=("list.value > f.items", *(f"f.output_{k} > o{k}.value" for k in range(3))),
    )  # fmt: skip
    s.start(list=items)
    assert s.run.outputs == {f"o{k}": {"items": chunk} for k, chunk in enumerate(chunks)}


def test_fan_outs_can_stand_inside_each_other() -> None:
    s = simulation(
        node("lists", "input"), node("outer", "fanout", mode="distribute", per_item=True),
        node("inner", "fanout", mode="distribute", per_item=True), work("fix"), node("row", "merge", over="inner"),
        node("all", "merge", over="outer"), node("o", "output"),
        links=("lists.value > outer.items", "outer.item > inner.items", "inner.item > fix.input",
               "fix.output.prompt_id > row.input_0", "row.output.merged > all.input_0", "all.output.merged > o.value"),
    )  # fmt: skip
    s.start(lists=[[PHOTO, PHOTO], [], [PHOTO]])
    for at in ((2, 0), (0, 1), (0, 0)):
        s.done("fix", *at)
    assert s.run.outputs == {"o": [["fix[0][0]", "fix[0][1]"], [], ["fix[2][0]"]]}


@pytest.mark.parametrize("late", [True, False])
def test_what_comes_from_outside_reaches_every_item_early_or_late(late: bool) -> None:
    s = simulation(
        node("photos", "input"), work("style", "draw"), node("is_any", "condition", condition="output.count > 0"),
        work("slow", "draw"), node("each", "fanout", mode="distribute", per_item=True), work("mix", "blend"),
        node("all", "merge", over="each"), node("wait", "merge"), node("o", "output"),
        links=("photos.value > wait.input_0", "slow.output > wait.input_1", "wait.output.merged.0 > is_any.input",
               "is_any.true > each.items", "each.item > mix.left", "style.output > mix.right",
               "mix.output > all.input_0", "all.output.count > o.value"),
    )  # fmt: skip
    s.start(photos=[PHOTO, PHOTO])
    assert started(s.done("slow" if late else "style")) == []
    assert started(s.done("style" if late else "slow")) == ["mix[0]", "mix[1]"]
    s.done("mix", 1)
    s.done("mix", 0)
    assert s.run.outputs == {"o": 2}


def test_the_first_failure_stops_everything() -> None:
    s = diamond()
    s.start()
    s.started("left", backend="worker:b")
    actions = s.failed("left", traceback="line 3")
    (failed,) = failures(actions)
    assert (failed.error.node, failed.error.backend) == ("left", "worker:b")
    assert failed.error.message == "Node left failed: out of paint"
    assert [str(each.key) for each in actions if isinstance(each, CancelJob)] == ["right"]
    assert s.run.status == GraphRunStatus.FAILED
    assert s.statuses() == {
        "photo": "done", "left": "failed", "right": "stopping", "last": "cancelled", "result": "cancelled",
    }  # fmt: skip
    assert s.run.record(ExecutionKey("left")).traceback == "line 3"
    s.tell(JobCancelled(ExecutionKey("right"), 1))
    assert s.run.record(ExecutionKey("right")).status == ExecutionStatus.CANCELLED


def test_a_retry_reuses_what_was_done_even_what_was_done_too_late() -> None:
    s = diamond()
    s.start()
    s.failed("left")
    s.tell(JobDone(ExecutionKey("right"), 1, {"images": [PHOTO]}))
    assert s.run.record(ExecutionKey("right")).status == ExecutionStatus.DONE
    (job,) = s.retry(backend="worker:b")
    assert isinstance(job, StartJob)
    assert (job.key, job.attempt, job.backend_affinity) == (ExecutionKey("left"), 2, "worker:b")
    assert started(s.done("left")) == ["last"]
    s.done("last")
    assert s.run.status == GraphRunStatus.COMPLETED
    assert s.run.error is None


def test_a_retry_starts_anew_what_was_stopped() -> None:
    s = diamond()
    s.start()
    s.failed("left")
    s.stopping.clear()
    assert started(s.retry()) == ["left", "right"]
    assert s.tell(JobCancelled(ExecutionKey("right"), 1)) == []
    s.done("left")
    s.done("right")
    s.done("last")
    assert s.run.status == GraphRunStatus.COMPLETED


def test_only_a_failed_run_can_be_retried() -> None:
    s = diamond()
    s.start()
    with pytest.raises(Conflict):
        s.retry()


def test_a_node_is_tried_as_often_as_it_says() -> None:
    s = line(retries=2)
    s.start()
    assert [s.failed("fix")[0].attempt for _ in range(2)] == [2, 3]  # type: ignore[union-attr]
    assert failures(s.failed("fix"))


@pytest.mark.parametrize("cause", [FailureCause.NO_TOKENS, FailureCause.REFUSED])
def test_what_would_fail_again_is_not_tried_again(cause: FailureCause) -> None:
    s = line(retries=2)
    s.start()
    assert failures(s.failed("fix", cause=cause))


def test_a_node_that_may_fail_lets_the_run_go_on_without_it() -> None:
    s = many(continue_on_error=True)
    s.start(photos=[picture(name) for name in "abc"])
    assert s.failed("fix", 1) == [FailNode(ExecutionKey("fix", (1,)), "out of paint")]
    s.done("fix", 0)
    s.done("fix", 2)
    assert [each["file_id"] for each in (s.run.outputs or {})["result"]] == ["fix[0]", "fix[2]"]
    assert s.run.status == GraphRunStatus.COMPLETED


def test_a_path_that_leads_nowhere_fails_the_node_that_needs_it() -> None:
    s = simulation(
        work("draw", "draw"), work("fix"), node("o", "output"),
        links=("draw.output.images.5 > fix.input", "fix.output > o.value"),
    )  # fmt: skip
    s.start()
    (failed,) = failures(s.done("draw"))
    assert "draw.output.images.5 is missing" in failed.error.message


def test_a_result_without_a_picture_fails_the_node_that_needs_one() -> None:
    s = line()
    s.start()
    (failed,) = failures(s.done("fix", images=[], files=[]))
    assert failed.error.message == "Node then failed: fix.output has no image for input"


def offline(*names: str) -> Any:
    return replace(
        WORLD,
        backends=tuple(replace(each, is_online=each.worker_id not in names) for each in WORKERS),
    )


def test_affinity_comes_first() -> None:
    s = line(backend_affinity="worker:b")
    (job,) = s.start()
    assert isinstance(job, StartJob)
    assert job.backend_affinity == "worker:b"


def test_without_a_fallback_an_offline_backend_fails_the_run_and_others_are_named() -> None:
    s = line(backend_affinity="worker:a")
    s.environment = offline("a")
    (failed,) = failures(s.start())
    assert failed.error.message == "Node fix failed: Backend worker:a is offline"
    assert failed.error.alternatives == ("worker:c", "worker:b")


def test_a_fleet_is_there_while_one_of_its_workers_is() -> None:
    s = line(backend_affinity="fleet:main/production")
    s.environment = offline("a")
    assert started(s.start()) == ["fix"]


def test_the_best_other_backend_has_the_shortest_queue_then_the_most_memory() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.environment = offline("a")
    (job,) = s.start()
    assert isinstance(job, StartJob)
    assert job.backend_affinity == "worker:c"


def test_with_nobody_left_the_capabilities_are_named() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.environment = offline("a", "b", "c")
    (failed,) = failures(s.start())
    assert failed.error.message == "Node fix failed: No online backend has these capabilities: gpu"


def asking() -> Simulation:
    s = line(backend_affinity="worker:a", fallback_strategy="ask_user")
    s.environment = offline("a")
    (ask,) = s.start()
    assert isinstance(ask, AskUser)
    assert ask.question.message == "Backend worker:a is offline"
    assert ask.question.backends == ("worker:c", "worker:b")
    assert s.run.status == GraphRunStatus.WAITING_FOR_USER
    return s


def test_a_person_may_choose_a_backend() -> None:
    s = asking()
    (job,) = s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.BACKEND, "worker:b"))
    assert isinstance(job, StartJob)
    assert job.backend_affinity == "worker:b"
    assert s.run.status == GraphRunStatus.RUNNING


def test_a_person_may_try_again_and_is_asked_again() -> None:
    s = asking()
    assert isinstance(s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.RETRY))[0], AskUser)
    s.environment = WORLD
    assert started(s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.RETRY))) == ["fix"]


def test_a_question_is_withdrawn_when_the_backend_is_back() -> None:
    s = asking()
    assert s.tell() == []
    s.environment = offline("b")
    (job,) = s.tell()
    assert isinstance(job, StartJob)
    assert job.backend_affinity == "worker:a"
    record = s.run.record(ExecutionKey("fix"))
    assert (s.run.status, s.run.asking, record.question) == (
        GraphRunStatus.RUNNING,
        frozenset(),
        None,
    )
    # Who answers now comes too late, and nothing runs twice.
    assert s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.BACKEND, "worker:c")) == []


def test_a_question_stays_while_only_others_are_back() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="ask_user")
    s.environment = offline("a", "b", "c")
    (ask,) = s.start()
    assert isinstance(ask, AskUser)
    s.environment = offline("a")
    assert s.tell() == []
    assert s.run.status == GraphRunStatus.WAITING_FOR_USER


def test_an_answer_in_the_moment_of_the_return_counts() -> None:
    s = asking()
    s.environment = WORLD
    (job,) = s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.BACKEND, "worker:b"))
    assert isinstance(job, StartJob)
    assert job.backend_affinity == "worker:b"


def test_a_person_may_skip_or_fail_the_node() -> None:
    s = asking()
    s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.SKIP))
    assert s.run.status == GraphRunStatus.COMPLETED
    assert s.run.record(ExecutionKey("then")).status == ExecutionStatus.SKIPPED
    s = asking()
    s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.FAIL))
    assert s.run.status == GraphRunStatus.FAILED


def test_a_second_answer_changes_nothing() -> None:
    s = asking()
    s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.BACKEND, "worker:b"))
    assert s.tell(QuestionAnswered(ExecutionKey("fix"), Choice.FAIL)) == []


def test_a_job_that_waits_for_a_worker_that_went_away_is_placed_anew() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.start()
    s.environment = offline("a")
    (cancel,) = s.tell()
    assert cancel == CancelJob(ExecutionKey("fix"), job_id(RUN_ID, ExecutionKey("fix"), 1), 1)
    assert s.tell() == []
    s.jobs.pop(ExecutionKey("fix"))
    (job,) = s.tell(JobCancelled(ExecutionKey("fix"), 1))
    assert isinstance(job, StartJob)
    assert (job.attempt, job.backend_affinity) == (2, "worker:c")


def test_a_job_that_was_done_while_it_was_taken_back_is_done() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.start()
    s.environment = offline("a")
    s.tell()
    assert started(s.done("fix")) == ["then"]


def test_a_job_that_runs_is_left_to_its_worker() -> None:
    s = line(backend_affinity="worker:a")
    s.start()
    s.started("fix")
    s.environment = offline("a")
    assert s.tell() == []


def test_a_lost_backend_with_a_fallback_uses_up_no_retry() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.start()
    s.environment = offline("a")
    (job,) = s.failed("fix", cause=FailureCause.BACKEND_LOST)
    assert isinstance(job, StartJob)
    assert (job.attempt, job.backend_affinity) == (2, "worker:c")


def test_backends_that_are_lost_again_and_again_come_to_an_end() -> None:
    s = line(backend_affinity="worker:a", fallback_strategy="auto_select")
    s.start()
    for _ in range(10):
        s.failed("fix", cause=FailureCause.BACKEND_LOST)
    assert failures(s.failed("fix", cause=FailureCause.BACKEND_LOST))


def test_a_lost_backend_without_a_fallback_names_the_others() -> None:
    s = line()
    s.start()
    (failed,) = failures(s.failed("fix", cause=FailureCause.BACKEND_LOST, backend="worker:a"))
    assert failed.error.backend == "worker:a"
    assert "worker:b" in failed.error.alternatives


def test_a_job_cancelled_by_somebody_else_fails_its_node() -> None:
    s = line()
    s.start()
    s.jobs.clear()
    (failed,) = failures(s.tell(JobCancelled(ExecutionKey("fix"), 1)))
    assert failed.error.message == "Node fix failed: the job was cancelled"


def test_a_cancelled_run_stops_its_jobs_and_starts_nothing_more() -> None:
    s = diamond()
    s.start()
    assert [type(each).__name__ for each in s.cancel()] == ["CancelRun", "CancelJob", "CancelJob"]
    assert s.run.status == GraphRunStatus.CANCELLED
    assert s.cancel() == []
    s.tell(JobCancelled(ExecutionKey("left"), 1), JobDone(ExecutionKey("right"), 1, {}))
    assert s.run.open_count == 0
    assert s.run.record(ExecutionKey("last")).status == ExecutionStatus.CANCELLED


def test_a_run_that_never_began_can_be_cancelled() -> None:
    s = diamond()
    s.cancel()
    assert set(s.statuses().values()) <= {"cancelled", "done"}


def test_a_run_never_spends_more_than_it_may() -> None:
    s = many()
    s.run = replace(s.run, max_tokens=7)  # a job costs 2
    assert len(started(s.start(photos=[PHOTO] * 5))) == 3
    assert started(s.done("fix", 0)) == []
    s.done("fix", 1)
    (failed,) = failures(s.done("fix", 2))
    assert failed.error.message == "the run has spent 6 of 7 tokens, and the next job costs 2"


@pytest.mark.parametrize(
    ("graph", "given", "most"),
    [(None, None, None), (9, None, 9), (None, 5, 5), (9, 5, 5), (9, 50, 9)],
)
def test_a_run_may_spend_what_its_graph_allows_or_less(
    graph: int | None, given: int | None, most: int | None
) -> None:
    more = {} if graph is None else {"max_tokens": graph}
    plan = plan_for(
        document(work("d", "draw"), node("o", "output"), links=("d.output > o.value",), **more)
    )
    assert new_run(plan, RUN_ID, {}, max_tokens=given).max_tokens == most


def test_a_refund_is_spent_again() -> None:
    s = many(continue_on_error=True)
    s.run = replace(s.run, max_tokens=4)
    s.start(photos=[PHOTO] * 3)
    assert started(s.failed("fix", 0)) == ["fix[2]"]


def test_progress_is_kept_in_the_record() -> None:
    s = line()
    s.start()
    s.tell(
        JobStarted(ExecutionKey("fix"), 1, "worker:a"),
        JobProgressed(ExecutionKey("fix"), 1, 0.5, "KSampler"),
    )
    record = s.run.record(ExecutionKey("fix"))
    assert (record.status, record.backend) == (ExecutionStatus.RUNNING, "worker:a")
    assert (record.progress, record.current_step) == (0.5, "KSampler")
    s.tell(JobProgressed(ExecutionKey("fix"), 9, 0.9))
    assert s.run.record(ExecutionKey("fix")).progress == 0.5
