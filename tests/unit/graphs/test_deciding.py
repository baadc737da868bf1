"""Graphs that decide: values, switches, approvals, maps, loops, graphs inside, judges."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import yaml
from tests.unit.graphs.builders import CATALOGUE, work
from tests.unit.graphs.simulation import NOW, RUN_ID, WORLD, Simulation, picture, plan_for

from comfyfleet.api.expressions import StepCount
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.errors import LimitExceeded
from comfyfleet.server.graphs.decide import next_actions
from comfyfleet.server.graphs.expand import GraphLibrary, expand
from comfyfleet.server.graphs.plan import quote_plan
from comfyfleet.server.graphs.progress import progress_of
from comfyfleet.server.graphs.run import (
    Choice,
    ExecutionKey,
    ExecutionStatus,
    GraphRunState,
    GraphRunStatus,
    JobDone,
    JobFailed,
    QuestionAnswered,
)
from comfyfleet.server.graphs.snapshot import dump_plan, load_plan
from comfyfleet.server.graphs.validate import check_graph


def begun(text: str, library: GraphLibrary | None = None, **inputs: Any) -> Simulation:
    """A run of a graph in YAML that is valid, as read back from its snapshot."""
    document = yaml.safe_load(text)
    assert check_graph(document, CATALOGUE, library=library or {}).problems == ()
    parsed = parse_graph(document).graph
    assert parse_graph(write_graph(parsed)).graph == parsed
    plan = load_plan(dump_plan(plan_for(document, library=library or {})))
    simulation = Simulation(plan, GraphRunState(RUN_ID))
    simulation.start(**inputs)
    return simulation


def properties(simulation: Simulation, node: str, *at: int) -> dict[str, Any]:
    return dict(simulation.jobs[ExecutionKey(node, at)].properties)


def problems(text: str, library: GraphLibrary | None = None) -> list[tuple[str, str, str]]:
    found = check_graph(yaml.safe_load(text), CATALOGUE, library=library or {}).problems
    return [(each.code, each.node, each.port) for each in found]


# Values


VALUES = """
name: values
nodes:
  - {id: name, type: input, value_type: text}
  - {id: caption, type: workflow, workflow: draw, properties: {text: "a {{ input.name | trim }}"}}
  - {id: made, type: value, values: {text: "{{ name }}: {{ caption.output.text | upper }}", twice: "{{ caption.output.width * 2 }}"}}
  - {id: again, type: workflow, workflow: draw, properties: {text: {from: made.text}}}
  - {id: result, type: output}
  - {id: size, type: output}
connections: [{from: again.output, to: result.value}, {from: made.twice, to: size.value}]
"""


def test_templates_fill_properties_and_make_values() -> None:
    run = begun(VALUES, name=" cat ")
    assert properties(run, "caption") == {"text": "a cat"}
    run.done("caption", text="fluffy", width=21)
    assert properties(run, "again") == {"text": " cat : FLUFFY"}
    run.done("again")
    assert run.run.status == GraphRunStatus.COMPLETED
    assert run.run.outputs
    assert run.run.outputs["size"] == 42


def test_what_a_template_lacks_fails_the_run_with_its_name() -> None:
    run = begun(VALUES, name="x")
    run.done("caption", width=1)  # without a text
    assert run.run.status == GraphRunStatus.FAILED
    assert run.run.error
    assert "made failed: text: caption.output.text is missing" in run.run.error.message


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ({"values": {"a": "{{ nobody.x }}"}}, ("unknown_node", "v", "a")),
        ({"values": {"a": "{{ photo + }}"}}, ("invalid_template", "v", "a")),
        ({"values": {}}, ("invalid_field", "v", "values")),
        ({"values": {"a b": 1}}, ("invalid_field", "v", "values")),
    ],
)
def test_a_value_that_cannot_be_made_is_refused(
    node: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    document = {
        "name": "x",
        "nodes": [
            {"id": "photo", "type": "input"},
            {"id": "v", "type": "value", **node},
            {"id": "o", "type": "output"},
        ],
        "connections": [{"from": "v.a", "to": "o.value"}],
    }
    found = check_graph(document, CATALOGUE).problems
    assert expected in [(each.code, each.node, each.port) for each in found]


def test_a_text_in_a_number_is_refused_before_anything_runs() -> None:
    node = work("b", "blend", properties={"strength": "{{ n }} times"})
    nodes = [{"id": "n", "type": "input"}, node, {"id": "o", "type": "output"}]
    document = {
        "name": "x",
        "nodes": nodes,
        "connections": [{"from": "b.output", "to": "o.value"}],
    }
    found = check_graph(document, CATALOGUE).problems
    assert ("type_mismatch", "b", "strength") in [(e.code, e.node, e.port) for e in found]


# Ways


SWITCH = """
name: switch
nodes:
  - {id: size, type: input, value_type: number}
  - {id: which, type: switch, cases: [{name: large, when: output > 500}, {name: middle, when: output > 100}]}
  - {id: a, type: workflow, workflow: draw, properties: {text: "large {{ which.large }}"}}
  - {id: b, type: workflow, workflow: draw, properties: {text: "middle {{ which.middle }}"}}
  - {id: c, type: workflow, workflow: draw, properties: {text: "small {{ which.default }}"}}
  - {id: all, type: merge}
  - {id: result, type: output}
