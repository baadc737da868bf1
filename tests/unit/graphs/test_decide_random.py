"""Random graphs, played in random order: each execution ends once, and the order makes no difference."""

import json
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.random_graphs import ANYTHING, BACKENDS, RANDOM_CATALOGUE, GraphMaker
from tests.unit.graphs.simulation import NOW, RUN_ID, Simulation, plan_for, result, simulate

from comfyfleet.server.graphs.draft import RunDraft
from comfyfleet.server.graphs.plan import RunPlan
from comfyfleet.server.graphs.progress import progress_of
from comfyfleet.server.graphs.run import (
    Choice,
    Environment,
    Event,
    ExecutionKey,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    JobFailed,
    QuestionAnswered,
    StartJob,
)
from comfyfleet.server.graphs.snapshot import dump_cut, dump_record, load_record, load_run

SEEDS = st.integers(0, 2**32)
SIZES = st.integers(2, 200)


def chance(*what: object) -> int:
    """A number that depends on nothing but what it is about, in any process and any order."""
    return zlib.crc32(repr(what).encode())


def outcomes(seed: int, failing: float) -> Callable[[StartJob], Event]:
    def outcome(job: StartJob) -> Event:
        fails = chance(seed, str(job.key)) % 1000 < failing * 1000
        if fails and job.attempt <= 1 + chance(seed, "times", str(job.key)) % 3:
            return JobFailed(job.key, job.attempt, "no")
        return JobDone(
            job.key, job.attempt, result(str(job.key), width=chance(str(job.key)) % 1000)
        )

    return outcome


def answers(seed: int, *, may_fail: bool) -> Callable[[ExecutionKey, int], QuestionAnswered]:
    def answer(key: ExecutionKey, times: int) -> QuestionAnswered:
        number = chance(seed, "answer", str(key)) % 10
        if number < 3 and times == 1:
            return QuestionAnswered(key, Choice.RETRY)
        if number < 5:
            return QuestionAnswered(key, Choice.SKIP)
        if number < 6 and may_fail:
            return QuestionAnswered(key, Choice.FAIL)
        return QuestionAnswered(key, Choice.BACKEND, "worker:here")

    return answer


def lists(seed: int) -> list[list[Any]]:
    """Of up to three lists with up to three items each."""
    return [[result(f"{n}.{k}") for k in range((seed >> n) % 4)] for n in range((seed + 2) % 4)]


def played(
    plan: RunPlan, seed: int, order: int, *, may_fail: bool, slice_max: int | None = None
) -> Simulation:
    rng = Random(order)
    inputs = {"picture": result("p"), "list": lists(seed)}
    environment = Environment(NOW, BACKENDS, in_queue_max=rng.choice([1, 3, 50]))
    simulation = Simulation(
        plan,
        GraphRunState(RUN_ID, inputs),
        environment,
        slice_max=slice_max,
        between=lambda run: read_again(plan, run),
    )
    outcome = outcomes(seed, 0.3 if not may_fail else 0.15)
    return simulate(simulation, rng, outcome, answers(seed, may_fail=may_fail))


def check_ended(simulation: Simulation) -> None:
    run, plan = simulation.run, simulation.plan
    assert run.status.is_over
    assert (run.open_count, run.in_flight, run.asking) == (0, frozenset(), frozenset())
    assert not run.held
    keys = list(RunDraft(plan, run, simulation.environment).all_keys())
    assert all(run.record(key).status.is_ended for key in keys)
    assert set(run.records) == set(keys)
    for node in plan.graph.nodes:
        assert run.tally(node).ended == run.tally(node).expected
    done = [
        k for k in keys if k.node in plan.workflows and run.record(k).status == ExecutionStatus.DONE
    ]
    assert run.tokens == ANYTHING.price_tokens * len(done)
    if run.status == GraphRunStatus.COMPLETED:
        assert progress_of(plan, run).overall_percent == pytest.approx(100)


