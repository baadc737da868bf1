"""Runs another project's test suite at a ComfyUI and through the gateway, and compares the outcomes."""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.external.servers import Servers
from tests.support.server.ports import free_port

ROOT = Path(__file__).parents[2]
PLUGIN_FOLDER = Path(__file__).parent / "plugin"
CLIENTS = Path(__file__).parent / "clients"
SUITE_SECONDS_MAX = 7200.0
TEST_SECONDS_MAX = 300.0
STOP_SECONDS_MAX = 60.0
OUTPUT_CHARACTERS = 4000
TEXT_LINES = 12
NOT_RUN = "not run"
COMFYUI = "EXTERNAL_COMFYUI"


class Way(StrEnum):
    """How the tests reach ComfyUI."""

    DIRECT = "direct"
    ONE_BACKEND = "one backend"
    TWO_BACKENDS = "two backends"

    @property
    def backends(self) -> int:
        """How many backends the gateway has. 0 means no gateway."""
        return list(Way).index(self)


GATEWAYS = (Way.ONE_BACKEND, Way.TWO_BACKENDS)


@dataclass(frozen=True)
class Expected:
    """A difference that has a reason. `test` is a pattern such as `*::test_full_cache*`."""

    test: str
    reason: str
    ways: tuple[Way, ...] = GATEWAYS


@dataclass(frozen=True)
class Suite:
    """A test suite of another project, and how its tests find the server.

    `variable` is the environment variable with the path of the checkout. The same name with `_PYTHON` is its interpreter.
    """

    name: str
    variable: str
    # Files of the checkout, or tests of ours: `{clients}` is replaced by their folder.
    tests: tuple[str, ...]
    # Options of pytest. `{port}` is replaced by a free port.
    options: tuple[str, ...] = ()
    # Whether fixtures of the suite start `python main.py`. Otherwise the servers run for the whole suite.
    starts_servers: bool = False
    server_options: tuple[str, ...] = ("--cpu",)
    # A fixture of the suite that is replaced by an object with the server's `url`.
    address_fixture: str = ""
    # Environment variables. `{url}` is replaced by the server's address.
    environ: Mapping[str, str] = field(default_factory=dict)
    # Folders of the checkout from which the tests import.
    imports: tuple[str, ...] = (".",)
    passthrough: tuple[str, ...] = ()
    expected: tuple[Expected, ...] = ()
    # Tests that depend on a time limit. They run once more alone if they fail.
    timed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Places:
    """The checkouts of the suite and of ComfyUI, and their interpreters."""

    checkout: Path
    python: str
    comfyui: Path
    comfyui_python: str