connections:
  - {from: size.value, to: which.input}
  - {from: a.output, to: all.input_0}
  - {from: b.output, to: all.input_1}
  - {from: c.output, to: all.input_2}
  - {from: all.output, to: result.value}
"""


@pytest.mark.parametrize(
    ("size", "way", "text"),
    [(900, "a", "large 900"), (200, "b", "middle 200"), (1, "c", "small 1")],
)
def test_a_switch_goes_one_way(size: int, way: str, text: str) -> None:
    run = begun(SWITCH, size=size)
    assert [str(key) for key in run.jobs] == [way]
    assert properties(run, way) == {"text": text}
    run.done(way)
    assert run.run.status == GraphRunStatus.COMPLETED
    assert run.run.outputs
    assert run.run.outputs["result"]["count"] == 1


def test_a_quote_counts_one_way_of_a_switch() -> None:
    quote = quote_plan(begun(SWITCH, size=1).plan)
    assert (quote.jobs_min, quote.jobs_max) == (1, 1)


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        ("{{ size }} and {{ which.large }}", (1, 2)),
        ("{{ which.large | default('none') }}", (2, 2)),
        ("{{ which.default }} or {{ which.large }}", (1, 1)),
        ("{{ size }} and {{ words.both }}", (1, 2)),
    ],
)
def test_a_quote_counts_a_node_only_where_its_templates_are_fed(
    text: str, jobs: tuple[int, int]
) -> None:
    document = f"""
name: Read by name
nodes:
  - {{id: size, type: input, value_type: integer}}
  - {{id: which, type: switch, cases: [{{name: large, when: output > 9}}]}}
  - {{id: words, type: value, values: {{both: "{{{{ size }}}} {{{{ which.large }}}}"}}}}
  - {{id: always, type: workflow, workflow: draw, properties: {{text: a cat}}}}
  - {{id: named, type: workflow, workflow: draw, properties: {{text: "{text}"}}}}
  - {{id: one, type: output}}
  - {{id: two, type: output}}
  - {{id: said, type: output}}
connections:
  - {{from: size.value, to: which.input}}
  - {{from: always.output, to: one.value}}
  - {{from: named.output, to: two.value}}
  - {{from: words.both, to: said.value}}
"""
    for size in (1, 10):
        run = begun(document, size=size)
        quote = quote_plan(run.plan)
        assert (quote.jobs_min, quote.jobs_max) == jobs
        assert quote.jobs_min <= len(run.jobs) <= quote.jobs_max


@pytest.mark.parametrize(
    ("cases", "port"),
    [([], "cases"), ([{"name": "a", "when": "output >"}], "cases.0.when"), ([{"name": "default", "when": "true"}], "cases"),
     ([{"name": "a", "when": "true"}] * 2, "cases"), ([{"name": "a", "when": "true", "then": 1}], "cases.0.then")],
)  # fmt: skip
def test_cases_are_checked(cases: list[dict[str, Any]], port: str) -> None:
    document = {"name": "x", "nodes": [{"id": "s", "type": "switch", "cases": cases}]}
    assert ("s", port) in [(each.node, each.port) for each in parse_graph(document).problems]


# People


APPROVE = """
name: approve
nodes:
  - {id: photos, type: input, value_type: "image[]"}
  - {id: look, type: approve, message: "Which are sharp?", pick: true, deadline: 60, on_deadline: reject}
  - {id: good, type: output}
  - {id: bad, type: output}
