"""Recorded talks with a real ComfyUI 0.28.0, played to the gateway with one engine behind it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from tests.support.backends.replay import (
    TRANSCRIPTS,
    Differences,
    nodes_with_slow_blur,
    play,
    report,
    scenarios,
)
from tests.support.server.gateway import GatewayProcess, serving_engines, up_with_engines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not TRANSCRIPTS.is_file(),
        reason=f"{TRANSCRIPTS} is absent (COMFYFLEET_SHARED names a place)",
    ),
]
# Long enough for an interrupt to go to the control plane, to the worker and to its engine.
BLUR_SECONDS = 1.2


class OnPurpose(NamedTuple):
    """`where`: what all places of the difference have in common. Another one is no longer on purpose."""

    reason: str
    where: str = ""


OWN_FILES = OnPurpose("each prompt writes files of its own, so nodes that save are never cached")
NEUTRAL_NAME = OnPurpose(
    "bytes that are no picture have a neutral ending on a backend, which reads them otherwise",
    r"exception_(message|type)",
)
CYCLE = OnPurpose("a cycle is refused when it is submitted, whichever input it goes through")
UPLOAD_LIMIT = OnPurpose("the limit of this control plane", r"max_upload_size")
# docs/reference/gateway-differences.md tells the same to users.
DIFFERENCES: Mapping[str, OnPurpose] = {
    "run_twice_fully_cached": OWN_FILES,
    "run_twice_cached_without_client_id": OWN_FILES,
    "run_same_graph_other_ids": OWN_FILES,
    "failing_run_without_client_id": NEUTRAL_NAME,
    "corrupt_image_fails": NEUTRAL_NAME,
    "good_after_failed": NEUTRAL_NAME,
    "second_branch_fails": OnPurpose(
        "a prefix that leads out of the folder stays in the folder of its prompt, and is no error"
    ),
    "ws_feature_flags": UPLOAD_LIMIT,
    "binary_images_with_metadata": UPLOAD_LIMIT,
    "cancel_finished_and_unknown": OnPurpose(
        "a path that is not ComfyUI's is answered by the control plane", r"POST /jobs/"
    ),
    "object_info": OnPurpose("the engine has fewer node types", r"more_than_500_classes"),
    "frontend_routes": OnPurpose("the editor is an extra", r"/extensions"),
    "equal_items_answer_500_and_run": OnPurpose("a repeated id is one job"),
    "worker_dies_on_dangling_extra_link": OnPurpose("the link is left out, and the worker lives"),
    "cycle_through_extra_input_after_success": CYCLE,
    "cycle_through_extra_input_after_failure": CYCLE,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    with (
        serving_engines(1, folder, nodes_with_slow_blur(BLUR_SECONDS)) as engines,
        up_with_engines(folder, engines) as server,
    ):
        yield server


def test_recorded_scenarios_are_answered_alike(
    server: GatewayProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {each["name"]: play_to_new_user(each, server) for each in scenarios()}
    with capsys.disabled():
        print(f"\nComfyUI 0.28.0 transcripts through the gateway\n{report(found)}")  # noqa: T201 - the figures are the point
    assert {name for name, differences in found.items() if differences} == set(DIFFERENCES)
    for name, expected in DIFFERENCES.items():
        assert unexpected(found[name], expected.where) == [], name


def unexpected(found: Differences, where: str) -> list[str]:
    places = [*found.status, *found.bodies, *found.events]
    return [each for each in places if not re.search(where, each)]


def play_to_new_user(scenario: Mapping[str, Any], server: GatewayProcess) -> Differences:
    """A user who has done nothing yet, and an engine that remembers nothing, are the start."""
    server.engines[0].engine.free()
    with server.user().open_engine_client() as talk:
        return play(scenario, talk, lambda name: None)
