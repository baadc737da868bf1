"""What `make` would do on a fresh clone."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("Makefile", "pyproject.toml", "constraints.txt")
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def would_do(target: str, folder: Path) -> str:
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_help_lists_every_target_that_people_use(clone: Path) -> None:
    listed = {line.split()[0] for line in subprocess.check_output(
        ["make", "--no-print-directory", "help"], cwd=clone, text=True
    ).splitlines()}  # fmt: skip
    named = re.search(r"^\.PHONY: (.*)$", (clone / "Makefile").read_text(), re.MULTILINE)
    assert named
    assert listed == {*named[1].split()}


def test_the_demo_installs_only_what_it_needs(clone: Path) -> None:
    assert 'setup.sh ".venv" server,worker,engine' in would_do("demo", clone)
    assert '"dev"' not in would_do("demo", clone)


def test_the_tests_install_all_also_after_a_demo(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".installed-demo").touch()
    assert "setup.sh" not in would_do("demo", clone)
    assert 'setup.sh ".venv" "dev"' in would_do("test", clone)


def test_a_demo_after_the_tests_installs_nothing(clone: Path) -> None:
    (clone / ".venv").mkdir()
    for name in (".installed", ".installed-demo"):
        (clone / ".venv" / name).touch()
    assert "setup.sh" not in would_do("demo", clone)