connections:
  - {from: photos.value, to: look.input}
  - {from: look.approved, to: good.value}
  - {from: look.rejected, to: bad.value}
"""
PHOTOS = [picture("a"), picture("b"), picture("c")]
LOOK = ExecutionKey("look")


def asked(text: str = APPROVE) -> Simulation:
    run = begun(text, photos=PHOTOS)
    assert run.run.status == GraphRunStatus.WAITING_FOR_USER
    return run


def test_a_person_picks_some() -> None:
    run = asked()
    question = run.run.record(LOOK).question
    assert question
    assert (question.message, question.pick_from) == ("Which are sharp?", 3)
    run.tell(QuestionAnswered(LOOK, Choice.APPROVE, picked=(2, 0)))
    assert run.run.outputs == {"good": [PHOTOS[2], PHOTOS[0]]}


def test_a_person_approves_all_or_nothing() -> None:
    yes, no = asked(), asked()
    yes.tell(QuestionAnswered(LOOK, Choice.APPROVE))
    no.tell(QuestionAnswered(LOOK, Choice.REJECT))
    assert yes.run.outputs == {"good": PHOTOS}
    assert no.run.outputs == {"bad": PHOTOS}


@pytest.mark.parametrize("then", ["approve", "reject", "fail"])
def test_a_deadline_answers_for_a_person(then: str) -> None:
    run = asked(APPROVE.replace("on_deadline: reject", f"on_deadline: {then}"))
    run.environment = replace(WORLD, now=NOW + timedelta(seconds=59))
    run.tell()
    assert run.run.status == GraphRunStatus.WAITING_FOR_USER
    run.environment = replace(WORLD, now=NOW + timedelta(seconds=61))
    run.tell()
    expected = {"approve": {"good": PHOTOS}, "reject": {"bad": PHOTOS}, "fail": None}[then]
    assert run.run.outputs == expected
    if then == "fail":
        assert run.run.error
        assert "the question was not answered within 60 s" in run.run.error.message


def test_pictures_of_a_result_are_picked_too() -> None:
    text = APPROVE.replace('value_type: "image[]"', "value_type: any")
    run = begun(text, photos={"images": PHOTOS, "width": 3})
    run.tell(QuestionAnswered(LOOK, Choice.APPROVE, picked=(1,)))
    assert run.run.outputs == {"good": {"images": [PHOTOS[1]]}}


@pytest.mark.parametrize(("answers", "then"), [(True, "reject"), (False, "approve")])
def test_all_pictures_of_a_result_go_on_as_some_of_them_would(answers: bool, then: str) -> None:
    text = APPROVE.replace('value_type: "image[]"', "value_type: any")
    text = text.replace("on_deadline: reject", f"on_deadline: {then}")
    run = begun(text, photos={"images": PHOTOS, "width": 3})
    run.environment = replace(WORLD, now=NOW + timedelta(seconds=0 if answers else 61))
    run.tell(*([QuestionAnswered(LOOK, Choice.APPROVE)] if answers else []))
    assert run.run.outputs == {"good": {"images": PHOTOS}}


# Maps


LITERAL_MAP = """
name: map
nodes:
  - {id: some, type: value, values: {rows: [{name: a}, {name: b}, {name: c}]}}
  - {id: draw, type: map, over: some.rows, do: {workflow: draw, properties: {text: "{{ item.name }}"}}}
  - {id: result, type: output}
connections: [{from: draw.output, to: result.value}]
"""


def test_the_items_of_a_literal_list_are_counted_in_a_quote() -> None:
    quote = quote_plan(begun(LITERAL_MAP).plan)
    assert (quote.jobs_min, quote.jobs_max) == (3, 3)


PASSED_ON = """
name: map
nodes:
  - {id: first, type: input, value_type: text}
  - {id: some, type: value, values: {rows: ["{{ input.first }}", b, c]}}
  - {id: again, type: value, values: {rows: "{{ some.rows }}", inside: {rows: [a, b]}}}
  - {id: draw, type: map, over: OVER, do: {workflow: draw, properties: {text: "{{ item }}"}}}
  - {id: result, type: output}
