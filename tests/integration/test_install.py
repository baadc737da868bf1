"""What `pip install comfyfleet` without any extra can do, and what it says of the rest."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distribution
from itertools import chain
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from tests.support.server.commands import NEGATIVE, OBJECT_INFO

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS_OF_EXTRAS = {
    "serve": "server",
    "db": "server",
    "worker": "worker",
    "engine": "engine",
    "up": "server,worker,engine",
}
USED_FROM_PYTHON = """
import comfyfleet.client, comfyfleet.errors, comfyfleet.workflow
import comfyfleet.cli.admin, comfyfleet.cli.graph, comfyfleet.cli.pipeline, comfyfleet.cli.run
"""
# What only commands with that extra import.
PARTS_OF_EXTRAS = {
    "server": "import comfyfleet.cli.serve",
    "worker": "import comfyfleet.cli.worker",
    "engine": "import comfyfleet.engine.child",
    "server,worker": "import comfyfleet.cli.up",
}
SECONDS_MAX = 300
NODE = re.compile(r"node(js)?|np[mx]|corepack|yarn|pnpm")
AT = re.compile(r"Control plane at (\S+)")
ASSET = re.compile(r"\w[\w.-]*-[\w-]{8}\.(?:js|css|woff2)")


def link_packages(requirements: Iterable[str], folder: Path) -> None:
    """Makes a folder for PYTHONPATH that holds these packages and what they need, and nothing else."""
    wanted, seen = [Requirement(each) for each in requirements], set()
    while wanted:
        each = wanted.pop()
        if str(each) in seen:
            continue
        seen.add(str(each))
        found = distribution(each.name)
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(found.locate_file(name))))
        needs = [Requirement(text) for text in found.requires or ()]
        extras = each.extras or {""}
        wanted += [
            need
            for need in needs
            if not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in extras)
        ]


def install(folder: Path, *extras: str) -> Path:
    of_extras = [PROJECT["optional-dependencies"][extra] for extra in extras]
    link_packages(chain(PROJECT["dependencies"], *of_extras), folder)
    (folder / "comfyfleet").symlink_to(ROOT / "src" / "comfyfleet")
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("core"))


def python(core: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # -S: without the packages that are installed beside this Python.
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={**os.environ, "PYTHONPATH": str(core)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_the_core_converts(core: Path) -> None:
    done = python(core, "-m", "comfyfleet", "convert", NEGATIVE, "--object-info", OBJECT_INFO)
    assert done.returncode == 0, done.stderr
    assert '"class_type"' in done.stdout


def test_the_core_is_enough_for_python_and_for_commands_that_call_a_server(core: Path) -> None:
    done = python(core, "-c", USED_FROM_PYTHON)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS_OF_EXTRAS)
def test_a_command_without_its_extra_says_what_to_install(core: Path, command: str) -> None:
    options = ("--port", "0") if command in ("serve", "up", "engine") else ("--fleet", "gpus")
    done = python(core, "-m", "comfyfleet", command, *(() if command == "db" else options))
    assert done.returncode == 1, done.stderr
    assert f'hint: pip install "comfyfleet[{COMMANDS_OF_EXTRAS[command]}]"' in done.stderr
    assert "which is not installed" in done.stderr


@pytest.mark.parametrize("command", ["up", "serve", "worker", "db"])
def test_help_without_the_extra_says_which_one_is_missing(core: Path, command: str) -> None:
    done = python(core, "-m", "comfyfleet", command, "--help")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.replace("│", " ").split())
    assert f'pip install "comfyfleet[{COMMANDS_OF_EXTRAS[command]}]"' in words


def test_up_with_a_comfyui_needs_no_engine(core: Path) -> None:
    done = python(core, "-m", "comfyfleet", "up", "--backend", "http://127.0.0.1:8188")
    assert 'hint: pip install "comfyfleet[server,worker]"' in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extras", PARTS_OF_EXTRAS)
def test_an_extra_brings_all_that_its_command_imports(extras: str, tmp_path: Path) -> None:
    done = python(install(tmp_path, *extras.split(",")), "-c", PARTS_OF_EXTRAS[extras])
    assert done.returncode == 0, done.stderr


def test_help_and_completion_and_slips_of_the_pen_need_no_extra(core: Path) -> None:
    shown = python(core, "-m", "comfyfleet", "--help")
    assert shown.returncode == 0, shown.stderr
    assert "│ serve " in shown.stdout
    assert "_comfyfleet" in python(core, "-m", "comfyfleet", "completion", "bash").stdout
    slip = python(core, "-m", "comfyfleet", "convret")
    assert slip.returncode == 2
    assert 'Did you mean "convert"?' in slip.stderr


def test_every_package_that_an_extra_brings_is_part_of_all() -> None:
    (everything,) = PROJECT["optional-dependencies"]["all"]
    others = set(PROJECT["optional-dependencies"]) - {"all", "dev", "bench", "editor"}
    assert Requirement(everything).extras == others


@pytest.fixture(scope="module")
def no_node(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment of a machine on which Node was never installed: all other programs are there."""
    folder = tmp_path_factory.mktemp("bin")
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in place.iterdir() if place.is_dir() else ():
            if not NODE.fullmatch(program.name) and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    assert shutil.which("node", path=str(folder)) is None
    return {**os.environ, "PATH": str(folder)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, no_node: Mapping[str, str]) -> Path:
    """Built from what is in git, and nothing that was built before."""
    checkout, made = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    pip = new_environment(made / "venv")
    run_pip(pip, "wheel", "--no-deps", "--wheel-dir", str(made), str(checkout), environ=no_node)
    return made / f"comfyfleet-{distribution('comfyfleet').version}-py3-none-any.whl"


