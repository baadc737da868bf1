"""Reruns: what is kept, what runs again, and that the values are those of a fresh run."""

import contextlib
import json
from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import document, node, work
from tests.unit.graphs.random_graphs import BACKENDS, RANDOM_CATALOGUE, GraphMaker
from tests.unit.graphs.simulation import NOW, RUN_ID, Simulation, plan_for, simulate
from tests.unit.graphs.test_decide_random import answers, check_kept, outcomes, played
from tests.unit.graphs.test_deciding_random import Maker, nobody_asks, outcome

from comfyfleet.api.graph_model import RoundEndNode, is_hidden
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.errors import InvalidInput
from comfyfleet.server.graphs.decide import decide_rerun
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.rerun import (
    EarlierRun,
    RerunFrom,
    changed_nodes,
    require_node,
    with_properties,
)
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    Event,
    ExecutionKey,
    ExecutionRecord,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    QuestionAnswered,
    StartJob,
    job_id,
)

SEEDS = st.integers(0, 2**32)
SECOND_ID = UUID(int=8)
DONE = ExecutionStatus.DONE


def rerun(
    before: Simulation,
    plan: RunPlan | None = None,
    *,
    start: str | None = None,
    max_tokens: int | None = None,
    **inputs: Any,
) -> tuple[Simulation, frozenset[ExecutionKey]]:
    plan = plan or before.plan
    given = {**before.run.inputs, **inputs}
    changed = changed_nodes(
        RerunFrom(before.plan, before.run.inputs), RerunFrom(plan, given), start=start
    )
    earlier = EarlierRun(plan, before.plan, before.run, changed)
    new = GraphRunState(SECOND_ID, given, max_tokens)
    decision, kept = decide_rerun(plan, new, earlier, before.environment)
    again = Simulation(plan, new, before.environment)
    again.follow(decision)
    assert not again.jobs, "the first decision starts nothing"
    return again, kept


def ran(again: Simulation) -> set[str]:
    return {str(key) for key, each in again.run.records.items() if each.attempt}


LINE = document(
    node("number", "input", default=1),
    work("first", "draw", properties={"text": "{{ number }}"}),
    work("second"),
    work("beside", "draw"),
    work("third"),
    node("result", "output"),
    node("other", "output"),
    links=(
        "first.output > second.input",
        "second.output > third.input",
        "third.output > result.value",
        "beside.output > other.value",
    ),
)


def ended_line() -> Simulation:
    line = Simulation(plan_for(LINE))
    line.start()
    for name in ("first", "beside", "second", "third"):
        line.done(name)
    assert line.run.status == GraphRunStatus.COMPLETED
    return line


def test_what_is_before_the_node_is_kept_for_nothing_and_says_where_it_came_from() -> None:
    line = ended_line()
    again, _ = rerun(line, start="second")
    again.tell()
    assert set(again.jobs) == {ExecutionKey("second")}
    again.done("second")
    again.done("third")
    assert again.run.status == GraphRunStatus.COMPLETED
    assert ran(again) == {"second", "third"}
    assert again.run.tokens == 4
    assert again.run.outputs == line.run.outputs
    for name in ("first", "beside"):
        record = again.run.record(ExecutionKey(name))
        assert record.reused_from == {
            "job_id": str(job_id(RUN_ID, ExecutionKey(name), 1)),
            "run_id": str(RUN_ID),
        }
        assert record.outputs == line.run.record(ExecutionKey(name)).outputs
    assert again.run.record(ExecutionKey("second")).reused_from is None


def test_a_result_that_was_kept_twice_names_the_run_that_made_it() -> None:
    first, _ = rerun(ended_line(), start="third")
    first.tell()
    first.done("third")
    second, _ = rerun(first, start="third")
    source = second.run.record(ExecutionKey("first")).reused_from
    assert source is not None
    assert source["run_id"] == str(RUN_ID)