connections: [{from: draw.output, to: result.value}]
"""


@pytest.mark.parametrize(("over", "jobs"), [("again.rows", 3), ("again.inside.rows", 2)])
def test_a_list_that_is_passed_on_is_counted_in_a_quote(over: str, jobs: int) -> None:
    quote = quote_plan(begun(PASSED_ON.replace("OVER", over), first="a").plan)
    assert (quote.jobs_min, quote.jobs_max) == (jobs, jobs)


def test_a_list_that_a_job_makes_is_counted_as_long_as_it_may_be() -> None:
    text = PASSED_ON.replace('["{{ input.first }}", b, c]', '"{{ input.first | split }}"')
    quote = quote_plan(begun(text.replace("OVER", "again.rows"), first="a").plan)
    assert (quote.jobs_min, quote.jobs_max) == (0, 100)


MAP = """
name: map
nodes:
  - {id: rows, type: input}
  - id: draw
    type: map
    over: input.rows
    at_once: 2
    continue_on_error: true
    do: {workflow: draw, properties: {text: "{{ index }} {{ item.name }}"}}
  - {id: result, type: output}
connections: [{from: draw.output, to: result.value}]
"""
ROWS = [{"name": name} for name in ("ann", "bob", "cid", "dan")]


def test_a_map_keeps_order_joins_rows_and_tells_what_failed() -> None:
    run = begun(MAP, rows=ROWS)
    assert [str(key) for key in run.jobs] == ["draw/do[0]", "draw/do[1]"]  # two at once
    assert properties(run, "draw/do", 1) == {"text": "1 bob"}
    run.done("draw/do", 1)
    assert [str(key) for key in run.jobs] == ["draw/do[0]", "draw/do[2]"]
    run.failed("draw/do", 2)
    run.done("draw/do", 0)
    run.done("draw/do", 3)
    assert run.run.outputs
    output = run.run.outputs["result"]
    assert [row["index"] for row in output["results"]] == [0, 1, 2, 3]
    assert [row["item"] for row in output["results"]] == ROWS
    assert output["results"][2]["error"] == "out of paint"
    assert output["results"][3]["output"]["prompt_id"] == "draw/do[3]"
    assert (output["count"], output["failed"], len(output["images"])) == (4, 1, 3)


def test_a_map_over_nothing_is_an_empty_result() -> None:
    run = begun(MAP, rows=[])
    assert run.run.outputs
    assert run.run.outputs["result"]["results"] == []


def test_a_map_fails_as_a_whole_unless_it_may_go_on() -> None:
    run = begun(MAP.replace("continue_on_error: true", "continue_on_error: false"), rows=ROWS)
    run.failed("draw/do", 0)
    assert run.run.status == GraphRunStatus.FAILED


def test_helpers_are_not_counted_as_nodes() -> None:
    run = begun(MAP, rows=ROWS)
    assert progress_of(run.plan, run.run).total_nodes == 4  # rows, draw, draw/do, result


def test_a_map_may_have_several_nodes_and_reach_out() -> None:
    text = """
name: map
nodes:
  - {id: rows, type: input}
  - {id: style, type: input}
  - id: each
    type: map
    over: rows
    do:
      nodes:
        - {id: draw, type: workflow, workflow: draw, properties: {text: "{{ item }}, {{ style }}"}}
        - {id: fix, type: workflow, workflow: fix, properties: {text: "{{ draw.output.text }}"}}
      connections: [{from: draw.output, to: fix.input}]
      result: fix.output
  - {id: result, type: output}
connections: [{from: each.output.images, to: result.value}]
"""
    run = begun(text, rows=["a", "b"], style="oil")
    assert properties(run, "each/draw", 1) == {"text": "b, oil"}
    run.done("each/draw", 1, text="hm")
    assert properties(run, "each/fix", 1)["text"] == "hm"
    run.done("each/fix", 1)
    run.done("each/draw", 0, text="ha")
    run.done("each/fix", 0)
    assert run.run.outputs
    assert [each["file_id"] for each in run.run.outputs["result"]] == ["each/fix[0]", "each/fix[1]"]


# Loops


LOOP = """
name: loop
nodes:
  - {id: photo, type: input, value_type: image}
  - id: refine
    type: loop
    start: {images: ["{{ photo }}"], width: 0}
    do: {workflow: fix, properties: {input: "{{ previous.images.0 }}", text: "round {{ round }}, {{ previous.width }}"}}
    until: output.width > 100
    at_most: 3
  - {id: result, type: output}
  - {id: rounds, type: output}
