"""Nothing is imported from the folder in which a command was started: it may be somebody else's."""

import re
from pathlib import Path

import httpx
import PIL.Image
import pytest
from tests.support.server.command_process import started
from tests.support.server.deployment import Deployment

import comfyfleet
from comfyfleet.cli.engine import start_engine_process
from comfyfleet.server.media import small_pictures
from comfyfleet.server.media.picture_processes import PictureProcesses

PACKAGES = ("PIL", "uvicorn", "sqlalchemy", "starlette", "numpy", "comfyfleet")
MARK = "imported"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with packages that leave a mark when they are imported."""
    folder = tmp_path / "theirs"
    for name in PACKAGES:
        package = folder / name
        package.mkdir(parents=True)
        mark = folder / MARK
        (package / "__init__.py").write_text(
            f"open({str(mark)!r}, 'a').write({name!r} + chr(10))\nraise ImportError({name!r})\n"
        )
    return folder


def imported(folder: Path) -> list[str]:
    mark = folder / MARK
    return mark.read_text().split() if mark.exists() else []


def test_the_engines_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with start_engine_process({}) as url:
        assert httpx.get(f"{url}/system_stats", timeout=60).status_code == 200
    assert imported(folder) == []


async def test_the_process_for_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    source, small = folder / "picture.png", folder / "small"
    PIL.Image.new("RGB", (2000, 2000), "red").save(source)
    words = str(source), str(small), str(10**8)
    assert await PictureProcesses().run(small_pictures.MODULE, *words) is not None
    assert small.stat().st_size > 0
    assert imported(folder) == []


def test_up(folder: Path) -> None:
    with started("up", "--port", "0", "--no-open", folder=folder) as running:
        running.wait_for_line("Worker built-in in fleet default/production")
    assert imported(folder) == []


async def test_the_processes_of_serve(folder: Path) -> None:
    async with Deployment(folder) as deployment:
        deployment.start_control("--processes", "2")
        assert deployment.admin.is_ready()
    assert imported(folder) == []


def test_every_process_that_we_start_ignores_the_current_folder() -> None:
    for file in Path(comfyfleet.__file__).parent.rglob("*.py"):
        for command in re.findall(r"sys\.executable,[^\])]*", file.read_text()):
            assert '"-P"' in command, (file.name, command)
