"""The driver of other projects' test suites, with a small suite and the built-in engine in place of ComfyUI."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.external.suites import (
    NOT_RUN,
    Expected,
    Outcome,
    Places,
    Suite,
    Way,
    differences,
    places_of,
    report_text,
    run_suite,
)

# Starts the engine with the options that a ComfyUI is started with.
MAIN = """
import sys
from comfyfleet.cli import main
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
folder = options["--output-directory"].removesuffix("/output")
sys.argv[1:] = ["engine", "--port", options["--port"], "--data", folder]
main()
"""
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--port")
"""
TESTS = """
import json, subprocess, time, urllib.error, urllib.request
import pytest

@pytest.fixture(scope="module")
def url(request):
    port = request.config.getoption("--port")
    server = subprocess.Popen(["python", "main.py", "--port", port, "--listen", "127.0.0.1", "--cpu"])
    yield f"http://127.0.0.1:{port}"
    server.kill()

def test_both_have_nodes(url, record_property):
    with urllib.request.urlopen(f"{url}/object_info") as response:
        record_property("blurs", "ImageBlur" in json.load(response))

def test_only_a_gateway_is_healthy(url):
    urllib.request.urlopen(f"{url}/healthz")

def test_a_backend_is_no_gateway(url, record_property):
    with urllib.request.urlopen(f"{url}/system_stats") as response:
        record_property("python", json.load(response)["system"]["python_version"])
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{url}/healthz")
"""
SUITE = Suite(
    name="small",
    variable="EXTERNAL_SMALL",
    tests=("test_small.py",),
    options=("--port={port}",),
    starts_servers=True,
    expected=(Expected("*::test_only_a_gateway_is_healthy", "a ComfyUI has no such route"),),
)


def outcomes(**names: str) -> Mapping[str, Outcome]:
    return {test: Outcome(name) for test, name in names.items()}


def test_tests_with_another_outcome_or_other_values_differ() -> None:
    direct = {
        **outcomes(a="passed", b="passed", c="failed"),
        "d": Outcome("passed", values={"x": 1}),
    }
    gateway = {**outcomes(a="passed", c="failed"), "d": Outcome("passed", values={"x": 2})}
    found = differences(SUITE, Way.ONE_BACKEND, direct, gateway)
    assert [(difference.test, difference.gateway.name) for difference in found] == [
        ("b", NOT_RUN),
        ("d", "passed"),
    ]
    text = report_text(SUITE, {Way.DIRECT: direct, Way.ONE_BACKEND: gateway}, found)
    assert "{'x': 1} directly, {'x': 2} here" in text
    assert text.count("**not expected**") == 2


@pytest.mark.parametrize(
    ("pattern", "ways", "is_expected"),
    [
        ("*::test_cache[[]classic]", (Way.TWO_BACKENDS,), False),
        ("*::test_cache[classic]", (Way.TWO_BACKENDS,), True),
        ("*::test_cache*", (Way.ONE_BACKEND,), False),
    ],
)
def test_an_expected_difference_has_its_ways_and_parameters(
    pattern: str, ways: tuple[Way, ...], is_expected: bool
) -> None:
    suite = Suite("s", "S", (), expected=(Expected(pattern, "because", ways),))
    test = "test_x.py::test_cache[classic]"
    (found,) = differences(suite, Way.TWO_BACKENDS, {test: Outcome("passed")}, {})
    assert found.reason == ("because" if is_expected else None)


def test_a_suite_whose_checkout_is_not_set_is_named() -> None:
    environ = {"EXTERNAL_COMFYUI": "/comfyui", "EXTERNAL_COMFYUI_PYTHON": "/python"}
    with pytest.raises(KeyError, match="EXTERNAL_SMALL"):
        places_of(SUITE, environ)
    places = places_of(SUITE, {**environ, "EXTERNAL_SMALL": "/small"})
    assert (places.checkout, places.python) == (Path("/small"), "/python")


def test_a_suite_runs_directly_and_through_the_gateway(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "main.py").write_text(MAIN)
    (checkout / "conftest.py").write_text(CONFTEST)
    (checkout / "test_small.py").write_text(TESTS)
    places = Places(checkout, sys.executable, checkout, sys.executable)
    ways = (Way.DIRECT, Way.TWO_BACKENDS)
    direct, gateway = (run_suite(SUITE, places, way, tmp_path / way) for way in ways)
    names = {test.partition("::")[2]: outcome.name for test, outcome in direct.items()}
    assert names == {
        "test_both_have_nodes": "passed",
        "test_only_a_gateway_is_healthy": "failed",
        "test_a_backend_is_no_gateway": "passed",
    }
    found = differences(SUITE, Way.TWO_BACKENDS, direct, gateway)
    reasons = {difference.test.partition("::")[2]: difference.reason for difference in found}
    assert reasons == {
        "test_a_backend_is_no_gateway": None,
        "test_only_a_gateway_is_healthy": "a ComfyUI has no such route",
    }
    assert not (checkout / "output").exists()