connections: [{from: refine.output.width, to: result.value}, {from: refine.rounds, to: rounds.value}]
"""


def test_a_loop_runs_until_its_condition_holds() -> None:
    run = begun(LOOP, photo=picture("p"))
    assert properties(run, "refine/do", 0) == {"input": picture("p"), "text": "round 1, 0"}
    run.done("refine/do", 0, width=50)
    assert properties(run, "refine/do", 1) == {
        "input": picture("refine/do[0]"),
        "text": "round 2, 50",
    }
    run.done("refine/do", 1, width=200)
    assert run.run.outputs == {"result": 200, "rounds": 2}
    assert run.run.tokens == 4


def test_a_loop_ends_after_its_last_round() -> None:
    run = begun(LOOP, photo=picture("p"))
    for number in range(3):
        run.done("refine/do", number, width=number)
    assert run.run.outputs == {"result": 2, "rounds": 3}


def test_the_best_round_may_be_the_result() -> None:
    run = begun(
        LOOP.replace("at_most: 3", "at_most: 3\n    best: output.width"), photo=picture("p")
    )
    for number, width in enumerate((10, 30, 20)):
        run.done("refine/do", number, width=width)
    assert run.run.outputs == {"result": 30, "rounds": 3}


def test_a_round_that_failed_is_retried_and_the_loop_goes_on() -> None:
    run = begun(LOOP, photo=picture("p"))
    run.done("refine/do", 0, width=1)
    run.failed("refine/do", 1)
    assert run.run.status == GraphRunStatus.FAILED
    run.retry()
    run.done("refine/do", 1, width=500)
    assert run.run.outputs == {"result": 500, "rounds": 2}


def test_a_loop_without_previous_runs_its_body_again() -> None:
    text = LOOP.replace(
        'properties: {input: "{{ previous.images.0 }}", text: "round {{ round }}, {{ previous.width }}"}',
        "properties: {input: {from: photo.value}}",
    )
    run = begun(text, photo=picture("p"))
    run.done("refine/do", 0, width=1)
    run.done("refine/do", 1, width=500)
    assert run.run.outputs == {"result": 500, "rounds": 2}


def test_loops_stand_in_maps() -> None:
    text = """
name: both
nodes:
  - {id: rows, type: input}
  - id: each
    type: map
    over: rows
    do:
      nodes:
        - id: again
          type: loop
          do: {workflow: draw, properties: {text: "{{ item }} {{ round }}"}}
          until: output.width > 100
          at_most: 5
      result: again.output
  - {id: result, type: output}
connections: [{from: each.output, to: result.value}]
"""
    run = begun(text, rows=["a", "b"])
    run.done("each/again/do", 1, 0, width=1)
    assert properties(run, "each/again/do", 1, 1) == {"text": "b 2"}
    run.done("each/again/do", 0, 0, width=500)
    run.done("each/again/do", 1, 1, width=500)
    assert run.run.outputs
    rows = run.run.outputs["result"]["results"]
    assert [row["output"]["prompt_id"] for row in rows] == [
        "each/again/do[0][0]",
        "each/again/do[1][1]",
    ]


def test_a_quote_counts_rounds() -> None:
    quote = quote_plan(begun(LOOP, photo=picture("p")).plan)
    assert (quote.jobs_min, quote.jobs_max, quote.tokens_max) == (1, 3, 6)
    assert quote.seconds_max == 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("at_most: 3", ""), ("missing_field", "refine", "at_most")),
        (("at_most: 3", "at_most: 51"), ("invalid_field", "refine", "at_most")),
        (
            ("until: output.width > 100", "until: width > 1"),
            ("invalid_condition", "refine", "until"),
        ),
        (("{{ previous.images.0 }}", "{{ photos }}"), ("unknown_node", "refine/do", "input")),
        (("workflow: fix", "workflow: nobody"), ("unknown_workflow", "refine/do", "workflow")),
        (("do:", "does:"), ("missing_field", "refine", "do")),
    ],
)
def test_a_loop_is_checked(change: tuple[str, str], expected: tuple[str, str, str]) -> None:
    assert expected in problems(LOOP.replace(*change))


# Graphs inside


INNER = """
name: portrait
nodes:
  - {id: photo, type: input, value_type: image}
  - {id: mode, type: input, value_type: text, default: a}
  - {id: fix, type: workflow, workflow: fix}
  - {id: result, type: output}
