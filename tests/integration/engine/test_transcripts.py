"""Recorded talks with a real ComfyUI 0.28.0, played to the engine."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.support.backends.replay import (
    TRANSCRIPTS,
    nodes_with_slow_blur,
    replay,
    report,
    scenarios,
)

from comfyfleet.engine import serve_in_thread

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
