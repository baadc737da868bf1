"""The rules of the door: bodies, paths, foreign pages, and what editors ask for."""

import os
from typing import Any

import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.backends.nodes import NODES, link
from tests.support.backends.prompts import node
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from comfyfleet.engine import Served

SHOWN = {"1": node("Say", word="x"), "9": node("Show", text=link("1"))}
TROUBLE = "500 Internal Server Error\n\nServer got itself in trouble"


@pytest.mark.parametrize("body", [b"", b"{bad", b"5", b"null", b'"prompt"', b"[" * 100_000])
def test_a_body_that_comfyui_trips_over_is_500(talk: EngineClient, body: bytes) -> None:
    answer = talk.http.post("/prompt", content=body)
    assert (answer.status_code, answer.text) == (500, TROUBLE)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": "x"},
        {"prompt": {"1": "x"}},
        {"prompt": {"1": {"class_type": "Say", "inputs": 5}}},
        {"prompt": {"1": {"class_type": []}}},
        {"prompt": {"1": {"_meta": 5}}},
        {"prompt": SHOWN, "number": "abc"},
        {"prompt": SHOWN, "number": None},
        {"prompt": SHOWN, "extra_data": None},
        {"prompt": SHOWN, "partial_execution_targets": 5},
    ],
)
def test_a_prompt_of_a_wrong_shape_is_500(talk: EngineClient, body: Any) -> None:
    assert talk.http.post("/prompt", json=body).status_code == 500
    assert talk.http.get("/prompt").json()["exec_info"]["queue_remaining"] == 0


def test_inputs_as_a_list_fail_the_validation(talk: EngineClient) -> None:
    body = {"prompt": {"1": {"class_type": "Say", "inputs": []}}}
    answer = talk.http.post("/prompt", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "prompt_outputs_failed_validation"
    assert answer.json()["node_errors"]["1"]["class_type"] == "Say"


@pytest.mark.parametrize("body", [{}, [], "x", {"client_id": "a"}])
def test_a_body_without_a_prompt_is_told_so(talk: EngineClient, body: Any) -> None:
    answer = talk.http.post("/prompt", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "no_prompt")


@pytest.mark.parametrize(
    "prompt_id", ["my id", "", 5, "0" * 32, "A0000000-0000-4000-8000-000000000000"]
)
def test_an_id_must_be_a_canonical_uuid(talk: EngineClient, prompt_id: Any) -> None:
    answer = talk.http.post("/prompt", json={"prompt": SHOWN, "prompt_id": prompt_id})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_prompt_id")


def test_refused_prompts_use_up_numbers_and_chosen_ones_do_not(talk: EngineClient) -> None:
    def number(**more: Any) -> Any:
        return talk.http.post("/prompt", json={"prompt": SHOWN, **more}).json().get("number")

    first = number()
    assert number(prompt_id="bad") is None
    assert number(number="7") == 7.0
    assert number(prompt_id=None) == first + 2
    assert number(front=True) == -(first + 3)


def test_the_content_type_is_not_looked_at(talk: EngineClient) -> None:
    body = b'{"prompt": {"9": {"class_type": "Show", "inputs": {"text": "x"}}}}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "image/png"):
        answer = talk.http.post("/prompt", content=body, headers={"content-type": kind})
        assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/queue", "/history"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 200),
        (b"[]", 200),
        (b'"x"', 200),
        (b'{"delete": "abc"}', 200),
        (b'{"delete": [5, null]}', 200),
        (b'{"delete": 5}', 500),
        (b"5", 500),
        (b"", 500),
    ],
)
def test_orders_to_delete_are_read_as_leniently_as_comfyui_does(
    talk: EngineClient, path: str, body: bytes, status: int
) -> None:
    assert talk.http.post(path, content=body).status_code == status


@pytest.mark.parametrize("body", [b"[]", b"5", b"null"])
def test_an_interrupt_that_is_json_but_no_object_is_500(talk: EngineClient, body: bytes) -> None:
    assert talk.http.post("/interrupt", content=body).status_code == 500


def test_history_can_be_paged_deleted_and_cleared(talk: EngineClient) -> None:
    ids = [talk.submit({"9": node("Show", text=word)}) for word in "abc"]
    talk.wait_idle()
    assert list(talk.http.get("/history?max_items=1").json()) == ids[-1:]
    assert list(talk.http.get("/history?offset=1").json()) == ids[1:]
    assert talk.http.get("/history?max_items=x").status_code == 500
    talk.http.post("/history", json={"delete": [ids[0], "unknown"]})
    assert list(talk.http.get("/history").json()) == ids[1:]
    talk.http.post("/history", json={"clear": True})
    assert talk.http.get("/history").json() == {}


def test_jobs_can_be_paged(talk: EngineClient) -> None:
    ids = [talk.submit({"9": node("Show", text=word)}) for word in "abc"]
    talk.wait_idle()
    page = talk.http.get("/api/jobs", params={"limit": 2, "sort_order": "asc"}).json()
    assert len(page["jobs"]) == 2
    assert page["pagination"] == {"offset": 0, "limit": 2, "total": 3, "has_more": True}
    assert talk.http.get("/api/jobs?limit=0").status_code == 400
    assert {job["id"] for job in talk.http.get("/api/jobs").json()["jobs"]} == set(ids)


@pytest.mark.parametrize("path", ["/prompt", "/queue", "/object_info", "/features", "/users"])
def test_every_route_exists_twice(talk: EngineClient, path: str) -> None:
    assert talk.http.get(path).json() == talk.http.get(f"/api{path}").json()


def test_jobs_have_their_prefix_already(talk: EngineClient) -> None:
    statuses = [talk.http.get(path).status_code for path in ("/api/jobs", "/api/api/jobs", "/jobs")]
    assert statuses == [200, 200, 404]


