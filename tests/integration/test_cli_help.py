"""The first things that one types: help, the version, and the tab key."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.server.commands import comfyfleet

from comfyfleet import __version__
from comfyfleet.cli.main import app

SECONDS_MAX = 60
NEEDED = {
    "bash": "complete -F _comfyfleet comfyfleet",
    "zsh": "#compdef comfyfleet",
    "fish": "complete -c comfyfleet",
}


def test_the_core_commands_come_first() -> None:
    out = comfyfleet("--help").out
    core, rest = out.split("─ More on one machine ─")
    places = [core.index(f"│ {name} ") for name in ("run", "inspect", "convert", "up")]
    assert places == sorted(places)
    assert "│ admin " in rest
    assert "│ graph " in rest


def test_help_is_a_command_too() -> None:
    assert comfyfleet("help").out == comfyfleet("--help").out
    assert comfyfleet("help", "convert").out == comfyfleet("convert", "--help").out
    nested = comfyfleet("help", "admin", "workflows", "register")
    assert "Usage: comfyfleet admin workflows register" in nested.out
    unknown = comfyfleet("help", "nothing")
    assert (unknown.code, unknown.out) == (1, "")
    assert "unknown command: nothing" in unknown.err


def test_the_version_has_a_short_option() -> None:
    assert comfyfleet("-V").out.strip() == comfyfleet("--version").out.strip() == __version__


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("completion")
    for shell in NEEDED:
        done = comfyfleet("completion", shell)
        assert done.code == 0, done.err
        (folder / shell).write_text(done.out)
    return folder


@pytest.mark.parametrize("shell", NEEDED)
def test_a_script_knows_every_command_and_the_options(scripts: Path, shell: str) -> None:
    script = (scripts / shell).read_text()
    assert NEEDED[shell] in script
    for name in app:
        assert name.lstrip("-") in script
    for word in ("register", "dispatches", "reachable-only", "fleet"):
        assert word in script


def test_a_shell_that_nobody_knows_is_wrong_usage() -> None:
    assert comfyfleet("completion", "csh").code == 2


BASH = """
source "$1"
words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _comfyfleet; echo "${COMPREPLY[*]}"; }
words comfyfleet ins
words comfyfleet admin wor
words comfyfleet run --det
words comfyfleet completion z
"""


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes(scripts: Path) -> None:
    done = spoken("bash", "-c", BASH, "bash", str(scripts / "bash"))
    inspect, workers, detach, zsh = done.splitlines()
    assert inspect.split() == ["inspect"]
    assert set(workers.split()) == {"workers", "workflows"}
    assert detach.split() == ["--detach"]
    assert zsh.split() == ["zsh"]


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")
def test_zsh_takes_the_script(scripts: Path) -> None:
    load = 'autoload -U compinit; compinit -u -D; source "$1"; print ${_comps[comfyfleet]}'
    assert "_comfyfleet" in spoken("zsh", "-f", "-c", load, "zsh", str(scripts / "zsh"))


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(scripts: Path) -> None:
    script = f"source {scripts / 'fish'}; complete -C 'comfyfleet ins'"
    assert "inspect" in spoken("fish", "--no-config", "-c", script)


def spoken(*command: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS_MAX,
        env={**os.environ, "TERM": "dumb"},
    )
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (("convert", "a.json", "--url", "http://127.0.0.1:8188"), "--server"),
        (("run", "a.json", "--host=127.0.0.1"), "--server"),
        (("up", "--comfyui-url", "http://127.0.0.1:8188"), "--backend"),
    ],
)
def test_another_name_for_the_address_of_a_comfyui_is_answered_with_ours(
    arguments: tuple[str, ...], ours: str
) -> None:
    refused = comfyfleet(*arguments)
    assert refused.code == 2
    assert refused.lines[0].endswith(f"Did you mean {ours}?")
