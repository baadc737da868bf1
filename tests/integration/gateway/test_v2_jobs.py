"""Comfy API v2: jobs as its clients know them, which are the same as those of ComfyUI's own clients."""

import base64
import json
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.support.backends.prompts import new_color, node, picture, slow
from tests.support.server.gateway import GatewayProcess, GatewayUser

from comfyfleet.transport.sse import EventParser, ServerEvent

SECONDS_MAX = 30.0
ENDED = ("succeeded", "failed", "canceled", "expired")


@pytest.fixture
def http(user: GatewayUser) -> Iterator[httpx.Client]:
    with user.http() as http:
        yield http


def submit(http: httpx.Client, workflow: dict[str, Any], **more: Any) -> dict[str, Any]:
    headers = more.pop("headers", {})
    answer = http.post("/api/v2/jobs", json={"workflow": workflow, **more}, headers=headers)
    assert answer.status_code == 201, answer.text
    job: dict[str, Any] = answer.json()
    return job


def wait(http: httpx.Client, job: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS_MAX
    while job["status"] not in ENDED:
        assert time.monotonic() < deadline, job
        time.sleep(0.05)
        job = http.get(job["urls"]["self"]).json()
    return job


def events_of(
    http: httpx.Client, job: dict[str, Any], last_event_id: str | None = None
) -> list[ServerEvent]:
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    parser = EventParser()
    with http.stream("GET", job["urls"]["events"], headers=headers) as stream:
        assert stream.status_code == 200
        return [event for piece in stream.iter_bytes() for event in parser.feed(piece)]


def error_of(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()["error"]
    assert body.keys() == {"code", "message", "details"}
    assert body["message"]
    return answer.status_code, body["code"]


def test_a_job_runs_and_its_output_can_be_downloaded(http: httpx.Client) -> None:
    job = submit(http, picture(0xFF0000))
    assert job["status"] in ("queued", "running")
    assert job["outputs"] == []
    ended = wait(http, job)
    assert ended["status"] == "succeeded"
    assert ended["error"] is None
    assert ended["metrics"]["execution_ms"] >= 0
    (output,) = ended["outputs"]
    assert output["node_id"] == "9"
    assert output["name"] == "contract_00001_.png"
    assert (output["type"], output["content_type"]) == ("image", "image/png")
    content = http.get(output["url"])
    assert content.content.startswith(b"\x89PNG")
    assert output["size_bytes"] == len(content.content)
    assert output["job_id"] == job["id"]


def test_a_job_has_exactly_the_fields_of_the_contract(http: httpx.Client) -> None:
    job = wait(http, submit(http, picture(new_color())))
    assert job.keys() == {
        "id", "status", "created_at", "started_at", "completed_at", "expires_at", "queue_position",
        "progress", "outputs", "outputs_reused", "error", "metrics", "urls",
    }  # fmt: skip
    assert job["urls"].keys() == {"self", "events", "cancel"}
    assert job["outputs"][0].keys() == {
        "node_id", "name", "type", "content_type", "size_bytes", "id", "hash", "url",
        "url_expires_at", "job_id",
    }  # fmt: skip
    for name in ("created_at", "started_at", "completed_at", "expires_at"):
        assert job[name].endswith("Z")


def test_the_same_job_is_in_the_history_of_comfyui_and_the_other_way_round(
    http: httpx.Client,
) -> None:
    job = wait(http, submit(http, picture(new_color())))
    history = http.get("/history").json()
    assert list(history) == [job["id"]]
    prompt_id = http.post("/prompt", json={"prompt": picture(new_color())}).json()["prompt_id"]
    own = wait(http, http.get(f"/api/v2/jobs/{prompt_id}").json())
    assert own["status"] == "succeeded"
    assert own["outputs"][0]["name"] == "contract_00002_.png"
    listed = http.get("/api/v2/jobs").json()["jobs"]
    assert [each["id"] for each in listed] == [prompt_id, job["id"]]


def test_events_tell_the_run_and_end_with_its_status(http: httpx.Client) -> None:
    job = submit(http, slow(new_color(), nodes=1))
    events = events_of(http, job)
    assert events[0].name == "status"
    assert [event.name for event in events[-2:]] == ["output", "status"]
    assert json.loads(events[-1].data) == {"status": "succeeded"}
    told = [json.loads(event.data) for event in events if event.name == "progress"]
    assert told
    assert told[-1]["value"] == 1.0
    assert told[-1]["nodes_done"] == told[-1]["nodes_total"] == 3
    assert any(each["current_node_class"] == "ComfyfleetSteps" for each in told)


def test_previews_come_while_a_sampler_runs(http: httpx.Client) -> None:
    steps = {"steps": 25, "step_ms": 100, "previews": True}
    prompt = picture(new_color())
    prompt["2"] = node("ComfyfleetSteps", image=["1", 0], **steps)
    prompt["9"]["inputs"]["images"] = ["2", 0]
    events = events_of(http, submit(http, prompt))
    previews = [json.loads(event.data) for event in events if event.name == "preview"]
    assert previews
    assert previews[0]["content_type"] in ("image/jpeg", "image/png")
    assert base64.b64decode(previews[0]["data_base64"])[:2] in (b"\xff\xd8", b"\x89P")


def test_a_reader_that_was_cut_off_goes_on_where_it_was(http: httpx.Client) -> None:
    job = submit(http, picture(new_color()))
    events = events_of(http, job)
    ids = [event.id for event in events if event.id]
    assert ids[-1] == "end"
    again = events_of(http, job, last_event_id=ids[0])
    assert [event.id for event in again] == ids[1:]
    (last,) = events_of(http, job, last_event_id=ids[-2])
    assert (last.name, last.id) == ("status", "end")
    answer = http.get(job["urls"]["events"], headers={"Last-Event-ID": "end"})
    assert answer.status_code == 204


def test_a_late_reader_gets_outputs_and_status(http: httpx.Client) -> None:
    job = wait(http, submit(http, picture(new_color())))
    events = events_of(http, job)
    assert json.loads(events[-2].data)["id"] == job["outputs"][0]["id"]


def test_a_running_job_is_cancelled_and_again_without_effect(http: httpx.Client) -> None:
    job = submit(http, slow(new_color(), nodes=6))
    deadline = time.monotonic() + SECONDS_MAX
    while http.get(job["urls"]["self"]).json()["status"] != "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running = http.get(job["urls"]["self"]).json()
    assert running["progress"]["nodes_total"] == 8
    for _ in range(2):
        answer = http.post(job["urls"]["cancel"])
        assert answer.status_code == 200
        assert wait(http, answer.json())["status"] == "canceled"


def test_a_waiting_job_that_is_cancelled_is_still_told_of(http: httpx.Client) -> None:
    first, second, third = (submit(http, slow(new_color())) for _ in range(3))
    waiting = http.get(third["urls"]["self"]).json()
    assert waiting["queue_position"] is not None or waiting["status"] != "queued"
    http.post(third["urls"]["cancel"])
    assert http.get(third["urls"]["self"]).json()["status"] == "canceled"
    listed = http.get("/api/v2/jobs?status=canceled").json()["jobs"]
    assert [each["id"] for each in listed] == [third["id"]]
    for job in (first, second):
        http.post(job["urls"]["cancel"])


def test_a_failed_job_tells_its_node(http: httpx.Client) -> None:
    prompt = {
        "1": node("EmptyImage", width=16, height=16, batch_size=1, color=new_color()),
        "2": node("ComfyfleetFail", image=["1", 0], fail=True, after_ms=0, message="no such luck"),
        "9": node("SaveImage", images=["2", 0], filename_prefix="x"),
    }
    job = wait(http, submit(http, prompt))
    assert job["status"] == "failed"
    assert job["error"]["code"] == "node_execution_error"
    assert job["error"]["node_id"] == "2"
    assert job["error"]["class_type"] == "ComfyfleetFail"
    assert job["error"]["message"]


def test_a_key_counts_once(http: httpx.Client) -> None:
    key = {"Idempotency-Key": str(uuid4())}
    job = submit(http, picture(new_color()), headers=key)
    body = {"workflow": picture(new_color())}
    again = http.post("/api/v2/jobs", json=body, headers=key)
    assert error_of(again) == (422, "idempotency_key_reuse")
    listed = http.get("/api/v2/jobs").json()["jobs"]
    assert [each["id"] for each in listed] == [job["id"]]


def test_a_key_is_free_again_after_a_refusal(http: httpx.Client) -> None:
    key = {"Idempotency-Key": str(uuid4())}
    refused = http.post("/api/v2/jobs", json={"workflow": {"1": node("Nothing")}}, headers=key)
    assert error_of(refused) == (422, "invalid_workflow")
    submit(http, picture(new_color()), headers=key)


def test_a_key_is_its_users_own(gateway: GatewayProcess, user: GatewayUser) -> None:
    key = {"Idempotency-Key": str(uuid4())}
    other = gateway.user(user.tenant_id)
    with user.http() as one, other.http() as two:
        submit(one, picture(new_color()), headers=key)
        submit(two, picture(new_color()), headers=key)


def test_a_refused_workflow_names_its_nodes(http: httpx.Client) -> None:
    prompt = picture(new_color())
    del prompt["9"]["inputs"]["images"]
    answer = http.post("/api/v2/jobs", json={"workflow": prompt})
    assert error_of(answer) == (422, "invalid_workflow")
    errors = answer.json()["error"]["details"]["node_errors"]
    assert errors["9"]["errors"][0]["type"] == "required_input_missing"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "invalid_workflow"),
        ({"workflow": []}, 422, "invalid_workflow"),
        ({"workflow": {"1": "x"}}, 422, "invalid_workflow"),
        ({"workflow": {"1": {}}, "inputs": {"a": 1}}, 422, "invalid_workflow"),
        ({"workflow": {"1": {}}, "extra_data": {"other": 1}}, 400, "invalid_request"),
        ({"workflow": {"1": {}}, "extra_data": {"api_key_comfy_org": 5}}, 400, "invalid_request"),
        ({"workflow": {"1": {}}, "metadata": 5}, 422, "invalid_request"),
        ({"workflow": {"1": {}}, "metadata": {"a": 1}}, 422, "invalid_request"),
        ({"workflow": {"1": {}}, "priority": "high"}, 422, "invalid_request"),
        ([], 400, "invalid_request"),
    ],
)
def test_bodies_that_make_no_sense_are_refused(
    http: httpx.Client, body: Any, status: int, code: str
) -> None:
    assert error_of(http.post("/api/v2/jobs", json=body)) == (status, code)