connections: [{from: photo.value, to: fix.input}, {from: mode.value, to: fix.mode}, {from: fix.output, to: result.value}]
"""
OUTER = """
name: outer
nodes:
  - {id: photo, type: input, value_type: image}
  - {id: one, type: graph, graph: portrait, version: 2, inputs: {photo: {from: photo.value}}}
  - {id: two, type: graph, graph: portrait, version: 2, inputs: {photo: "{{ one.result }}", mode: b}}
  - {id: result, type: output}
connections: [{from: two.result, to: result.value}]
"""
LIBRARY = {("portrait", 2): parse_graph(yaml.safe_load(INNER)).graph}


def test_a_graph_stands_in_another() -> None:
    run = begun(OUTER, LIBRARY, photo=picture("p"))
    assert properties(run, "one/fix") == {"input": picture("p"), "mode": "a"}
    run.done("one/fix")
    assert properties(run, "two/fix") == {"input": picture("one/fix"), "mode": "b"}
    run.done("two/fix")
    assert run.run.outputs
    assert run.run.outputs["result"]["prompt_id"] == "two/fix"


def test_a_list_that_is_given_to_a_graph_inside_is_counted_in_a_quote() -> None:
    inner = """
name: drawn
nodes:
  - {id: rows, type: input}
  - {id: draw, type: map, over: input.rows, do: {workflow: draw, properties: {text: "{{ item }}"}}}
  - {id: result, type: output}
connections: [{from: draw.output, to: result.value}]
"""
    outer = """
name: outer
nodes:
  - {id: one, type: graph, graph: drawn, version: 1, inputs: {rows: [a, b, c]}}
  - {id: result, type: output}
connections: [{from: one.result, to: result.value}]
"""
    library = {("drawn", 1): parse_graph(yaml.safe_load(inner)).graph}
    quote = quote_plan(begun(outer, library).plan)
    assert (quote.jobs_min, quote.jobs_max) == (3, 3)


def test_a_graph_is_mapped() -> None:
    text = """
name: outer
nodes:
  - {id: photos, type: input, value_type: "image[]"}
  - {id: each, type: map, over: photos, do: {graph: portrait, version: 2, inputs: {photo: "{{ item }}"}}}
  - {id: result, type: output}
connections: [{from: each.output, to: result.value}]
"""
    run = begun(text, LIBRARY, photos=PHOTOS[:2])
    run.done("each/do/fix", 1)
    run.done("each/do/fix", 0)
    assert run.run.outputs
    output = run.run.outputs["result"]
    assert [row["output"]["result"]["prompt_id"] for row in output["results"]] == [
        "each/do/fix[0]",
        "each/do/fix[1]",
    ]
    assert len(output["images"]) == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("portrait", "nobody"), ("unknown_graph", "one", "graph")),
        (("version: 2, inputs: {photo: {from: photo.value}}", "inputs: {photo: 1}"), ("missing_field", "one", "version")),
        (("inputs: {photo: {from: photo.value}}", "inputs: {}"), ("missing_input", "one", "photo")),
        (("{photo: {from: photo.value}}", "{photo: {from: photo.value}, x: 1}"), ("unknown_input", "one", "x")),
        (("two.result", "two.nobody"), ("unknown_port", "result", "value")),
        (("one.result }}", "one.result.width }}"), ("type_mismatch", "two", "photo")),
    ],
)  # fmt: skip
def test_a_graph_inside_is_checked(change: tuple[str, str], expected: tuple[str, str, str]) -> None:
    assert expected in problems(OUTER.replace(*change), LIBRARY)


def test_a_graph_may_not_contain_itself_nor_go_too_deep() -> None:
    text = "{{name: x, nodes: [{{id: g, type: graph, graph: {}, version: 1}}, {{id: o, type: output}}], connections: [{{from: g.o, to: o.value}}]}}"
    own = {("me", 1): parse_graph(yaml.safe_load(text.format("me"))).graph}
    found = expand(own["me", 1], own).problems
    assert [each.message for each in found] == ["graph 'me' contains itself"]
    chain = {
        (f"g{n}", 1): parse_graph(yaml.safe_load(text.format(f"g{n + 1}"))).graph for n in range(10)
    }
    assert "nested more than 5 levels deep" in expand(chain["g0", 1], chain).problems[0].message


def test_what_is_inside_may_not_multiply_connections_without_end() -> None:
    texts = " ".join(f"{{{{ a.v{number} }}}}" for number in range(1000))
    values = {f"v{number}": number for number in range(1000)}
    inner = {
        "name": "wide",
        "nodes": [
            {"id": "a", "type": "value", "values": values},
            {"id": "b", "type": "value", "values": {"text": texts}},
            {"id": "o", "type": "output"},
        ],
        "connections": [{"from": "b.text", "to": "o.value"}],
    }
    nodes = [{"id": f"g{n}", "type": "graph", "graph": "wide", "version": 1} for n in range(400)]
    outer = parse_graph({"name": "x", "nodes": nodes, "connections": []}).graph
    found = expand(outer, {("wide", 1): parse_graph(inner).graph})
    assert [each.message for each in found.problems] == [
        "the graph has more than 20,000 connections, including nested ones"
    ]
    assert len(found.graph.connections) == 20_000


def test_many_nodes_together_may_not_hold_a_decision() -> None:
    text = """
