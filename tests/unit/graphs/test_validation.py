"""Everything that is wrong with a graph is told at once, with its node and port."""

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.graphs.builders import (
    CATALOGUE,
    EXAMPLES,
    document,
    example_catalogue,
    node,
    work,
)

from comfyfleet.api.documents import read_document
from comfyfleet.api.graph_model import PROBLEMS_TOLD_MAX, DocumentProblem, GraphLimits
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.errors import InvalidInput
from comfyfleet.server.catalog.model import Property
from comfyfleet.server.fleets.model import BackendOffer
from comfyfleet.server.graphs.catalogue import BackendState, WorkflowFacts, catalogue_of
from comfyfleet.server.graphs.plan import plan_of
from comfyfleet.server.graphs.validate import check_graph, check_inputs

SOUND = document(
    node("photo", "input", value_type="image"),
    work("fix"),
    node("result", "output"),
    links=("photo.value > fix.input", "fix.output > result.value"),
)


def problems(given: dict[str, Any], **limits: int) -> list[tuple[str, str, str]]:
    found = check_graph(given, CATALOGUE, GraphLimits(**limits)).problems
    return [(each.code, each.node, each.port) for each in found]


def with_(*nodes: dict[str, Any], links: tuple[str, ...] = ()) -> dict[str, Any]:
    """The sound graph, and something more."""
    more = document(*nodes, links=links)
    return {key: SOUND[key] + more[key] if key != "name" else SOUND[key] for key in SOUND}


def test_a_sound_graph_has_no_problems() -> None:
    assert check_graph(SOUND, CATALOGUE).problems == ()


@pytest.mark.parametrize("path", sorted((EXAMPLES / "graphs").glob("*.yaml")), ids=lambda p: p.stem)
def test_the_examples_are_sound_and_can_be_planned(path: Any) -> None:
    inner = parse_graph(read_document((EXAMPLES / "graphs/one-row.yaml").read_text("utf-8"))).graph
    library, document = {("One row", 1): inner}, read_document(path.read_text("utf-8"))
    checked = check_graph(document, example_catalogue(), library=library)
    assert checked.problems == ()
    assert plan_of(checked.graph, example_catalogue(), library).shape.order


