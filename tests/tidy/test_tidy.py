"""Small modules, small functions, and one word for one thing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE_LINES_MAX = 800
FUNCTION_LINES_MAX = 50
# Each says too little, or is a second word for something in the glossary (docs/concepts/glossary.md).
WORDS_NOT_USED = {
    "utils": "name what it does",
    "helper": "name what it does",
    "manager": "name what it does",
    "misc": "name what it does",
    "task": "job",
    "blob": "file",
    "artifact": "file",
    "cluster": "fleet",
    "runner": "worker",
    "preset": "effect",
    "coin": "token",
    "cron": "sweep",
    "dag": "graph",
}
MODULES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("bench/**/*.py")])


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_short_and_so_are_its_functions(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= MODULE_LINES_MAX, "two modules, probably"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= FUNCTION_LINES_MAX, f"{node.name} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_use_our_words(path: Path) -> None:
    names = {path.stem, *public_names(ast.parse(path.read_text(encoding="utf-8")))}
    for name in sorted(names):
        if name.startswith("_"):
            continue
        for word in words_of(name) & WORDS_NOT_USED.keys():
            pytest.fail(f"{name}: don't say {word!r}, {WORDS_NOT_USED[word]}")


def test_every_word_that_is_not_used_would_be_noticed() -> None:
    assert words_of("TaskManager") == {"task", "manager"}
    assert words_of("job_task_2") == {"job", "task"}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sql_lives_in_db_and_in_stores(path: Path) -> None:
    room = path.relative_to(ROOT).parts
    if room[0] == "bench" or room[2] == "db" or path.name == "store.py" or "store" in room:
        return
    names = list(imported(ast.parse(path.read_text(encoding="utf-8"))))
    assert not [name for name in names if name.split(".")[0] in ("sqlalchemy", "asyncpg")]
    if room[2] in ("http", "loops", "cli"):
        assert not [name for name in names if name.endswith(".store")]