def test_a_cancelled_run_is_taken_up_where_it_was() -> None:
    line = Simulation(plan_for(LINE))
    line.start()
    line.done("first")
    line.cancel()
    again, _ = rerun(line)
    again.tell()
    assert set(again.jobs) == {ExecutionKey("second"), ExecutionKey("beside")}
    assert ran(again) == {"second", "beside"}


def test_a_changed_input_runs_what_depends_on_it() -> None:
    line = ended_line()
    again, _ = rerun(line, number=2)
    again.tell()
    assert set(again.jobs) == {ExecutionKey("first")}
    same, kept = rerun(line, number=1)
    assert same.run.status == GraphRunStatus.COMPLETED
    assert len(kept) == len(same.run.records)
    true, _ = rerun(line, number=True)
    true.tell()
    assert set(true.jobs) == {ExecutionKey("first")}, "1 is not true"


def test_another_version_runs_the_nodes_that_differ_and_what_depends_on_them() -> None:
    line = ended_line()
    nodes = [
        {**each, "retries": 3} if each["id"] == "first" else each
        for each in LINE["nodes"]
        if each["id"] != "beside"
    ]
    changed = {**LINE, "nodes": [*nodes, work("beside", "draw", properties={"text": "other"})]}
    again, _ = rerun(line, plan_for(changed))
    again.tell()
    assert set(again.jobs) == {ExecutionKey("beside")}, "how often it is tried changes no result"
    links = [each for each in LINE["connections"] if each["to"] != "third.input"]
    rewired = {**LINE, "connections": [*links, {"from": "first.output", "to": "third.input"}]}
    rewired["nodes"] = [each for each in LINE["nodes"] if each["id"] != "second"]
    again, _ = rerun(line, plan_for(rewired))
    again.tell()
    assert set(again.jobs) == {ExecutionKey("third")}


def test_a_value_that_a_new_version_reads_whole_is_put_together() -> None:
    made = node("made", "value", values={"a": "{{ number }}", "b": 2})
    head = (node("number", "input", default=1), made, work("draw", "draw", properties={"text": "{{ made.a }}"}))  # fmt: skip
    old = document(*head, node("result", "output"), links=("draw.output > result.value",))
    run = Simulation(plan_for(old))
    run.start()
    run.done("draw")
    new = document(
        *head, node("result", "output"), node("all", "output"),
        links=("draw.output > result.value", "made.outputs > all.value"),
    )  # fmt: skip
    again, _ = rerun(run, plan_for(new))
    assert again.run.outputs is not None
    assert again.run.outputs["all"] == {"a": 1, "b": 2}
    assert not ran(again)


ALBUM = document(
    node("rows", "input", value_type="any"),
    node(
        "draw",
        "map",
        over="rows",
        continue_on_error=True,
        do={"workflow": "draw", "properties": {"text": "{{ item }}"}},
    ),
    node("result", "output"),
    links=("draw.output > result.value",),
)


def test_items_without_a_result_run_and_the_others_stay() -> None:
    album = Simulation(plan_for(ALBUM))
    album.start(rows=["a", "b", "c"])
    album.done("draw/do", 0)
    album.failed("draw/do", 1)
    album.done("draw/do", 2)
    assert album.run.status == GraphRunStatus.COMPLETED
    again, _ = rerun(album)
    again.tell()
    assert set(again.jobs) == {ExecutionKey("draw/do", (1,))}
    again.done("draw/do", 1)
    assert again.run.outputs is not None
    assert again.run.outputs["result"]["failed"] == 0
    assert again.run.outputs["result"]["count"] == 3


def test_a_map_is_run_again_with_all_that_is_inside_it() -> None:
    album = Simulation(plan_for(ALBUM))
    album.start(rows=["a", "b"])
    album.done("draw/do", 0)
    album.done("draw/do", 1)
    for start in ("draw", "draw/do"):
        again, _ = rerun(album, start=start)
        again.tell()
        assert len(again.jobs) == 2
    again, _ = rerun(album, start="result")
    assert again.run.outputs == album.run.outputs
    assert not ran(again)