name: heavy
nodes:
  - {id: rows, type: input}
  - id: each
    type: map
    over: rows
    do:
      nodes: [{id: heavy, type: value, values: {total: "{{ rows | sum }}"}}]
      result: heavy.total
  - {id: result, type: output}
connections: [{from: each.output, to: result.value}]
"""
    assert begun(text, rows=[1] * 100).run.status == GraphRunStatus.COMPLETED
    heavy = begun(text.replace("over: rows", "over: rows\n    max_items: 10000"), rows=[1] * 9000)
    assert heavy.run.error
    assert "takes more than 2,000,000 steps" in heavy.run.error.message


# 81,000 steps each: one alone is allowed.
SUMS_OF_OUTPUT = " + ".join(["(output | sum)"] * 9) + " < 0"
SUMS = "{{ " + " + ".join(["(big | sum)"] * 9) + " }}"
HEAVY_NODES: dict[str, dict[str, Any]] = {
    "condition": {"type": "condition", "condition": SUMS_OF_OUTPUT},
    "switch": {
        "type": "switch",
        "cases": [{"name": f"c{number}", "when": SUMS_OF_OUTPUT} for number in range(30)],
    },
    "value": {"type": "value", "values": {f"v{number}": SUMS for number in range(30)}},
    "workflow": {
        "type": "workflow",
        "workflow": "draw",
        "properties": {"text": f"{SUMS}!"},
    },
}


@pytest.mark.parametrize("kind", HEAVY_NODES)
def test_all_that_is_decided_at_one_moment_shares_its_steps(kind: str) -> None:
    """Whatever it is made of: many nodes, or one with many expressions."""
    port = {"condition": "false", "switch": "default", "value": "v0", "workflow": "output"}[kind]
    nodes: list[dict[str, Any]] = [{"id": "big", "type": "input", "value_type": "any"}]
    connections = []
    for number in range(30):
        nodes += [{"id": f"n{number}", **HEAVY_NODES[kind]}, {"id": f"o{number}", "type": "output"}]
        connections.append({"from": f"n{number}.{port}", "to": f"o{number}.value"})
        if kind in ("condition", "switch"):
            connections.append({"from": "big.value", "to": f"n{number}.input"})
    document = {"name": "heavy", "nodes": nodes, "connections": connections}
    run = begun(yaml.safe_dump(document), big=[1] * 9_000)
    assert run.run.status == GraphRunStatus.FAILED
    assert run.run.error
    assert "takes more than 2,000,000 steps" in run.run.error.message
    light = begun(yaml.safe_dump(document), big=[1] * 9)
    assert light.run.status != GraphRunStatus.FAILED


def wide_graph(nodes: int, wires: int) -> str:
    """Each item goes through merges that nothing reaches, each with many connections."""
    merges = [{"id": f"x{n}", "type": "merge", "mode": "collect"} for n in range(nodes)]
    fanout = {"type": "fanout", "mode": "distribute", "per_item": True, "max_items": 10_000}
    document = {
        "name": "wide",
        "nodes": [
            {"id": "list", "type": "input", "value_type": "integer[]"},
            {"id": "each", **fanout},
            {"id": "never", "type": "condition", "condition": "output == 'no'"},
            *merges,
            {"id": "all", "type": "merge", "mode": "collect", "over": "each"},
            {"id": "result", "type": "output"},
        ],
        "connections": [
            {"from": "list.value", "to": "each.items"},
            {"from": "each.item", "to": "never.input"},
            *[
                {"from": "never.true", "to": f"x{n}.input_{wire}"}
                for n in range(nodes)
                for wire in range(wires)
            ],
            *[{"from": f"x{n}.output", "to": f"all.input_{n}"} for n in range(nodes)],
            {"from": "all.output", "to": "result.value"},
        ],
    }
    return yaml.safe_dump(document)


def test_connections_of_many_items_are_steps_too() -> None:
    run = begun(wide_graph(nodes=1, wires=4_000), list=[1] * 600).run
    assert run.error
    assert "takes more than 2,000,000 steps" in run.error.message
    assert begun(wide_graph(nodes=1, wires=10), list=[1] * 600).run.status.is_over


def test_items_through_more_nodes_than_a_run_can_hold_are_refused_at_once() -> None:
    run = begun(wide_graph(nodes=200, wires=1), list=[1] * 10_000).run
    assert run.error
    assert run.error.node == "each"
    assert "more than its limit of 100,000" in run.error.message
    assert len(run.records) < 1_000


def test_one_node_stops_in_the_moment_that_the_steps_are_used_up() -> None:
    total = StepCount(most=100)
    for _ in range(2):
        StepCount(total).add(50)
    with pytest.raises(LimitExceeded, match="100 steps"):
        StepCount(total).add(1)
    assert total.count == 101


# Judges


SCORE = """
name: best of
nodes:
  - {id: photos, type: input, value_type: "image[]"}
  - {id: rank, type: score, over: photos, workflow: fix, property: input, score: output.width / 10, keep: 2}
  - {id: best, type: output}
  - {id: score, type: output}