def test_a_body_that_is_no_json_is_refused(http: httpx.Client) -> None:
    assert error_of(http.post("/api/v2/jobs", content=b"{")) == (400, "invalid_request")
    deep = b'{"workflow":' + b"[" * 900 + b"]" * 900 + b"}"
    assert http.post("/api/v2/jobs", content=deep).status_code in (400, 422)


def test_others_jobs_are_not_there(gateway: GatewayProcess, user: GatewayUser) -> None:
    with user.http() as own:
        job = submit(own, picture(new_color()))
        for other in (gateway.user(), gateway.user(user.tenant_id)):
            with other.http() as http:
                for method, part in (
                    ("GET", ""), ("GET", "/workflow"), ("GET", "/events"), ("POST", "/cancel"),
                ):  # fmt: skip
                    answer = http.request(method, f"/api/v2/jobs/{job['id']}{part}")
                    assert error_of(answer) == (404, "not_found")
                assert http.get("/api/v2/jobs").json()["jobs"] == []
        assert wait(own, job)["status"] == "succeeded"


def test_without_a_right_key_nothing_is_told(gateway: GatewayProcess) -> None:
    wrong = httpx.get(f"{gateway.url}/api/v2/jobs", headers={"Authorization": "Bearer cf_wrong"})
    assert error_of(wrong) == (401, "unauthorized")