REFINE = document(
    node("start", "input", default=1),
    node(
        "refine",
        "loop",
        start={"width": "{{ start }}"},
        at_most=4,
        until="output.width > 900",
        do={
            "nodes": [
                work("a", "draw", properties={"text": "{{ previous.width }}"}),
                work("b", "draw", properties={"text": "{{ a.output.width }}"}),
            ],
            "result": "b.output",
        },
    ),
    node("result", "output"),
    links=("refine.output > result.value",),
)


def refined(rounds: int) -> Simulation:
    loop = Simulation(plan_for(REFINE))
    loop.start()
    for number in range(rounds):
        loop.done("refine/a", number)
        loop.done("refine/b", number, width=1000 if number == 2 else number)
    return loop


def test_a_loop_goes_on_in_the_round_in_which_it_was_cancelled() -> None:
    loop = refined(1)
    loop.done("refine/a", 1)
    loop.cancel()
    again, _ = rerun(loop)
    again.tell()
    assert set(again.jobs) == {ExecutionKey("refine/b", (1,))}
    again.done("refine/b", 1, width=1000)
    assert again.run.status == GraphRunStatus.COMPLETED
    assert ran(again) == {"refine/b[1]"}


def test_a_round_runs_again_if_the_round_before_it_does() -> None:
    loop = refined(3)
    assert loop.run.status == GraphRunStatus.COMPLETED
    again, kept = rerun(loop, start="refine/b")
    assert ExecutionKey("refine/a", (0,)) in kept
    again.tell()
    assert set(again.jobs) == {ExecutionKey("refine/b", (0,))}
    again.done("refine/b", 0, width=5)
    assert set(again.jobs) == {ExecutionKey("refine/a", (1,))}, "it reads what the first round gave"


def with_loop(**fields: Any) -> RunPlan:
    loop = next(each for each in REFINE["nodes"] if each["id"] == "refine")
    nodes = [{**each, **fields} if each is loop else each for each in REFINE["nodes"]]
    return plan_for({**REFINE, "nodes": nodes})


def test_a_loop_that_may_go_on_for_longer_keeps_its_rounds() -> None:
    loop = refined(3)
    longer, _ = rerun(loop, with_loop(until="output.width > 2000"))
    longer.tell()
    assert set(longer.jobs) == {ExecutionKey("refine/a", (3,))}
    loop = Simulation(with_loop(at_most=2))
    loop.start()
    for number in range(2):
        loop.done("refine/a", number)
        loop.done("refine/b", number, width=number)
    assert loop.run.status == GraphRunStatus.COMPLETED
    longer, _ = rerun(loop, with_loop(at_most=3))
    longer.tell()
    assert set(longer.jobs) == {ExecutionKey("refine/a", (2,))}
    shorter, _ = rerun(loop, with_loop(at_most=1))
    assert shorter.run.status == GraphRunStatus.COMPLETED
    assert shorter.run.outputs == {"result": loop.run.record(ExecutionKey("refine/b", (0,))).outputs["output"]}  # type: ignore[index]  # fmt: skip


def test_a_round_runs_again_if_what_the_round_before_gave_is_computed_anew() -> None:
    def plan(more: int) -> RunPlan:
        inside = [
            work("a", "draw", properties={"text": "{{ previous.width }}"}),
            node("sum", "value", values={"width": f"{{{{ a.output.width + {more} }}}}"}),
        ]
        return with_loop(do={"nodes": inside, "result": "sum.outputs"}, at_most=3)

    loop = Simulation(plan(1))
    loop.start()
    for number in range(3):
        loop.done("refine/a", number, width=number)
    assert loop.run.status == GraphRunStatus.COMPLETED
    again, _ = rerun(loop, plan(2))
    again.tell()
    assert set(again.jobs) == {ExecutionKey("refine/a", (1,))}, "its sum is another"


