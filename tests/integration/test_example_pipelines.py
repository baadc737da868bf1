"""The example pipelines run as written, with the examples' workflows, on the built-in engine."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.support.server.command_process import started
from tests.support.server.commands import EXAMPLES, Result, comfyfleet
from tests.support.server.local_server import KEY, LocalServer

PERSON_NEEDED = 3  # the exit code of --wait when only a person can help


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("examples")
    with started("up", "--port", "0", folder=folder) as running:
        url, key = running.wait_for_line(KEY).groups()
        running.wait_for_line("Worker built-in in fleet default/production")
        properties = str(EXAMPLES / "properties.yaml")
        operator = {"COMFYFLEET_URL": url, "COMFYFLEET_KEY": key}
        register = ("admin", "workflows", "register", "--from", properties)
        done = comfyfleet(*register, environ=operator)
        assert done.code == 0, done.err
        yield LocalServer(running, url, key, folder)


class Shopper:
    def __init__(self, server: LocalServer) -> None:
        self.environ = {"COMFYFLEET_URL": server.url, "COMFYFLEET_KEY": server.customer()}

    def says(self, *arguments: str, ends: Sequence[int] = (0,)) -> Result:
        done = comfyfleet("pipeline", *arguments, environ=self.environ, width=200)
        assert done.code in ends, done.out + done.err
        return done

    def run(self, name: str, *given: str) -> dict[str, Any]:
        file = str(EXAMPLES / "pipelines" / f"{name}.yaml")
        done = self.says("run", file, *given, "--wait", "--json", ends=(0, PERSON_NEEDED))
        run: dict[str, Any] = done.json
        assert (done.code == PERSON_NEEDED) == (run["reason"] == "waiting_for_judgement")
        return run

    def candidates(self, run: dict[str, Any], *wanted: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.says("candidates", run["id"], *wanted, "--json").json
        return found


@pytest.fixture
def ada(server: LocalServer) -> Shopper:
    return Shopper(server)


def test_colours_are_softened_and_enlarged(ada: Shopper) -> None:
    run = ada.run("soft-colours", "--base", "1", "--set", "colour=3368601", "--set", "width=64")
    assert run["reason"] == "complete"
    assert [each["made"] for each in run["steps"]] == [1, 2, 4]


def expected(score: float) -> tuple[str, str | None]:
    if score >= 0.7:
        return "approved", "judge"
    return ("rejected", "judge") if score < 0.4 else ("active", None)


def test_the_judge_lets_the_well_exposed_through(ada: Shopper) -> None:
    """Its colours are of chance, so the thresholds are checked, whatever comes out."""
    run = ada.run("well-exposed", "--base", "8", "--concurrent", "2")
    base, soften = run["steps"]
    found = ada.candidates(run, "--step", "0", "--sort", "score")
    scores = [each["judge_score"] for each in found]
    assert scores == sorted(scores, reverse=True)
    assert [(each["status"], each["judged_by"]) for each in found] == list(map(expected, scores))
    unclear = sum(each["status"] == "active" for each in found)
    assert run["reason"] == ("waiting_for_judgement" if unclear else "complete")
    assert (base["waiting"], base["unjudged"], base["failed"]) == (unclear, 0, 0)
    good = {each["id"] for each in found if each["status"] == "approved"}
    children = ada.candidates(run, "--step", "1")
    assert {each["parent"] for each in children} == good
    assert soften["made"] == 2 * len(good)
    # A plain colour stays alike, however much it is softened.
    assert {(each["judge_score"], each["status"]) for each in children} <= {(1.0, "approved")}
    spent = 8 * 2 + len(good) * 3  # both judges are free
    assert run["tokens"] == spent
    board = ada.says("status", run["id"]).out
    assert f"Base: exposure approves from 0.7, rejects below 0.4; 0 left to judge, {unclear}" in (
        board
    )
    tree = ada.says("tree", run["id"]).out
    for each in found:
        (line,) = [line for line in tree.splitlines() if each["id"] in line]
        assert ("by the judge" in line) == (each["judged_by"] == "judge")
        assert f"score {each['judge_score']:g}" in line
    shown = ada.says("candidates", run["id"], "--step", "0", "--sort", "score").out
    first = [line.split()[0] for line in shown.splitlines()[1:]]
    assert first == [each["id"] for each in found]
    last = found[-1]["id"]
    assert f"{last} is approved" in ada.says("approve", run["id"], last).err
    (line,) = [line for line in ada.says("tree", run["id"]).out.splitlines() if last in line]
    assert "by the judge" not in line
