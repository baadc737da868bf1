"""Tables in CSV and JSON lines as inputs of graphs: typed by the graph, wrong cells named by row and column."""

from pathlib import Path
from typing import Any

import pytest
from tests.unit.graphs.builders import CATALOGUE, document, node, work

from comfyfleet.api.graph_model import InputNode, input_type
from comfyfleet.api.graph_parse import parse_graph, write_graph
from comfyfleet.client import rows_from
from comfyfleet.errors import InvalidInput
from comfyfleet.server.graphs.validate import check_graph, check_inputs

COLUMNS = {"name": "text", "width": "integer", "strength": "number", "again": "boolean"}
ROWS: list[dict[str, Any]] = [
    {"name": "a cat, asleep", "width": 64, "strength": 0.5, "again": True},
    {"name": "", "width": -3, "strength": 2, "again": False},
]


def written(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_file_is_rows_of_typed_cells(tmp_path: Path, start: str, end: str) -> None:
    lines = ["name,width,strength,again", '"a cat, asleep",64,0.5,true', ",-3,2,False", ""]
    assert rows_from(written(tmp_path, start + end.join(lines)), COLUMNS) == ROWS


def test_json_lines_are_rows_as_they_are(tmp_path: Path) -> None:
    text = (
        '{"name": "a cat, asleep", "width": 64, "strength": 0.5, "again": true}\n\n'
        '{"name": "", "width": -3, "strength": 2, "again": false}\n'
    )
    assert rows_from(written(tmp_path, text, "rows.jsonl"), COLUMNS) == ROWS
    assert rows_from(written(tmp_path, text, "rows.jsonl")) == ROWS


def test_without_types_cells_of_a_csv_file_are_texts(tmp_path: Path) -> None:
    path = written(tmp_path, "name,width\ncat,64\n")
    assert rows_from(path) == [{"name": "cat", "width": "64"}]
    # What the graph doesn't know of stays, too.
    assert rows_from(path, {"width": "integer"}) == [{"name": "cat", "width": 64}]


def test_an_empty_cell_that_is_no_text_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "name,width,again\n,,\nshort\n")
    columns = {"name": "text", "width": "integer", "again": "boolean"}
    assert rows_from(path, columns) == [{"name": ""}, {"name": "short"}]
    path = written(tmp_path, '{"name": null, "width": null}', "rows.jsonl")
    assert rows_from(path, columns) == [{}]


def test_wrong_cells_are_named_all_at_once(tmp_path: Path) -> None:
    text = "name,width,strength,again\ncat,64.5,nan,yes\ndog,1,1,true\ncow,0x1,one,1\n"
    with pytest.raises(InvalidInput) as caught:
        rows_from(written(tmp_path, text), COLUMNS)
    assert caught.value.details["problems"] == [
        "row 1, column width: takes integer, not '64.5'",
        "row 1, column strength: takes number, not 'nan'",
        "row 1, column again: takes boolean, not 'yes'",
        "row 3, column width: takes integer, not '0x1'",
        "row 3, column strength: takes number, not 'one'",
        "row 3, column again: takes boolean, not '1'",
    ]
    text = '{"width": "64"}\n{"width": 6.5}\n'
    with pytest.raises(InvalidInput, match="row 2, column width"):
        rows_from(written(tmp_path, text, "rows.jsonl"), COLUMNS)


def test_cells_of_media_are_files_beside_the_table(tmp_path: Path) -> None:
    written(tmp_path, "a picture", "cat.png")
    path = written(tmp_path, "photo,of\ncat.png,cat\n")
    assert rows_from(path, {"photo": "image"}) == [{"photo": tmp_path / "cat.png", "of": "cat"}]
    with pytest.raises(InvalidInput, match="row 1, column photo: takes image"):
        rows_from(written(tmp_path, "photo\ndog.png\n"), {"photo": "image"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.csv", "", "the first line"),
        ("rows.csv", "a,a\n1,2\n", "unique name"),
        ("rows.csv", "a,\n1,2\n", "a unique name for each"),
        ("rows.csv", "name\n1,2\n", "line 2: there are 2 cells, but only 1 columns"),
        ("rows.csv", "promt,width\n", "has no column name; it has promt, width"),
        ("rows.csv", 'name\n"open', "line 2"),
        ("rows.jsonl", "{}\nnone\n", "line 2 isn't valid JSON"),
        ("rows.jsonl", "[1]\n", "line 1 must be an object"),
        ("rows.xlsx", "PK", "use a .csv or .jsonl"),
    ],
)
def test_what_is_no_table_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        rows_from(written(tmp_path, text, name), {"name": "text"})


def test_tables_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="more than 10,000 rows"):
        rows_from(written(tmp_path, "a\n" + "1\n" * 10_001))
    with pytest.raises(InvalidInput, match="can't be read"):
        rows_from(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"a\n\xe9\n")
    with pytest.raises(InvalidInput, match="valid UTF-8"):
        rows_from(tmp_path / "latin.csv")


TABLE = document(
    node("rows", "input", columns={"text": "text", "width": "integer", "photo": "image"}),
    node("each", "fanout", mode="distribute", per_item=True),
    work("draw", "draw"),
    node("all", "merge", over="each"),
    node("result", "output"),
    links=("rows.value > each.items", "each.item.text > draw.text", "draw.output > all.input_0",
           "all.output > result.value"),
)  # fmt: skip


def test_the_columns_of_an_input_are_types_of_its_items() -> None:
    assert check_graph(TABLE, CATALOGUE).problems == ()
    found = parse_graph(TABLE).graph
    assert parse_graph(write_graph(found)).graph == found
    rows = found.nodes["rows"]
    assert isinstance(rows, InputNode)
    assert str(input_type(rows)) == "row[]"
    for path, code in (("each.item.height", "unknown_field"), ("each.item.width", "type_mismatch")):
        wrong = {**TABLE, "connections": [dict(each) for each in TABLE["connections"]]}
        wrong["connections"][1]["from"] = path
        assert [each.code for each in check_graph(wrong, CATALOGUE).problems] == [code]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": {"a.b": "text"}}, "names without dots"),
        ({"columns": {"a": "text[]"}}, "names without dots"),
        ({"columns": []}, "an object"),
        ({"columns": {"a": "text"}, "value_type": "image"}, "instead of a value_type"),
    ],
)
def test_columns_that_are_none_are_a_problem(fields: dict[str, Any], message: str) -> None:
    (problem,) = parse_graph(document(node("rows", "input", **fields))).problems
    assert message in problem.message


def test_a_run_is_refused_for_wrong_cells_whoever_sends_them() -> None:
    graph = parse_graph(TABLE).graph

    def told(rows: Any) -> list[str]:
        return [each.message for each in check_inputs(graph, {"rows": rows})]

    assert told([{"text": "cat", "width": 3, "photo": "id"}, {"text": "dog", "more": 1}, {}]) == []
    assert told([{"text": 3}, 7, {"width": "3", "photo": ""}]) == [
        "row 1, column text: must be of type text, not 3",
        "row 2 must be an object, not 7",
        "row 3, column width: must be of type integer, not '3'",
        "row 3, column photo: must be of type image, not ''",
    ]
    assert len(told([{"text": 3}] * 1000)) == 20
    assert told({"text": "cat"}) == ["must be of type row[], not {'text': 'cat'}"]