def test_an_approval_stays_given_unless_what_it_was_about_is_new() -> None:
    asks = document(
        work("draw", "draw"),
        node("look", "approve", message="good?"),
        work("fix"),
        node("result", "output"),
        links=("draw.output > look.input", "look.approved > fix.input", "fix.output > result.value"),
    )  # fmt: skip
    run = Simulation(plan_for(asks))
    run.start()
    run.done("draw")
    run.tell(QuestionAnswered(ExecutionKey("look"), Choice.APPROVE))
    run.done("fix")
    again, _ = rerun(run, start="fix")
    assert again.run.record(ExecutionKey("look")).reused_from == {
        "job_id": None,
        "run_id": str(RUN_ID),
    }
    assert not again.run.asking
    again, _ = rerun(run, start="look")
    assert again.run.status == GraphRunStatus.WAITING_FOR_USER
    assert not ran(again)


def test_a_graph_inside_is_run_again_from_one_of_its_nodes() -> None:
    inner = document(
        node("photo", "input", value_type="image"),
        work("soft"),
        work("hard"),
        node("made", "output"),
        links=("photo.value > soft.input", "soft.output > hard.input", "hard.output > made.value"),
    )
    outer = document(
        work("draw", "draw"),
        node("framed", "graph", graph="Frame", version=1, inputs={"photo": "{{ draw.output.images.0 }}"}),
        node("result", "output"),
        links=("framed.made > result.value",),
    )  # fmt: skip
    run = Simulation(plan_for(outer, library={("Frame", 1): parse_graph(inner).graph}))
    run.start()
    for name in ("draw", "framed/soft", "framed/hard"):
        run.done(name)
    assert run.run.status == GraphRunStatus.COMPLETED
    for start, first in (("framed", "framed/soft"), ("framed/hard", "framed/hard")):
        again, _ = rerun(run, start=start)
        again.tell()
        assert set(again.jobs) == {ExecutionKey(first)}
    with pytest.raises(InvalidInput, match="inside a map or a loop"):
        with_properties(outer, {"framed/soft.mode": "b"})


def test_a_node_that_is_not_there_is_refused_by_name() -> None:
    plan = plan_for(ALBUM)
    require_node(plan, "draw/do")
    for name in ("paint", "draw/.each", ""):
        with pytest.raises(InvalidInput, match="no node"):
            require_node(plan, name)


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("first.text", "x", lambda it: it["nodes"][0]["properties"]["text"]),
        ("second.input", {"file_id": "f"}, lambda it: it["nodes"][0]["properties"]["input"]),
        ("number.default", 7, lambda it: it["nodes"][0]["default"]),
    ],
)
def test_a_property_is_set_for_one_run(name: str, value: Any, where: Any) -> None:
    before = json.dumps(LINE)
    changed = with_properties(LINE, {name: value})
    assert where(changed) == value
    assert name not in {each["to"] for each in changed["connections"]}
    assert json.dumps(LINE) == before


def test_what_fed_only_a_property_that_is_set_is_left_out() -> None:
    changed = with_properties(LINE, {"third.input": {"file_id": "f"}})
    assert [each["id"] for each in changed["nodes"]] == ["beside", "third", "result", "other"]
    assert parse_graph(changed).problems == ()
    read_twice = document(
        node("radius", "input", default=1),
        work("first", "draw"),
        work("second", "draw", properties={"text": "{{ radius }}"}),
        links=("radius.value > first.width", "radius.value > second.width"),
    )
    for values in ({"first.width": 2}, {"first.width": 2, "second.width": 2}):
        assert with_properties(read_twice, values)["nodes"][0]["id"] == "radius"
    every: dict[str, Any] = {"first.width": 2, "second.width": 2, "second.text": "x"}
    assert with_properties(read_twice, every)["nodes"][0]["id"] == "first"


