"""Few modules, each named by what an engineer would search for, and no name for two classes."""

from collections import Counter

import pytest
from tests.tidy import figures

SHORT_FILES_MAX = 62
FILES_MAX = 470
TOP_PACKAGES_MAX = 11
SHARED_NAMES_MAX = 15
# Public class names that several classes may share, and why.
SHARED_NAMES = {
    "Job": "what a worker is given, and the row of the control plane",
    "Progress": "the worker protocol's and a backend's event of that name",
    "Limits": "exported by workflow, and the name of a model in the admin API",
}
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
