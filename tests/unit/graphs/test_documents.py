"""Texts from outside become plain values, and are refused before they can hurt."""

from typing import Any

import pytest

from comfyfleet.api.documents import read_document
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.errors import InvalidInput, LimitExceeded


def test_json_and_yaml_say_the_same() -> None:
    assert read_document('{"a": [1, 2.5, null, true, "x"]}') == {"a": [1, 2.5, None, True, "x"]}
    assert read_document("a: [1, 2.5, null, true, x]") == {"a": [1, 2.5, None, True, "x"]}


@pytest.mark.parametrize("text", ["on", "yes", "1:30", "2024-01-01", "0x1f", "=", "<<"])
def test_a_text_that_old_yaml_would_turn_into_something_else_stays_a_text(text: str) -> None:
    assert read_document(f"key: {text}") == {"key": text}


def test_flow_style_is_yaml_too() -> None:
    assert read_document("{a: 1, b: [x]}") == {"a": 1, "b": ["x"]}


def test_a_key_may_be_any_plain_text() -> None:
    assert read_document("on: 1\n2: 3") == {"on": 1, "2": 3}


@pytest.mark.parametrize("text", ["a: 1\na: 2", '{"a": 1, "a": 2}'])
def test_a_key_given_twice_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="twice"):
        read_document(text)


def test_an_error_has_its_line_and_column() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_document("a: 1\nb: [1, 2")
    assert caught.value.details["line"] >= 2


@pytest.mark.parametrize("text", ["!!python/object:os.system {}", "? [1]\n: 2", "a: *nowhere"])
def test_nothing_but_plain_values_can_be_made(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_document(text)


def test_aliases_that_unfold_into_something_huge_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(LimitExceeded, match="values"):
        read_document("\n".join(lines))


def test_an_alias_that_holds_itself_is_refused() -> None:
    with pytest.raises(LimitExceeded, match="nested"):
        read_document("a: &a [*a]")


@pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, "a: " + "[" * 60 + "]" * 60])
def test_depth_is_bounded(text: str) -> None:
    with pytest.raises(LimitExceeded, match="nested"):
        read_document(text)


@pytest.mark.parametrize(
    "text", ['{"a": "\\u0000"}', '{"\\ud800": 1}', '{"a": ' + "1" * 5000 + "}"]
)
def test_what_no_database_can_keep_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_document(text)


def test_length_is_bounded() -> None:
    with pytest.raises(LimitExceeded, match="characters"):
        read_document("a: " + "x" * 300_000)


NODES = [{"id": "a", "type": "input"}, {"id": "b", "type": "output"}]


def test_a_layout_is_kept_for_nodes_that_are_there() -> None:
    places = {"a": [0, 12.6], "b": [-300, 4], "gone": [1, 1]}
    parsed = parse_graph({"name": "n", "nodes": NODES, "layout": places})
    assert (parsed.problems, parsed.graph.layout) == ((), {"a": (0, 13), "b": (-300, 4)})
    assert parse_graph(write_graph(parsed.graph)) == parsed
    assert "layout" not in write_graph(parse_graph({"name": "n", "nodes": NODES}).graph)


@pytest.mark.parametrize(
    "places", [[], {"a": 3}, {"a": [1]}, {"a": [1, "x"]}, {"a": [1e9, 0]}, {"a": [float("nan"), 0]}]
)
def test_a_layout_that_is_none_is_a_problem(places: Any) -> None:
    parsed = parse_graph({"name": "n", "nodes": NODES, "layout": places})
    assert [each.code for each in parsed.problems] == ["invalid_field"]
    assert "layout must be an object" in parsed.problems[0].message
