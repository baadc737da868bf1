"""Provides the previous version for comparisons, from git and in its own environment."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "022d355"


@contextmanager
def baseline_at(existing: Path | None) -> Iterator[Path]:
    """Yields a tree with a .venv: the existing one, or a temporary one that is created here."""
    if existing is not None:
        yield existing.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="comfyfleet-before-") as folder:
        tree = Path(folder) / "tree"
        _run("git", "worktree", "add", "--quiet", "--detach", tree, COMMIT, folder=ROOT)
        try:
            _run("sh", "tools/setup.sh", ".venv", "server,engine,postgres", folder=tree)
            yield tree
        finally:
            _run("git", "worktree", "remove", "--force", tree, folder=ROOT)


def _run(*command: str | Path, folder: Path) -> None:
    subprocess.run(command, cwd=folder, check=True)
