"""Every module of the benchmarks can be imported, also one that only a child process imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
FOLDERS = sorted(path.parent.name for path in BENCH.glob("*_load/*.py"))
# The extra `bench` has them; make check runs without it.
PEERS = ("pgqueuer", "procrastinate")
IN_A_STRING = re.compile(rf"\b((?:{'|'.join(sorted(set(FOLDERS)))})\.\w+)\b(?!\.py)")
IMPORT_ALL = f"""
import importlib, sys
sys.path.insert(0, {str(BENCH)!r})
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {PEERS!r}:
            raise
    except Exception as error:
        raise SystemExit(f"{{name}}: {{error!r}}")
"""


def module_names() -> Iterator[str]:
    for path in BENCH.rglob("*.py"):
        name = ".".join(path.relative_to(BENCH).with_suffix("").parts)
        # The standard library has a module of that name, which this one imports in its place.
        if name != "queue":
            yield name


def names_in_strings() -> Iterator[str]:
    for path in BENCH.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from IN_A_STRING.findall(node.value)


def test_every_module_can_be_imported() -> None:
    names = sorted({*module_names(), *names_in_strings()})
    assert "queue_load.idle_polls" in names
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
