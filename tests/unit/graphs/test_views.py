"""What people see of a graph and its runs: progress, a quote, a drawing."""

import time
from collections import deque
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.unit.graphs.builders import EXAMPLES, document, example_catalogue, node, work
from tests.unit.graphs.simulation import RUN_ID, WORLD, Simulation, picture, plan_for

from comfyfleet.api.graph_mermaid import draw_mermaid
from comfyfleet.api.graph_model import GraphLimits
from comfyfleet.api.graph_parse import parse_graph_text
from comfyfleet.server.graphs.apply import ENDED_RUNS_KEPT_MAX, LoadedRun, RunCache
from comfyfleet.server.graphs.decide import next_actions
from comfyfleet.server.graphs.draft import RunDraft
from comfyfleet.server.graphs.plan import RunPlan, plan_of, quote_plan
from comfyfleet.server.graphs.progress import node_status, progress_of
from comfyfleet.server.graphs.run import (
    OUTPUTS_SIZE_MAX,
    RUN_SIZE_MAX,
    ExecutionKey,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    JobProgressed,
    JobWaiting,
    PersistentMap,
    RunRow,
    StartJob,
    ValueSize,
)

TENANT = uuid4()


def branch() -> RunPlan:
    """draw (10 tokens, 10 s) → fix (2, 1 s) or blend (5, 4 s)."""
    return plan_for(document(
        work("draw", "draw"), node("c", "condition", condition="output.width > 600"), work("fix"),
        work("blend", "blend"), node("m", "merge"), node("o", "output"),
        links=("draw.output > c.input", "c.true > fix.input", "c.false > blend.left", "fix.output > m.input_0",
               "blend.output > m.input_1", "m.output > o.value"),
    ))  # fmt: skip


def items() -> RunPlan:
    return plan_for(document(
        node("photos", "input"), node("each", "fanout", mode="distribute", per_item=True, max_items=10_000),
        work("fix"), node("all", "merge", over="each"), node("o", "output"),
        links=("photos.value > each.items", "each.item > fix.input", "fix.output > all.input_0",
               "all.output > o.value"),
    ))  # fmt: skip


def test_a_quote_is_the_cheapest_and_the_dearest_way_through() -> None:
    found = quote_plan(branch())
    assert (found.tokens_min, found.tokens_max) == (12, 15)
    assert (found.jobs_min, found.jobs_max) == (2, 2)
    assert (found.seconds_min, found.seconds_max) == (11.0, 14.0)


def test_a_quote_for_a_known_list_is_exact_and_for_an_unknown_one_a_range() -> None:
    found = quote_plan(items(), {"photos": [1, 2, 3]}, side_by_side=2)
    assert (found.tokens_min, found.tokens_max, found.seconds_max) == (6, 6, 1.5)
    found = quote_plan(items())
    assert (found.tokens_min, found.tokens_max) == (0, 20_000)


def test_with_many_conditions_a_quote_is_wide() -> None:
    nodes = [node(f"c{n}", "condition", condition="output.exists") for n in range(10)]
    links = [f"draw.output > c{n}.input" for n in range(10)] + [
        "c0.true > fix.input",
        "fix.output > o.value",
    ]
    found = quote_plan(
        plan_for(
            document(
                work("draw", "draw"), work("fix"), node("o", "output"), *nodes, links=tuple(links)
            )
        )
    )
    assert (found.tokens_min, found.tokens_max) == (10, 12)


def test_a_quote_says_what_nobody_has_timed() -> None:
    graph = parse_graph_text((EXAMPLES / "graphs/album.yaml").read_text("utf-8")).graph
    assert quote_plan(plan_of(graph, example_catalogue())).unknown_durations == ("soften",)


