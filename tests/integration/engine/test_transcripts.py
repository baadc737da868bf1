"""Recorded talks with a real ComfyUI 0.28.0, played to the engine."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.golden.shared import SHARED
from tests.support.backends.replay import TIME_SCALE, Differences, replay

from comfyfleet.engine import serve_in_thread
from comfyfleet.engine.node import Context, EngineNodeType, NodeResult
from comfyfleet.engine.nodes import registry

TRANSCRIPTS = SHARED / "transcripts" / "0.28.0.jsonl"
# What the recorded server needed seconds for; long enough for all that is asked meanwhile.
BLUR_SECONDS = 1.5 * TIME_SCALE

pytestmark = pytest.mark.skipif(
    not TRANSCRIPTS.is_file(), reason=f"{TRANSCRIPTS} is absent (COMFYFLEET_SHARED names a place)"
)

# Where we answer otherwise on purpose, or can't answer alike.
DEVIATIONS: Mapping[str, str] = {
    "equal_items_answer_500_and_run": "two equal items are no trouble: 200, and both run",
    "worker_dies_on_dangling_extra_link": "the run fails, the worker lives",
    "object_info": "the engine has fewer than 500 classes",
    "frontend_routes": "the engine brings no editor, so there are no extensions of it",
}
SURVIVED = ("equal_items_answer_500_and_run", "worker_dies_on_dangling_extra_link")


def scenarios() -> list[dict[str, Any]]:
    lines = TRANSCRIPTS.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def nodes_with_slow_blur() -> Mapping[str, EngineNodeType]:
    nodes = dict(registry())

    def blur(context: Context, image: Any, blur_radius: int, sigma: float) -> NodeResult:
        # Asleep, not paused: no interrupt reaches a real blur before its end.
        time.sleep(BLUR_SECONDS)
        return NodeResult((image,))

    nodes["ImageBlur"] = EngineNodeType(name="ImageBlur", info=nodes["ImageBlur"].info, run=blur)
    return nodes


def report(found: Mapping[str, Differences]) -> str:
    lines = []
    for level in ("status", "bodies", "events"):
        missed = {
            name: getattr(diff, level) for name, diff in found.items() if getattr(diff, level)
        }
        lines.append(f"{level}: {len(found) - len(missed)}/{len(found)} scenarios alike")
        lines += [f"  {name}: {places[0]}" for name, places in missed.items()]
    return "\n".join(lines)


def test_recorded_scenarios_are_answered_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_in_thread(data=tmp_path, nodes=nodes_with_slow_blur()) as served:
        found = {scenario["name"]: replay(scenario, served) for scenario in scenarios()}
    with capsys.disabled():
        print(f"\nComfyUI 0.28.0 transcripts\n{report(found)}")  # noqa: T201 - the figures are the point
    assert {name for name, differences in found.items() if differences} == set(DEVIATIONS)


@pytest.mark.parametrize("name", SURVIVED)
def test_a_mortal_engine_answers_alike_even_where_comfyui_breaks(tmp_path: Path, name: str) -> None:
    (scenario,) = (scenario for scenario in scenarios() if scenario["name"] == name)
    with serve_in_thread(
        data=tmp_path, nodes=nodes_with_slow_blur(), dies_like_comfyui=True
    ) as served:
        found = replay(scenario, served)
    assert not found, report({name: found})
