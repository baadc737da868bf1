"""Few modules, each named by what an engineer would search for, and no name for two classes."""

import re
from collections import Counter
from pathlib import Path

import pytest
from tests.tidy import figures

SHORT_FILES_MAX = 62
FILES_MAX = 485
TOP_PACKAGES_MAX = 11
SHARED_NAMES_MAX = 15
# Public class names that several classes may share, and why.
SHARED_NAMES = {
    "Job": "what a worker is given, and the row of the control plane",
    "Progress": "the worker protocol's and a backend's event of that name",
    "Limits": "exported by workflow, and the name of a model in the admin API",
}
PACKAGE = figures.ROOT / "src" / "comfyfleet"
SUPPORT_PACKAGES = ["backends", "databases", "jobs", "server", "workers"]


def test_no_module_is_named_by_a_gerund() -> None:
    assert figures.gerunds() == []


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("settling", True), ("giving_back", True), ("string", False), ("ping", False)],
)
def test_a_gerund_is_told_from_a_noun(name: str, is_one: bool) -> None:
    assert figures.is_gerund(name) is is_one


def test_class_names_are_shared_for_a_stated_reason_only() -> None:
    shared = figures.shared_class_names()
    assert {name: places for name, places in shared.items() if name not in SHARED_NAMES} == {}
    assert set(SHARED_NAMES) <= set(shared), "take what is no longer shared off the list"
    assert len(SHARED_NAMES) <= SHARED_NAMES_MAX


def test_there_are_few_files_and_few_short_ones() -> None:
    assert len(figures.package_modules()) <= FILES_MAX
    assert len(figures.short_files()) <= SHORT_FILES_MAX, figures.short_files()


def test_there_are_few_packages_at_the_top() -> None:
    assert len(figures.top_packages()) <= TOP_PACKAGES_MAX, figures.top_packages()


def test_the_map_names_every_package() -> None:
    """Those at the top, and those of the control plane, with its triggers."""
    contributing = (figures.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(\w+(?:/|\.py))\s", contributing.partition("## The map")[2]))
    package = figures.ROOT / "src" / "comfyfleet"
    found = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    found |= {f"{path.parent.name}/" for path in package.glob("server/*/__init__.py")}
    assert sorted(found - named) == []
    assert {"triggers.py", "trigger_inputs.py"} <= named


def test_what_tests_share_is_in_five_packages() -> None:
    assert figures.support_packages() == SUPPORT_PACKAGES
    assert not list(figures.ROOT.glob("tests/*kit"))


def test_no_two_modules_of_tests_have_one_name() -> None:
    """The collector imports those outside of packages by their bare names."""
    found = Counter(
        path.name
        for path in (figures.ROOT / "tests").rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    )
    assert [name for name, count in found.items() if count > 1] == []


def folders_in(*folders: Path) -> set[str]:
    return {
        path.name
        for folder in folders
        for path in folder.iterdir()
        if path.is_dir() and path.name[0].isalpha()
    }


def test_the_map_names_every_package_and_nothing_else() -> None:
    root = figures.ROOT
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (source_map,) = re.findall(r"## The map\s+```\n(.*?)```", text, re.S)
    named, words = set(re.findall(r"(\w+)/", source_map)), set(re.findall(r"\w+", source_map))
    packages, tests = folders_in(PACKAGE, PACKAGE / "server"), folders_in(root / "tests")
    assert (packages - named) | (tests - words) == set(), "the map lacks these"
    others = folders_in(root, root / "src", root / "docs")
    assert named - packages - tests - others == set(), "there are no such folders"
