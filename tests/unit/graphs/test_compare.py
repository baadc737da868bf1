"""Two runs side by side: what is the same, and what is not."""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.graphs.builders import document, node, work
from tests.unit.graphs.simulation import NOW, RUN_ID, Simulation, plan_for

from comfyfleet.api.graph_reports import RunComparison
from comfyfleet.server.graphs import compare
from comfyfleet.server.graphs.compare import RunFacts, compare_runs
from comfyfleet.server.graphs.run import GraphRunState, RunRow
from comfyfleet.server.graphs.timeline import timeline_of

TENANT, GRAPH = UUID(int=1), UUID(int=2)


def facts(
    nodes: tuple[dict[str, Any], ...] = (work("draw", "draw"),),
    *,
    seconds: float = 10,
    made: dict[str, Any] | None = None,
    **inputs: Any,
) -> RunFacts:
    links = ("draw.output > o.value",)
    given_inputs = tuple(node(name, "input", required=False) for name in ("size", "rows"))
    simulation = Simulation(
        plan_for(document(*given_inputs, *nodes, node("o", "output"), links=links))
    )
    simulation.start(**inputs)
    later = NOW + timedelta(seconds=seconds)
    simulation.environment = replace(simulation.environment, now=NOW)
    simulation.started("draw")
    simulation.environment = replace(simulation.environment, now=later)
    simulation.done("draw", **(made or {}))
    run: GraphRunState = simulation.run
    head = RunRow(
        id=RUN_ID,
        tenant_id=TENANT,
        user_id=TENANT,
        graph_id=GRAPH,
        graph_version=1,
        snapshot={},
        inputs=inputs,
        max_tokens=None,
        created_at=NOW,
        status=run.status,
    )
    times = timeline_of(simulation.plan, run, started_at=NOW, ended_at=later, now=later)
    return RunFacts(head, simulation.plan, run, times)


def different(found: RunComparison) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    return {
        (each.section.value, each.name): (each.a, each.b)
        for each in found.values
        if not each.is_same
    }


def files(*ids: str) -> dict[str, Any]:
    made = [{"file_id": each, "filename": f"{each}.png"} for each in ids]
    return {"images": made, "files": made}


def test_inputs_properties_and_times_are_told_where_they_differ() -> None:
    one = facts(size={"width": 1, "height": 2})
    two = facts(
        (work("draw", "draw", properties={"text": "cat"}),),
        seconds=20,
        size={"width": 1, "height": 3},
    )
    assert different(compare_runs(one, two, {})) == {
        ("inputs", "size.height"): ("2", "3"),
        ("nodes", "draw.properties.text"): (None, "cat"),
        ("times", "run"): ("10.0 s", "20.0 s"),
        ("times", "draw running"): ("10.0 s", "20.0 s"),
    }


def test_times_that_are_nearly_the_same_are_the_same() -> None:
    assert different(compare_runs(facts(seconds=10), facts(seconds=10.9), {})) == {}
    assert different(compare_runs(facts(seconds=0.01), facts(seconds=0.1), {})) == {}
    assert different(compare_runs(facts(seconds=10), facts(seconds=12), {})) != {}


def test_a_prompt_has_an_id_of_its_own_in_each_run_which_is_no_difference() -> None:
    one = facts(made={"prompt_id": "a", "execution_time": 1.0})
    two = facts(made={"prompt_id": "b", "execution_time": 2.0})
    assert different(compare_runs(one, two, {})) == {}


def test_files_are_compared_by_content_or_else_by_id() -> None:
    one, two = facts(made=files("x", "y")), facts(made=files("z", "w"))
    hashes = {"x": "a" * 64, "z": "a" * 64, "y": "b" * 64}
    assert different(compare_runs(one, two, hashes)) == {
        ("outputs", "o.files.1"): ("y.png (bbbbbbbbbbbb)", "w.png (id w)")
    }
    assert different(compare_runs(one, one, {})) == {}


def test_true_is_not_one_and_one_is_one_point_zero() -> None:
    assert ("inputs", "size") in different(compare_runs(facts(size=True), facts(size=1), {}))
    assert different(compare_runs(facts(size=1.0), facts(size=1), {})) == {}


def test_large_values_are_bounded_and_still_compared() -> None:
    many = list(range(compare.LEAVES_MAX + 50))
    found = compare_runs(facts(rows=many), facts(rows=[each + 1 for each in many]), {})
    assert len(found.values) == compare.VALUES_MAX
    assert found.left_out == found.different - compare.VALUES_MAX
    other = [*many[:-1], "x"]
    assert different(compare_runs(facts(rows=many), facts(rows=other), {})) == {
        ("inputs", "…"): ("50 more values", "50 more values")
    }
    text = compare_runs(facts(size="a" * 10_000), facts(size="b"), {}).values[0].a
    assert text is not None
    assert len(text) == compare.VALUE_CHARACTERS_MAX


def test_long_names_are_cut_and_stay_apart() -> None:
    """Each value would have the names of all levels around it in its own."""
    inner: Any = list(range(compare.LEAVES_MAX))
    for _ in range(25):
        inner = {"k" * 6_000: inner}
    leaves = compare._leaves({"size": inner}, {})
    assert len(leaves) == compare.LEAVES_MAX
    assert max(map(len, leaves)) < 25 * 100
    one, two = ({"size": {"k" * 100 + end: 1}} for end in "ab")
    assert compare._leaves(one, {}).keys().isdisjoint(compare._leaves(two, {}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(json_values, json_values)
def test_a_comparison_is_the_same_both_ways_round_and_nothing_differs_from_itself(
    left: Any, right: Any
) -> None:
    one, two = _FACTS, _FACTS
    one = replace(one, head=replace(one.head, inputs={"size": left}))
    two = replace(two, head=replace(two.head, inputs={"size": right}))
    there, back = compare_runs(one, two, {}), compare_runs(two, one, {})
    turned = {name: (b, a) for name, (a, b) in different(back).items()}
    assert different(there) == turned
    assert compare_runs(one, one, {}).different == 0


_FACTS = facts()
