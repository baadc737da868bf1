"""The engine as Comfy Cloud: keys, names by content, redirects, raw states, shapes of its own."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.support.backends.comfy_cloud import CloudAccount, serving_cloud
from tests.support.backends.engine_client import WAIT_SECONDS_MAX, EngineClient, open_engine_client
from tests.support.backends.nodes import NODES, link
from tests.support.backends.prompts import node
from websockets.exceptions import InvalidStatus

from comfyfleet.engine import Served

KEY, OTHER_KEY, POOR_KEY = "key-of-alice", "key-of-bob", "key-of-carol"
ACCOUNTS = {
    KEY: CloudAccount("alice"),
    OTHER_KEY: CloudAccount("bob"),
    POOR_KEY: CloudAccount("carol", has_credits=False),
}
ENDED = {"node": None}


@pytest.fixture
def served() -> Iterator[Served]:
    with serving_cloud(ACCOUNTS, nodes=NODES) as cloud:
        yield cloud


@pytest.fixture
def alice(served: Served) -> Iterator[EngineClient]:
    with open_engine_client(served.url) as talk:
        talk.http.headers["x-api-key"] = KEY
        yield talk


@pytest.fixture
def bob(served: Served) -> Iterator[EngineClient]:
    with open_engine_client(served.url) as talk:
        talk.http.headers["x-api-key"] = OTHER_KEY
        yield talk


def said(word: str) -> dict[str, Any]:
    return {"1": node("Say", word=word), "9": node("Show", text=link("1"))}


def slow() -> dict[str, Any]:
    step = node("Step", steps=1000, milliseconds=1000)
    return {"1": step, "9": node("Show", text=link("1"))}


def submit(talk: EngineClient, prompt: Any, **more: Any) -> str:
    answer = talk.http.post("/api/prompt", json={"prompt": prompt, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["prompt_id"])


def status(talk: EngineClient, job_id: str) -> Any:
    return talk.http.get(f"/api/job/{job_id}/status").json()


def wait_for(talk: EngineClient, job_id: str, state: str) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while (found := status(talk, job_id))["status"] != state:
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("path", ["/api/prompt", "/api/jobs", "/api/object_info", "/api/view"])
def test_nothing_is_to_be_had_without_a_key(served: Served, path: str) -> None:
    for headers in ({}, {"x-api-key": "wrong"}):
        answer = httpx.get(f"{served.url}{path}", headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED")


def test_some_things_are_public(served: Served) -> None:
    assert httpx.get(f"{served.url}/api/system_stats").status_code == 200
    assert httpx.get(f"{served.url}/api/features").status_code == 200


def test_routes_without_prefix_are_not_there(alice: EngineClient) -> None:
    assert alice.http.get("/prompt").status_code == 404


def test_the_server_chooses_the_id_and_ignores_the_place_in_the_queue(alice: EngineClient) -> None:
    wanted = "00000000-0000-4000-8000-000000000001"
    more = {"prompt_id": wanted, "number": -5, "front": True, "client_id": "bob"}
    answer = alice.http.post("/api/prompt", json={"prompt": said("x"), **more}).json()
    assert answer["prompt_id"] != wanted
    assert answer["number"] >= 0
    wait_for(alice, answer["prompt_id"], "success")
    detail = alice.http.get(f"/api/history_v2/{answer['prompt_id']}").json()
    assert detail[answer["prompt_id"]]["prompt"]["extra_data"]["client_id"] == "alice"


def test_a_bad_prompt_is_refused_as_by_a_comfyui(alice: EngineClient) -> None:
    answer = alice.http.post("/api/prompt", json={"prompt": {"1": node("Nope")}})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "missing_node_type")
    assert alice.http.post("/api/prompt", content=b"{bad").json()["code"] == "MALFORMED_BODY"


def test_without_credits_nothing_is_accepted(served: Served) -> None:
    answer = httpx.post(
        f"{served.url}/api/prompt", json={"prompt": said("x")}, headers={"x-api-key": POOR_KEY}
    )
    assert (answer.status_code, answer.json()["code"]) == (402, "INSUFFICIENT_CREDITS")


def test_a_job_goes_through_raw_states(alice: EngineClient) -> None:
    first, second, third = (
        submit(alice, slow()),
        submit(alice, said("x")),
        submit(alice, said("y")),
    )
    wait_for(alice, first, "executing")
    assert status(alice, second)["status"] == "pending_execution"
    assert status(alice, third)["status"] == "queued_waiting"
    alice.http.post("/api/interrupt")
    assert wait_for(alice, first, "cancelled")["error_message"] is None
    found = wait_for(alice, second, "success")
    assert found.keys() == {
        "id",
        "status",
        "created_at",
        "updated_at",
        "last_state_update",
        "assigned_inference",
        "error_message",
    }


def test_a_failed_job_says_why(alice: EngineClient) -> None:
    prompt = {"1": node("Fail", word="luck"), "9": node("Show", text=link("1"))}
    job_id = submit(alice, prompt)
    assert wait_for(alice, job_id, "error")["error_message"] == "no luck today\n"
    job = alice.http.get(f"/api/jobs/{job_id}").json()
    assert (job["status"], job["execution_error"]["node_id"]) == ("failed", "1")


def test_a_job_shows_its_outputs_and_counts_time_in_seconds(alice: EngineClient) -> None:
    before = int(time.time())
    job_id = submit(alice, said("x"))
    wait_for(alice, job_id, "success")
    job = alice.http.get(f"/api/jobs/{job_id}").json()
    assert job["outputs"] == {"9": {"text": ["x"]}}
    assert before <= job["create_time"] <= job["update_time"] <= int(time.time())
    assert job["workflow"] == said("x")
    assert job["execution_meta"]["9"]["node_id"] == "9"


def test_a_waiting_job_that_is_cancelled_is_remembered(alice: EngineClient) -> None:
    submit(alice, slow())
    waiting = [submit(alice, said(word)) for word in "abc"]
    answer = alice.http.post("/api/queue", json={"delete": [waiting[0], "unknown"]})
    assert answer.json() == {"deleted": [waiting[0]], "cleared": False}
    assert alice.http.post(f"/api/jobs/{waiting[1]}/cancel").json() == {"cancelled": True}
    answer = alice.http.post("/api/queue", json={"clear": True})
    assert answer.json() == {"deleted": [waiting[2]], "cleared": True}
    assert {status(alice, job_id)["status"] for job_id in waiting} == {"cancelled"}
    alice.http.post("/api/interrupt")


@pytest.mark.parametrize("body", [{}, {"clear": True, "more": 1}, {"delete": "x"}, []])
def test_orders_to_the_queue_are_strict(alice: EngineClient, body: Any) -> None:
    assert alice.http.post("/api/queue", json=body).status_code == 400


def test_the_queue_has_rows_of_its_own_order(alice: EngineClient) -> None:
    first, second = submit(alice, slow()), submit(alice, said("x"))
    wait_for(alice, first, "executing")
    queue = alice.http.get("/api/queue").json()
    assert queue["queue_running"][0][1] == first
    number, job_id, prompt, outputs, metadata = queue["queue_pending"][0]
    assert (number, job_id, prompt, outputs) == (1, second, said("x"), ["9"])
    assert metadata.keys() == {"create_time"}
    assert alice.http.get("/api/prompt").json() == {"exec_info": {"queue_remaining": 2}}
    alice.http.post("/api/interrupt")


def test_history_is_a_list_with_the_newest_first(alice: EngineClient) -> None:
    ids = [submit(alice, said(word)) for word in "abc"]
    wait_for(alice, ids[-1], "success")
    history = alice.http.get("/api/history_v2").json()["history"]
    assert [entry["prompt_id"] for entry in history] == ids[::-1]
    assert history[0]["prompt"].keys() == {"priority", "prompt_id", "extra_data"}
    page = alice.http.get("/api/history_v2", params={"max_items": 1, "offset": 1}).json()
    assert [entry["prompt_id"] for entry in page["history"]] == [ids[1]]
    alice.http.post("/api/history", json={"delete": [ids[0]]})
    assert alice.http.get(f"/api/history_v2/{ids[0]}").status_code == 404
    alice.http.post("/api/history", json={"clear": True})
    assert alice.http.get("/api/history_v2").json() == {"history": []}


def test_jobs_are_listed_by_status_and_page(alice: EngineClient) -> None:
    ids = [submit(alice, said(word)) for word in "abc"]
    wait_for(alice, ids[-1], "success")
    page = alice.http.get("/api/jobs", params={"status": "completed", "limit": 2}).json()
    assert len(page["jobs"]) == 2
    assert page["pagination"] == {"offset": 0, "limit": 2, "total": 3, "has_more": True}
    assert alice.http.get("/api/jobs?status=failed").json()["jobs"] == []
    assert alice.http.get("/api/jobs?limit=1001").status_code == 400
    assert alice.http.get("/api/jobs?limit=x").json()["code"] == "INVALID_QUERY"


def test_users_do_not_see_each_others_jobs(alice: EngineClient, bob: EngineClient) -> None:
    job_id = submit(alice, slow())
    wait_for(alice, job_id, "executing")
    assert bob.http.get(f"/api/job/{job_id}/status").status_code == 403
    assert bob.http.get(f"/api/jobs/{job_id}").json()["code"] == "FORBIDDEN"
    assert bob.http.get("/api/jobs").json()["jobs"] == []
    assert bob.http.get("/api/queue").json() == {"queue_running": [], "queue_pending": []}
    bob.http.post("/api/interrupt")
    assert bob.http.post(f"/api/jobs/{job_id}/cancel").status_code == 403
    assert status(alice, job_id)["status"] == "executing"
    assert alice.http.get("/api/job/unknown/status").status_code == 404
    alice.http.post("/api/interrupt")


def test_every_connection_of_a_user_hears_everything_and_others_nothing(
    served: Served, alice: EngineClient, bob: EngineClient
) -> None:
    ears = [alice.listen("one", f"/ws?token={KEY}") for _ in range(2)]
    other = bob.listen("two", f"/ws?token={OTHER_KEY}")
    ears.pop().close()
    ears.append(alice.listen("three", f"/ws?token={KEY}"))
    submit(alice, said("x"))
    for ear in ears:
        ear.wait("executing", ENDED)
    assert "execution_start" not in other.names()


def test_nobody_listens_without_a_key(served: Served, alice: EngineClient) -> None:
    with pytest.raises(InvalidStatus):
        alice.listen("one")


def upload(talk: EngineClient, name: str, content: bytes, **fields: str) -> httpx.Response:
    files = {"image": (name, content, "image/png")}
    return talk.http.post("/api/upload/image", files=files, data=fields)


def test_an_upload_is_named_by_its_content(alice: EngineClient, bob: EngineClient) -> None:
    name = f"{hashlib.sha256(b'bytes').hexdigest()}.png"
    for talk, called in ((alice, "a.png"), (alice, "b.png"), (bob, "c.PNG")):
        answer = upload(talk, called, b"bytes", subfolder="ignored", overwrite="true")
        assert answer.json() == {"name": name, "subfolder": "", "type": "input"}
    assert alice.http.post("/api/upload/image").json()["code"] == "BAD_REQUEST"


def test_a_file_is_behind_a_signed_url_that_refuses_the_key(alice: EngineClient) -> None:
    name = upload(alice, "a.png", b"bytes").json()["name"]
    answer = alice.http.get("/api/view", params={"filename": name, "type": "input"})
    assert answer.status_code == 302
    location = answer.headers["location"]
    assert httpx.URL(location).host != alice.http.base_url.host
    assert httpx.get(location).content == b"bytes"
    assert httpx.get(location, headers={"x-api-key": KEY}).status_code == 400
    assert httpx.get(location, headers={"authorization": "Bearer x"}).status_code == 400
    assert httpx.get(location[:-1]).status_code == 403
    assert httpx.get(location.replace(name, "other.png")).status_code == 403


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({}, 400),
        ({"filename": "nope.png"}, 404),
        ({"filename": "../x"}, 400),
        ({"filename": "a", "subfolder": "../.."}, 400),
    ],
)
def test_a_file_that_is_not_there_is_no_redirect(
    alice: EngineClient, query: dict[str, str], code: int
) -> None:
    assert alice.http.get("/api/view", params=query).status_code == code


def test_at_most_so_many_jobs_can_wait(
    alice: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.backends.comfy_cloud.cloud.QUEUE_JOBS_MAX", 1)
    first = submit(alice, slow())
    wait_for(alice, first, "executing")
    submit(alice, said("x"))
    answer = alice.http.post("/api/prompt", json={"prompt": said("y")})
    assert (answer.status_code, answer.json()["code"]) == (429, "QUEUE_FULL")
    alice.http.post("/api/interrupt")