def test_labels_are_kept_and_jobs_found_by_them(http: httpx.Client) -> None:
    one = submit(http, picture(new_color()), metadata={"client": "acme", "run": "7"})
    submit(http, picture(new_color()), metadata={"client": "other"})
    assert one["metadata"] == {"client": "acme", "run": "7"}
    listed = http.get("/api/v2/jobs", params={"metadata[client]": "acme"}).json()
    assert [each["id"] for each in listed["jobs"]] == [one["id"]]


def test_lists_are_read_page_by_page(http: httpx.Client) -> None:
    made = [submit(http, picture(new_color()))["id"] for _ in range(5)]
    seen: list[str] = []
    cursor: dict[str, str] = {}
    for _ in range(3):
        page = http.get("/api/v2/jobs", params={"limit": 2, **cursor}).json()
        seen += [each["id"] for each in page["jobs"]]
        cursor = {"cursor": page.get("next_cursor", "")}
    assert seen == made[::-1]
    assert "next_cursor" not in page
    assert error_of(http.get("/api/v2/jobs?cursor=x")) == (422, "invalid_cursor")
    assert error_of(http.get("/api/v2/jobs?limit=0")) == (400, "invalid_request")
    assert error_of(http.get("/api/v2/jobs?status=nope")) == (400, "invalid_request")


def test_the_workflow_of_a_job_is_told_as_it_came(http: httpx.Client) -> None:
    prompt = picture(new_color())
    job = submit(http, prompt)
    answer = http.get(f"/api/v2/jobs/{job['id']}/workflow").json()
    assert answer == {"workflow": prompt, "format": "api"}


def test_links_have_the_key_of_clients_that_have_it_in_their_address(user: GatewayUser) -> None:
    with httpx.Client(timeout=SECONDS_MAX) as http:
        answer = http.post(
            f"{user.url_with_key}/api/v2/jobs", json={"workflow": picture(new_color())}
        )
        job = wait(http, answer.json())
        assert job["status"] == "succeeded"
        assert http.get(job["outputs"][0]["url"]).content.startswith(b"\x89PNG")
