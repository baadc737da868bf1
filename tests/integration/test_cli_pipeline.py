"""`comfyfleet pipeline` as a client of a control plane that runs."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from tests.support.server.command_process import started
from tests.support.server.commands import Result, comfyfleet
from tests.support.server.local_server import LocalServer, local_server_in
from tests.support.server.processes import finish

TWO_STEPS = """
name: Two steps
steps:
  - name: Base
    workflow: negative
    properties: {width: "{{ variables.width }}", colour: "{{ variables.colour }}"}
    needs_approval: true
  - name: Soft and small
    workflow: soften
    properties: {input: "{{ parent.file }}", radius: 2}
    children_per_parent: 2
    images_per_job: 2
"""
FAILING = "name: Bad\nsteps: [{name: Base, workflow: failing}]\n"
SLOW = "name: Slow\nsteps: [{name: Base, workflow: slow}]\n"


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


class Customer:
    def __init__(self, local_server: LocalServer) -> None:
        self.tenant = local_server.tenant()
        self.environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": self.tenant["key"]}

    def says(self, *arguments: str, code: int = 0) -> Result:
        done = comfyfleet("pipeline", *arguments, environ=self.environ, width=200)
        assert done.code == code, done.out + done.err
        return done

    def call(self, path: str, method: str = "POST") -> Any:
        headers = {"Authorization": f"Bearer {self.tenant['key']}"}
        url = f"{self.environ['COMFYFLEET_URL']}/api/{path}"
        answer = httpx.request(method, url, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.says("status", run_id, "--json").json
        return found


@pytest.fixture
def ada(local_server: LocalServer) -> Customer:
    return Customer(local_server)


def written(folder: Path, text: str = TWO_STEPS) -> str:
    file = folder / "pipeline.yaml"
    file.write_text(text)
    return str(file)


SET = ("--set", "width=48", "--set", "colour=255")


def test_a_pipeline_is_created_and_all_that_is_wrong_is_told(tmp_path: Path, ada: Customer) -> None:
    made = ada.says("create", written(tmp_path))
    assert len(made.out.strip()) == 36
    answer = ada.says("create", written(tmp_path), "--json").json
    assert [each["name"] for each in answer["document"]["steps"]] == ["Base", "Soft and small"]
    broken = TWO_STEPS.replace("negative", "nothing").replace("radius: 2", "radios: 2")
    refused = ada.says("create", written(tmp_path, broken), code=1)
    assert "error: the pipeline has 2 problems:\n" in refused.err
    assert "warning" not in refused.err
    assert "Base.workflow: " in refused.err
    assert "Soft and small.radios: " in refused.err
    assert "was not found" in ada.says("create", "nowhere.yaml", code=1).err
    picture = tmp_path / "picture.yaml"
    picture.write_bytes(b"\x89PNG")
    for command in ("create", "run"):
        assert f"{picture} is not UTF-8 text" in ada.says(command, str(picture), code=1).err


def test_a_run_is_made_judged_shown_and_exported(tmp_path: Path, ada: Customer) -> None:
    pipeline = ada.says("create", written(tmp_path)).out.strip()
    limits = ("--concurrent", "2", "--tokens", "50", "--candidates", "20")
    given = ("--base", "2", *SET, *limits, "--folder", "cats/spring")
    run = ada.says("run", pipeline, *given, "--wait", "--json", code=3).json
    assert run["reason"] == "waiting_for_judgement"
    assert run["limits"]["tokens"] == 50
    assert run["limits"]["candidates"] == 20
    assert run["target_folder"] == "cats/spring"
    first = ada.says("tree", run["id"], "--json").json["tree"][0]["id"]
    ada.call(f"pipeline-runs/{run['id']}/candidates/{first}/approve")
    followed = ada.says("status", run["id"], "--follow", code=3)
    assert "waiting_for_judgement" in followed.err
    assert f"pipeline approve|reject {run['id']} CANDIDATE" in followed.err
    board = ada.says("status", run["id"]).out
    header, base, soft, figures = (" ".join(line.split()) for line in board.splitlines())
    assert header == "name wanted made approved rejected in flight failed"
    assert base == "Base 2 2 1 0 0 0"
    assert soft == "Soft and small 2 2 0 0 0 0"
    assert figures.startswith("active: waiting_for_judgement · 100% succeeded · 7 tokens · 0.0 MB")
    lines = ada.says("tree", run["id"]).out.splitlines()
    assert lines[0] == run["id"]
    assert lines[1] == f"├── {first}  1000  approved"
    assert sum("active" in line for line in lines) == 3
    exported(tmp_path / "all", ada, run["id"], 4)
    exported(tmp_path / "good", ada, run["id"], 1, "--status", "approved")
    none = ada.says("export", run["id"], str(tmp_path / "no"), "--status", "winner", code=1)
    assert "none of its 4 candidates has the status winner" in none.err


def test_no_time_is_left_for_children_of_what_was_rejected(tmp_path: Path, ada: Customer) -> None:
    run_id = ada.says("run", written(tmp_path), "--base", "2", *SET, "--wait", code=3).out.strip()
    good, bad = (each["id"] for each in ada.says("tree", run_id, "--json").json["tree"])
    ada.says("approve", run_id, good)
    ada.says("reject", run_id, bad)
    ada.says("status", run_id, "--follow")
    ended = ada.status(run_id)
    assert (ended["reason"], ended["seconds_left"]) == ("complete", 0)
    assert "left" not in ada.says("status", run_id).out


def test_candidates_are_judged_and_compared_by_commands(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path)
    run = ada.says("run", file, "--base", "4", *SET, "--wait", "--json", code=3).json
    ids = [each["id"] for each in ada.says("tree", run["id"], "--json").json["tree"]]
    none = ada.says("export", run["id"], "-o", str(tmp_path / "no"), "--status", "approved", code=1)
    assert "none of its 4 candidates has the status approved" in none.err
    assert f"{ids[1]} is rejected" in ada.says("reject", run["id"], ids[0], ids[1]).err
    ada.says("undo", run["id"], ids[1])
    pair = ada.says("pair", run["id"], "--json").json["candidates"]
    assert "won" in ada.says("vote", run["id"], pair[0]["id"], pair[1]["id"]).err
    assert f"{ids[2]} is approved" in ada.says("approve", run["id"], ids[2]).err
    scores = {each["id"]: each for each in ada.says("tree", run["id"], "--json").json["tree"]}
    assert scores[pair[0]["id"]]["score"] > scores[pair[1]["id"]]["score"]
    assert scores[ids[0]]["status"] == "rejected"
    assert "cancelled" in ada.says("cancel", run["id"]).err
    assert [each["id"] for each in ada.says("runs", "--json").json] == [run["id"]]
    (pipeline,) = ada.says("list", "--json").json
    ada.says("delete", pipeline["id"])
    assert "there are no pipelines yet" in ada.says("list").err


def exported(folder: Path, ada: Customer, run_id: str, count: int, *more: str) -> None:
    """Copies with their own names, an index of them, and a sheet with all."""
    said = ada.says("export", run_id, str(folder), *more)
    assert f"{count} candidate" in said.err
    index = json.loads((folder / "index.json").read_text())
    assert len(index["candidates"]) == count
    assert index["run"]["id"] == run_id
    files = {each["file"] for each in index["candidates"]}
    found = {each.relative_to(folder).as_posix() for each in folder.rglob("cats/**/*.png")}
    assert found == files
    folders = {each.rpartition("/")[0] for each in files}
    assert folders <= {"cats/spring/base", "cats/spring/soft-and-small"}
    for each in index["candidates"]:
        assert (folder / each["file"]).stat().st_size == each["size"]
    with PIL.Image.open(folder / "contact-sheet.png") as sheet:
        assert sheet.width > 200


def test_a_pipeline_is_stored_once_and_named_by_its_name(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path)
    first, again = (ada.says("create", file, "--json").json["id"] for _ in range(2))
    assert first == again
    run = ada.says("run", "Two steps", "--base", "1", *SET, "--json").json
    assert run["pipeline_id"] == first
    of_it = ada.says("runs", "--pipeline", "Two steps", "--json").json
    assert [each["id"] for each in of_it] == [run["id"]]
    ada.says("cancel", run["id"])
    other = tmp_path / "other.yaml"
    other.write_text(TWO_STEPS.replace("radius: 2", "radius: 3"))
    newer = ada.says("create", str(other), "--json").json["id"]
    assert newer != first
    ada.says("delete", "Two steps")
    assert [each["id"] for each in ada.says("list", "--json").json] == [first]
    assert "pipeline 'Three steps' was not found" in ada.says("delete", "Three steps", code=1).err


def test_runs_exported_to_one_folder_keep_their_own_index(tmp_path: Path, ada: Customer) -> None:
    file, out = written(tmp_path), tmp_path / "out"
    runs = [
        ada.says(
            "run", file, "--base", "1", *SET, "--folder", name, "--wait", "--json", code=3
        ).json
        for name in ("first", "second")
    ]
    for run in [*runs, *runs]:
        ada.says("export", run["id"], "-o", str(out))
    indexes = {json.loads(path.read_text())["run"]["id"] for path in out.glob("index*.json")}
    assert indexes == {run["id"] for run in runs}
    assert len(list(out.glob("contact-sheet*.png"))) == 2


def test_a_missing_file_is_named_as_a_file(tmp_path: Path, ada: Customer) -> None:
    missing = str(tmp_path / "missing.yaml")
    assert f"file {missing} was not found" in ada.says("run", missing, code=1).err


def test_a_file_is_run_and_exported_by_one_command(tmp_path: Path, ada: Customer) -> None:
    """As a process of its own, as people have it."""
    file = written(tmp_path, TWO_STEPS.replace("    needs_approval: true\n", ""))
    arguments = ("run", file, *SET, "--export", "out")
    said = finish("pipeline", *arguments, folder=tmp_path, environ=ada.environ)
    run = ada.status(said.strip())
    assert run["reason"] == "complete"
    assert len(json.loads((tmp_path / "out" / "index.json").read_text())["candidates"]) == 3


def test_a_run_submits_nothing_after_its_time(tmp_path: Path, ada: Customer) -> None:
    given = (*SET, "--until", "2026-01-01T06:00:00+00:00", "--wait", "--json")
    run = ada.says("run", written(tmp_path), *given).json
    assert run["reason"] == "time_up"
    until = datetime.fromisoformat(run["limits"]["until"])
    assert until == datetime(2026, 1, 1, 6, tzinfo=UTC)
    assert run["steps"][0]["made"] == 0
    answer = ada.call(f"pipeline-runs/{run['id']}", "GET")
    as_json = json.dumps(answer, indent=2, ensure_ascii=False) + "\n"
    assert ada.says("status", run["id"], "--json").out == as_json
    assert ada.says("run", written(tmp_path), *SET, "--until", "tomorrow", code=2).err


def test_a_run_that_is_waited_for_tells_its_id_and_why_it_waits(
    tmp_path: Path, local_server: LocalServer
) -> None:
    poor = local_server.tenant(0)
    environ = {"COMFYFLEET_URL": local_server.url, "COMFYFLEET_KEY": poor["key"]}
    given = ("run", written(tmp_path), *SET, "--wait")
    with started("pipeline", *given, folder=tmp_path, **environ) as waiting:
        waiting.wait_for_line("warning: run [0-9a-f-]{36} is waiting: Insufficient token balance")
        waiting.wait_for_line(
            "error: run .* can't continue: Insufficient token balance. Resolve this problem"
        )
        assert waiting.process.wait(60) == 3


def test_a_run_needs_its_variables(tmp_path: Path, ada: Customer) -> None:
    refused = ada.says("run", written(tmp_path), "--set", "width=48", code=1)
    assert "colour" in refused.err
    bad = ada.says("run", written(tmp_path), "--set", "width", code=1)
    assert "--set name=value" in bad.err


def test_a_run_is_paused_and_resumed(tmp_path: Path, ada: Customer) -> None:
    run_id = ada.says("run", written(tmp_path, SLOW), "--base", "2").out.strip()
    assert "the run is paused" in ada.says("pause", run_id).err
    paused = ada.status(run_id)
    assert (paused["status"], paused["pause_reason"]) == ("paused", "asked")
    assert "pause reason: asked" in ada.says("status", run_id).out
    assert ada.says("resume", run_id, "--json").json["status"] == "active"
    assert ada.status(run_id)["pause_reason"] is None
    ada.call(f"pipeline-runs/{run_id}/cancel")
    assert "cancelled" in ada.says("resume", run_id, code=1).err


def test_failed_jobs_are_made_again_when_somebody_says_so(tmp_path: Path, ada: Customer) -> None:
    file = written(tmp_path, FAILING)
    failed = ada.says("run", file, "--base", "2", "--wait", "--json", code=3)
    assert "2 jobs have failed" in failed.err
    assert f"comfyfleet pipeline retry {failed.json['id']}" in failed.err
    run = failed.json
    assert (run["reason"], run["steps"][0]["failed"]) == ("failed", 2)
    assert "0% succeeded" in ada.says("status", run["id"]).out
    assert "2 jobs are retried" in ada.says("retry", run["id"]).err
    ada.says("status", run["id"], "--follow", code=3)
    again = ada.status(run["id"])
    assert again["jobs"] == {"failed": 2, "retried": 2}
    unknown = ada.says("retry", run["id"], "--job", run["id"], code=1)
    assert "no failed job" in unknown.err


def test_a_pipeline_that_is_not_there_says_where_they_are_listed(ada: Customer) -> None:
    said = ada.says("run", "nosuch", code=1).err
    assert "pipeline 'nosuch' was not found" in said
    assert "comfyfleet pipeline list" in said


def test_a_run_of_others_is_not_there(
    tmp_path: Path, local_server: LocalServer, ada: Customer
) -> None:
    run_id = ada.says("run", written(tmp_path, FAILING)).out.strip()
    eve = Customer(local_server)
    for command in ("status", "pause", "resume", "tree", "retry"):
        assert "was not found" in eve.says(command, run_id, code=1).err
    assert "was not found" in eve.says("export", run_id, str(tmp_path), code=1).err


@pytest.mark.parametrize("command", ["graph", "pipeline"])
def test_a_key_that_is_missing_or_wrong_is_told_apart(
    local_server: LocalServer, command: str
) -> None:
    word = {"graph": "show", "pipeline": "status"}[command]
    for url, key, said in (
        ("http://fleet.invalid", "", "COMFYFLEET_KEY is not set"),
        (local_server.url, "cf_wrong", "COMFYFLEET_KEY must be"),
        (local_server.url, local_server.admin_key, "this key doesn't belong to a customer"),
    ):
        environ = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
        done = comfyfleet(command, word, "7c1f0000-0000-4000-8000-000000000000", environ=environ)
        assert done.code != 0
        assert said in done.err
        assert "your API key" in done.err or key == local_server.admin_key
