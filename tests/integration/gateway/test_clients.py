"""Programs of others that talk to a ComfyUI, unmodified, through a gateway with two engines behind it.

Each uploads a picture, runs a prompt on it and downloads the result; each sends its key in another way.
"""

import base64
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from tests.support.server.clients import (
    client_environ,
    node_command,
    node_folder,
    python_of,
    run_client,
)
from tests.support.server.commands import EXAMPLES
from tests.support.server.gateway import GatewayProcess, GatewayUser

COMFY_CLI = "comfy-cli==1.23.0"
SIMPLIFIED = "comfy-api-simplified==1.6.0"
SAINTNO = "@saintno/comfyui-sdk@0.3.1"
STABLE_CANVAS = "@stable-canvas/comfyui-client@1.5.9"
MCP = "comfyui-mcp@0.52.203"

SCRIPTS = Path(__file__).parent / "clients"
PHOTO = EXAMPLES / "inputs" / "photo.png"
NOTHING_QUEUED: Mapping[str, Any] = {"queue_running": [], "queue_pending": []}
WAIT_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.05


def invert(image: str = "photo.png") -> dict[str, Any]:
    """Long enough for live messages, with previews that nobody has asked for."""
    steps = {"steps": 4, "step_ms": 60, "previews": True, "image": ["1", 0]}
    nodes: dict[str, Any] = {
        "1": ("Load", "LoadImage", {"image": image}),
        "2": ("Wait", "ComfyfleetSteps", steps),
        "3": ("Invert", "ImageInvert", {"image": ["2", 0]}),
        "4": ("Save", "SaveImage", {"images": ["3", 0], "filename_prefix": "inverted"}),
    }
    return {
        node_id: {"class_type": kind, "inputs": inputs, "_meta": {"title": title}}
        for node_id, (title, kind, inputs) in nodes.items()
    }


def invert_at_once() -> dict[str, Any]:
    """With one output only."""
    nodes = invert()
    del nodes["2"]
    nodes["3"]["inputs"] = {"image": ["1", 0]}
    return nodes


def check_inverted(picture: bytes) -> None:
    with PIL.Image.open(PHOTO) as photo, PIL.Image.open(BytesIO(picture)) as made:
        wanted = 255 - np.asarray(photo.convert("RGB"), dtype=int)
        # No folder of the backend, so that the picture can be opened in an editor and run again.
        assert "comfyfleet/" not in made.text["prompt"]  # type: ignore[attr-defined]
        # A pixel may differ by one, as floats become bytes.
        assert np.abs(np.asarray(made.convert("RGB"), dtype=int) - wanted).max() <= 1


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "prompt.json").write_text(json.dumps(invert()))
    return tmp_path


def run_script(user: GatewayUser, home: Path, *command: str) -> Any:
    """What it told, and the picture that it saved."""
    names = (user.url, user.key, "prompt.json", str(PHOTO), "result.png")
    told = json.loads(run_client([*command, *names], folder=home).stdout)
    check_inverted((home / "result.png").read_bytes())
    return told


def run_node(script: str, package: str, user: GatewayUser, home: Path) -> Any:
    modules = node_folder(package) / "node_modules"
    (home / "node_modules").symlink_to(modules)
    (home / script).write_text((SCRIPTS / script).read_text())
    return run_script(user, home, *node_command(home / script))


def test_comfy_cli_without_a_key_on_the_same_machine(gateway: GatewayProcess, home: Path) -> None:
    comfy = python_of(COMFY_CLI).parent / "comfy"
    environ = {"COMFY_LOCAL_URL": gateway.url, "CI": "1"}

    def run(*arguments: str) -> Any:
        done = run_client([comfy, "--json", *arguments], folder=home, environ=environ)
        return json.loads(done.stdout)["data"]

    (uploaded,) = run("upload", str(PHOTO))["uploads"]
    (home / "prompt.json").write_text(json.dumps(invert(uploaded["cloud_name"])))
    ran = run("run", "--workflow", "prompt.json", "--wait")
    assert ran["status"] == "completed"
    assert sorted(ran["executed_node_ids"]) == ["1", "2", "3", "4"]
    (saved,) = run("download", ran["prompt_id"], "--out-dir", "results")["files"]
    check_inverted(Path(saved["path"]).read_bytes())
    (job,) = [each for each in run("jobs", "ls")["jobs"] if each["prompt_id"] == ran["prompt_id"]]
    assert (job["status"], job["outputs"]) == ("completed", 1)


