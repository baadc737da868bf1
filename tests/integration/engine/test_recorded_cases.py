"""Recorded prompts, sent to a served engine: run, failed or refused as by a real ComfyUI."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.golden.comparing import difference, matches, without
from tests.golden.shared import ENGINE
from tests.support.backends.engine_client import EngineClient, open_engine_client

from comfyfleet.engine import Served, serve_in_thread

pytestmark = pytest.mark.skipif(
    not ENGINE.is_dir(), reason=f"{ENGINE} is absent (COMFYFLEET_SHARED names another place)"
)


def cases() -> list[dict[str, Any]]:
    lines = (ENGINE / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture
def picture_engine(tmp_path: Path) -> Iterator[Served]:
    with serve_in_thread(data=tmp_path) as served:
        shutil.copytree(ENGINE / "inputs", served.engine.folders.input, dirs_exist_ok=True)
        yield served


def miss(case: dict[str, Any], talk: EngineClient, served: Served) -> str:
    """Why a case is missed; empty when it is not."""
    prepare(case, talk, served)
    answer = talk.http.post("/prompt", json={"prompt": case["prompt"]})
    error = case["error"] or {}
    if error.get("kind") == "refused":
        return compare_refusal(error, answer.status_code, answer.json())
    if answer.status_code != 200:
        return f"refused: {answer.text}"
    talk.wait_idle(settle_seconds=0)
    record = talk.history(answer.json()["prompt_id"])
    if error:
        return compare_failure(error, record)
    return compare_results(case, record, served)


def prepare(case: dict[str, Any], talk: EngineClient, served: Served) -> None:
    """Nothing saved, nothing cached, and the files that the case says were there."""
    folders = served.engine.folders
    talk.http.post("/free", json={"free_memory": True})
    for folder in (folders.output, folders.temp):
        shutil.rmtree(folder)
        folder.mkdir()
    for name in case.get("existing", ()):
        (folders.output / name).parent.mkdir(parents=True, exist_ok=True)
        (folders.output / name).touch()


def compare_refusal(error: dict[str, Any], status: int, body: dict[str, Any]) -> str:
    want, got = (comparable(answer) for answer in (error["body"], body))
    if (error["status"], want) == (status, got):
        return ""
    return f"{status} {got}"


def comparable(body: dict[str, Any]) -> Any:
    """Without order where ComfyUI has none, and without what Python and people wrote."""
    body = without(body, "tooltip", "traceback")
    nodes = {
        node_id: {**told, "errors": sorted(told["errors"], key=str)}
        for node_id, told in body["node_errors"].items()
    }
    for told in nodes.values():
        told["dependent_outputs"] = sorted(told["dependent_outputs"])
    return body["error"]["type"], body["error"]["message"], nodes


def compare_failure(error: dict[str, Any], record: dict[str, Any]) -> str:
    event, data = record["status"]["messages"][-1]
    got = (event, data.get("node_id"), data.get("node_type"))
    want = ("execution_error", error["node_id"], error["node_type"])
    return "" if got == want else f"{got}"


def compare_results(case: dict[str, Any], record: dict[str, Any], served: Served) -> str:
    if not matches(case["history"], record["outputs"]):
        return f"{record['status']['messages'][-1]} {record['outputs']}"
    folders = served.engine.folders
    places = {"output": folders.output, "temp": folders.temp}
    found = (
        difference(
            {**wanted, "tolerance": case["tolerance"]}, record["outputs"][wanted["node_id"]], places
        )
        for wanted in case["outputs"]
    )
    return next(filter(None, found), "")


def test_recorded_prompts_are_run_failed_and_refused_alike(
    picture_engine: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    total, missed = Counter[str](), {}
    with open_engine_client(picture_engine.url) as talk:
        for case in cases():
            total[case["set"]] += 1
            if reason := miss(case, talk, picture_engine):
                missed[case["name"]] = reason
    with capsys.disabled():
        print(f"\nRecorded prompts over HTTP: {dict(total)}, missed {len(missed)} {missed}")  # noqa: T201
    assert not missed