def test_progress_counts_nodes_and_weighs_them_by_how_long_they_take() -> None:
    s = Simulation(branch())
    assert progress_of(s.plan, s.run).overall_percent == 0
    s.start()
    s.started("draw", backend="worker:b")
    s.tell(JobProgressed(ExecutionKey("draw"), 1, 0.5, "KSampler"))
    found = progress_of(s.plan, s.run)
    assert found.running_nodes == (("draw", (), "worker:b", 0.5, "KSampler"),)
    assert (found.completed_nodes, found.total_nodes) == (0, 6)
    assert found.overall_percent == pytest.approx(100 * 0.5 / 6)
    assert found.weighted_percent == pytest.approx(100 * 5 / 15.03, rel=1e-3)
    s.done("draw", width=700)
    s.done("fix")
    found = progress_of(s.plan, s.run)
    assert (found.completed_nodes, found.total_nodes) == (6, 6)
    assert found.overall_percent == found.weighted_percent == pytest.approx(100)
    assert node_status(s.plan, s.run, "blend") == ExecutionStatus.SKIPPED
    assert node_status(s.plan, s.run, "fix") == ExecutionStatus.DONE


def test_progress_of_items_grows_with_each_of_them() -> None:
    s = Simulation(items())
    s.start(photos=[picture(name) for name in "abcd"])
    s.done("fix", 2)
    assert progress_of(s.plan, s.run).overall_percent == pytest.approx(100 * 2.25 / 5)
    assert node_status(s.plan, s.run, "fix") == ExecutionStatus.RUNNING


def test_a_run_that_failed_counts_what_was_completed() -> None:
    s = Simulation(branch())
    s.start()
    s.failed("draw")
    found = progress_of(s.plan, s.run)
    assert s.run.status == GraphRunStatus.FAILED
    assert (found.completed_nodes, found.total_nodes) == (0, 6)
    assert found.overall_percent == 0


def test_a_job_that_waits_in_the_queue_is_not_running() -> None:
    s = Simulation(branch())
    s.start()
    assert progress_of(s.plan, s.run).running_nodes == ()
    assert node_status(s.plan, s.run, "draw") == ExecutionStatus.QUEUED


def test_progress_is_never_told_lower_than_before() -> None:
    s, runs = Simulation(branch()), RunCache()
    s.start()
    s.started("draw", backend="worker:b")
    s.tell(JobProgressed(ExecutionKey("draw"), 1, 0.5, None))
    before = runs.keep_monotonic(s.run, progress_of(s.plan, s.run))
    s.tell(JobWaiting(ExecutionKey("draw"), 1))
    assert progress_of(s.plan, s.run).overall_percent == 0
    assert runs.keep_monotonic(s.run, progress_of(s.plan, s.run)).overall_percent == (
        before.overall_percent
    )


def loaded_run(status: GraphRunStatus) -> LoadedRun:
    s = Simulation(branch())
    row = RunRow(uuid4(), TENANT, uuid4(), uuid4(), 1, {}, {}, None, datetime.now(UTC))
    return LoadedRun(row, s.plan, replace(s.run, status=status), row.revision)


def test_open_runs_are_kept_longer_than_those_that_ended() -> None:
    runs = RunCache()
    is_open = loaded_run(GraphRunStatus.RUNNING)
    runs.keep(is_open)
    ended = [loaded_run(GraphRunStatus.COMPLETED) for _ in range(ENDED_RUNS_KEPT_MAX + 1)]
    for run in ended:
        runs.keep(run)
    kept = [run for run in ended if runs.get_cached(TENANT, run.head.id)]
    assert kept == ended[1:]
    assert runs.get_cached(TENANT, is_open.head.id) == is_open


@pytest.mark.parametrize("name", ["album", "picture-and-clip", "soften-if-large"])
def test_the_pictures_in_the_docs_are_those_of_the_examples(name: str) -> None:
    graph = parse_graph_text((EXAMPLES / f"graphs/{name}.yaml").read_text("utf-8")).graph
    page = (EXAMPLES.parent / "docs/concepts/graphs.md").read_text("utf-8")
    assert f"```mermaid\n{draw_mermaid(graph)}```" in page


