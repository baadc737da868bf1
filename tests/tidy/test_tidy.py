"""Small modules, small functions, and one word for one thing."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from tests.tidy.figures import ROOT, modules

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
    "preset": "effect",
    "coin": "token",
    "cron": "sweep",
    "dag": "graph",
}
STORE = re.compile(r"comfyfleet\.server\.\w+\.store(_\w+)?(\.|$)")
Complaints: TypeAlias = Callable[[Path, str, ast.Module], Iterator[str]]


def public_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}


def too_long(path: Path, source: str, tree: ast.Module) -> Iterator[str]:
    if source.count("\n") > MODULE_LINES_MAX:
        yield "has more lines than a module may have: two modules, probably"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name} has {lines} lines"


def other_words(path: Path, source: str, tree: ast.Module) -> Iterator[str]:
    for name in sorted({path.stem, *public_names(tree)}):
        if not name.startswith("_"):
            for word in words_of(name) & WORDS_NOT_USED.keys():
                yield f"{name}: don't say {word!r}, {WORDS_NOT_USED[word]}"


def test_every_word_that_is_not_used_would_be_noticed() -> None:
    assert words_of("TaskManager") == {"task", "manager"}
    assert words_of("job_task_2") == {"job", "task"}


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sql_elsewhere(path: Path, source: str, tree: ast.Module) -> Iterator[str]:
    room = path.relative_to(ROOT).parts
    if (
        room[0] == "bench"
        or room[2:4] == ("server", "db")
        or "store" in room
        or path.name.startswith("store")
    ):
        return
    for name in imported(tree):
        if name.split(".")[0] in ("sqlalchemy", "asyncpg"):
            yield f"imports {name}"
        if {"http", "cli"} & set(room) and STORE.match(name):
            yield f"imports {name}"


# One test for all modules: a test for each would be a quarter of all tests.
@pytest.mark.parametrize("complaints", [too_long, other_words, sql_elsewhere])
def test_every_module_is_tidy(complaints: Complaints) -> None:
    found = [
        f"{module.name}: {complaint}"
        for module in modules()
        for complaint in complaints(module.path, module.source, module.tree)
    ]
    assert modules()
    assert found == []


@pytest.mark.parametrize(
    ("complaints", "source", "complaint"),
    [
        (too_long, "x = 1\n" * (MODULE_LINES_MAX + 1), "two modules, probably"),
        (too_long, "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX, "f has 51 lines"),
        (other_words, "class TaskList: ...", "TaskList: don't say 'task', job"),
        (sql_elsewhere, "from sqlalchemy import text", "imports sqlalchemy"),
        (
            sql_elsewhere,
            "import comfyfleet.server.jobs.store",
            "imports comfyfleet.server.jobs.store",
        ),
        (
            sql_elsewhere,
            "from comfyfleet.server.jobs import store_statements",
            "imports comfyfleet.server.jobs.store_statements",
        ),
    ],
)
def test_what_is_untidy_is_found(complaints: Complaints, source: str, complaint: str) -> None:
    path = ROOT / "src" / "comfyfleet" / "server" / "http" / "app.py"
    (found,) = complaints(path, source, ast.parse(source))
    assert complaint in found