def test_comfy_api_simplified_by_user_and_password(user: GatewayUser, home: Path) -> None:
    """It listens only after it has submitted, and takes every binary frame for a result."""
    python = str(python_of(SIMPLIFIED))
    told = run_script(user, home, python, str(SCRIPTS / "simplified.py"))
    assert told["uploaded"]["subfolder"] == "default_upload_folder"
    assert told["name"] == "inverted_00001_.png"
    assert told["queue"] == NOTHING_QUEUED
    assert told["load"] == ["LoadImage"]


def test_saintno_comfyui_sdk_by_bearer_key(user: GatewayUser, home: Path) -> None:
    """What it tells after the first step depends on how busy this machine is."""
    told = run_node("saintno.mjs", SAINTNO, user, home)
    assert (told["told"][0], told["told"][-1]) == ("pending", "finished")
    assert {*told["told"]} <= {"pending", "start", "progress", "output", "finished"}
    picture = {"filename": "inverted_00001_.png", "subfolder": "", "type": "output"}
    assert told["picture"] == picture
    assert told["queue"] == NOTHING_QUEUED


def test_stable_canvas_client_by_keys_in_its_addresses(user: GatewayUser, home: Path) -> None:
    """It ends with the first output, and takes previews for results."""
    (home / "prompt.json").write_text(json.dumps(invert_at_once()))
    told = run_node("stable_canvas.mjs", STABLE_CANVAS, user, home)
    view = f"{user.url_with_key}/view?filename=inverted_0000{{}}_.png&subfolder=&type=output"
    assert told["pictures"] == [view.format(1)]
    assert told["polled"] == [view.format(2)]
    assert told["queue"] == {"Running": [], "Pending": []}
    assert told["runs"] == 2


class McpSession:
    """Calls the tools of an MCP server over its standard input and output."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._number = 0
        about = {"name": "tests", "version": "1"}
        self.call("initialize", protocolVersion="2024-11-05", capabilities={}, clientInfo=about)
        self._send({"method": "notifications/initialized", "params": {}})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if answer.get("id") == self._number:
                return answer["result"]
        raise AssertionError("the MCP server has gone")

    def tool(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        result = self.call("tools/call", name=name, arguments=arguments)
        assert not result.get("isError"), result
        parts: list[dict[str, Any]] = result["content"]
        return parts

    def text(self, name: str, **arguments: Any) -> str:
        return str(self.tool(name, **arguments)[0]["text"])

    def wait_until_done(self, prompt_id: str) -> Any:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while True:
            status = json.loads(self.text("queue", action="status", prompt_id=prompt_id))
            if status["done"]:
                return status
            assert time.monotonic() < deadline, status
            time.sleep(LOOK_SECONDS)


@contextmanager
def open_mcp(user: GatewayUser, home: Path) -> Iterator[McpSession]:
    server = node_folder(MCP) / "node_modules" / "comfyui-mcp" / "dist" / "index.js"
    environ = {"COMFYUI_URL": user.url, "COMFYUI_AUTH_TOKEN": user.key, "TMPDIR": str(home)}
    process = subprocess.Popen(
        node_command(server),
        cwd=home,
        env=client_environ(home, environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield McpSession(process)
    finally:
        process.kill()
        process.communicate()


def test_comfyui_mcp_by_bearer_key(user: GatewayUser, home: Path) -> None:
    with open_mcp(user, home) as mcp:
        uploaded = mcp.text("upload_image", action="image", source_path=str(PHOTO))
        assert "Filename: photo.png" in uploaded
        queued = json.loads(mcp.text("enqueue_workflow", action="enqueue", workflow=invert()))
        prompt_id = queued["prompt_id"]
        status = mcp.wait_until_done(prompt_id)
        assert status["status_str"] == "success"
        history = mcp.text("get_history", action="list", prompt_id=prompt_id)
        name = re.search(r"images → \*\*(\S+)", history)
        assert name is not None, history
        _, picture = mcp.tool("get_image", action="get", filename=name[1])
        check_inverted(base64.b64decode(picture["data"]))