def test_a_property_inside_a_map_or_a_loop_is_set() -> None:
    album = with_properties(write_graph(parse_graph(ALBUM).graph), {"draw/do.text": "x"})
    assert album["nodes"][1]["do"]["properties"]["text"] == "x"
    loop = with_properties(write_graph(parse_graph(REFINE).graph), {"refine/b.text": "y", "refine.at_most": 2})  # fmt: skip
    assert loop["nodes"][1]["do"]["nodes"][1]["properties"]["text"] == "y"
    assert loop["nodes"][1]["at_most"] == 2
    assert parse_graph(loop).problems == ()


@pytest.mark.parametrize("name", ["first", "paint.text", "first.", ".text", "first/do.text", "number.id", "draw/x.text"])  # fmt: skip
def test_a_property_that_cannot_be_set_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        with_properties(LINE, {name: 1})
    assert refused.value.details["field"] == "set"


@pytest.mark.parametrize(
    ("do", "name"),
    [
        ({"nodes": 5}, "draw/x.y"),
        ({"nodes": [5]}, "draw/x.y"),
        ({"nodes": [{"id": "x", "properties": 5}]}, "draw/x.y"),
        ({"nodes": [{"id": "x", "type": ["a"]}], "connections": [5]}, "draw/x.y"),
        ({"type": "value", "values": []}, "draw/do.y"),
    ],
)
def test_nonsense_that_is_set_first_is_refused_like_any_other(do: Any, name: str) -> None:
    album = write_graph(parse_graph(ALBUM).graph)
    with contextlib.suppress(InvalidInput):
        changed = with_properties(album, {"draw.do": do, name: 1})
        assert parse_graph(changed).problems


# Random graphs


def depends(plan: RunPlan, first: ExecutionKey, then: ExecutionKey) -> bool:
    """Whether one execution reads another, or is in a round that the other has decided on."""
    for judge in plan.graph.nodes.values():
        if not isinstance(judge, RoundEndNode) or judge.rounds not in plan.scope(then.node):
            continue
        depth = plan.scope(then.node).index(judge.rounds)
        is_result = first.node in {each.source.node for each in plan.shape.incoming[judge.id]}
        if is_result and (*first.at[:depth], first.at[depth] + 1) == then.at[: depth + 1]:
            return True
    length = min(len(first.at), len(then.at))
    return first.node in plan.shape.sources[then.node] and first.at[:length] == then.at[:length]


def run_again(plan: RunPlan, run: GraphRunState, starts: set[ExecutionKey]) -> set[ExecutionKey]:
    """Returns what depends on some executions, by going from one to the next."""
    found, waiting = set(starts), list(starts)
    while waiting:
        first = waiting.pop()
        more = {key for key in run.records if key not in found and depends(plan, first, key)}
        found |= more
        waiting += more
    return found


def check_rerun(seed: int, size: int, order: int) -> None:
    graph, rng = Maker(Random(seed), size).document(), Random(order)
    plan = plan_for(graph, RANDOM_CATALOGUE)
    inputs = {"number": seed % 10, "list": [seed % 5, *range(seed % 4)]}
    environment = Environment(NOW, BACKENDS, in_queue_max=rng.choice([1, 3, 50]))
    whole = simulate(
        Simulation(plan, GraphRunState(RUN_ID, inputs), environment), rng, outcome, nobody_asks
    )
    check_rerun_of(whole, rng, outcome, nobody_asks)