def places_of(suite: Suite, environ: Mapping[str, str]) -> Places:
    """Raises KeyError with the name of a variable that is not set."""
    comfyui, comfyui_python = Path(environ[COMFYUI]), environ[f"{COMFYUI}_PYTHON"]
    python = environ.get(f"{suite.variable}_PYTHON", comfyui_python)
    return Places(Path(environ[suite.variable]), python, comfyui, comfyui_python)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test: `passed`, `skipped`, `failed`, `error` or `not run`.

    `values` are what the test recorded with `record_property`; they are compared, too.
    """

    name: str = NOT_RUN
    seconds: float = 0.0
    text: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def is_like(self, other: "Outcome") -> bool:
        return self.name == other.name and self.values == other.values


Outcomes = Mapping[str, Outcome]


@dataclass(frozen=True)
class Difference:
    test: str
    way: Way
    direct: Outcome
    gateway: Outcome
    reason: str | None

    @property
    def text(self) -> str:
        """The end of the failure, and the values that differ."""
        lines = (self.gateway.text or self.direct.text).splitlines()[-TEXT_LINES:]
        if self.direct.values != self.gateway.values:
            lines.append(f"values: {self.direct.values} directly, {self.gateway.values} here")
        return "\n".join(lines)


def differences(suite: Suite, way: Way, direct: Outcomes, gateway: Outcomes) -> list[Difference]:
    found = []
    for test in sorted(direct.keys() | gateway.keys()):
        before, after = direct.get(test, Outcome()), gateway.get(test, Outcome())
        if not before.is_like(after):
            found.append(Difference(test, way, before, after, _reason(suite, way, test)))
    return found


def _reason(suite: Suite, way: Way, test: str) -> str | None:
    reasons = (
        expected.reason
        for expected in suite.expected
        if way in expected.ways and fnmatchcase(test, _escaped(expected.test))
    )
    return next(reasons, None)


def _escaped(pattern: str) -> str:
    """Parameters of a test stand in square brackets, which are no set of characters here."""
    return pattern.replace("[", "[[]")


def run_suite(suite: Suite, places: Places, way: Way, folder: Path) -> dict[str, Outcome]:
    """Runs the suite, and then its timed tests that failed once more, each alone."""
    folder.mkdir(parents=True, exist_ok=True)
    run = _Run(suite, places, way, folder)
    outcomes = run.outcomes((*suite.tests, *suite.options))
    for test, outcome in list(outcomes.items()):
        is_timed = any(fnmatchcase(test, _escaped(pattern)) for pattern in suite.timed)
        if is_timed and outcome.name == "failed":
            outcomes |= run.outcomes((test, *suite.options))
    return outcomes


@dataclass(frozen=True)
class _Run:
    suite: Suite
    places: Places
    way: Way
    folder: Path

    def outcomes(self, tests: Sequence[str]) -> dict[str, Outcome]:
        servers = Servers(
            checkout=str(self.places.comfyui),
            python=self.places.comfyui_python,
            folder=str(self.folder),
            backends=self.way.backends,
            passthrough=self.suite.passthrough,
        )
        if self.suite.starts_servers:
            return self._pytest(tests, servers, url="")
        with _started(servers, self.suite.server_options) as url:
            return self._pytest(tests, servers, url=url)

    def _pytest(self, tests: Sequence[str], servers: Servers, *, url: str) -> dict[str, Outcome]:
        report, log = self.folder / "report.json", self.folder / "pytest.log"
        report.unlink(missing_ok=True)
        options = ["-p", "external_suite", "-p", "no:cacheprovider", "--rootdir=.", "-q"]
        with log.open("w", encoding="utf-8") as output:
            words = self._words(tests)
            subprocess.run(
                [self.places.python, "-m", "pytest", *options, *words],
                cwd=self.places.checkout,
                env=self._environ(servers, report, url),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=SUITE_SECONDS_MAX,
                check=False,
            )
        return _outcomes(report, log)

    def _words(self, tests: Sequence[str]) -> list[str]:
        """The tests of ours are copied, so that pytest doesn't read the conftest.py above them."""
        clients, port = self.folder.parent / "clients", str(free_port())
        shutil.copytree(CLIENTS, clients, dirs_exist_ok=True)
        return [word.replace("{port}", port).replace("{clients}", str(clients)) for word in tests]

    def _environ(self, servers: Servers, report: Path, url: str) -> dict[str, str]:
        config = {
            "launcher": servers.command(),
            "launcher_folder": str(ROOT),
            "launcher_environ": dict(os.environ),
            "report": str(report),
            "url": url,
            "address_fixture": self.suite.address_fixture,
            "seconds_max": TEST_SECONDS_MAX,
        }
        imports = [PLUGIN_FOLDER, *(self.places.checkout / path for path in self.suite.imports)]
        own = {name: text.format(url=url) for name, text in self.suite.environ.items()}
        return {
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(map(str, imports)),
            "EXTERNAL_SUITE": json.dumps(config),
            **own,
        }


@contextmanager
def _started(servers: Servers, options: Sequence[str]) -> Iterator[str]:
    process = subprocess.Popen(
        [*servers.command(), *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, f"the servers did not start; their logs are in {servers.folder}"
        yield url
    finally:
        process.stdin.close()
        process.wait(STOP_SECONDS_MAX)
        process.stdout.close()


def _outcomes(report: Path, log: Path) -> dict[str, Outcome]:
    output = log.read_text(encoding="utf-8", errors="replace")[-OUTPUT_CHARACTERS:]
    assert report.is_file(), f"pytest wrote no report:\n{output}"
    content = json.loads(report.read_text(encoding="utf-8"))
    assert content["collected"], f"pytest collected no tests:\n{output}"
    known = {
        test: Outcome(found["outcome"], found["seconds"], found["text"], found["values"])
        for test, found in content["tests"].items()
    }
    return {test: known.get(test, Outcome()) for test in content["collected"]}


def report_text(suite: Suite, outcomes: Mapping[Way, Outcomes], found: Sequence[Difference]) -> str:
    """A table of outcomes, and the differences, as Markdown."""
    lines = [f"## {suite.name}", "", "| | outcomes | seconds in tests |", "|---|---|---|"]
    for way, results in outcomes.items():
        counts = Counter(outcome.name for outcome in results.values())
        shown = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        seconds = sum(outcome.seconds for outcome in results.values())
        lines.append(f"| {way} | {shown} | {seconds:.1f} |")
    for difference in found:
        reason = difference.reason or "**not expected**"
        outcome = f"{difference.direct.name} directly, {difference.gateway.name} here"
        lines += ["", f"### {difference.test}, {difference.way}: {outcome}", "", reason]
        lines += ["", "```", difference.text, "```"]
    return "\n".join([*lines, ""])
