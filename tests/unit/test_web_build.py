"""When the pages are built again, and with which Node."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "web_build.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """On a web/ of its own, with npm replaced by a note of what it was asked."""
    found = importlib.util.spec_from_file_location("web_build_on_trial", TOOL)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    web = tmp_path / "web"
    for name in (*module.SOURCES, "src/main.tsx", "src/main.test.ts", "README.md"):
        (web / name).parent.mkdir(parents=True, exist_ok=True)
        (web / name).write_text("one")
    monkeypatch.setattr(module, "WEB", web)
    monkeypatch.setattr(module, "STATIC", tmp_path / "static")
    asked: list[str] = []

    def npm(arguments: list[str], **environment: str) -> None:
        asked.append(" ".join(arguments))
        (web / "node_modules").mkdir(exist_ok=True)
        if made := environment.get("COMFYFLEET_WEB_OUT"):
            Path(made).mkdir()
            (Path(made) / "index.html").write_text("built")

    monkeypatch.setattr(module, "_npm", npm)
    module.__dict__["asked"] = asked
    return module


def test_pages_are_built_once(tool: ModuleType) -> None:
    assert tool.build()
    assert not tool.build()
    assert (tool.STATIC / "index.html").read_text() == "built"
    assert [each.split()[0] for each in tool.asked] == ["ci", "run"]


@pytest.mark.parametrize(
    ("name", "is_stale"),
    [("src/main.tsx", True), ("src/new.ts", True), ("vite.config.ts", True), ("src/main.test.ts", False), ("README.md", False)],
)  # fmt: skip
def test_only_what_they_are_made_from_makes_them_old(
    tool: ModuleType, name: str, is_stale: bool
) -> None:
    tool.build()
    (tool.WEB / name).write_text("two")
    assert tool.is_stale() is is_stale


def test_what_was_taken_away_makes_them_old(tool: ModuleType) -> None:
    tool.build()
    (tool.WEB / "src" / "main.tsx").unlink()
    assert tool.is_stale()


def test_a_source_archive_is_never_stale(tool: ModuleType) -> None:
    (tool.WEB / "package.json").unlink()
    assert not tool.is_stale()
    assert not tool.build()


def test_a_failed_build_leaves_the_last_one(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool.build()
    (tool.WEB / "src" / "main.tsx").write_text("two")

    def fails(arguments: list[str], **environment: str) -> None:
        raise tool.BuildFailed("npm run build failed")

    monkeypatch.setattr(tool, "_npm", fails)
    with pytest.raises(tool.BuildFailed):
        tool.build()
    assert (tool.STATIC / "index.html").read_text() == "built"
    assert tool.is_stale()


def test_a_build_takes_away_no_tools_of_checks(tool: ModuleType) -> None:
    tool.install()
    tool.build()
    assert [each.split()[0] for each in tool.asked] == ["ci", "run"]
    assert "--omit=dev" not in tool.asked[0]
    mark = json.loads((tool.WEB / "node_modules" / ".installed.json").read_text())
    assert mark["checks"] is True


def test_checks_install_what_a_build_left_out(tool: ModuleType) -> None:
    tool.build()
    tool.install()
    assert [each for each in tool.asked if each.startswith("ci")][1:] == [
        "ci --ignore-scripts --no-audit --no-fund"
    ]
