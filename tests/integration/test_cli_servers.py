"""`--server`: node types come from a running ComfyUI, over real sockets."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.server.commands import NEGATIVE, OBJECT_INFO, comfyfleet
from tests.support.server.small_http import Answer, SmallServer, serving

from comfyfleet.cli.context import ServerCache, base_url, url_without_password

REMOTE = {"route": "/internal/files/output", "query_params": {"sort": "true"}}
ASKED = "/internal/files/output?sort=true"
REMOTE_NODE = {"input": {"required": {"image": ["COMBO", {"remote": REMOTE}]}}, "output": []}


@pytest.fixture
def comfyui() -> Iterator[SmallServer]:
    with serving({"/object_info": Answer(Path(OBJECT_INFO).read_bytes())}) as server:
        yield server


@pytest.fixture
def remote_flow(tmp_path: Path, comfyui: SmallServer) -> str:
    """A workflow with a node whose choices the server keeps under a route."""
    comfyui.answers["/object_info"] = Answer(json.dumps({"Pick": REMOTE_NODE}).encode())
    path = tmp_path / "flow.json"
    node = {"id": 1, "type": "Pick", "widgets_values": ["b.png", False]}
    path.write_text(json.dumps({"nodes": [node], "links": [], "version": 0.4}))
    return str(path)


def chosen(prompt: Any) -> Any:
    return prompt["1"]["inputs"]["image"]


def test_a_server_tells_its_node_types(comfyui: SmallServer) -> None:
    result = comfyfleet("convert", NEGATIVE, "--server", comfyui.url)
    assert len(result.json) == 4


def test_the_environment_names_the_server(comfyui: SmallServer) -> None:
    result = comfyfleet("convert", NEGATIVE, environ={"COMFYUI_BASE_URL": comfyui.url})
    assert len(result.json) == 4


def test_a_file_goes_before_the_environment(comfyui: SmallServer) -> None:
    environ = {"COMFYUI_BASE_URL": comfyui.url}
    assert comfyfleet("convert", NEGATIVE, "--object-info", OBJECT_INFO, environ=environ).code == 0
    assert not comfyui.asked


def test_a_server_is_asked_once(comfyui: SmallServer) -> None:
    servers = ServerCache()
    for command in ("convert", "inspect", "inspect"):
        assert comfyfleet(command, NEGATIVE, "--server", comfyui.url, servers=servers).code == 0
    assert comfyui.asked == {"/object_info": 1}


def test_choices_that_the_server_keeps_elsewhere_are_fetched(
    comfyui: SmallServer, remote_flow: str
) -> None:
    comfyui.answers[ASKED] = Answer(b'["a.png", "b.png"]')
    result = comfyfleet("convert", remote_flow, "--server", comfyui.url)
    assert chosen(result.json) == "b.png"
    assert result.err == ""
    assert comfyui.asked[ASKED] == 1


@pytest.mark.parametrize(
    "answer",
    [
        Answer(b"gone", 500),
        Answer(b'{"not": "a list"}'),
        Answer(b"<html>", content_type="text/html"),
    ],
    ids=["error", "no list", "no JSON"],
)
def test_choices_that_cannot_be_fetched_are_a_warning(
    comfyui: SmallServer, remote_flow: str, answer: Answer
) -> None:
    comfyui.answers[ASKED] = answer
    result = comfyfleet("convert", remote_flow, "--server", comfyui.url)
    assert result.code == 0
    assert result.lines[0].startswith("warning: the choices at /internal/files/output could not")


def test_choices_on_another_host_are_not_fetched(comfyui: SmallServer, remote_flow: str) -> None:
    elsewhere = {"route": f"{comfyui.url}/secret"}
    node = {"input": {"required": {"image": ["COMBO", {"remote": elsewhere}]}}, "output": []}
    comfyui.answers["/object_info"] = Answer(json.dumps({"Pick": node}).encode())
    result = comfyfleet("convert", remote_flow, "--server", comfyui.url)
    assert result.code == 0
    assert "are not fetched" in result.lines[0]
    assert comfyui.asked == {"/object_info": 1}


def test_a_number_alone_is_no_address() -> None:
    """It would be read as an IP address."""
    result = comfyfleet("convert", NEGATIVE, "--server", "21600")
    assert result.code == 1
    assert result.lines[0] == "error: 21600 is not the URL of a server"
    assert "http://127.0.0.1:21600" in result.lines[1]


def test_https_at_a_port_that_speaks_http_says_so(comfyui: SmallServer) -> None:
    url = comfyui.url.replace("http://", "https://")
    for command in (("convert", NEGATIVE), ("run", NEGATIVE)):
        result = comfyfleet(*command, "--server", url)
        assert result.code == 1
        assert "the server doesn't support TLS; use http:// instead of https://" in result.lines[0]


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        result = comfyfleet("convert", NEGATIVE, "--server", url)
    assert result.code == 1
    assert result.lines[0].startswith(f"error: no server responds at {url}: ")
    assert "Is ComfyUI running there?" in result.lines[1]


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (Answer(b"no", 404), "404 Not Found"),
        (Answer(b"<!doctype html>", content_type="text/html; charset=utf-8"), "text/html that begins with '<!doctype html>'"),
        (Answer(b'{"detail": 1}'), "it has the keys detail"),
        (Answer(b"[1]"), "it isn't a JSON object"),
    ],
    ids=["404", "web page", "another API", "a list"],
)  # fmt: skip
def test_a_server_that_is_no_comfyui(comfyui: SmallServer, answer: Answer, got: str) -> None:
    comfyui.answers["/object_info"] = answer
    result = comfyfleet("inspect", NEGATIVE, "--server", comfyui.url)
    assert (result.code, result.out) == (1, "")
    assert f"{comfyui.url} is not a ComfyUI" in result.lines[0]
    assert got in result.lines[0]
    assert result.lines[1].startswith("hint: ")


def test_a_slow_server_is_not_waited_for_forever(comfyui: SmallServer) -> None:
    comfyui.answers["/object_info"] = Answer(b"{}", wait_seconds=0.3)
    servers = ServerCache(answer_seconds=0.05)
    result = comfyfleet("convert", NEGATIVE, "--server", comfyui.url, servers=servers)
    assert result.code == 1
    assert result.lines[0] == f"error: {comfyui.url} did not answer within 0.05 seconds"


@pytest.mark.parametrize("url", ["nope:port", "http://host:99999", "http://[::", ""])
@pytest.mark.parametrize(
    "command",
    [
        ("up", "--port", "0", "--backend"),
        ("worker", "--control", "http://127.0.0.1:1", "--fleet", "a", "--backend"),
    ],
)
def test_a_backend_that_is_no_url_is_told_in_one_line(url: str, command: tuple[str, ...]) -> None:
    result = comfyfleet(*command, url)
    assert result.code == 1
    assert "is not the URL of a server" in result.lines[0]


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://[::", "http://a b"])
def test_what_is_no_url_is_explained(url: str) -> None:
    result = comfyfleet("convert", NEGATIVE, "--server", url)
    assert result.code == 1
    assert "http://127.0.0.1:8188" in result.lines[1]


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("127.0.0.1:8188", "http://127.0.0.1:8188"),
        (" http://gpu:8188/ ", "http://gpu:8188"),
        ("https://gpu/comfy/#workflow", "https://gpu/comfy"),
        ("http://gpu:8188/object_info", "http://gpu:8188"),
        ("http://gpu:8188/api/object_info", "http://gpu:8188"),
    ],
)
def test_addresses_are_taken_as_people_copy_them(typed: str, base: str) -> None:
    assert base_url(typed) == base


def test_passwords_are_not_shown() -> None:
    assert url_without_password("https://me:secret@gpu:8188") == "https://gpu:8188"
