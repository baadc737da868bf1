"""One person with one ComfyUI: two commands lead from nothing to pictures, without a tenant, a key or tokens."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.support.server.command_process import CommandProcess, started
from tests.support.server.commands import EXAMPLES, comfyfleet

from comfyfleet.engine import serve_in_thread
from comfyfleet.server.http.local_access import tells_users

PIPELINE = """
name: Blue pictures
steps:
  - name: Base
    workflow: workflows/negative.json
    properties: {width: "{{ variables.width }}", height: 64}
  - name: Soften
    workflow: workflows/soften.json
    properties: {input: "{{ parent.file }}"}
    images_per_job: 2
    children_per_parent: 2
"""
WAIT_SECONDS_MAX = 90.0
COMMAND = (sys.executable, "-c", "from comfyfleet.cli import main; main()")
pytestmark = pytest.mark.skipif(not tells_users(), reason="this system needs the printed address")


@pytest.fixture(scope="module")
def comfyui_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve_in_thread(data=tmp_path_factory.mktemp("comfyui")) as comfyui:
        yield comfyui.url


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, comfyui_url: str) -> Iterator[CommandProcess]:
    folder = tmp_path_factory.mktemp("up")
    with started("up", "--port", "0", folder=folder, COMFYUI_BASE_URL=comfyui_url) as running:
        running.wait_for_line("Any ComfyUI client")
        yield running


@pytest.fixture
def url(up: CommandProcess) -> str:
    return up.wait_for_line(r"Control plane at (\S+)")[1]


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    (tmp_path / "workflows").symlink_to(EXAMPLES / "workflows")
    file = tmp_path / "pipeline.yaml"
    file.write_text(PIPELINE)
    return file


def test_two_commands_lead_from_nothing_to_pictures(
    up: CommandProcess, url: str, pipeline: Path, tmp_path: Path
) -> None:
    pictures = tmp_path / "pictures"
    words = ("run", str(pipeline), "--base", "2", "--set", "width=64", "--folder", "blue")
    done = comfyfleet(
        "pipeline", *words, "--follow", str(pictures), environ={"COMFYFLEET_URL": url}
    )
    assert done.code == 0, done.err
    assert len(list((pictures / "blue" / "base").iterdir())) == 2
    assert len(list((pictures / "blue" / "soften").iterdir())) == 4
    assert (pictures / "contact-sheet.png").is_file()
    run = json.loads((pictures / "index.json").read_text())
    assert run["run"]["tokens"] == 0, "the local user pays nothing"

    candidate = run["candidates"][0]["id"]
    shown = comfyfleet(
        "pipeline", "prompt", done.out.split()[0], candidate, environ={"COMFYFLEET_URL": url}
    )
    assert shown.json["2"]["inputs"]["width"] == 64, shown.err


def test_the_prompt_of_a_candidate_names_the_files_that_its_backend_read(
    url: str, comfyui_url: str, pipeline: Path, tmp_path: Path
) -> None:
    words = ("run", str(pipeline), "--base", "1", "--set", "width=64", "--folder", "replayed")
    environ = {"COMFYFLEET_URL": url}
    done = comfyfleet(
        "pipeline", *words, "--follow", str(tmp_path), environ={**environ, "COMFYFLEET_KEY": ""}
    )
    assert done.code == 0, done.err
    run_id = done.out.split()[0]
    candidates = json.loads((tmp_path / "index.json").read_text())["candidates"]
    child = next(candidate for candidate in candidates if candidate["parent"])
    shown = comfyfleet("pipeline", "prompt", run_id, child["id"], environ=environ)
    loaded = [node for node in shown.json.values() if node["class_type"] == "LoadImage"]
    name = loaded[0]["inputs"]["image"]
    history = httpx.get(f"{comfyui_url}/history").json()
    assert child["provider_job_id"] in history, "ComfyUI knows the run by this id"
    sent = history[child["provider_job_id"]]["prompt"][2]
    assert name in [node["inputs"].get("image") for node in sent.values()]


SLOW = {
    "1": {
        "class_type": "ComfyfleetSteps",
        "inputs": {"steps": 6000, "step_ms": 100, "previews": False},
    },
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "slow"}},
}
SLOW_PIPELINE = """
name: Slow end
steps:
  - name: Base
    workflow: workflows/negative.json
    properties: {width: 64, height: 64}
  - name: Slow
    workflow: slow.json
