"""What the documentation tells people to run is run here, as written."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
from tests.support.server.command_process import started
from tests.support.server.local_server import KEY, LocalServer, local_server_in

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 300


@pytest.fixture(scope="module")
def local_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server_in(tmp_path_factory.mktemp("shop")) as local_server:
        yield local_server


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    (folder / "examples").symlink_to(ROOT / "examples")
    # As if it were installed for good: the pages say `comfyfleet`.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_the_quickstart_and_what_builds_on_it_are_run_as_written(tmp_path: Path) -> None:
    """Against a server as it comes up for the first time; the guides begin where the quickstart ended."""
    guides = [
        blocks(page, "bash")
        for page in ("how-to/graphs.md", "how-to/deciding-graphs.md", "how-to/pipelines.md")
    ]
    quickstart = "\n".join(blocks("quickstart.md", "bash"))
    # Each as the operator anew.
    rest = "\n".join("(echo BEGIN\n" + "\n".join(guide) + "\n)" for guide in guides)
    with started("up", "--port", "0", folder=tmp_path) as running:
        url, key = running.wait_for_line(KEY).groups()
        script = f"set -euo pipefail\n{quickstart}\n{rest}"
        ran = run(["bash", "-c", script], tmp_path, COMFYFLEET_URL=url, COMFYFLEET_KEY=key)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, graphs, deciding, pipelines = ran.stdout.split("BEGIN\n")
    assert first.splitlines()[-2:] == ["completed", "997"]
    with PIL.Image.open(tmp_path / "softened.png") as picture:
        assert max(picture.size) == 320
    assert "Album: completed" in graphs + ran.stderr
    for name in (
        "Best of eight",
        "Refine until sharp",
        "Caption, then decide",
        "Batch from a table",
    ):
        assert f"{name}: completed" in deciding + ran.stderr
    assert list((tmp_path / "results").rglob("contact-sheet.png"))
    assert "Base: exposure approves from 0.7, rejects below 0.4; 0 left to judge" in pipelines


def test_the_drawing_in_the_graphs_page_is_what_the_command_draws(tmp_path: Path) -> None:
    (drawing,) = blocks("how-to/graphs.md", "mermaid")
    shown = run(["comfyfleet", "graph", "show", "examples/graphs/album.yaml"], tmp_path)
    assert shown.stdout.strip() == drawing.strip()


def test_the_first_commands_of_the_readme_are_run_as_written(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ \.venv/bin/(comfyfleet run examples.*)$", text, re.MULTILINE)
    assert len(commands) == 2
    ran = run(["bash", "-c", "set -e\n" + "\n".join(commands)], tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "output/negative_384.png" in ran.stdout.splitlines()
    assert "output/softened.png" in ran.stdout.splitlines()


def test_the_example_of_the_python_client_is_run_as_written(
    local_server: LocalServer, tmp_path: Path
) -> None:
    program = ROOT / "examples" / "python_client.py"
    ran = run(
        [sys.executable, str(program), str(ROOT / "examples/inputs/photo.png"), str(tmp_path)],
        tmp_path,
        COMFYFLEET_URL=local_server.url,
        COMFYFLEET_KEY=local_server.customer(),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1000 tokens" in ran.stdout
    assert "997 tokens" in ran.stdout
    assert len(list(tmp_path.glob("photo-soften*.png"))) == 2


def test_the_page_of_the_python_client_shows_that_example() -> None:
    (shown, *_) = blocks("how-to/python-client.md", "python")
    assert shown.strip() in (ROOT / "examples" / "python_client.py").read_text(encoding="utf-8")


def test_pieces_of_the_python_clients_page_run(local_server: LocalServer, tmp_path: Path) -> None:
    """Each by itself, with a client at hand."""
    _, *pieces = blocks("how-to/python-client.md", "python")
    body = "\n".join(f"    {line}" for line in "\n".join(pieces).splitlines())
    program = f"""
import asyncio
from pathlib import Path
from comfyfleet.client import Client

async def main(client):
{body}

async def opened():
    async with Client({local_server.url!r}, {local_server.customer()!r}) as client:
        await main(client)

asyncio.run(opened())
"""
    ran = run([sys.executable, "-c", program], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_demo_has_something_for_every_page(tmp_path: Path) -> None:
    """Its own summary is read from the API after all was made."""
    command = [sys.executable, "-m", "demo", "--once", "--folder", str(tmp_path / "kept")]
    tools = str(ROOT / "tools")
    ran = run(command, tmp_path, PYTHONPATH=tools, PYTHONDONTWRITEBYTECODE="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "13 effects with examples" in ran.stdout
    assert "8 candidates to judge" in ran.stdout
    (jobs,) = re.findall(r"jobs: (.*); workers: built-in, studio-1, studio-2", ran.stdout)
    assert [each.split()[1] for each in jobs.split(", ")] == [
        "queued",
        "processing",
        "completed",
        "failed",
        "cancelled",
    ]
    assert len({each.parent.name for each in (tmp_path / "kept" / "results").rglob("*.*")}) == 13
