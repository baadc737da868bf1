"""The timeline of a run: who waited for what, and the critical path."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import document, node, work
from tests.unit.graphs.random_graphs import BACKENDS, RANDOM_CATALOGUE
from tests.unit.graphs.simulation import NOW, RUN_ID, WORLD, Simulation, picture, plan_for
from tests.unit.graphs.test_deciding_random import SEEDS, Maker, outcome

from comfyfleet.api.graph_model import is_hidden
from comfyfleet.api.graph_reports import NodeTimeline, RunTimeline, SpanKind
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    ExecutionKey,
    GraphRunState,
    JobStarted,
    QuestionAnswered,
)
from comfyfleet.server.graphs.snapshot import dump_record, load_record
from comfyfleet.server.graphs.timeline import (
    CRITICAL_STEPS_MAX,
    SPANS_PER_NODE_MAX,
    RunTimes,
    TimeSpan,
    critical_path,
    joined_spans,
    timeline_of,
)

RUNNING, ASKING, QUEUED, HELD = (
    SpanKind.RUNNING,
    SpanKind.ASKING,
    SpanKind.QUEUED,
    SpanKind.HELD,
)


def at(simulation: Simulation, seconds: float) -> Simulation:
    now = NOW + timedelta(seconds=seconds)
    simulation.environment = replace(simulation.environment, now=now)
    return simulation


def timeline(simulation: Simulation) -> RunTimeline:
    now = simulation.environment.now
    ended_at = now if simulation.run.status.is_over else None
    return timeline_of(simulation.plan, simulation.run, started_at=NOW, ended_at=ended_at, now=now)


def row(found: RunTimeline, name: str) -> NodeTimeline:
    (one,) = [each for each in found.nodes if each.id == name]
    return one


def spans(one: NodeTimeline) -> list[tuple[str, float, float]]:
    return [(each.kind.value, each.start, each.end) for each in one.spans]


def path(found: RunTimeline) -> list[tuple[str, float]]:
    return [(each.node, round(each.end - each.start, 3)) for each in found.critical_path]


def two_ways() -> Simulation:
    """draw → fix, and blend beside it; all that was made is merged."""
    plan = plan_for(document(
        work("draw", "draw"), work("fix"), work("other", "draw"), node("m", "merge"), node("o", "output"),
        links=("draw.output > fix.input", "fix.output > m.input_0", "other.output > m.input_1", "m.output > o.value"),
    ))  # fmt: skip
    simulation = Simulation(plan)
    simulation.start()
    return simulation


def test_a_row_says_when_a_node_waited_and_ran_and_the_critical_path_is_the_longest_chain() -> None:
    simulation = two_ways()
    at(simulation, 2).started("draw")
    at(simulation, 3).started("other")
    at(simulation, 10).done("draw")
    at(simulation, 12).done("other")
    at(simulation, 11.5).started("fix")
    at(simulation, 20).done("fix")
    found = timeline(simulation)
    assert (found.seconds, found.status) == (20.0, "completed")
    assert spans(row(found, "draw")) == [("queued", 0, 2), ("running", 2, 10)]
    assert spans(row(found, "fix")) == [("queued", 10, 11.5), ("running", 11.5, 20)]
    assert (row(found, "fix").after, row(found, "fix").ready, row(found, "fix").ended) == (
        "draw",
        10,
        20,
    )
    assert (row(found, "m").after, spans(row(found, "m"))) == ("fix", [])
    assert path(found) == [("draw", 10), ("fix", 10), ("m", 0), ("o", 0)]
    assert [each.id for each in found.nodes if not each.is_critical] == ["other"]
    assert found.critical_path[1].seconds.queued == 1.5


def test_what_is_held_by_the_limit_of_the_run_waits_for_its_turn() -> None:
    simulation = Simulation(two_ways().plan, environment=replace(WORLD, in_queue_max=1))
    simulation.start()
    first, second = (
        ("draw", "other") if ExecutionKey("draw") in simulation.jobs else ("other", "draw")
    )
    at(simulation, 4).done(first)
    at(simulation, 6).started(second)
    found = timeline(at(simulation, 7))
    assert spans(row(found, second))[:2] == [("held", 0, 4), ("queued", 4, 6)]


def test_of_a_run_that_goes_on_the_path_leads_to_what_has_been_going_on_for_longest() -> None:
    simulation = two_ways()
    at(simulation, 1).started("draw")
    at(simulation, 1).started("other")
    at(simulation, 5).done("draw")
    found = timeline(at(simulation, 9))
    assert path(found) == [("other", 9)]
    assert spans(row(found, "fix")) == [("queued", 5, 9)]
    assert (row(found, "m").after, row(found, "m").ready, row(found, "m").ended) == (
        "fix",
        None,
        None,
    )


def test_a_question_is_time_that_a_person_took() -> None:
    plan = plan_for(document(
        work("draw", "draw"), node("ask", "approve", message="fine?"), node("o", "output"),
        links=("draw.output > ask.input", "ask.approved > o.value"),
    ))  # fmt: skip
    simulation = Simulation(plan)
    simulation.start()
    at(simulation, 3).done("draw")
    asked = timeline(at(simulation, 5))
    assert (row(asked, "ask").status, spans(row(asked, "ask"))) == ("asking", [("asking", 3, 5)])
    at(simulation, 60).tell(QuestionAnswered(ExecutionKey("ask"), Choice.APPROVE))
    found = timeline(simulation)
    assert spans(row(found, "ask")) == [("asking", 3, 60)]
    assert path(found) == [("draw", 3), ("ask", 57), ("o", 0)]
    record = simulation.run.record(ExecutionKey("ask"))
    assert load_record(dump_record(record)) == record


def test_a_backend_that_a_person_chose_is_waited_for_and_then_runs() -> None:
    node_of = work("draw", "draw", backend_affinity="worker:away", fallback_strategy="ask_user")
    plan = plan_for(document(node_of, node("o", "output"), links=("draw.output > o.value",)))
    simulation = Simulation(plan)
    simulation.start()
    at(simulation, 30).tell(QuestionAnswered(ExecutionKey("draw"), Choice.BACKEND, "worker:b"))
    at(simulation, 32).started("draw", backend="worker:b")
    at(simulation, 40).done("draw")
    drawn = row(timeline(simulation), "draw")
    assert spans(drawn) == [("asking", 0, 30), ("queued", 30, 32), ("running", 32, 40)]


def test_an_earlier_attempt_is_told_as_one() -> None:
    plan = plan_for(
        document(
            work("draw", "draw", retries=1), node("o", "output"), links=("draw.output > o.value",)
        )
    )
    simulation = Simulation(plan)
    simulation.start()
    at(simulation, 5).failed("draw")
    at(simulation, 6).started("draw")
    at(simulation, 8).done("draw")
    assert spans(row(timeline(simulation), "draw")) == [
        ("retried", 0, 5),
        ("queued", 5, 6),
        ("running", 6, 8),
    ]


def test_what_was_skipped_is_not_on_the_path() -> None:
    plan = plan_for(document(
        work("draw", "draw"), node("c", "condition", condition="output.width > 600"), work("fix"),
        node("m", "merge"), node("o", "output"),
        links=("draw.output > c.input", "c.true > fix.input", "fix.output > m.input_0", "c.false > m.input_1",
               "m.output > o.value"),
    ))  # fmt: skip
    simulation = Simulation(plan)
    simulation.start()
    at(simulation, 5).done("draw", width=512)
    assert [name for name, _ in path(timeline(simulation))] == ["draw", "c", "m", "o"]


LOOP = node(
    "refine", "loop", start={"p": "{{ draw.output }}"}, until="output.width > 600", at_most=5,
    do={"workflow": "fix", "properties": {"input": "{{ previous }}"}},
)  # fmt: skip


def test_a_later_round_of_a_loop_waited_for_the_one_before() -> None:
    loop = {**LOOP, "start": {}, "do": {"workflow": "draw", "properties": {"text": "{{ round }}"}}}
    plan = plan_for(document(loop, node("o", "output"), links=("refine.output > o.value",)))
    simulation = Simulation(plan)
    simulation.start()
    at(simulation, 4).done("refine/do", 0, width=1)
    at(simulation, 9).done("refine/do", 1, width=1)
    at(simulation, 11).done("refine/do", 2, width=700)
    found = timeline(simulation)
    assert path(found) == [
        ("refine/do", 4),
        ("refine/do", 5),
        ("refine/do", 2),
        ("refine", 0),
        ("o", 0),
    ]
    assert [each.index for each in found.critical_path[:3]] == [(0,), (1,), (2,)]
    assert (row(found, "refine/do").executions, row(found, "refine/do").longest) == (3, (1,))
    assert not [each.id for each in found.nodes if is_hidden(plan.node(each.id))]


def test_a_map_of_ten_thousand_items_is_one_row() -> None:
    do = {"workflow": "fix", "properties": {"input": "{{ item }}"}}
    plan = plan_for(document(
        node("photos", "input"), node("all", "map", over="input.photos", max_items=10_000, do=do),
        node("o", "output"), links=("all.output > o.value",),
    ))  # fmt: skip
    simulation = Simulation(plan, environment=replace(WORLD, in_queue_max=10_000))
    simulation.start(photos=[picture(str(number)) for number in range(10_000)])
    for number in range(0, 1_000, 50):  # as many as may be in flight
        jobs = [
            simulation.jobs[ExecutionKey("all/do", (each,))] for each in range(number, number + 50)
        ]
        at(simulation, number + 1).tell(*(JobStarted(each.key, 1, "worker:a") for each in jobs))
    begun = time.monotonic()
    found = timeline(at(simulation, 20_000))
    assert time.monotonic() - begun < 10
    one = row(found, "all/do")
    assert (one.executions, one.expected) == (10_000, 10_000)
    assert len(one.spans) <= SPANS_PER_NODE_MAX
    assert len(found.critical_path) <= CRITICAL_STEPS_MAX
    assert len(found.model_dump_json()) < 20_000


def test_spans_of_many_executions_are_joined_and_bounded() -> None:
    row = joined_spans(
        [
            TimeSpan(QUEUED, 0, 4),
            TimeSpan(RUNNING, 2, 6),
            TimeSpan(RUNNING, 5, 7),
            TimeSpan(HELD, 9, 10),
        ]
    )
    assert row == [TimeSpan(QUEUED, 0, 2), TimeSpan(RUNNING, 2, 7), TimeSpan(HELD, 9, 10)]
    many = [
        TimeSpan(RUNNING if number % 2 else ASKING, number, number + 1) for number in range(5_000)
    ]
    few = joined_spans(many)
    assert len(few) <= SPANS_PER_NODE_MAX
    assert (few[0].start, few[-1].end) == (0, 5_000)
    apart = joined_spans(
        [TimeSpan(RUNNING, 10 * number, 10 * number + 1) for number in range(5_000)]
    )
    assert len(apart) <= SPANS_PER_NODE_MAX


@given(
    st.lists(
        st.tuples(st.sampled_from(SpanKind), st.integers(0, 50), st.integers(1, 20)), max_size=200
    )
)
def test_joined_spans_follow_each_other_and_cover_what_was_there(
    drawn: list[tuple[SpanKind, int, int]],
) -> None:
    given_spans = [TimeSpan(kind, start, start + length) for kind, start, length in drawn]
    found = joined_spans(given_spans, most=1_000)
    assert all(one.end <= two.start for one, two in itertools.pairwise(found))
    moments = {moment for each in given_spans for moment in range(int(each.start), int(each.end))}
    assert moments == {moment for each in found for moment in range(int(each.start), int(each.end))}


@given(st.data())
def test_a_critical_path_is_a_chain_of_dependencies_whose_parts_add_up(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    sources = [
        data.draw(st.sets(st.integers(0, number - 1), max_size=4)) if number else set()
        for number in range(count)
    ]
    ends: dict[int, float] = {}
    for number in range(count):
        ready = max((ends[each] for each in sources[number]), default=0.0)
        ends[number] = ready + data.draw(st.integers(0, 9))
    last = max(ends, key=lambda each: (ends[each], each))
    found = critical_path(last, ends, lambda each: sources[each], lambda each: each)
    assert not sources[found[0]]
    assert all(one in sources[two] for one, two in itertools.pairwise(found))
    own = [ends[each] - max((ends[one] for one in sources[each]), default=0.0) for each in found]
    assert sum(own) == ends[last] == max(ends.values())


class Clocked(Simulation):
    """Time goes on before each event."""

    tick: Callable[[], float]

    def tell(self, *events: Any) -> Any:
        now = self.environment.now + timedelta(seconds=self.tick())
        self.environment = replace(self.environment, now=now)
        return super().tell(*events)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 20), SEEDS)
def test_the_steps_of_any_run_add_up_to_its_duration(seed: int, size: int, order: int) -> None:
    plan, rng = plan_for(Maker(Random(seed), size).document(), RANDOM_CATALOGUE), Random(order)
    inputs = {"number": seed % 10, "list": [seed % 5, *range(seed % 4)]}
    environment = Environment(NOW, BACKENDS, in_queue_max=2)
    simulation = Clocked(plan, GraphRunState(RUN_ID, inputs), environment)
    simulation.tick = lambda: rng.choice([0.0, 0.5, 3.0])
    simulation.start()
    check_timeline(simulation)
    while simulation.jobs:
        job = simulation.jobs[rng.choice(sorted(simulation.jobs))]
        if rng.random() < 0.5:
            simulation.tell(JobStarted(job.key, job.attempt, "worker:a"))
        else:
            simulation.tell(outcome(simulation.jobs.pop(job.key)))
        check_timeline(simulation)


def check_timeline(simulation: Simulation) -> None:
    found = timeline(simulation)
    timed = RunTimes(simulation.plan, simulation.run, NOW, None, simulation.environment.now)
    steps = found.critical_path
    if found.critical_total == len(steps) and steps:
        assert steps[0].start == 0
        assert all(one.end == two.start for one, two in itertools.pairwise(steps))
        total = sum(each.end - each.start for each in steps)
        ended = max(timed.ends.values(), default=0.0)
        assert abs(total - (ended if found.status == "completed" else found.seconds)) < 0.01
    for each in found.nodes:
        assert all(0 <= one.start < one.end <= found.seconds + 0.001 for one in each.spans)
        assert len(each.spans) <= SPANS_PER_NODE_MAX