"""


def test_pictures_appear_while_the_run_works(
    up: CommandProcess, url: str, pipeline: Path, tmp_path: Path
) -> None:
    """The second step takes ten minutes. The picture of the first one is there long before the run ends."""
    (tmp_path / "slow.json").write_text(json.dumps(SLOW))
    pipeline.write_text(SLOW_PIPELINE)
    folder = tmp_path / "out"
    words = ("run", str(pipeline), "--base", "1", "--follow", str(folder))
    process = subprocess.Popen(
        [*COMMAND, "pipeline", *words],
        env={**os.environ, "COMFYFLEET_URL": url, "COMFYFLEET_KEY": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        run_id = process.stdout.readline().strip()
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        try:
            while not list(folder.rglob("*.png")):
                assert process.poll() is None, "it ended before a picture was there"
                assert time.monotonic() < deadline, "no picture is there while the run works"
                time.sleep(0.1)
            assert process.poll() is None
            assert not (folder / "index.json").exists()
        finally:
            process.kill()
            stopped = comfyfleet("pipeline", "cancel", run_id, environ={"COMFYFLEET_URL": url})
    assert stopped.code == 0, stopped.err


def test_an_equal_workflow_is_registered_once(up: CommandProcess, url: str, pipeline: Path) -> None:
    environ = {"COMFYFLEET_URL": url}
    first, second = (
        comfyfleet("pipeline", "create", str(pipeline), environ=environ) for _ in range(2)
    )
    assert first.out == second.out != "", first.err


def test_a_key_of_a_tenant_uses_no_workflow_files(
    up: CommandProcess, url: str, pipeline: Path
) -> None:
    key = up.wait_for_line(r"COMFYFLEET_KEY=(\w{64})")[1]
    admin = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
    made = comfyfleet("admin", "tenants", "create", "Ada", "--json", environ=admin)
    customer = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": made.json["key"]}
    refused = comfyfleet("pipeline", "run", str(pipeline), environ=customer)
    assert refused.code == 1
    assert "only the local user of `comfyfleet up`" in refused.lines[0]


def test_an_operators_commands_need_a_key(up: CommandProcess, url: str) -> None:
    refused = comfyfleet("admin", "fleets", "list", environ={"COMFYFLEET_URL": url})
    assert refused.code == 1
    assert "COMFYFLEET_KEY is not set" in refused.lines[0]


def test_a_picture_of_ones_own_is_uploaded(up: CommandProcess, url: str, tmp_path: Path) -> None:
    (tmp_path / "workflows").symlink_to(EXAMPLES / "workflows")
    file = tmp_path / "own.yaml"
    file.write_text(
        "name: Own\nsteps:\n  - name: Soften\n    workflow: workflows/soften.json\n"
        '    images_per_job: 2\n    properties: {input: "{{ variables.photo }}"}\n'
    )
    photo = EXAMPLES / "inputs" / "photo.png"
    environ = {"COMFYFLEET_URL": url}
    run = ("pipeline", "run", str(file), "--base", "2", "--wait")
    by_file = comfyfleet(*run, "--set", f"photo=@{photo}", environ=environ)
    assert by_file.code == 0, by_file.err
    uploaded = comfyfleet("upload", str(photo), environ=environ)
    assert uploaded.code == 0, uploaded.err
    by_id = comfyfleet(*run, "--set", f"photo={uploaded.out.strip()}", environ=environ)
    assert by_id.code == 0, by_id.err
    for wrong, says in {
        "photo=@nowhere.png": "file nowhere.png was not found",
        "photo=/a/photo.png": "must be the id of a media item or an upload",
        "photo=7": "must be the id of a media item or an upload",
        "photo=00000000-0000-4000-8000-000000000000": "was not found",
        "other=1": "the run has no variable 'photo'",
    }.items():
        refused = comfyfleet(*run, "--set", wrong, environ=environ)
        assert (refused.code, refused.out) == (1, ""), wrong
        assert says in refused.err


def test_a_target_folder_never_leads_out_of_the_folder(
    up: CommandProcess, url: str, pipeline: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "inside"
    folder.mkdir()
    (folder / "blue").symlink_to(outside)
    words = ("run", str(pipeline), "--set", "width=64", "--follow", str(folder))
    environ = {"COMFYFLEET_URL": url}
    for name in ("../outside", "/etc"):
        refused = comfyfleet("pipeline", *words, "--folder", name, environ=environ)
        assert refused.code == 1, name
    linked = comfyfleet("pipeline", *words, "--folder", "blue", environ=environ)
    assert linked.code == 1
    assert "leads out of" in linked.lines[-1]
    assert not list(outside.iterdir())
