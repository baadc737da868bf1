"""Figures of the source tree, counted once for all tests: `python -m tests.tidy.figures` prints them."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "comfyfleet"
SHORT_LINES = 60
# Words that end like gerunds and are nouns.
NOUNS = {"billing", "mapping", "ping", "pricing", "ring", "setting", "string", "thing"}


@dataclass(frozen=True)
class Module:
    path: Path
    source: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    @property
    def is_ours(self) -> bool:
        """Whether it is of the package, not of the benches beside it."""
        return self.path.is_relative_to(PACKAGE)

    @property
    def is_migration(self) -> bool:
        return "migrations" in self.path.parts

    @property
    def name(self) -> str:
        return str(self.path.relative_to(PACKAGE if self.is_ours else ROOT))


@cache
def modules() -> tuple[Module, ...]:
    paths = sorted([*PACKAGE.rglob("*.py"), *ROOT.glob("bench/**/*.py")])
    sources = [(path, path.read_text(encoding="utf-8")) for path in paths]
    return tuple(Module(path, source, ast.parse(source)) for path, source in sources)


def package_modules() -> list[Module]:
    return [module for module in modules() if module.is_ours]


def gerunds() -> list[str]:
    return [
        module.name
        for module in package_modules()
        if not module.is_migration and is_gerund(module.path.stem)
    ]


def is_gerund(name: str) -> bool:
    return any(re.search(r"\w{2}ing$", word) and word not in NOUNS for word in name.split("_"))


def short_files() -> list[str]:
    """Files with few lines. A migration is as long as its change, so it is not counted."""
    return [
        module.name
        for module in package_modules()
        if module.lines < SHORT_LINES and not module.is_migration
    ]


def top_packages() -> list[str]:
    return sorted(each.parent.name for each in PACKAGE.glob("*/__init__.py"))


def support_packages() -> list[str]:
    return sorted(each.parent.name for each in ROOT.glob("tests/support/*/__init__.py"))


def public_classes() -> dict[str, list[str]]:
    """Where each public class name is defined."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in package_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module.name)
    return found


def shared_class_names() -> dict[str, list[str]]:
    return {name: places for name, places in public_classes().items() if len(places) > 1}


def code_lines(module: Module) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    documented = {line for node in ast.walk(module.tree) for line in _docstring_lines(node)}
    lines = enumerate((line.strip() for line in module.source.splitlines()), start=1)
    return sum(
        bool(line) and not line.startswith("#") and number not in documented
        for number, line in lines
    )


def _docstring_lines(node: ast.AST) -> Iterator[int]:
    has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(node, has_docstring) and ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        yield from range(first.lineno, (first.end_lineno or first.lineno) + 1)


def figures() -> dict[str, int]:
    ours = package_modules()
    return {
        "files": len(ours),
        f"files under {SHORT_LINES} lines, without migrations": len(short_files()),
        "lines of the longest module": max(module.lines for module in ours),
        "code lines": sum(code_lines(module) for module in ours),
        "packages at the top": len(top_packages()),
        "modules named by a gerund": len(gerunds()),
        "public class names": len(public_classes()),
        "public class names that several classes share": len(shared_class_names()),
        "packages that support tests": len(support_packages()),
    }


if __name__ == "__main__":
    for name, figure in figures().items():
        sys.stdout.write(f"{figure:7,}  {name}\n")