def check_kept(simulation: Simulation) -> None:
    """A run that was written down and read again is the same run."""
    assert read_again(simulation.plan, simulation.run) == simulation.run


def read_again(plan: RunPlan, run: GraphRunState) -> GraphRunState:
    """Returns a run as a process that starts later reads it."""
    rows = {key: json.loads(json.dumps(dump_record(each))) for key, each in run.records.items()}
    head = GraphRunState(
        run.id,
        run.inputs,
        run.max_tokens,
        run.status,
        tokens=run.tokens,
        error=run.error,
        outputs=run.outputs,
    )
    cut = json.loads(json.dumps(dump_cut(run)))
    return load_run(plan, head, {key: load_record(row) for key, row in rows.items()}, cut)


@settings(max_examples=6, deadline=None)
@given(SEEDS, SIZES, SEEDS)
def test_a_run_can_be_written_down_and_read_again_at_any_moment(
    seed: int, size: int, order: int
) -> None:
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=True).document(), RANDOM_CATALOGUE)
    rng, outcome = Random(order), outcomes(seed, 0.2)
    inputs = {"picture": result("p"), "list": lists(seed)}
    simulation = Simulation(
        plan, GraphRunState(RUN_ID, inputs), Environment(NOW, BACKENDS, in_queue_max=2)
    )
    simulation.start()
    while simulation.jobs:
        if rng.random() < 0.2:
            check_kept(simulation)
        simulation.tell(outcome(simulation.jobs.pop(rng.choice(sorted(simulation.jobs)))))
    check_kept(simulation)


def state_of(simulation: Simulation) -> dict[str, Any]:
    """All that may not depend on the order."""
    records = {
        str(key): (record.status, record.outputs, record.error, record.notes, record.attempt)
        for key, record in simulation.run.records.items()
    }
    return {"status": simulation.run.status, "outputs": simulation.run.outputs, **records}


def check_a_graph_that_gets_through(seed: int, size: int, orders: tuple[int, int]) -> None:
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=False).document(), RANDOM_CATALOGUE)
    one, other = (played(plan, seed, order, may_fail=False) for order in orders)
    for simulation in (one, other):
        check_ended(simulation)
        assert simulation.run.status == GraphRunStatus.COMPLETED
    assert state_of(one) == state_of(other)


def check_a_graph_that_may_fail(seed: int, size: int, orders: tuple[int, int]) -> None:
    """Which node fails first is a matter of order; that the run fails is not."""
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=True).document(), RANDOM_CATALOGUE)
    one, other = (played(plan, seed, order, may_fail=True) for order in orders)
    for simulation in (one, other):
        check_ended(simulation)
    assert one.run.status == other.run.status
    if one.run.status == GraphRunStatus.COMPLETED:
        assert state_of(one) == state_of(other)


@settings(max_examples=12, deadline=None)
@given(SEEDS, SIZES, st.tuples(SEEDS, SEEDS))
def test_every_execution_ends_once_and_the_order_makes_no_difference(
    seed: int, size: int, orders: tuple[int, int]
) -> None:
    check_a_graph_that_gets_through(seed, size, orders)


@settings(max_examples=12, deadline=None)
@given(SEEDS, SIZES, st.tuples(SEEDS, SEEDS))
def test_with_failures_the_run_fails_in_every_order_or_in_none(
    seed: int, size: int, orders: tuple[int, int]
) -> None:
    check_a_graph_that_may_fail(seed, size, orders)


@settings(max_examples=20, deadline=None)
@given(SEEDS, SIZES, st.tuples(SEEDS, SEEDS), st.integers(1, 30))
def test_decisions_in_slices_of_any_size_have_the_same_result(
    seed: int, size: int, orders: tuple[int, int], slice_max: int
) -> None:
    """Between two slices, the run is written down and read again, as after a restart."""
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=False).document(), RANDOM_CATALOGUE)
    whole = played(plan, seed, orders[0], may_fail=False)
    sliced = played(plan, seed, orders[1], may_fail=False, slice_max=slice_max)
    check_ended(sliced)
    assert state_of(sliced) == state_of(whole)
    assert sliced.job_ids == whole.job_ids
    assert sliced.cuts or slice_max > 1


