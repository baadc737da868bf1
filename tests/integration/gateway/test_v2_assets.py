"""Comfy API v2: assets by id and by content, and workflows that name them."""

import io
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
from blake3 import blake3
from PIL import Image
from tests.integration.gateway.test_v2_jobs import error_of, submit, wait
from tests.support.backends.prompts import new_color, node, picture, slow
from tests.support.server.gateway import GatewayProcess, GatewayUser


@pytest.fixture
def http(user: GatewayUser) -> Iterator[httpx.Client]:
    with user.http() as http:
        yield http


def png(color: int | None = None) -> bytes:
    value = new_color() if color is None else color
    data = io.BytesIO()
    Image.new("RGB", (8, 8), (value >> 16 & 255, value >> 8 & 255, value & 255)).save(data, "PNG")
    return data.getvalue()


def hash_of(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def upload(http: httpx.Client, data: bytes, name: str = "cat.png", **fields: Any) -> httpx.Response:
    form = {"content_type": "image/png", "file_path": name, **fields}
    return http.post("/api/v2/assets", files={"file": (name, data)}, data=form)


def reference(asset: dict[str, Any]) -> dict[str, Any]:
    return {"__type": "core/ASSET", "info": {"id": asset["id"]}}


def loading(value: Any) -> dict[str, Any]:
    return {
        "1": node("LoadImage", image=value),
        "9": node("SaveImage", images=["1", 0], filename_prefix="loaded"),
    }


def test_an_upload_is_an_asset(http: httpx.Client) -> None:
    data = png()
    answer = upload(http, data, expected_hash=hash_of(data), tags=["a", "b"])
    assert answer.status_code == 201, answer.text
    asset = answer.json()
    assert asset["hash"] == hash_of(data)
    assert asset["size_bytes"] == len(data)
    assert asset["content_type"] == "image/png"
    assert asset["file_path"] == "cat.png"
    assert asset["created_new"] is True
    assert asset["expires_at"] is None
    again = http.get(f"/api/v2/assets/{asset['id']}").json()
    assert "created_new" not in again
    assert again["hash"] == asset["hash"]
    assert http.get(asset["url"]).content == data


def test_the_same_bytes_are_the_same_asset(http: httpx.Client) -> None:
    data = png()
    first = upload(http, data).json()
    again = upload(http, data, "other.png")
    assert again.status_code == 200
    assert again.json()["id"] == first["id"]
    assert again.json()["created_new"] is False


def test_bytes_that_are_there_need_not_be_sent(http: httpx.Client) -> None:
    data = png()
    assert http.head(f"/api/v2/assets/by-hash/{hash_of(data)}").status_code == 404
    body = {"hash": hash_of(data), "file_path": "x.png"}
    missing = http.post("/api/v2/assets/from-hash", json=body)
    assert error_of(missing) == (404, "blob_not_found")
    first = upload(http, data).json()
    assert http.head(f"/api/v2/assets/by-hash/{hash_of(data)}").status_code == 200
    minted = http.post("/api/v2/assets/from-hash", json=body)
    assert (minted.status_code, minted.json()["id"]) == (200, first["id"])


def test_others_bytes_and_assets_are_not_there(gateway: GatewayProcess, user: GatewayUser) -> None:
    data = png()
    with user.http() as own:
        asset = upload(own, data).json()
        for other in (gateway.user(), gateway.user(user.tenant_id)):
            with other.http() as http:
                assert http.head(f"/api/v2/assets/by-hash/{hash_of(data)}").status_code == 404
                for method, part in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                    answer = http.request(method, f"/api/v2/assets/{asset['id']}{part}")
                    assert error_of(answer) == (404, "not_found")
                body = {"workflow": loading(reference(asset))}
                refused = http.post("/api/v2/jobs", json=body)
                assert error_of(refused) == (422, "missing_asset")
        assert own.get(asset["url"]).content == data


def test_a_wrong_hash_is_refused_and_nothing_stored(http: httpx.Client) -> None:
    data = png()
    answer = upload(http, data, expected_hash=hash_of(b"other"))
    assert error_of(answer) == (409, "hash_mismatch")
    assert http.head(f"/api/v2/assets/by-hash/{hash_of(data)}").status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"file_path": "../x.png"},
        {"file_path": "/etc/passwd"},
        {"file_path": "models/checkpoints/x.safetensors"},
        {"expected_hash": "md5:00"},
        {"expires_in": "5"},
        {"expires_in": "soon"},
        {"content_type": "no type"},
    ],
)
def test_uploads_that_make_no_sense_are_refused(http: httpx.Client, fields: dict[str, str]) -> None:
    form = {"content_type": "image/png", "file_path": "cat.png", **fields}
    answer = http.post("/api/v2/assets", files={"file": ("cat.png", png())}, data=form)
    assert error_of(answer) == (422, "invalid_request")


