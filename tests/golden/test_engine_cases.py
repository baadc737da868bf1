"""The nodes against what a real ComfyUI answered. Refusals are the validator's, not the nodes'."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.golden.comparing import difference, matches, without
from tests.golden.shared import ENGINE
from tests.unit.engine.node_runs import NODES, NodeStopped, PromptRun, RecordingContext, folders_in

pytestmark = pytest.mark.skipif(
    not ENGINE.is_dir(), reason=f"{ENGINE} is absent (COMFYFLEET_SHARED names another place)"
)

# What only people read; the recorded entries are without it.
PROSE = ("description", "tooltip", "output_tooltips", "search_aliases")


def cases() -> list[dict[str, Any]]:
    lines = (ENGINE / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def miss(case: dict[str, Any], base: Path) -> str:
    """Why a case is missed; empty when it is not."""
    folders = folders_in(base, ENGINE / "inputs")
    for name in case.get("existing", ()):
        (folders.output / name).parent.mkdir(parents=True, exist_ok=True)
        (folders.output / name).touch()
    running = PromptRun(case["prompt"], RecordingContext(folders, case["prompt"]))
    error = case["error"]
    try:
        history = running.history()
    except NodeStopped as stopped:
        expected = error["node_id"] if error else None
        return "" if stopped.node_id == expected else f"failed in {stopped}"
    if error:
        return f"node {error['node_id']} did not fail"
    if not matches(case["history"], history):
        return f"history {history}"
    places = {"output": folders.output, "temp": folders.temp}
    found = (
        difference({**wanted, "tolerance": case["tolerance"]}, history[wanted["node_id"]], places)
        for wanted in case["outputs"]
    )
    return next(filter(None, found), "")


def is_refused(case: dict[str, Any]) -> bool:
    return bool(case["error"]) and case["error"]["kind"] == "refused"


def test_nodes_answer_as_comfyui_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hits, misses = Counter[str](), {}
    run = [case for case in cases() if not is_refused(case)]
    for number, case in enumerate(run):
        why = miss(case, tmp_path / str(number))
        hits[case["set"]] += not why
        if why:
            misses[case["name"]] = why
    totals = Counter(case["set"] for case in run)
    with capsys.disabled():
        figures = ", ".join(f"{kind} {hits[kind]}/{totals[kind]}" for kind in sorted(totals))
        print(f"\nengine cases: {figures}")  # noqa: T201 - the figures are asked for
    assert not misses


def test_a_file_that_is_missing_is_refused_in_comfyuis_words(tmp_path: Path) -> None:
    folders = folders_in(tmp_path, ENGINE / "inputs")
    for case in filter(is_refused, cases()):
        for node_id, told in dict(case["error"]["body"].get("node_errors") or {}).items():
            for error in told["errors"]:
                if error["type"] == "custom_validation_failed":
                    node = case["prompt"][node_id]
                    node_type = NODES[node["class_type"]]
                    assert node_type.validate
                    message = node_type.validate(folders, node["inputs"])
                    assert error["details"] == f"{node_type.validated[0]} - {message}"


def test_every_entry_of_object_info_is_comfyuis() -> None:
    recorded = json.loads((ENGINE / "object_info.json").read_text(encoding="utf-8"))
    assert recorded.keys() <= NODES.keys()
    for name, entry in recorded.items():
        assert without(json.loads(json.dumps(NODES[name].info)), *PROSE) == entry, name