@settings(max_examples=12, deadline=None)
@given(SEEDS, SIZES, st.tuples(SEEDS, SEEDS), st.integers(1, 30))
def test_with_failures_slices_of_any_size_fail_the_run_or_do_not(
    seed: int, size: int, orders: tuple[int, int], slice_max: int
) -> None:
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=True).document(), RANDOM_CATALOGUE)
    whole = played(plan, seed, orders[0], may_fail=True)
    sliced = played(plan, seed, orders[1], may_fail=True, slice_max=slice_max)
    check_ended(sliced)
    assert sliced.run.status == whole.run.status
    if whole.run.status == GraphRunStatus.COMPLETED:
        assert state_of(sliced) == state_of(whole)


@settings(max_examples=8, deadline=None)
@given(SEEDS, SIZES, SEEDS, st.integers(0, 30))
def test_a_run_that_is_cancelled_at_any_moment_ends(
    seed: int, size: int, order: int, steps: int
) -> None:
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=False).document(), RANDOM_CATALOGUE)
    rng, outcome = Random(order), outcomes(seed, 0.3)
    simulation = Simulation(
        plan, GraphRunState(RUN_ID, {"list": [[1], [2, 3], []]}), Environment(NOW, BACKENDS)
    )
    simulation.start()
    for _ in range(steps):
        if simulation.jobs:
            simulation.tell(outcome(simulation.jobs.pop(rng.choice(sorted(simulation.jobs)))))
    simulation.cancel()
    for key in sorted(simulation.stopping):
        simulation.tell(outcome(simulation.stopping.pop(key)))
    check_ended(simulation)


@settings(max_examples=8, deadline=None)
@given(SEEDS, SIZES, SEEDS)
def test_a_failed_run_that_is_retried_until_all_goes_well_ends_as_if_nothing_had_failed(
    seed: int, size: int, order: int
) -> None:
    plan = plan_for(GraphMaker(Random(seed), size, may_fail=True).document(), RANDOM_CATALOGUE)
    well = outcomes(seed, 0.0)
    expected = Simulation(
        plan, GraphRunState(RUN_ID, {"list": [[1], [2, 3], []]}), Environment(NOW, BACKENDS)
    )
    answer = answers(seed, may_fail=False)
    simulate(expected, Random(order), well, answer)
    tried = Simulation(
        plan, GraphRunState(RUN_ID, {"list": [[1], [2, 3], []]}), Environment(NOW, BACKENDS)
    )
    rng, fails_first = Random(order), fast_failures(seed, plan)
    simulate(tried, rng, fails_first, answer)
    for _ in range(400):
        if tried.run.status != GraphRunStatus.FAILED:
            break
        tried.asked.clear()
        tried.retry()
        simulate(tried, rng, fails_first, answer)
    assert tried.run.status == expected.run.status == GraphRunStatus.COMPLETED
    assert tried.run.outputs == expected.run.outputs


def fast_failures(seed: int, plan: RunPlan) -> Callable[[StartJob], Event]:
    """Nodes that fail the run do so once each."""
    well, failed = outcomes(seed, 0.0), set[ExecutionKey]()

    def outcome(job: StartJob) -> Event:
        is_fatal = not plan.workflow_node(job.key.node).continue_on_error
        if is_fatal and job.key not in failed and chance(seed, job.key) % 2:
            failed.add(job.key)
            return JobFailed(job.key, job.attempt, "no")
        return well(job)

    return outcome


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(SEEDS, SIZES, st.tuples(SEEDS, SEEDS))
def test_every_execution_ends_once_deep(seed: int, size: int, orders: tuple[int, int]) -> None:
    check_a_graph_that_gets_through(seed, size, orders)
    check_a_graph_that_may_fail(seed, size, orders)
