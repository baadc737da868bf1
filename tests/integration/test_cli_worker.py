"""What `comfyfleet worker` refuses before it starts anything, and what it then says."""

import socket
from pathlib import Path

import pytest
from tests.support.server.commands import comfyfleet

from comfyfleet.cli.worker import _default_state

COMMAND = ("--comfyui-command", "comfyui --port {port}")


def said_to(*arguments: str, **environ: str) -> str:
    where = ("worker", "--control", "http://127.0.0.1:1", "--fleet", "gpus", "--state", "/nowhere")
    result = comfyfleet(*where, *arguments, environ=environ)
    assert result.code == 1, result.err
    return " ".join(result.err.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "specify exactly one backend: --backend URL, --comfyui-command, or --cloud"),
        (("--per-gpu", "2", "--backend", "http://127.0.0.1:1"), "require --comfyui-command"),
        (("--gpus", "0", "--backend", "http://127.0.0.1:1"), "require --comfyui-command"),
        (
            (*COMMAND, "--per-gpu", "0"),
            "--per-gpu must be a whole number from 1 to 16, or auto, not '0'",
        ),
        ((*COMMAND, "--per-gpu", "many"), "not 'many'"),
        ((*COMMAND, "--gpus", "0,1,0"), "--gpus contains a GPU twice"),
        (
            (*COMMAND, "--gpus", "first"),
            "--gpus must be indexes or UUIDs, such as 0,1 or GPU-…, not 'first'",
        ),
        ((*COMMAND, "--metrics", "9100"), "--metrics must be HOST:PORT"),
        (("--comfyui-command", "comfyui", "--per-gpu", "2"), "doesn't contain {port}"),
        (("--comfyui-command", " "), "--comfyui-command is empty"),
        (("--comfyui-command", "a 'b"), "--comfyui-command isn't a valid command"),
    ],
)
def test_what_can_not_be_meant_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in said_to(*arguments)


def test_all_gpus_are_those_that_may_be_seen() -> None:
    assert "contains a GPU twice" in said_to(
        *COMMAND, "--gpus", "all", CUDA_VISIBLE_DEVICES="1, GPU-a,1"
    )
    said = said_to(*COMMAND, "--gpus", "all", CUDA_VISIBLE_DEVICES="")
    assert "NVIDIA's driver reports no GPU" in said


def test_auto_without_a_figure_of_the_memory_says_what_to_give() -> None:
    said = said_to(*COMMAND, "--per-gpu", "auto", CUDA_VISIBLE_DEVICES="")
    assert "requires the memory usage of GPU 0" in said
    assert "--gpu-memory-command" in said


def test_a_port_for_metrics_that_is_taken_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = said_to(*COMMAND, "--metrics", address)
    assert f"--metrics: can't listen on {address}: Address already in use" in said
    assert "Use a different port" in said


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({}, "~/.local/state/comfyfleet"),
        ({"LOCALAPPDATA": "/local"}, "/local/comfyfleet"),
        ({"LOCALAPPDATA": "/local", "XDG_STATE_HOME": "/state"}, "/state/comfyfleet"),
    ],
    ids=["posix", "windows", "chosen"],
)
def test_the_state_is_where_the_system_keeps_it(environ: dict[str, str], folder: str) -> None:
    assert _default_state(environ) == Path(folder)
