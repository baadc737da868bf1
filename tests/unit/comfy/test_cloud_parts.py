"""The pure parts of the cloud: states, marker, server-sent events, origins, shapes."""

from typing import Any

import httpx
import pytest

from comfyfleet.comfy.cloud_calls import (
    call_by_id,
    is_marked,
    require_own_link,
    require_storage_link,
    resolve_link,
    with_marker,
)
from comfyfleet.comfy.cloud_v1 import is_retryable, phase_of
from comfyfleet.comfy.cloud_v2 import parse_job, parse_output
from comfyfleet.errors import UnexpectedAnswer

RUN = "6f1c1c1e-0000-4000-8000-000000000001"
OTHER_RUN = "6f1c1c1e-0000-4000-8000-000000000002"
CLOUD = httpx.URL("https://cloud.example")
LOCAL = httpx.URL("http://127.0.0.1:8000")
JOB: dict[str, Any] = {"id": "j", "status": "queued", "outputs": [], "urls": {}}
OUTPUT = {"node_id": "9", "name": "a.png", "type": "image", "id": "asset", "url": "/x"}


@pytest.mark.parametrize("state", ["success", "error", "non_retryable_error", "lost", "cancelled"])
def test_these_states_end_a_job(state: str) -> None:
    assert phase_of(state) not in ("waiting", "running")


@pytest.mark.parametrize(
    "state",
    ["submitted", "queued_limited", "executing", "executed", "erroring", "cancel_requested", "new"],
)
def test_every_other_state_is_in_flight(state: str) -> None:
    assert phase_of(state) in ("waiting", "running")


def test_only_the_clouds_own_trouble_is_worth_another_try() -> None:
    states = ("error", "lost", "non_retryable_error", "cancelled", "success")
    assert [is_retryable(state) for state in states] == [True, True, False, False, False]


def test_a_marked_prompt_is_known_by_its_run_only_and_the_given_one_is_not_changed() -> None:
    prompt = {"1": {"class_type": "A", "inputs": {}, "_meta": {"title": "t"}}}
    marked = with_marker(prompt, RUN)
    assert marked["1"]["_meta"]["title"] == "t"
    assert is_marked([1, "id", marked], RUN)
    assert not is_marked([1, "id", marked], OTHER_RUN)
    assert not is_marked(prompt, RUN)


@pytest.mark.parametrize("its_id", ["../prompt", "..", "a/b", "a?b=c", "a#b"])
def test_an_id_does_not_lead_to_another_route(its_id: str) -> None:
    path = call_by_id("GET", "/jobs/{id}/status", its_id).path
    assert path is not None
    assert path.count("/") == 3
    assert not set("?#.") & set(path)


def test_links_belong_to_the_origin_not_to_the_base() -> None:
    base = httpx.URL("https://cloud.example/some/base?x=1")
    assert resolve_link(base, "/api/v2/jobs/1") == "https://cloud.example/api/v2/jobs/1"
    assert require_own_link(base, "https://cloud.example:443/a") == "https://cloud.example:443/a"


def test_a_link_to_another_host_is_not_followed_with_the_key() -> None:
    with pytest.raises(UnexpectedAnswer, match=r"evil\.example"):
        require_own_link(CLOUD, "//evil.example/api/v2/jobs/1/cancel")


@pytest.mark.parametrize(
    ("base", "location", "is_followed"),
    [
        (CLOUD, "https://storage.example/x", True),
        (CLOUD, "http://storage.example/x", False),
        (CLOUD, "http://127.0.0.1/x", False),
        (LOCAL, "http://localhost:9000/x", True),
        (LOCAL, "http://storage.example/x", False),
        (LOCAL, "https://storage.example/x", True),
        (LOCAL, "file:///etc/passwd", False),
    ],
)
def test_a_redirect_leads_to_https_or_stays_on_this_machine(
    base: httpx.URL, location: str, is_followed: bool
) -> None:
    if is_followed:
        assert require_storage_link(base, base, location) == location
        return
    with pytest.raises(UnexpectedAnswer):
        require_storage_link(base, base, location)


def test_a_job_of_v2_is_parsed() -> None:
    job = parse_job({**JOB, "status": "succeeded", "outputs": [OUTPUT], "outputs_reused": True})
    assert (job.job_id, job.is_over, job.is_reused) == ("j", True, True)
    assert [output.asset_id for output in job.outputs] == ["asset"]


def test_a_status_that_v2_does_not_have_is_in_flight() -> None:
    assert not parse_job({**JOB, "status": "paused"}).is_over


@pytest.mark.parametrize(
    "answer",
    [None, [], "job", {}, {"id": 1, "status": "queued"}, {"id": "j"}, {**JOB, "outputs": {}}],
)
def test_an_odd_job_is_told_with_what_was_received(answer: object) -> None:
    with pytest.raises(UnexpectedAnswer, match="received"):
        parse_job(answer)


def test_an_output_without_its_asset_is_unexpected() -> None:
    with pytest.raises(UnexpectedAnswer, match=r"a string .id."):
        parse_output({**OUTPUT, "id": None})