def check_rerun_of(
    whole: Simulation,
    rng: Random,
    outcome: Callable[[StartJob], Event],
    answer: Callable[[ExecutionKey, int], QuestionAnswered],
) -> None:
    plan, was = whole.plan, whole.run.records
    start = rng.choice([each for each in plan.shape.order if not is_hidden(plan.node(each))])
    again, kept = rerun(whole, start=start)
    check_kept(again)
    again = simulate(again, rng, outcome, answer)
    assert again.run.status == GraphRunStatus.COMPLETED, again.run.error
    assert again.run.outputs == whole.run.outputs
    inside = {key for key in was if f"{key.node}/".startswith(f"{start}/")}
    lacking = {key for key, each in was.items() if each.status == "failed" or is_put_off(each)}
    expected = run_again(plan, whole.run, inside | lacking)
    tried = {key for key in expected if was[key].attempt}
    assert {key for key, each in again.run.records.items() if each.attempt} == tried
    assert kept == was.keys() - expected
    for key, record in was.items():
        new = again.run.record(key)
        assert (new.status, new.outputs, new.inputs) == (
            record.status,
            record.outputs,
            record.inputs,
        )


def is_put_off(record: ExecutionRecord) -> bool:
    """Whether a person has skipped it, who may choose otherwise now."""
    return record.status == ExecutionStatus.SKIPPED and record.inputs is not None


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(2, 80), SEEDS)
def test_a_rerun_of_fan_outs_conditions_and_answers_gives_what_a_fresh_run_gives(
    seed: int, size: int, order: int
) -> None:
    check_older_kinds(seed, size, order)


def check_older_kinds(seed: int, size: int, order: int) -> None:
    maker = GraphMaker(Random(seed), size, may_fail=False)
    plan = plan_for(maker.document(), RANDOM_CATALOGUE)
    whole = played(plan, seed, order, may_fail=False)
    check_rerun_of(whole, Random(order), outcomes(seed, 0.3), answers(seed, may_fail=False))


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 20), SEEDS)
def test_a_rerun_gives_what_a_fresh_run_gives_and_runs_only_what_depends_on_the_node(
    seed: int, size: int, order: int
) -> None:
    check_rerun(seed, size, order)


def check_taken_up(seed: int, size: int, order: int) -> None:
    """Cancels a run at any moment and changes an input, or not: a rerun gives what a fresh run gives."""
    graph, rng = Maker(Random(seed), size).document(), Random(order)
    plan = plan_for(graph, RANDOM_CATALOGUE)
    inputs = {"number": seed % 10, "list": [seed % 5, *range(seed % 4)]}
    environment = Environment(NOW, BACKENDS, in_queue_max=2)
    cut = Simulation(plan, GraphRunState(RUN_ID, inputs), environment)
    cut.start()
    while cut.jobs and rng.random() < 0.9:
        cut.tell(outcome(cut.jobs.pop(rng.choice(sorted(cut.jobs)))))
    cut.cancel()
    changes: dict[str, Any] = {"number": seed % 7} if rng.random() < 0.5 else {}
    again, kept = rerun(cut, start=None, **changes)
    check_kept(again)
    again = simulate(again, rng, outcome, nobody_asks)
    fresh = simulate(
        Simulation(plan, GraphRunState(RUN_ID, {**inputs, **changes}), environment),
        rng,
        outcome,
        nobody_asks,
    )
    assert again.run.outputs == fresh.run.outputs
    assert again.run.records.keys() == fresh.run.records.keys()
    had = {key for key, each in cut.run.records.items() if each.status == DONE and each.attempt}
    if not changes or changes["number"] == inputs["number"]:
        behind = {key for key, each in cut.run.records.items() if each.status == "failed"}
        assert had - run_again(plan, cut.run, behind) <= kept, "nothing that was there is run again"
    assert not {key for key in kept if again.run.record(key).attempt}


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(1, 20), SEEDS)
def test_a_run_that_was_cut_is_taken_up_as_if_it_had_not_been(
    seed: int, size: int, order: int
) -> None:
    check_taken_up(seed, size, order)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(SEEDS, st.integers(2, 60), SEEDS)
def test_reruns_of_all_kinds_deep(seed: int, size: int, order: int) -> None:
    check_older_kinds(seed, size, order)
    check_rerun(seed, size // 2, order)
    check_taken_up(seed, size // 2, order)
