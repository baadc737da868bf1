"""Runs as a client sees them: events, history, queue, cancelling."""

import json
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tests.support.backends.engine_client import EngineClient, open_engine_client
from tests.support.backends.nodes import NODES, link
from tests.support.backends.prompts import node

from comfyfleet.engine import serve_in_thread

ENDED = {"node": None}


def said(word: str) -> dict[str, Any]:
    return {"1": node("Say", word=word), "9": node("Show", text=link("1"))}


def slow(milliseconds: int = 60_000, steps: int = 1) -> dict[str, Any]:
    """Runs until it is interrupted; its own word keeps it out of the cache."""
    step = node("Step", steps=steps, milliseconds=milliseconds)
    return {"1": step, "9": node("Show", text=link("1"))}


def test_one_run_is_told_in_order_and_is_in_history_when_it_is_over(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    prompt_id = talk.submit(said("hi"), client_id="alice")
    alice.wait("executing", ENDED)
    assert alice.names() == [
        *("status", "status", "status"),
        *("execution_start", "execution_cached"),
        *("progress_state", "executing", "progress_state"),
        *("progress_state", "executing", "executed", "progress_state"),
        *("execution_success", "status", "executing"),
    ]
    record = talk.history(prompt_id)
    assert record["outputs"] == {"9": {"text": ["hi"]}}
    assert record["status"]["status_str"] == "success"
    assert record["prompt"][1] == prompt_id
    assert record["prompt"][3]["client_id"] == "alice"


def test_the_same_prompt_again_is_cached(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    for cached in ([], ["1", "9"]):
        talk.submit(said("hi"), client_id="alice")
        assert alice.wait("execution_cached")["nodes"] == cached
        assert alice.wait("executed")["output"] == {"text": ["hi"]}
        alice.wait("executing", ENDED)


def test_free_drops_what_is_cached(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    talk.submit(said("hi"), client_id="alice")
    alice.wait("executing", ENDED)
    talk.http.post("/free", json={"free_memory": True})
    talk.submit(said("hi"), client_id="alice")
    alice.wait("execution_start")
    assert alice.wait("execution_cached")["nodes"] == []


def test_history_holds_the_coerced_prompt(talk: EngineClient) -> None:
    prompt_id = talk.submit({"1": node("Count", value="7"), "9": node("Show", text=link("1"))})
    talk.wait_idle()
    assert talk.history(prompt_id)["prompt"][2]["1"]["inputs"] == {"value": 7}


def test_secrets_are_neither_in_queue_nor_in_history(talk: EngineClient) -> None:
    extra_data = {"api_key_comfy_org": "secret", "auth_token_comfy_org": "secret", "mine": 1}
    prompt_id = talk.submit(said("x"), extra_data=extra_data)
    talk.wait_idle()
    kept = talk.history(prompt_id)["prompt"][3]
    assert kept.keys() == {"mine", "create_time"}


def test_where_a_prompt_came_from_is_kept(talk: EngineClient) -> None:
    answer = talk.http.post(
        "/prompt", json={"prompt": said("x")}, headers={"Comfy-Usage-Source": "tests"}
    )
    talk.wait_idle()
    kept = talk.history(answer.json()["prompt_id"])["prompt"][3]
    assert kept["comfy_usage_source"] == "tests"


def test_a_failed_run_is_an_error_and_the_next_one_is_not(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    prompt = {"1": node("Fail", word="luck"), "9": node("Show", text=link("1"))}
    failed = talk.submit(prompt, client_id="alice")
    assert alice.wait("execution_error")["exception_message"] == "no luck today\n"
    alice.wait("executing", ENDED)
    assert talk.http.get(f"/api/jobs/{failed}").json()["status"] == "failed"
    good = talk.submit(said("x"), client_id="alice")
    alice.wait("executing", ENDED)
    assert talk.http.get(f"/api/jobs/{good}").json()["status"] == "completed"


@pytest.mark.parametrize("how", ["by id", "global", "unreadable body", "cancel", "cancel batch"])
def test_a_running_prompt_can_be_stopped(talk: EngineClient, how: str) -> None:
    alice = talk.listen("alice")
    prompt_id = talk.submit(slow(), client_id="alice")
    alice.wait("progress")
    requests: dict[str, tuple[str, bytes]] = {
        "by id": ("/interrupt", b'{"prompt_id": "%s"}' % prompt_id.encode()),
        "global": ("/interrupt", b""),
        "unreadable body": ("/interrupt", b"{bad"),
        "cancel": (f"/api/jobs/{prompt_id}/cancel", b""),
        "cancel batch": ("/api/jobs/cancel", b'{"job_ids": ["%s"]}' % prompt_id.encode()),
    }
    path, body = requests[how]
    assert talk.http.post(path, content=body).status_code == 200
    assert alice.wait("execution_interrupted")["node_id"] == "1"
    alice.wait("executing", ENDED)
    assert talk.history(prompt_id)["status"]["status_str"] == "error"
    assert talk.http.get(f"/api/jobs/{prompt_id}").json()["status"] == "cancelled"
    assert talk.http.get("/api/jobs?status=failed").json()["jobs"] == []


def test_an_interrupt_of_a_waiting_or_unknown_prompt_is_ignored(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    first = talk.submit(slow(150), client_id="alice")
    alice.wait("progress")
    second = talk.submit(said("x"), client_id="alice")
    for prompt_id in (second, "unknown"):
        talk.http.post("/interrupt", json={"prompt_id": prompt_id})
    talk.wait_idle()
    states = {job["id"]: job["status"] for job in talk.http.get("/api/jobs").json()["jobs"]}
    assert states == {first: "completed", second: "completed"}


def test_a_waiting_prompt_leaves_no_trace_when_it_is_taken_back(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    running = talk.submit(slow(), client_id="alice")
    alice.wait("progress")
    waiting = [talk.submit(said(word), client_id="alice") for word in "abc"]
    talk.http.post("/queue", json={"delete": [waiting[0], "unknown", running]})
    assert talk.http.post(f"/api/jobs/{waiting[1]}/cancel").json() == {"cancelled": True}
    queue = talk.http.get("/queue").json()
    assert [row[1] for row in queue["queue_running"]] == [running]
    assert [row[1] for row in queue["queue_pending"]] == [waiting[2]]
    talk.http.post("/queue", json={"clear": True})
    talk.http.post("/interrupt")
    talk.wait_idle()
    assert list(talk.http.get("/history").json()) == [running]
    assert talk.http.get(f"/api/jobs/{waiting[0]}").status_code == 404


def test_cancelling_what_is_over_or_unknown_does_nothing(talk: EngineClient) -> None:
    prompt_id = talk.submit(said("x"))
    talk.wait_idle()
    for job_id in (prompt_id, "00000000-0000-4000-8000-000000000099", "nope"):
        assert talk.http.post(f"/api/jobs/{job_id}/cancel").json() == {"cancelled": False}
    answer = talk.http.post("/api/jobs/cancel", json={"job_ids": [prompt_id]})
    assert answer.json() == {"cancelled": False}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{bad", {"error": "Request body must be valid JSON"}),
        (b"{}", {"error": "job_ids must be a list"}),
        (b"[]", {"error": "job_ids must be a list"}),
        (
            b'{"job_ids": ["nope", 5]}',
            {"error": "job_ids contains invalid id(s)", "invalid_ids": ["nope", "5"]},
        ),
    ],
)
def test_a_bad_batch_to_cancel_is_refused(talk: EngineClient, body: bytes, error: Any) -> None:
    answer = talk.http.post("/api/jobs/cancel", content=body)
    assert (answer.status_code, answer.json()) == (400, error)


def test_numbers_order_the_queue_and_front_is_a_stack(talk: EngineClient) -> None:
    alice = talk.listen("alice")
    talk.submit(slow(300), client_id="alice")
    alice.wait("progress")
    ids = {
        "late": talk.submit(said("a"), number=500),
        "plain": talk.submit(said("b")),
        "front": talk.submit(said("c"), front=True),
        "first": talk.submit(said("d"), front=True),
        "soon": talk.submit(said("e"), number=-0.5, front=True),
    }
    talk.wait_idle()
    order = list(talk.http.get("/history").json())[1:]
    assert order == [ids[name] for name in ("first", "front", "soon", "plain", "late")]


def test_a_socket_that_comes_back_in_mid_run_is_told_the_node_and_then_the_rest(
    talk: EngineClient,
) -> None:
    alice = talk.listen("alice")
    talk.submit(slow(400), client_id="alice")
    alice.wait("progress")
    alice.close()
    again = talk.listen("alice")
    again.wait("executing", ENDED)
    assert again.events[1] == ["executing", {"node": "1"}]
    assert again.names()[-4:] == ["progress_state", "execution_success", "status", "executing"]


def test_of_two_sockets_with_one_id_the_newer_hears_everything(talk: EngineClient) -> None:
    first, second = talk.listen("alice"), talk.listen("alice")
    talk.submit(said("x"), client_id="alice")
    second.wait("executing", ENDED)
    assert first.names() == ["status"]
    first.close()
    time.sleep(0.1)
    talk.submit(said("y"), client_id="alice")
    talk.wait_idle()
    # ComfyUI's rule: the id is deaf now, so ids must not be shared.
    assert second.names().count("execution_start") == 1


def test_others_hear_of_a_run_with_a_client_only_that_the_queue_changed(talk: EngineClient) -> None:
    bob = talk.listen("bob")
    talk.submit(said("x"), client_id="alice")
    talk.wait_idle()
    assert set(bob.names()) == {"status"}


def test_a_run_without_a_client_shows_its_progress_to_everybody(talk: EngineClient) -> None:
    bob = talk.listen("bob")
    talk.submit(said("x"))
    talk.wait_idle()
    assert set(bob.names()) == {"status", "progress_state"}


def test_a_socket_without_id_gets_one(talk: EngineClient) -> None:
    ear = talk.listen()
    sid = ear.events[0][1]["sid"]
    assert len(sid) == 32
    talk.submit(said("x"), client_id=sid)
    ear.wait("execution_success")


def test_feature_flags_count_as_the_first_json_only(talk: EngineClient) -> None:
    flags = {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
    garbage, late = talk.listen("garbage"), talk.listen("late")
    garbage.send("not json")
    garbage.send(flags)
    assert garbage.wait("feature_flags") == talk.http.get("/features").json()
    late.send({"type": "hello"})
    late.send(flags)
    time.sleep(0.1)
    assert late.names() == ["status"]


@pytest.mark.parametrize("announced", [True, False])
def test_previews_have_metadata_for_who_asked(talk: EngineClient, announced: bool) -> None:
    alice = talk.listen("alice")
    if announced:
        alice.send({"type": "feature_flags", "data": {"supports_preview_metadata": True}})
        alice.wait("feature_flags")
    pixel = _pixel().decode("latin-1")
    step = node("Step", steps=1, milliseconds=0, preview=pixel)
    prompt_id = talk.submit({"1": step, "9": node("Show", text=link("1"))}, client_id="alice")
    alice.wait("executing", ENDED)
    (frame,) = (event for event in alice.events if isinstance(event, dict))
    if announced:
        assert frame["metadata"] == {
            "node_id": "1",
            "prompt_id": prompt_id,
            "display_node_id": "1",
            "parent_node_id": None,
            "real_node_id": "1",
            "image_type": "image/png",
        }
    else:
        assert (frame["binary"], frame["format"]) == (1, 2)


def _pixel() -> bytes:
    buffer = BytesIO()
    PIL.Image.new("RGB", (1, 1)).save(buffer, "PNG")
    return buffer.getvalue()


def test_equal_number_and_id_are_no_trouble(talk: EngineClient) -> None:
    """Deviation: ComfyUI answers 500 to the second, or its worker dies at the next pop."""
    alice = talk.listen("alice")
    talk.submit(slow(200), client_id="alice")
    alice.wait("progress")
    prompt_id = "00000000-0000-4000-8000-000000000002"
    for word in "abc":
        assert talk.submit(said(word), number=5, prompt_id=prompt_id) == prompt_id
    talk.wait_idle()
    assert talk.history(prompt_id)["outputs"] == {"9": {"text": ["c"]}}


def test_a_dangling_link_in_an_undeclared_input_fails_one_run_only(talk: EngineClient) -> None:
    """Deviation: ComfyUI's worker dies of it, and nothing runs until a restart."""
    broken = talk.submit({"9": node("Show", text="x", more=link("77"))})
    good = talk.submit(said("x"))
    talk.wait_idle()
    assert talk.history(broken)["status"]["status_str"] == "error"
    assert talk.history(good)["status"]["status_str"] == "success"


def test_a_mortal_engine_dies_where_comfyui_does_and_goes_on_answering(tmp_path: Path) -> None:
    with (
        serve_in_thread(data=tmp_path, nodes=NODES, dies_like_comfyui=True) as served,
        open_engine_client(served.url) as talk,
    ):
        talk.submit({"9": node("Show", text="x", more=link("77"))})
        talk.submit(said("x"))
        time.sleep(0.2)
        assert talk.http.get("/prompt").json() == {"exec_info": {"queue_remaining": 2}}
        assert talk.http.get("/history").json() == {}


def test_a_strange_client_id_reaches_nobody_and_breaks_nothing(talk: EngineClient) -> None:
    bob = talk.listen("bob")
    strange: list[Any] = [[], {"a": 1}, 5, ""]
    for client_id in strange:
        talk.submit(said(json.dumps(client_id)), client_id=client_id)
    talk.wait_idle()
    assert set(bob.names()) == {"status"}
