"""`comfyfleet up --backend URL --backend URL`: nothing configured, and backends that come and go."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.gateway.test_clients import (
    COMFY_CLI,
    PHOTO,
    check_inverted,
    invert,
    invert_at_once,
)
from tests.support.backends.engine_client import EngineClient, SocketClient, open_engine_client
from tests.support.backends.nodes import node_type
from tests.support.server.asgi import free_listener, url_of
from tests.support.server.clients import client_environ, python_of
from tests.support.server.command_process import CommandProcess, started
from tests.support.server.commands import comfyfleet
from tests.support.server.gateway import PROMPT
from tests.support.server.processes import Process

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.node import Context, EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry

WAIT_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.02


def wait_for(is_so: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not (found := is_so()):
        assert time.monotonic() < deadline, what
        time.sleep(LOOK_SECONDS)
    return found


@contextmanager
def engine_process(folder: Path, name: str) -> Iterator[tuple[Process, str]]:
    arguments = ("engine", "--port", "0", "--data", str(folder / name))
    engine = Process(name, *arguments, folder=folder, environ={})
    try:
        yield engine, engine.wait_for_line(r"Engine at (http://[\d.:]+)")[1]
    finally:
        engine.kill()


@contextmanager
def up(
    folder: Path, *backends: str, port: int = 0, comfyui_folders: Sequence[Path] = ()
) -> Iterator[tuple[CommandProcess, str]]:
    """With nothing configured, and no key."""
    words = [word for url in backends for word in ("--backend", url)]
    words += [word for each in comfyui_folders for word in ("--comfyui-folder", str(each))]
    with started("up", "--port", str(port), *words, folder=folder) as running:
        yield running, running.wait_for_line(r"Control plane at (\S+)")[1]


def wait_until_ready(url: str) -> None:
    wait_for(lambda: httpx.get(f"{url}/object_info").json(), "no backend has told its node types")


def free_port() -> int:
    with free_listener() as listener:
        return int(url_of(listener).rpartition(":")[2])


def slow_invert(milliseconds: int) -> dict[str, Any]:
    prompt = invert()
    prompt["2"]["inputs"] |= {"steps": 20, "step_ms": milliseconds // 20}
    return prompt


def running_at(url: str) -> bool:
    return bool(httpx.get(f"{url}/queue").json()["queue_running"])


def test_a_run_ends_on_another_backend_when_its_own_is_killed(tmp_path: Path) -> None:
    """comfy-cli waits for its run, and does not notice."""
    comfy = python_of(COMFY_CLI).parent / "comfy"
    (tmp_path / "prompt.json").write_text(json.dumps(slow_invert(2_000)))
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(tmp_path, name)) for name in ("one", "two")]
        _, url = stack.enter_context(up(tmp_path, *(url for _, url in engines)))
        wait_until_ready(url)
        with PHOTO.open("rb") as photo:
            httpx.post(f"{url}/upload/image", files={"image": ("photo.png", photo)})
        client = subprocess.Popen(
            [comfy, "--json", "run", "--workflow", "prompt.json", "--wait"],
            cwd=tmp_path,
            env=client_environ(tmp_path, {"COMFY_LOCAL_URL": url, "CI": "1"}),
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(client.kill)
        victim = wait_for(
            lambda: next((each for each in engines if running_at(each[1])), None),
            "no engine runs it",
        )
        victim[0].kill()
        told, _ = client.communicate(timeout=WAIT_SECONDS_MAX)
        ran = json.loads(told)["data"]
        assert ran["status"] == "completed", told
        (picture,) = ran["outputs_by_node"]["4"]
        check_inverted(httpx.get(picture).content)
        (entry,) = httpx.get(f"{url}/history").json().values()
        messages = [kind for kind, _ in entry["status"]["messages"]]
        assert messages == ["execution_start", "execution_cached", "execution_success"]


def test_it_says_where_it_is_and_how_to_point_a_client_to_it(tmp_path: Path) -> None:
    with serve_in_thread() as engine, up(tmp_path, engine.url) as (running, url):
        running.wait_for_line(f"Any ComfyUI client can use {url} as its server")
        running.wait_for_line(f"COMFY_LOCAL_URL={url} comfy run")
        wait_until_ready(url)
        assert httpx.get(url.replace("127.0.0.1", "localhost") + "/queue").status_code == 200
        elsewhere = httpx.get(f"{url}/queue", headers={"host": "evil.example"})
        assert elsewhere.status_code in (401, 403)


@pytest.mark.parametrize("is_named", [True, False])
def test_the_node_cache_keeps_uploads_where_the_folder_of_the_backend_is_named(
    tmp_path: Path, *, is_named: bool
) -> None:
    home = tmp_path / "comfyui"
    prompt = invert_at_once()
    prompt["4"] = {"class_type": "PreviewImage", "inputs": {"images": ["3", 0]}}
    with serve_in_thread(data=home) as engine:
        folders = [home] if is_named else []
        with up(tmp_path, engine.url, comfyui_folders=folders) as (_, url):
            wait_until_ready(url)
            with PHOTO.open("rb") as photo:
                httpx.post(f"{url}/upload/image", files={"image": ("photo.png", photo)})
            with open_engine_client(url) as client:
                cached = [_cached_nodes(client, prompt) for _ in range(2)]
    assert cached == [[], ["1", "3", "4"] if is_named else []]


def _cached_nodes(client: EngineClient, prompt: dict[str, Any]) -> list[str]:
    prompt_id = client.submit(prompt)
    client.wait_idle()
    messages = client.history(prompt_id)["status"]["messages"]
    return sorted(
        node for kind, data in messages if kind == "execution_cached" for node in data["nodes"]
    )


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--comfyui-folder", "comfyui"), "there are 1 --comfyui-folder options, but 2"),
        (("--comfyui-folder", "comfyui", "--comfyui-folder", "."), "has no folder `output`"),
    ],
)
def test_folders_that_fit_no_backends_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "comfyui" / "output").mkdir(parents=True)
    backends = ("--backend", "http://127.0.0.1:1", "--backend", "http://127.0.0.1:2")
    done = comfyfleet("up", "--port", "0", *backends, *words)
    assert done.code == 1
    assert reason in done.err


def test_a_backend_that_is_down_at_the_start_joins_when_it_comes(tmp_path: Path) -> None:
    port = free_port()
    late = f"http://127.0.0.1:{port}"
    with serve_in_thread() as engine, up(tmp_path, late, engine.url) as (running, url):
        running.wait_for_line(f"waiting for the backend at {late}")
        wait_until_ready(url)
        with open_engine_client(url) as client:
            first = client.submit(PROMPT)
            client.wait_idle()
            assert client.history(first)["status"]["completed"]
            with serve_in_thread(port=port) as joined:
                wait_for(lambda: _runs_at(client, joined.url), "the late one runs nothing")


def _runs_at(client: EngineClient, url: str) -> bool:
    for color in range(4):
        prompt = {
            **PROMPT,
            "1": {**PROMPT["1"], "inputs": {**PROMPT["1"]["inputs"], "color": color}},
        }
        client.submit(prompt)
    client.wait_idle()
    return bool(_history(url))


def test_prompts_that_wait_outlive_a_restart_and_their_client_hears_of_them(tmp_path: Path) -> None:
    port = free_port()
    prompt = slow_invert(400)
    del prompt["1"], prompt["2"]["inputs"]["image"]
    with serve_in_thread() as engine:
        with up(tmp_path, engine.url, port=port) as (first, url), open_engine_client(url) as client:
            wait_until_ready(url)
            ear = client.listen("me")
            ids = [client.submit(prompt, client_id="me") for _ in range(3)]
            ear.wait("progress", {"prompt_id": ids[0]})
            first.process.send_signal(signal.SIGKILL)
        with up(tmp_path, engine.url, port=port) as (_, url), open_engine_client(url) as client:
            ear = client.listen("me")
            wait_for(lambda: ends_heard(ear) == {*ids}, "it did not hear of all")
            assert {*client.http.get("/history").json()} == {*ids}


def ends_heard(ear: SocketClient) -> set[str]:
    texts = [event for event in ear.events if isinstance(event, list)]
    return {
        data["prompt_id"] for kind, data in texts if kind == "executing" and data["node"] is None
    }


MODELS = {
    "one": ["a.safetensors", "both.safetensors"],
    "two": ["b.safetensors", "both.safetensors"],
}


def with_models(models: list[str]) -> Mapping[str, EngineNodeType]:
    def load(context: Context, ckpt_name: str) -> NodeResult:
        return NodeResult((ckpt_name,))

    name = "CheckpointLoaderSimple"
    loader = node_type(name, load, {"ckpt_name": [models]}, outputs=("MODEL",))
    return {**registry(), name: loader}


def of_model(name: str) -> dict[str, Any]:
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": name}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 0]}},
    }


def test_prompts_go_to_the_backend_that_has_their_model(tmp_path: Path) -> None:
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(serve_in_thread(nodes=with_models(models)))
            for name, models in MODELS.items()
        }
        _, url = stack.enter_context(up(tmp_path, *(each.url for each in engines.values())))
        wait_until_ready(url)
        client = stack.enter_context(open_engine_client(url))
        wanted = {"a.safetensors", "b.safetensors", "both.safetensors"}
        wait_for(lambda: _choices(client) == wanted, "the models of both are not told")
        for name in ("a.safetensors", "b.safetensors") * 3:
            client.submit(of_model(name))
        client.wait_idle()
        ran = {
            name: {entry["prompt"][2]["1"]["inputs"]["ckpt_name"] for entry in _history(each.url)}
            for name, each in engines.items()
        }
        assert ran == {"one": {"a.safetensors"}, "two": {"b.safetensors"}}
        refused = client.http.post("/prompt", json={"prompt": of_model("c.safetensors")})
        assert refused.status_code == 400
        (error,) = refused.json()["node_errors"]["1"]["errors"]
        assert error["type"] == "value_not_in_list"


def _choices(client: EngineClient) -> set[str]:
    info = client.http.get("/object_info/CheckpointLoaderSimple").json()
    return set(info["CheckpointLoaderSimple"]["input"]["required"]["ckpt_name"][0])


def _history(url: str) -> list[Any]:
    return [*httpx.get(f"{url}/history").json().values()]