@pytest.mark.parametrize("path", sorted((EXAMPLES / "graphs").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_graph_written_out_reads_as_the_same_graph(path: Any) -> None:
    graph = check_graph(read_document(path.read_text("utf-8")), example_catalogue()).graph
    assert parse_graph(json.loads(json.dumps(write_graph(graph)))).graph == graph


def test_there_are_examples() -> None:
    assert len(list((EXAMPLES / "graphs").glob("*.yaml"))) == 9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (with_(work("x", "nobody"), links=("x.output > result.value",)),
         [("unknown_workflow", "x", "workflow"), ("repeated_input", "result", "value")]),
        (with_(work("x", "fix", version=9)), [("unknown_workflow", "x", "workflow"), ("unreachable_node", "x", "")]),
        (document(work("d", "draw", properties={"colour": 1}), node("o", "output"), links=("d.output > o.value",)),
         [("unknown_property", "d", "colour")]),
        (document(work("d", "draw", properties={"text": 1}), node("o", "output"), links=("d.output > o.value",)),
         [("type_mismatch", "d", "text")]),
        (document(work("b", "blend", properties={"strength": 3}), node("o", "output"), links=("b.output > o.value",)),
         [("type_mismatch", "b", "strength")]),
        (document(node("t", "input", value_type="text"), work("f"), node("o", "output"),
                  links=("t.value > f.input", "f.output > o.value")), [("type_mismatch", "f", "input")]),
        (document(node("t", "input", value_type="image[]"), work("f"), node("o", "output"),
                  links=("t.value > f.input", "f.output > o.value")), [("type_mismatch", "f", "input")]),
        (document(work("f"), node("o", "output"), links=("f.output > o.value",)), [("missing_input", "f", "input")]),
        (document(work("d", "draw"), node("o", "output"), links=("d.picture > o.value",)),
         [("unknown_port", "o", "value")]),
        (document(work("d", "draw"), node("o", "output"), links=("d.output.depth > o.value",)),
         [("unknown_field", "o", "value")]),
        (document(work("d", "draw"), node("o", "output"), links=("d.output > o.value", "d.output > d.size")),
         [("unknown_property", "d", "size"), ("cycle", "d", "")]),
        (document(work("d", "draw"), node("o", "output"), links=("e.output > o.value",)),
         [("unknown_node", "o", "value"), ("unreachable_node", "d", "")]),
        (document(work("d", "draw", backend_affinity="worker:c"), node("o", "output"), links=("d.output > o.value",)),
         [("unable_backend", "d", "backend_affinity")]),
        (document(work("d", "draw", backend_affinity="worker:z"), node("o", "output"), links=("d.output > o.value",)),
         [("unknown_backend", "d", "backend_affinity")]),
        (document(work("d", "draw")), [("no_output", "", "")]),
        (with_(node("m", "merge")), [("missing_input", "m", "input_0"), ("unreachable_node", "m", "")]),
    ],
)  # fmt: skip
def test_each_mistake_is_told_where_it_is(
    given: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    assert sorted(problems(given)) == sorted(expected)


def test_an_affinity_to_a_backend_without_the_model_that_the_node_names_is_told_with_it() -> None:
    properties = (Property("model", "text", default="usual.safetensors", binding="1.ckpt_name"),)
    files = {"CheckpointLoader.ckpt_name": frozenset({"other.safetensors"})}
    slugs = frozenset({"paint"})
    backend = BackendState("c", "f/s", workflows=slugs, offer=BackendOffer("k", model_files=files))
    catalogue = catalogue_of((WorkflowFacts("paint", 1, properties),), (backend,))
    said = {}
    for model in ("big.safetensors", "other.safetensors", None):
        values = {} if model is None else {"model": model}
        wanted = work("d", "paint", backend_affinity="worker:c", properties=values)
        found = check_graph(
            document(wanted, node("o", "output"), links=("d.output > o.value",)), catalogue
        )
        said[model] = [(each.code, each.message) for each in found.problems]
    unable = "worker:c can't run the workflow 'paint'"
    assert said == {
        "big.safetensors": [("unable_backend", f"{unable}: it lacks big.safetensors")],
        "other.safetensors": [],
        None: [("unable_backend", unable)],
    }


@pytest.mark.parametrize(
    ("bad", "code", "port"),
    [
        (node("x", "condition", condition="output ="), "invalid_condition", "condition"),
        (node("x", "condition"), "missing_field", "condition"),
        (work("x", retries=-1), "invalid_field", "retries"),
        (work("x", retries=True), "invalid_field", "retries"),
        (work("x", fallback_strategy="maybe"), "invalid_field", "fallback_strategy"),
        (work("x", backend_affinity="gpu 7"), "invalid_field", "backend_affinity"),
        (work("x", color="red"), "unknown_field", "color"),
        (work("x", properties=[1]), "invalid_field", "properties"),
        (work("x", properties={"input": {"from": "photo"}}), "invalid_connection", "input"),
        (node("x", "fanout", per_item=True), "invalid_field", "per_item"),
        (node("x", "fanout", output_count=0), "invalid_field", "output_count"),
        (node("x", "input", value_type="picture"), "invalid_field", "value_type"),
        (node("x", "nothing"), "unknown_type", "type"),
    ],
)
def test_a_field_that_cannot_be_used_is_told_once(
    bad: dict[str, Any], code: str, port: str
) -> None:
    assert problems(with_(bad, links=("photo.value > x.input",))) == [(code, "x", port)]


def test_a_cycle_is_named_node_by_node() -> None:
    given = document(
        node("o", "output"), *(work(name, "blend") for name in "abc"),
        links=("a.output > b.left", "b.output > c.left", "c.output > a.left", "c.output > o.value"),
    )  # fmt: skip
    (cycle,) = check_graph(given, CATALOGUE).problems
    assert cycle.code == "cycle"
    assert cycle.message.split(": ")[1] in ("a → b → c → a", "b → c → a → b", "c → a → b → c")


def test_every_cycle_is_told() -> None:
    given = document(
        node("o", "output"), *(work(name, "blend") for name in "abcd"),
        links=("a.output > b.left", "b.output > a.left", "b.output > c.left", "c.output > d.left",
               "d.output > c.right", "d.output > o.value"),
    )  # fmt: skip
    assert [code for code, _, _ in problems(given)] == ["cycle", "cycle"]


PER_ITEM = node("each", "fanout", mode="distribute", per_item=True, max_items=50)
ITEMS = (
    node("photos", "input", value_type="image[]"), PER_ITEM, work("fix"), node("all", "merge", over="each"),
    node("o", "output"),
)  # fmt: skip
ITEM_LINKS = ("photos.value > each.items", "each.item > fix.input", "fix.output > all.input_0")


def test_items_must_be_merged_before_they_come_out() -> None:
    assert problems(document(*ITEMS, links=(*ITEM_LINKS, "all.output > o.value"))) == []
    found = problems(document(*ITEMS, links=(*ITEM_LINKS, "fix.output > o.value")))
    assert ("open_items", "o", "") in found


def test_items_of_two_fan_outs_do_not_mix() -> None:
    other = node("other", "fanout", mode="distribute", per_item=True)
    given = document(
        *ITEMS, other, work("blend", "blend"),
        links=(*ITEM_LINKS, "photos.value > other.items", "each.item > blend.left", "other.item > blend.right",
               "all.output > o.value"),
    )  # fmt: skip
    assert ("mixed_items", "blend", "") in problems(given)


def test_a_merge_must_be_over_a_fan_out_with_items() -> None:
    given = document(work("d", "draw"), node("m", "merge", over="d"), node("o", "output"),
                     links=("d.output > m.input_0", "m.output > o.value"))  # fmt: skip
    assert ("invalid_over", "m", "over") in problems(given)


def test_jobs_and_nodes_are_limited() -> None:
    given = document(*ITEMS, links=(*ITEM_LINKS, "all.output > o.value"))
    assert problems(given, jobs_max=49) == [("too_many_jobs", "", "")]
    assert ("too_many", "", "") in problems(given, nodes_max=4)
    assert ("too_deep", "fix", "") in problems(given, fanout_depth_max=0)


def test_chunks_for_a_node_that_takes_one_picture_are_told_what_to_set() -> None:
    given = document(
        node("photos", "input", value_type="image[]"),
        node("each", "fanout", mode="distribute"),
        work("f"),
        node("o", "output"),
        links=("photos.value > each.items", "each.output_0 > f.input", "f.output > o.value"),
    )
    (problem,) = check_graph(given, CATALOGUE).problems
    assert "set per_item: true" in problem.message


def test_several_mistakes_are_told_together() -> None:
    given = with_(
        work("x", "nobody", retries=-1),
        node("x", "output"),
        work("y", "draw", properties={"text": 1}),
    )
    codes = [code for code, _, _ in problems(given)]
    assert codes == ["invalid_field", "repeated_id", "type_mismatch"]


@pytest.mark.parametrize(
    "given", [None, [], {}, {"nodes": 3, "connections": [1]}, {"name": "x", "nodes": [[]]}]
)
def test_any_document_is_answered_with_problems(given: Any) -> None:
    assert check_graph(given, CATALOGUE).problems


JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "x", "each.item", "photo.value", "over", "0"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "from", "to", "type"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip
SOUND_ONES = st.sampled_from([SOUND, document(*ITEMS, links=(*ITEM_LINKS, "all.output > o.value"))])


def spoilt(given: Any, rng: Random, junk: list[Any]) -> Any:
    """The same document with something else here and there."""
    if junk and rng.random() < 0.08:
        return junk.pop()
    if isinstance(given, dict):
        return {key: spoilt(each, rng, junk) for key, each in given.items() if rng.random() < 0.97}
    if isinstance(given, list):
        return [spoilt(each, rng, junk) for each in given]
    return given


@settings(max_examples=120, deadline=None)
@given(SOUND_ONES, st.integers(0, 2**32), st.lists(JUNK, max_size=4))
def test_whatever_is_in_a_document_it_is_answered_with_problems_or_can_be_planned(
    sound: dict[str, Any], seed: int, junk: list[Any]
) -> None:
    checked = check_graph(spoilt(sound, Random(seed), junk), CATALOGUE)
    if not checked.problems:
        assert plan_of(checked.graph, CATALOGUE)


def test_the_inputs_of_a_run_are_checked_too() -> None:
    graph = check_graph(SOUND, CATALOGUE).graph
    assert check_inputs(graph, {"photo": {"file_id": "f"}}) == ()
    assert [each.code for each in check_inputs(graph, {"foto": 1})] == [
        "unknown_input",
        "missing_input",
    ]
    assert [each.code for each in check_inputs(graph, {"photo": 1})] == ["type_mismatch"]


@pytest.mark.parametrize("kind", ["value", "switch"])
def test_expressions_of_a_graph_have_a_limit_together(kind: str) -> None:
    """Each alone is allowed; hundreds of them took the time of everybody."""
    text = " + ".join(["output.width"] * 130)

    def nodes(count: int) -> list[dict[str, Any]]:
        if kind == "value":
            values = {f"x{number}": f"{{{{ photo.{text} }}}}" for number in range(count)}
            return [node("v", "value", values=values)]
        cases = [{"name": f"c{number}", "when": f"{text} > 0"} for number in range(50)]
        return [node(f"s{number}", "switch", cases=cases) for number in range(count // 50)]

    def told(count: int) -> bool:
        found = parse_graph(document(node("photo", "input"), *nodes(count))).problems
        return any("have more than 200,000 characters" in each.message for each in found)

    assert told(150)
    assert not told(50)


def test_many_wrong_names_do_not_tell_all_right_ones_each() -> None:
    """A request of kilobytes must not be answered with gigabytes."""
    inputs = [node(f"i{number:03}{'x' * 56}", "input", default=1) for number in range(400)]
    links = tuple(f"{each['id']}.value > all.input_{at}" for at, each in enumerate(inputs))
    inner = document(
        *inputs,
        node("all", "merge", mode="collect"),
        node("o", "output"),
        links=(*links, "all.output > o.value"),
    )
    library = {("inner", 1): parse_graph(inner).graph}
    wrong = {f"w{number}": 1 for number in range(3_000)}
    outer = document(
        node("one", "graph", graph="inner", version=1, inputs=wrong),
        node("o", "output"),
        links=("one.o > o.value",),
    )
    for found in (
        check_graph(outer, CATALOGUE, library=library).problems,
        check_inputs(library["inner", 1], wrong),
    ):
        assert len(found) == PROBLEMS_TOLD_MAX + 1
        assert found[-1].message == "and 2,000 more problems"
        assert max(len(each.message) for each in found) < 2_000


def test_a_problem_names_its_place() -> None:
    assert str(DocumentProblem("x", "is wrong", "fix", "input")) == "fix.input: is wrong"
    assert str(DocumentProblem("x", "it is wrong")) == "it is wrong"


def test_a_graph_with_problems_cannot_be_planned() -> None:
    given = document(work("a", "blend"), links=("a.output > a.left",))
    with pytest.raises(InvalidInput, match="a → a"):
        plan_of(parse_graph(given).graph, CATALOGUE)
