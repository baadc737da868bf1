"""Settings of a whole graph: defaults of its nodes, how much of it runs at a time, until when; and results that are
taken again instead of run."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.unit.graphs.builders import document, node, work
from tests.unit.graphs.simulation import (
    NOW,
    RUN_ID,
    WORLD,
    Simulation,
    failures,
    picture,
    plan_for,
    result,
    started,
)

from comfyfleet.api.graph_model import GraphDefinition, WorkflowNode
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.server.graphs.catalogue import BackendNeed
from comfyfleet.server.graphs.decide import deadline_from
from comfyfleet.server.graphs.plan import quote_plan
from comfyfleet.server.graphs.run import (
    Environment,
    ExecutionKey,
    GraphRunState,
    GraphRunStatus,
    JobDone,
)

PHOTO = picture("photo")
SOURCE = {"job_id": "0" * 32, "run_id": None}


def many(*, settings: dict[str, Any] | None = None, **fields: Any) -> Simulation:
    """Each of the photos is fixed, for 2 tokens, and all are brought together."""
    plan = plan_for(
        document(
            node("photos", "input"), node("each", "fanout", mode="distribute", per_item=True),
            work("fix", **fields), node("all", "merge", mode="concat_images", over="each"), node("result", "output"),
            links=("photos.value > each.items", "each.item > fix.input", "fix.output > all.input_0",
                   "all.output.images > result.value"),
            **(settings or {}),
        )
    )  # fmt: skip
    return Simulation(plan, GraphRunState(RUN_ID, deadline_at=deadline_from(plan, NOW)))


def reuse(s: Simulation, node_id: str, *at: int) -> list[Any]:
    job = s.jobs.pop(ExecutionKey(node_id, at))
    return s.tell(JobDone(job.key, job.attempt, result(str(job.key)), reused_from=SOURCE))


def parsed(**settings: Any) -> GraphDefinition:
    two = (work("plain"), work("own", priority=0, reuse=False))
    found = parse_graph(document(*two, node("o", "output"), **settings))
    assert found.problems == ()
    return found.graph


def test_nodes_take_what_their_graph_says_unless_they_say_something_else() -> None:
    graph = parsed(priority=7, reuse=True)
    plain, own = graph.nodes["plain"], graph.nodes["own"]
    assert isinstance(plain, WorkflowNode)
    assert isinstance(own, WorkflowNode)
    assert (plain.priority, plain.reuse) == (7, True)
    assert (own.priority, own.reuse) == (0, False)
    usual = parsed().nodes["plain"]
    assert isinstance(usual, WorkflowNode)
    assert (usual.priority, usual.reuse) == (0, False)


@pytest.mark.parametrize(
    "settings",
    [{}, {"priority": 7}, {"reuse": True}, {"at_once": 2, "deadline": 60}, {"priority": -3, "reuse": True}],
)  # fmt: skip
def test_settings_are_written_as_they_are_read(settings: dict[str, Any]) -> None:
    graph = parsed(**settings)
    written = write_graph(graph)
    assert {name: written.get(name) for name in settings} == settings
    assert parse_graph(written).graph == graph


@pytest.mark.parametrize(
    ("name", "value"),
    [("reuse", "yes"), ("priority", 1001), ("at_once", 0), ("deadline", 0), ("deadline", 10**9)],
)
def test_a_setting_out_of_its_range_is_a_problem(name: str, value: Any) -> None:
    (problem,) = parse_graph(document(node("o", "output"), **{name: value})).problems
    assert problem.code == "invalid_field"
    assert name in problem.message


def test_no_more_jobs_at_once_than_the_graph_wants_or_the_plane_allows() -> None:
    assert len(started(many(settings={"at_once": 2}).start(photos=[PHOTO] * 9))) == 2
    assert len(started(many(settings={"at_once": 50}).start(photos=[PHOTO] * 9))) == 5


def test_a_quote_knows_how_much_runs_side_by_side() -> None:
    inputs = {"photos": [PHOTO] * 4}
    found = quote_plan(many(settings={"at_once": 1}).plan, inputs, side_by_side=4)
    assert found.seconds_max == 4.0


def test_a_run_fails_at_its_deadline_and_stops_its_jobs() -> None:
    s = many(settings={"deadline": 60})
    s.start(photos=[PHOTO] * 2)
    s.environment = replace(WORLD, now=NOW + timedelta(seconds=59))
    assert s.tell() == []
    s.environment = replace(WORLD, now=NOW + timedelta(seconds=60))
    (failed,) = failures(s.tell())
    assert failed.error.message == "the run exceeded its deadline of 60 s"
    assert failed.error.node == "fix"
    assert s.run.status == GraphRunStatus.FAILED
    assert len(s.stopping) == 2


def test_a_retry_gets_a_deadline_of_its_own() -> None:
    s = many(settings={"deadline": 60})
    s.start(photos=[PHOTO])
    s.environment = replace(WORLD, now=NOW + timedelta(hours=1))
    s.tell()
    s.stopping.clear()
    s.retry()
    assert s.run.deadline_at == NOW + timedelta(hours=1, seconds=60)
    assert s.run.status == GraphRunStatus.RUNNING


def test_what_ends_with_the_last_event_is_not_overdue() -> None:
    s = many(settings={"deadline": 60})
    s.start(photos=[])
    assert s.run.status == GraphRunStatus.COMPLETED
    assert s.tell() == []


def test_a_result_that_was_there_costs_nothing_and_says_where_it_came_from() -> None:
    s = many(reuse=True)
    s.start(photos=[PHOTO] * 2)
    assert s.run.tokens == 4
    reuse(s, "fix", 0)
    assert s.run.tokens == 2
    assert s.run.record(ExecutionKey("fix", (0,))).reused_from == SOURCE
    s.done("fix", 1)
    assert s.run.tokens == 2
    assert s.run.status == GraphRunStatus.COMPLETED
    assert s.run.record(ExecutionKey("fix", (1,))).reused_from is None


def test_with_no_tokens_left_a_result_that_may_be_there_is_looked_for() -> None:
    s = many(reuse=True)
    s.run = replace(s.run, max_tokens=3)
    assert started(s.start(photos=[PHOTO] * 3)) == ["fix[0]"]
    assert started(reuse(s, "fix", 0)) == ["fix[1]"]
    # Paid: nothing is left for the third, which may cost nothing all the same.
    assert started(s.done("fix", 1)) == ["fix[2]"]
    reuse(s, "fix", 2)
    assert s.run.status == GraphRunStatus.COMPLETED
    assert s.run.tokens == 2


def test_a_quote_says_that_results_may_be_there_already() -> None:
    inputs = {"photos": [PHOTO] * 3}
    found = quote_plan(many(reuse=True).plan, inputs)
    assert (found.tokens_min, found.tokens_max) == (0, 6)
    assert (found.jobs_min, found.jobs_max) == (0, 3)
    assert quote_plan(many().plan, inputs).tokens_min == 6


@pytest.mark.parametrize(
    ("slug", "seconds", "is_unserved"),
    [
        ("usual", 59, False),
        ("usual", 60, True),
        ("on-demand", 599, False),
        ("on-demand", 600, True),
    ],
)
def test_a_workflow_whose_machines_start_on_demand_has_its_own_time(
    slug: str, seconds: int, is_unserved: bool
) -> None:
    environment = Environment(
        now=NOW + timedelta(seconds=seconds),
        watched_since=NOW,
        no_backend_seconds=60,
        starts_within={"on-demand": 600},
    )
    assert environment.is_unserved(slug, BackendNeed(slug), NOW) is is_unserved