def test_a_drawing_escapes_what_people_wrote() -> None:
    plan = plan_for(document(
        work("draw", "draw"), node("end", "condition", condition='output.prompt_id == "<b>"'), node("o", "output"),
        links=("draw.output > end.input", "end.true > o.value"),
    ))  # fmt: skip
    drawn = draw_mermaid(plan.graph)
    assert 'n1{"end<br/><small>output.prompt_id == &quot;&lt;b&gt;&quot;</small>"}' in drawn
    assert 'n1 -->|"true"| n2' in drawn


def test_buckets_are_a_mapping_that_shares_what_did_not_change() -> None:
    old: PersistentMap[int, str] = PersistentMap({n: str(n) for n in range(1000)})
    new = old.changed({5: "five", 2000: "more"}, gone=[7, 4000])
    assert (len(old), old[5], 7 in old) == (1000, "5", True)
    assert (len(new), new[5], new[2000], 7 in new) == (1000, "five", "more", False)
    assert new == {**{n: str(n) for n in range(1000) if n != 7}, 5: "five", 2000: "more"}
    assert sum(one is other for one, other in zip(old._buckets, new._buckets, strict=True)) >= 252


def real_file(name: str) -> dict[str, Any]:
    file_id = str(UUID(int=1))
    return {
        "file_id": file_id, "filename": name, "path": f"{file_id}/{name}", "mime_type": "image/png",
        "size": 1_500_000,
    }  # fmt: skip


def real_result() -> dict[str, Any]:
    """As a job with one picture has it."""
    drawn = [{**real_file("ComfyUI_00001_.png"), "width": 1024, "height": 1024}]
    return {
        "images": drawn, "files": drawn, "width": 1024, "height": 1024, "text": "", "json": None,
        "values": {}, "prompt_id": str(UUID(int=2)), "execution_time": 1.5,
    }  # fmt: skip


def advance_all(count: int) -> GraphRunState:
    """A fan-out of so many jobs, from the first to the last."""
    plan, jobs = items(), deque[StartJob]()
    run = GraphRunState(RUN_ID, {"photos": [real_file("IMG_20260101_120000.png")] * count})
    advance = next_actions(plan, run, (), WORLD)
    while advance.run.status != GraphRunStatus.COMPLETED:
        jobs += [each for each in advance.actions if isinstance(each, StartJob)]
        job = jobs.popleft()
        done = JobDone(job.key, job.attempt, real_result())
        advance = next_actions(plan, advance.run, (done,), WORLD)
    return advance.run


def test_the_largest_fan_out_of_jobs_with_a_picture_fits_into_the_budget_of_a_run() -> None:
    few = 50
    run, times = advance_all(few), GraphLimits().fanout_items_max // few
    for size, most in ((run.size, RUN_SIZE_MAX), (run.outputs_size, OUTPUTS_SIZE_MAX)):
        assert ValueSize(size.values * times, size.characters * times).fits(most)


def reads_per_job(count: int, monkeypatch: pytest.MonkeyPatch) -> float:
    reads, read = [0], RunDraft.record

    def counted(self: RunDraft, key: ExecutionKey) -> Any:
        reads[0] += 1
        return read(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(RunDraft, "record", counted)
        advance_all(count)
    return reads[0] / count


def test_a_job_of_a_large_fan_out_looks_at_no_more_than_one_of_a_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reads_per_job(600, monkeypatch) <= reads_per_job(30, monkeypatch)


def seconds_per_job(count: int, times: int) -> float:
    begin = time.process_time()
    for _ in range(times):
        advance_all(count)
    return (time.process_time() - begin) / (times * count)


@pytest.mark.slow
def test_the_time_per_job_is_flat_from_a_hundred_to_ten_thousand() -> None:
    small = min(seconds_per_job(100, 20) for _ in range(3))
    large = min(seconds_per_job(10_000, 1) for _ in range(3))
    assert large < 1.5 * small