def test_an_upload_without_a_file_is_refused(http: httpx.Client) -> None:
    answer = http.post("/api/v2/assets", data={"file_path": "x.png"})
    assert error_of(answer) == (422, "invalid_request")


def test_content_is_read_in_parts(http: httpx.Client) -> None:
    data = png()
    asset = upload(http, data).json()
    part = http.get(asset["url"], headers={"Range": "bytes=2-5"})
    assert (part.status_code, part.content) == (206, data[2:6])
    assert part.headers["content-range"] == f"bytes 2-5/{len(data)}"
    beyond = http.get(asset["url"], headers={"Range": f"bytes={len(data)}-"})
    assert beyond.status_code == 416


def test_a_workflow_names_an_asset_by_id_or_by_hash(http: httpx.Client) -> None:
    data = png(0x00FF00)
    asset = upload(http, data, "sub/grass.png").json()
    by_hash = {"__type": "core/ASSET", "info": {"hash": asset["hash"]}}
    for value in (reference(asset), by_hash):
        job = wait(http, submit(http, loading(value)))
        assert job["status"] == "succeeded", job
        made = Image.open(io.BytesIO(http.get(job["outputs"][0]["url"]).content))
        assert made.convert("RGB").getpixel((0, 0)) == (0, 255, 0)
    told = http.get(f"/api/v2/jobs/{job['id']}/workflow").json()["workflow"]
    assert told["1"]["inputs"]["image"] == "sub/grass.png"


def test_an_output_is_an_asset_that_the_next_workflow_loads(http: httpx.Client) -> None:
    job = wait(http, submit(http, picture(0x0000FF)))
    (output,) = job["outputs"]
    asset = http.get(f"/api/v2/assets/{output['id']}").json()
    assert asset["job_id"] == job["id"]
    assert asset["hash"] == output["hash"]
    second = wait(http, submit(http, loading(reference(output))))
    assert second["status"] == "succeeded", second
    made = Image.open(io.BytesIO(http.get(second["outputs"][0]["url"]).content))
    assert made.convert("RGB").getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    "value",
    [
        {"__type": "core/ASSET"},
        {"__type": "core/ASSET", "info": 5},
        {"__type": "core/ASSET", "info": {"id": "../x"}},
        {"__type": "core/ASSET", "info": {"id": str(uuid4())}},
        {"__type": "core/ASSET", "info": {"hash": "blake3:00"}},
    ],
)
def test_a_reference_to_nothing_is_refused(http: httpx.Client, value: dict[str, Any]) -> None:
    answer = http.post("/api/v2/jobs", json={"workflow": loading(value)})
    assert error_of(answer) == (422, "missing_asset")
    assert len(answer.json()["error"]["details"]["missing_ids"]) == 1


def test_a_deleted_asset_is_gone(http: httpx.Client) -> None:
    data = png()
    asset = upload(http, data).json()
    assert http.delete(f"/api/v2/assets/{asset['id']}").status_code == 204
    assert error_of(http.delete(f"/api/v2/assets/{asset['id']}")) == (404, "not_found")
    assert error_of(http.get(asset["url"])) == (404, "not_found")
    assert http.head(f"/api/v2/assets/by-hash/{hash_of(data)}").status_code == 404
    viewed = http.get("/view", params={"filename": "cat.png", "type": "input"})
    assert viewed.status_code == 404


def test_an_asset_that_a_job_needs_is_not_deleted(http: httpx.Client) -> None:
    asset = upload(http, png()).json()
    prompt = slow(new_color(), nodes=6)
    prompt["1"] = node("LoadImage", image=reference(asset))
    job = submit(http, prompt)
    answer = http.delete(f"/api/v2/assets/{asset['id']}")
    assert error_of(answer) == (409, "asset_in_use")
    wait(http, http.post(job["urls"]["cancel"]).json())
    assert http.delete(f"/api/v2/assets/{asset['id']}").status_code == 204


def test_an_asset_is_an_upload_that_clients_of_comfyui_know(http: httpx.Client) -> None:
    data = png()
    upload(http, data, "dog.png")
    viewed = http.get("/view", params={"filename": "dog.png", "type": "input"})
    assert viewed.content == data


def test_the_time_that_an_asset_is_kept_for_is_only_made_longer(http: httpx.Client) -> None:
    data = png()
    first = upload(http, data, expires_in="600").json()
    assert first["expires_at"] > first["created_at"]
    shorter = upload(http, data, expires_in="60").json()
    assert shorter["expires_at"] == first["expires_at"]
    longer = upload(http, data, expires_in="6000").json()
    assert longer["expires_at"] > first["expires_at"]
    assert upload(http, data).json()["expires_at"] is None
