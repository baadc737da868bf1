"""`comfyfleet graph` as a client of a control plane that runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.support.server.commands import Result, comfyfleet
from tests.support.server.local_server import PHOTO, LocalServer, local_server_in
from tests.support.server.processes import Process, finish
from tests.support.server.relay import relayed

from comfyfleet.cli.graph_inputs import node_lines

GRAPH = """
name: A square
nodes:
  - {id: draw, type: workflow, workflow: negative, properties: {width: 40}}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: picture.value}
"""
INSIDE = """name: Inside
nodes:
  - {id: photo, type: input}
  - id: again
    type: loop
    at_most: 2
    until: round == 2
    do:
      nodes:
        - {id: blur, type: workflow, workflow: soften}
      result: blur.output
"""
# Other steps for each test: an engine knows again what it has made.
SLOW = """
name: Slow
nodes:
  - {id: wait, type: workflow, workflow: slow, properties: {steps: STEPS}}
  - {id: picture, type: output}
connections:
  - {from: wait.output, to: picture.value}
"""
IN_TURN = """
name: In turn
nodes:
  - {id: wait, type: workflow, workflow: slow, properties: {steps: 60}}
  - {id: draw, type: workflow, workflow: negative, properties: {width: {from: wait.output.width}}}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: picture.value}
"""
ASKING = """
name: Asking
nodes:
  - {id: draw, type: workflow, workflow: negative, backend_affinity: "worker:away", fallback_strategy: ask_user}
  - {id: picture, type: output}
connections:
  - {from: draw.output, to: picture.value}
"""
SOFTEN = """
name: Soften
nodes:
  - {id: photo, type: input, value_type: image}
  - {id: radius, type: input, value_type: integer}
  - {id: soften, type: workflow, workflow: soften}
  - {id: picture, type: output}
connections:
  - {from: photo.value, to: soften.input}
  - {from: radius.value, to: soften.radius}
  - {from: soften.output, to: picture.value}
"""

SOFTEN_AND_DRAW = """
name: Soften and draw
nodes:
  - {id: photo, type: input, value_type: image}
  - {id: radius, type: input, value_type: integer}
  - {id: soften, type: workflow, workflow: soften, properties: {radius: {from: radius.value}}}
  - {id: draw, type: workflow, workflow: negative, properties: {width: {from: soften.output.width}}}
  - {id: soft, type: output}
  - {id: picture, type: output}
connections:
  - {from: photo.value, to: soften.input}
  - {from: soften.output, to: soft.value}
  - {from: draw.output, to: picture.value}
"""
FROM_TABLE = """
name: From a table
reuse: true
nodes:
  - {id: rows, type: input, columns: {photo: image, radius: integer}}
  - {id: each, type: fanout, mode: distribute, per_item: true}
  - {id: soften, type: workflow, workflow: soften}
  - {id: album, type: merge, mode: concat_images, over: each}
  - {id: result, type: output}
connections:
  - {from: rows.value, to: each.items}
  - {from: each.item.photo, to: soften.input}
  - {from: each.item.radius, to: soften.radius}
  - {from: soften.output, to: album.input_0}
  - {from: album.output.images, to: result.value}