def new_environment(folder: Path) -> tuple[str, ...]:
    """Makes an empty virtual environment; returns its pip."""
    venv.create(folder, with_pip=True)
    return (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")


def run_pip(pip: Sequence[str], *arguments: str, environ: Mapping[str, str]) -> None:
    made = subprocess.run([*pip, *arguments], capture_output=True, text=True, env=environ)
    if "No matching distribution" in made.stdout + made.stderr:
        pytest.skip(f"no index has what it needs: {made.stderr.strip().splitlines()[-1]}")
    assert made.returncode == 0, made.stdout + made.stderr


@pytest.mark.slow
def test_the_wheel_installs_without_extras_into_an_empty_environment(
    wheel: Path, no_node: Mapping[str, str], tmp_path: Path
) -> None:
    pip = new_environment(tmp_path / "venv")
    run_pip(pip, "install", str(wheel), environ=no_node)
    listed = subprocess.run([*pip, "list"], capture_output=True, text=True, check=True).stdout
    assert not {"fastapi", "sqlalchemy", "psutil", "numpy"} & set(listed.lower().split())
    done = subprocess.run(
        [tmp_path / "venv/bin/comfyfleet", "convert", NEGATIVE, "--object-info", OBJECT_INFO],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_wheel_serves_every_page_where_there_is_no_node(
    wheel: Path, no_node: Mapping[str, str], tmp_path: Path
) -> None:
    run_pip(new_environment(tmp_path / "venv"), "install", f"{wheel}[server]", environ=no_node)
    program = str(tmp_path / "venv/bin/comfyfleet")
    command = [program, "serve", "--port", "0", "--data", str(tmp_path / "data")]
    with subprocess.Popen(
        command, env=no_node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as serving:
        try:
            assert serving.stdout
            told = iter(serving.stdout.readline, "")
            url = next(found[1] for line in told if (found := AT.search(line)))
            assert_serves_pages(url)
        finally:
            serving.terminate()


def assert_serves_pages(url: str) -> None:
    """Every address, and every script that any page loads."""
    routes = re.findall(r'page\("([^"]+)"', (ROOT / "web/src/app/routes.tsx").read_text("utf-8"))
    assert len(routes) > 30
    with httpx.Client(base_url=url, headers={"Accept": "text/html"}, timeout=30) as client:
        for path in routes:
            page = client.get(re.sub(r":\w+", "some", path))
            assert page.status_code == 200, path
            assert 'id="root"' in page.text, path
        wanted, seen = ASSET.findall(page.text), set()
        while wanted:
            if (name := wanted.pop()) in seen:
                continue
            seen.add(name)
            script = client.get(f"/web/assets/{name}")
            assert script.status_code == 200, name
            wanted += ASSET.findall(script.text) if name.endswith(".js") else []
    assert len([name for name in seen if name.endswith(".js")]) >= len(routes)
