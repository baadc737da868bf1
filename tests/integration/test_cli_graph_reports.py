"""`comfyfleet graph show`, `compare` and `draw` of runs that were run."""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from tests.integration.test_cli_graph import ASKING, GRAPH, Customer, written
from tests.support.server.local_server import LocalServer, local_server_in

WIDER = GRAPH.replace("width: 40", "width: 60")


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


@pytest.fixture
def ada(local_server: LocalServer) -> Customer:
    return Customer(local_server)


def test_a_run_is_shown_as_a_timeline(tmp_path: Path, ada: Customer) -> None:
    run = ada.says("run", written(tmp_path), "--watch", "--json").json
    shown = ada.says("show", run["id"]).out
    assert "A square: completed, 2 of 2 nodes, 100 %" in shown
    assert "* draw" in shown
    assert "critical path, " in shown
    alone = ada.says("show", run["id"], "--timeline").out
    assert "A square: completed" not in alone
    assert "* draw" in alone
    found = ada.says("show", run["id"], "--timeline", "--json").json
    assert [each["node"] for each in found["critical_path"]] == ["draw", "picture"]
    assert ada.says("show", run["id"], "--json").json["id"] == run["id"]


def test_two_runs_are_compared(tmp_path: Path, ada: Customer) -> None:
    one = ada.says("run", written(tmp_path), "--watch", "--json").json["id"]
    two = ada.says("run", written(tmp_path, WIDER), "--watch", "--json").json["id"]
    lines = ada.says("compare", one, two).out.splitlines()
    (row,) = [line for line in lines if "draw.properties.width" in line]
    assert row.split() == ["nodes", "draw.properties.width", "40", "60"]
    assert not any("draw.workflow" in line for line in lines)
    (made,) = [line for line in lines if "picture.files.0" in line]
    assert made.split()[0] == "outputs"
    whole = ada.says("compare", one, two, "--all").out
    assert "draw.workflow" in whole
    found = ada.says("compare", one, two, "--json").json
    assert {each["section"] for each in found["values"]} >= {"nodes", "outputs", "run"}
    eve = ada.says("compare", one, "00000000-0000-4000-8000-000000000000", code=1)
    assert "was not found" in eve.err


def test_a_graph_and_a_run_are_drawn(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path)
    target = tmp_path / "graph.svg"
    drawn = ada.says("draw", file, "-o", str(target), "--json")
    assert f"{target} is written" in drawn.err
    assert drawn.json["svg"] == target.read_text("utf-8")
    assert ElementTree.parse(target).getroot().tag.endswith("svg")  # noqa: S314
    run = ada.says("run", file, "--watch", "--json").json
    for what in (run["id"], run["graph_id"], "A square"):
        picture = ElementTree.fromstring(ada.says("draw", what).out)  # noqa: S314
        words = " ".join(each.text or "" for each in picture.iter())
        assert ("✓ done" in words) == (what == run["id"])
    asking = ada.says("run", written(tmp_path, ASKING), "--json").json["id"]
    assert "? asking" in ada.says("draw", asking).out
    empty = tmp_path / "empty.yaml"
    empty.write_text("name: nothing\nnodes: []\n")
    assert "has no nodes to draw" in ada.says("draw", str(empty), code=1).err