"""


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


def written(folder: Path, text: str = GRAPH) -> str:
    file = folder / "graph.yaml"
    file.write_text(text)
    return str(file)


class Customer:
    def __init__(self, local_server: LocalServer, tokens: int = 1_000) -> None:
        self.tenant = local_server.tenant(tokens)
        self.environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": self.tenant["key"]}
        self.headers = {"Authorization": f"Bearer {self.tenant['key']}"}

    def says(self, *arguments: str, code: int = 0, url: str | None = None) -> Result:
        environ = {**self.environ, "COMFYFLEET_URL": url} if url else self.environ
        done = comfyfleet("graph", *arguments, environ=environ, width=200)
        assert done.code == code, done.out + done.err
        return done

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.says("show", run_id, "--json").json
        return found


@pytest.fixture
def ada(local_server: LocalServer) -> Customer:
    return Customer(local_server)


def test_a_graph_is_checked_run_watched_shown_and_exported(tmp_path: Path, ada: Customer) -> None:
    """As a process of its own, as people have it."""
    file = written(tmp_path)

    def said(*arguments: str) -> str:
        return finish("graph", *arguments, folder=tmp_path, environ=ada.environ)

    assert "flowchart" in said("show", file)
    said("validate", file)
    run = json.loads(said("run", file, "--watch", "--json"))
    assert run["status"] == "completed"
    assert run["outputs"]["picture"]["width"] == 20
    assert "A square: completed, 2 of 2 nodes, 100 %" in said("show", run["id"])
    assert "workflow: negative" in said("export", run["graph_id"])


def test_what_is_exported_can_be_run_again(tmp_path: Path, ada: Customer) -> None:
    run = ada.says("run", written(tmp_path), "--watch", "--json").json
    exported = ada.says("export", run["graph_id"])
    again = written(tmp_path, exported.out)
    assert yaml.safe_load(exported.out)["nodes"][0]["properties"] == {"width": 40}
    assert (
        ada.says("export", run["graph_id"], "--version", "1", "--json").json["name"] == "A square"
    )
    assert ada.says("run", again, "--watch", "--json").json["status"] == "completed"
    refused = ada.says("export", run["graph_id"], "--version", "2", code=1)
    assert "version 2" in refused.err


def test_a_graph_and_a_run_are_drawn_or_shown_as_a_tree(tmp_path: Path, ada: Customer) -> None:
    run = ada.says("run", written(tmp_path), "--watch", "--json").json
    drawn = ada.says("show", run["graph_id"]).out
    assert drawn.startswith("flowchart")
    assert ada.says("show", run["id"], "--mermaid").out == drawn
    lines = ada.says("show", run["id"]).out.splitlines()
    assert lines[0] == "A square: completed, 2 of 2 nodes, 100 %"
    assert lines[1].startswith("├── ✓ draw  negative  ")


def test_inputs_are_values_and_files(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path, SOFTEN)
    given = ("--input", f"photo=@{PHOTO}", "--input", "radius=2")
    run = ada.says("run", file, *given, "--watch", "--json").json
    assert run["status"] == "completed"
    assert run["inputs"]["photo"]["filename"] == "photo.png"
    bare = ada.says("run", file, "--input", f"photo={PHOTO}", "--input", "radius=2", code=1)
    assert bare.lines[-1] == f"hint: To upload it: --input photo=@{PHOTO}"
    bad = ada.says("run", file, "--input", "photo=@nowhere.png", code=1)
    assert "file nowhere.png was not found" in bad.err
    clip = PHOTO.with_name("clip.mp4")
    wrong = ada.says(
        "run", file, "--input", f"photo=@{clip}", "--input", "radius=2", "--watch", code=1
    )
    assert "input requires image, but the file is video/mp4" in wrong.err
    assert "radius" in ada.says("run", file, "--input", f"photo=@{PHOTO}", code=1).err


def test_a_table_is_an_input_and_what_has_not_changed_in_it_is_reused(
    tmp_path: Path, ada: Customer
) -> None:
    file, table = written(tmp_path, FROM_TABLE), tmp_path / "rows.csv"
    (tmp_path / "photo.png").write_bytes(PHOTO.read_bytes())
    given = ("run", file, "--input", f"rows=@{table}")
    table.write_text("photo,radius\nphoto.png,2\nphoto.png,wide\nnone.png,3\n")
    refused = ada.says(*given, code=1)
    assert "row 2, column radius: takes integer, not 'wide'" in refused.err
    assert "row 3, column photo: takes image, not 'none.png'" in refused.err
    assert "there are no graphs yet" in ada.says("list").out + ada.says("list").err
    table.write_text("photo,radius\nphoto.png,2\nphoto.png,3\n")
    first = ada.says(*given, "--watch", "--json").json
    assert [each["radius"] for each in first["inputs"]["rows"]] == [2, 3]
    assert first["tokens"] > 0
    table.write_text("photo,radius\nphoto.png,3\nphoto.png,4\n")
    again = ada.says(*given, "--watch", "--json").json
    assert again["status"] == "completed"
    assert again["tokens"] * 2 == first["tokens"]
    shown = ada.says("show", again["id"]).out
    (reused,) = (each for each in again["executions"] if each["reused_from"])
    source = reused["reused_from"]
    assert (source["run_id"], reused["job_id"], reused["index"]) == (first["id"], None, [0])
    assert f"reused from job {source['job_id']} of run {first['id']}" in shown
    quote = ada.says("quote", "From a table", *given[2:], "--json").json
    assert (quote["tokens_min"], quote["tokens_max"]) == (0, first["tokens"])


def test_problems_are_told_with_their_places(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path, GRAPH.replace("negative", "nothing"))
    refused = ada.says("validate", file, code=1)
    line = 1 + next(
        at for at, text in enumerate(Path(file).read_text().splitlines()) if "nothing" in text
    )
    assert (
        f"{Path(file).name}:{line}: draw.workflow: workflow 'nothing' isn't available"
        in refused.out
    )
    assert "has 1 problem\n" in refused.err


def test_lines_of_nodes_inside_others_are_found(tmp_path: Path) -> None:
    file = Path(written(tmp_path, INSIDE))
    assert node_lines(file) == {"photo": 3, "again": 4, "again/do": 9, "again/blur": 10}
    as_json = tmp_path / "graph.json"
    as_json.write_text(json.dumps(yaml.safe_load(INSIDE), indent=1))
    assert node_lines(as_json).keys() == node_lines(file).keys()


def test_a_file_that_is_no_graph_is_named(tmp_path: Path, ada: Customer) -> None:
    cut = tmp_path / "cut.yaml"
    cut.write_text("name: [")
    assert (
        f"error: file {tmp_path}/no.yaml was not found"
        in ada.says("validate", str(tmp_path / "no.yaml"), code=1).err
    )
    assert f"error: {PHOTO} is not UTF-8 text" in ada.says("validate", str(PHOTO), code=1).err
    assert f"error: {cut}: the document can't be read" in ada.says("validate", str(cut), code=1).err


def test_a_stored_graph_is_drawn_by_its_name(tmp_path: Path, ada: Customer) -> None:
    ada.says("quote", written(tmp_path))
    assert ada.says("show", "A square").out.startswith("flowchart")
    for command in ("show", "draw"):
        unknown = ada.says(command, "circle.yaml", code=1).err
        assert "no file, graph or run named circle.yaml was found" in unknown
    assert "use a name like a.svg" in ada.says("draw", "A square", "-o", "a.png", code=1).err
    not_an_id = ada.says("rerun", "A square", code=2).err
    assert "'A square' is not an id" in not_an_id
    assert "List the ids with: comfyfleet graph runs" in not_an_id


def test_a_failed_run_is_retried_to_its_end(tmp_path: Path, local_server: LocalServer) -> None:
    """The tokens are gone by the time of the second job."""
    ada = Customer(local_server, tokens=0)
    poor = ada.says("run", written(tmp_path), code=1).err
    assert "Insufficient token balance" in poor
    assert "hint: This requires 2 tokens, and your balance is 0." in poor
    assert ada.says("runs", "--json").json == []
    local_server.pay(ada.tenant, 3)
    run_id = ada.says("run", written(tmp_path, IN_TURN)).out.strip()
    ada.says("run", written(tmp_path), "--watch")
    assert "Node draw failed" in ada.says("show", run_id, "--watch", code=3).err
    assert ada.run(run_id)["status"] == "failed"
    assert "Node draw failed" in ada.says("show", run_id).err
    unknown = ada.says("retry", run_id, "--backend", "worker:nobody", code=1)
    assert "backend worker:nobody was not found" in unknown.err
    local_server.pay(ada.tenant, 2, "paid-2")
    done = ada.says("retry", run_id, "--backend", "worker:built-in", "--watch")
    assert "In turn: completed, 3 of 3 nodes, 100 %" in done.err
    (drawn,) = [each for each in ada.run(run_id)["executions"] if each["node"] == "draw"]
    assert drawn["backend"] == "worker:built-in"
    assert "only" in ada.says("retry", run_id, code=1).err


def test_a_run_is_run_again_from_a_node(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    photo, file = f"photo=@{PHOTO}", written(tmp_path, SOFTEN_AND_DRAW)
    run = ada.says("run", file, "-i", photo, "-i", "radius=1", "--watch", "--json").json
    again = ada.says("rerun", run["id"], "--from", "draw", "--set", "draw.width=30", "-o", str(tmp_path / "out"))  # fmt: skip
    run_id, *saved = again.out.split()
    assert saved
    assert all(Path(each).is_file() for each in saved)
    seen = ada.run(run_id)
    assert (seen["status"], seen["rerun_of"]["run_id"]) == ("completed", run["id"])
    assert seen["outputs"]["picture"]["width"] == 15
    shown = ada.says("show", run_id).out
    assert f"rerun of {run['id']} from draw" in shown
    assert f"of run {run['id']}" in shown, "the softened one was kept"
    assert [each["id"] for each in ada.says("runs", "--rerun-of", run["id"], "--json").json] == [run_id]  # fmt: skip
    all_of_it = ada.says("rerun", run["id"], "-i", "radius=2", "--watch", "--json").json
    assert all_of_it["tokens"] == run["tokens"]
    assert "all nodes already have results" in ada.says("rerun", run["id"], code=1).err
    assert "use NODE.PROPERTY=VALUE" in ada.says("rerun", run["id"], "--set", "x", code=1).err  # fmt: skip
    assert "no node 'paint'" in ada.says("rerun", run["id"], "--from", "paint", code=1).err
    stranger = Customer(local_server)
    stranger.says("rerun", run["id"], "--from", "draw", code=1)


def test_a_question_is_answered(tmp_path: Path, local_server: LocalServer, ada: Customer) -> None:
    local_server.offline_worker("away", "negative")
    graph = written(tmp_path, ASKING)
    ada.says("validate", graph)
    runs = [ada.says("run", graph, "--json").json for _ in range(3)]
    assert [each["status"] for each in runs] == ["waiting_for_user"] * 3
    run_ids = [each["id"] for each in runs]
    answer = httpx.get(
        f"{local_server.url}/api/graph-runs/{run_ids[0]}", headers=ada.headers
    ).json()
    as_json = json.dumps(answer, indent=2, ensure_ascii=False) + "\n"
    assert ada.says("show", run_ids[0], "--json").out == as_json
    shown = ada.says("show", run_ids[0])
    assert (
        "draw asks: Backend worker:away is offline; answer backend, retry, skip, fail" in shown.out
    )
    assert "worker:built-in" in shown.out
    ada.says("answer", run_ids[0], "backend", "--backend", "worker:nobody", code=1)
    ada.says("answer", run_ids[0], "backend", "--node", "draw", "--backend", "worker:built-in")
    assert ada.says("show", run_ids[0], "--watch", "--json").json["status"] == "completed"
    skipped = ada.says("answer", run_ids[1], "skip", "--json").json
    assert {each["id"]: each["status"] for each in skipped["nodes"]}["draw"] == "skipped"
    assert "Asking: failed" in ada.says("answer", run_ids[2], "fail").err
    assert "the run has no open question" in ada.says("answer", run_ids[2], "skip", code=1).err


def test_an_answer_that_names_no_backend_says_how_to_find_one(ada: Customer) -> None:
    refused = ada.says("answer", "0b2f7c1e-4c1d-4f6a-9d0e-3a5b8c7d9e10", "backend", code=1)
    assert "requires --backend" in refused.err
    assert "graph show" in refused.err


def test_a_question_is_told_where_there_is_no_terminal(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    local_server.offline_worker("elsewhere", "negative")
    graph = written(tmp_path, ASKING.replace("away", "elsewhere"))
    watching = Process(
        "watching", "graph", "run", graph, "--watch", folder=tmp_path, environ=ada.environ
    )
    asked = watching.wait_for_line(
        r"elsewhere is offline; answer with: comfyfleet graph answer (\S+)"
    )
    assert watching.wait() == 3, "nobody can answer in a log"
    ada.says("answer", asked[1], "backend", "--backend", "worker:built-in")
    assert "completed" in ada.says("show", asked[1], "--watch").err


def test_graphs_and_runs_are_listed_priced_downloaded_and_deleted(
    tmp_path: Path, ada: Customer
) -> None:
    file = written(tmp_path)
    assert "there are no graphs yet" in ada.says("list").err
    assert ada.says("quote", file).out.split()[:4] == ["tokens", "2", "jobs", "1"]
    done = ada.says("run", file, "-o", str(tmp_path / "made"))
    run_id, path = done.out.split()
    assert Path(path).parent == tmp_path / "made"
    assert Path(path).read_bytes().startswith(b"\x89PNG")
    shown = ada.says("show", run_id).out
    assert "✓ draw  negative  0." in shown
    assert f"→ picture: {Path(path).name}" in shown
    again = ada.says("run", "A square", "--watch").out.strip()
    (graph,) = ada.says("list", "--json").json
    assert graph["name"] == "A square"
    assert {each["id"] for each in ada.says("runs", "--json").json} == {run_id, again}
    assert ada.says("runs", "--graph", "A square", "--status", "failed").out == ""
    assert ada.says("download", again, "-o", str(tmp_path / "more")).out.strip()
    assert "A square: completed" in ada.says("cancel", again).err
    ada.says("delete", graph["id"])
    assert ada.says("list", "--json").json == []
    assert len(ada.says("runs", "--json").json) == 2
    assert "✓ draw  negative" in ada.says("show", run_id).out


@pytest.mark.parametrize("is_degraded", [False, True], ids=["restart", "no database"])
def test_a_run_is_watched_through_an_outage_of_its_control_plane(
    tmp_path: Path, local_server: LocalServer, ada: Customer, is_degraded: bool
) -> None:
    # More than the streams that are tried before the run itself is asked for.
    with relayed(local_server.url, cuts=1, refusals=6, is_degraded=is_degraded) as relay:
        # Not the same twice: the engine would take the first one's result.
        file = written(tmp_path, SLOW.replace("STEPS", "29" if is_degraded else "28"))
        done = ada.says("run", file, "--watch", "--json", url=relay.url)
    assert done.json["status"] == "completed"
    assert done.err.count("the run continues, retrying") == 1


def test_watching_follows_the_stream(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    """The run is looked at before and after: what happens in between is told."""
    with relayed(local_server.url) as relay:
        done = ada.says(
            "run", written(tmp_path, SLOW.replace("STEPS", "25")), "--watch", url=relay.url
        )
    assert "Slow: completed, 2 of 2 nodes, 100 %" in done.err
    assert relay.count("GET events") == 1
    assert relay.count("GET run") == 2


def test_a_stream_that_breaks_is_opened_again(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    with relayed(local_server.url, cuts=1) as relay:
        done = ada.says(
            "run",
            written(tmp_path, SLOW.replace("STEPS", "26")),
            "--watch",
            "--json",
            url=relay.url,
        )
    assert done.json["status"] == "completed"
    assert relay.count("GET events") == 2
    assert relay.count("GET run") == 2


def test_where_no_stream_comes_through_the_run_is_polled(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    with relayed(local_server.url, has_streams=False) as relay:
        done = ada.says(
            "run",
            written(tmp_path, SLOW.replace("STEPS", "27")),
            "--watch",
            "--json",
            url=relay.url,
        )
    assert done.json["status"] == "completed"
    assert relay.count("GET run") >= 4