def test_unknown_paths_can_be_read_in_vain_but_not_written(talk: EngineClient) -> None:
    read = talk.http.get("/nope")
    assert (read.status_code, read.content) == (404, b"")
    for method, path, allowed in (
        ("POST", "/nope", "GET,HEAD"),
        ("POST", "/view", "GET,HEAD"),
        ("DELETE", "/prompt", "GET,HEAD,POST"),
    ):
        written = talk.http.request(method, path)
        assert (written.status_code, written.text) == (405, "405: Method Not Allowed")
        assert written.headers["allow"] == allowed
    assert talk.http.get("/internal/nope").text == "404: Not Found"
    assert talk.http.get("/api/internal/logs").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://evil.example", "host": "127.0.0.1"}, 403),
        ({"origin": "http://127.0.0.1"}, 200),
        ({"origin": "http://localhost:8188", "host": "localhost:8188"}, 200),
        ({"origin": "http://localhost:9999", "host": "localhost:8188"}, 403),
        ({"origin": "http://comfy.example", "host": "comfy.example"}, 403),
        ({"host": "comfy.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_are_kept_out(
    talk: EngineClient, headers: dict[str, str], status: int
) -> None:
    assert talk.http.get("/prompt", headers=headers).status_code == status


def test_pages_of_other_sites_can_not_listen(served: Served) -> None:
    url = f"{served.url.replace('http', 'ws', 1)}/ws"
    with pytest.raises(InvalidStatus), connect(url, origin=Origin("http://evil.example")):
        pass


def test_a_preflight_is_answered(talk: EngineClient) -> None:
    assert talk.http.options("/prompt").status_code == 200


def test_object_info_describes_the_nodes(talk: EngineClient) -> None:
    assert talk.http.get("/object_info").json().keys() == NODES.keys()
    assert talk.http.get("/object_info/Say").json()["Say"]["output"] == ["STRING"]
    assert talk.http.get("/object_info/Nope").json() == {}


def test_the_server_says_what_it_is(talk: EngineClient) -> None:
    stats = talk.http.get("/system_stats").json()
    assert stats["system"]["comfyui_version"] == "0.28.0"
    assert stats["system"]["ram_total"] > 0
    assert stats["devices"][0]["type"] == "cpu"
    assert "text/html" in talk.http.get("/").headers["content-type"]


def test_there_are_no_models(talk: EngineClient) -> None:
    assert "checkpoints" in talk.http.get("/models").json()
    assert talk.http.get("/models/checkpoints").json() == []
    assert talk.http.get("/models/nope").status_code == 404
    assert talk.http.get("/view_metadata/checkpoints?filename=a.safetensors").status_code == 404


def test_settings_are_kept(talk: EngineClient) -> None:
    assert talk.http.get("/users").json() == {"storage": "server", "migrated": False}
    assert talk.http.get("/settings").json() == {}
    talk.http.post("/settings", json={"a": 1})
    talk.http.post("/settings/b", json=[2])
    assert talk.http.get("/settings").json() == {"a": 1, "b": [2]}
    assert talk.http.get("/settings/b").json() == [2]
    assert talk.http.get("/settings/c").json() is None
    assert talk.http.get("/users").json()["migrated"] is True


def test_user_files_can_be_kept_listed_moved_and_deleted(talk: EngineClient) -> None:
    assert talk.http.get("/userdata?dir=workflows").text == "Directory not found"
    assert (
        talk.http.post("/userdata/workflows%2Fa.json", content=b"{}").json() == "workflows/a.json"
    )
    assert talk.http.post("/userdata/workflows%2Fa.json?overwrite=false").status_code == 409
    assert talk.http.get("/userdata?dir=workflows").json() == ["a.json"]
    assert talk.http.get("/userdata/workflows%2Fa.json").content == b"{}"
    moved = talk.http.post("/userdata/workflows%2Fa.json/move/workflows%2Fb.json")
    assert moved.json() == "workflows/b.json"
    names = [entry["path"] for entry in talk.http.get("/v2/userdata").json()]
    assert names == ["workflows", "workflows/b.json"]
    assert talk.http.delete("/userdata/workflows%2Fb.json").status_code == 204
    assert talk.http.get("/userdata/workflows%2Fb.json").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/userdata", 400),
        ("GET", "/userdata?dir=..%2F..", 403),
        ("GET", "/v2/userdata?path=..%2F..", 400),
        ("GET", "/userdata/..%2F..%2Finput", 403),
        ("POST", "/userdata/..%2F..%2Fx", 403),
        ("DELETE", "/userdata/..%2F..%2Fx", 403),
    ],
)
def test_user_files_stay_in_their_folder(
    talk: EngineClient, method: str, path: str, status: int
) -> None:
    assert talk.http.request(method, path).status_code == status


def test_an_editor_finds_its_internal_routes(talk: EngineClient) -> None:
    assert talk.http.get("/internal/logs").json() == ""
    assert talk.http.get("/internal/logs/raw").json()["entries"] == []
    subscribe = {"clientId": "a", "enabled": True}
    assert talk.http.patch("/internal/logs/subscribe", json=subscribe).status_code == 200
    assert talk.http.patch("/internal/logs/subscribe", json={}).status_code == 500
    assert "loras" in talk.http.get("/internal/folder_paths").json()


def test_files_are_listed_newest_first(talk: EngineClient, served: Served) -> None:
    for age, name in enumerate(("new.png", "old.png")):
        path = served.engine.folders.output / name
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    assert talk.http.get("/internal/files/output").json() == [
        "new.png [output]",
        "old.png [output]",
    ]
    assert talk.http.get("/internal/files/nope").status_code == 400