connections: [{from: rank.output.images, to: best.value}, {from: rank.output.score, to: score.value}]
"""


def test_the_best_are_kept() -> None:
    run = begun(SCORE, photos=PHOTOS)
    for number, width in ((2, 30), (0, 10), (1, 90)):
        run.done("rank/do", number, width=width)
    assert run.run.outputs == {"best": [PHOTOS[1], PHOTOS[2]], "score": 9}


def test_a_judge_that_gives_no_number_fails_with_its_item() -> None:
    run = begun(SCORE.replace("output.width / 10", "output.text"), photos=PHOTOS[:1])
    run.done("rank/do", 0, text="good")
    assert run.run.error
    assert "item 0 has no score: 'good' is not a number" in run.run.error.message


def test_jobs_of_both_maps_start_and_neither_has_more_than_it_may() -> None:
    text = """
name: two
nodes:
  - {id: rows, type: input}
  - {id: a, type: map, over: rows, at_once: 1, do: {workflow: draw}}
  - {id: b, type: map, over: rows, at_once: 2, do: {workflow: draw}}
  - {id: both, type: merge}
  - {id: result, type: output}
connections: [{from: a.output, to: both.input_0}, {from: b.output, to: both.input_1}, {from: both.output, to: result.value}]
"""
    run = begun(text, rows=[1, 2, 3])
    assert sorted(map(str, run.jobs)) == ["a/do[0]", "b/do[0]", "b/do[1]"]
    run.done("a/do", 0)
    assert sorted(map(str, run.jobs)) == ["a/do[1]", "b/do[0]", "b/do[1]"]


def test_events_that_come_again_change_nothing() -> None:
    run = begun(LOOP, photo=picture("p"))
    key = ExecutionKey("refine/do", (0,))
    job = run.jobs[key]
    run.done("refine/do", 0, width=1)
    again = next_actions(
        run.plan, run.run, [JobDone(key, job.attempt, {}), JobFailed(key, job.attempt, "x")], WORLD
    )
    assert again.actions == ()
    assert again.run.record(key).status == ExecutionStatus.DONE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SCORE.replace('"image[]"', "image"), ("rank", "over")),
        (LOOP.replace("start: {", "start: {extra: '{{ nobody.x }}', "), ("refine", "start.extra")),
        (OUTER.replace("{from: photo.value}", "'{{ nobody.x }}'"), ("one", "photo")),
    ],
)
def test_a_problem_names_nothing_that_nobody_wrote(text: str, expected: tuple[str, str]) -> None:
    found = check_graph(yaml.safe_load(text), CATALOGUE, library=LIBRARY).problems
    assert expected in [(each.node, each.port) for each in found]
    assert not [each for each in found if "/." in str(each)]
