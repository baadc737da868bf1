"""Results of runs by the names that ComfyUI would give them: viewed, used again, and each user's own."""

from io import BytesIO
from typing import Any

import PIL.Image
import pytest
from tests.support.backends.engine_client import EngineClient
from tests.support.server.gateway import GatewayProcess, GatewayUser


def drawn(color: int, kind: str = "SaveImage") -> dict[str, Any]:
    size = {"width": 8, "height": 8, "batch_size": 1, "color": color}
    saved: dict[str, Any] = {"images": ["1", 0]}
    if kind == "SaveImage":
        saved["filename_prefix"] = "deep/drawn"
    return {
        "1": {"class_type": "EmptyImage", "inputs": size},
        "2": {"class_type": kind, "inputs": saved},
    }


def run(talk: EngineClient, prompt: dict[str, Any]) -> list[dict[str, Any]]:
    """The pictures that the prompt made."""
    prompt_id = talk.http.post("/prompt", json={"prompt": prompt}).json()["prompt_id"]
    talk.wait_idle()
    record = talk.http.get(f"/history/{prompt_id}").json()[prompt_id]
    assert record["status"]["status_str"] == "success", record
    return [each for output in record["outputs"].values() for each in output["images"]]


def test_a_result_is_viewed_in_parts_as_a_preview_and_used_again(talk: EngineClient) -> None:
    (made,) = run(talk, drawn(0xFF0000))
    assert (made["filename"], made["subfolder"]) == ("drawn_00001_.png", "deep")
    whole = talk.http.get("/view", params=made)
    picture = PIL.Image.open(BytesIO(whole.content))
    assert picture.convert("RGB").getpixel((0, 0)) == (255, 0, 0)
    part = talk.http.get("/view", params=made, headers={"Range": "bytes=0-7"})
    assert (part.status_code, part.content) == (206, b"\x89PNG\r\n\x1a\n")
    preview = talk.http.get("/view", params={**made, "preview": "webp;50"})
    assert PIL.Image.open(BytesIO(preview.content)).format == "WEBP"
    again = {
        "1": {"class_type": "LoadImage", "inputs": {"image": "deep/drawn_00001_.png [output]"}},
        "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
        "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
    }
    (inverted,) = run(talk, again)
    assert inverted["type"] == "temp"
    shown = PIL.Image.open(BytesIO(talk.http.get("/view", params=inverted).content))
    assert shown.convert("RGB").getpixel((0, 0)) == (0, 255, 255)
    assert talk.http.get("/internal/files/output").json() == []  # it is in a subfolder
    assert talk.http.get("/internal/files/temp").json() == [f"{inverted['filename']} [temp]"]


def test_an_upload_with_the_bytes_and_name_of_a_result_is_that_result(talk: EngineClient) -> None:
    (made,) = run(talk, drawn(0x00FF00))
    content = talk.http.get("/view", params=made).content
    names = [
        talk.http.post(
            "/upload/image",
            files={"image": ("drawn_00001_.png", data)},
            data={"type": "output", "subfolder": "deep"},
        ).json()["name"]
        for data in (content, b"other")
    ]
    assert names == ["drawn_00001_.png", "drawn_00001_ (1).png"]
    assert talk.http.get("/view", params=made).content == content


@pytest.mark.parametrize("is_colleague", [True, False])
def test_another_users_result_is_neither_viewed_nor_used(
    gateway: GatewayProcess, user: GatewayUser, talk: EngineClient, is_colleague: bool
) -> None:
    (made,) = run(talk, drawn(0x0000FF))
    other = gateway.user(user.tenant_id if is_colleague else None)
    name = f"{made['subfolder']}/{made['filename']} [output]"
    prompt = {
        "1": {"class_type": "LoadImage", "inputs": {"image": name}},
        "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    with other.http() as http:
        assert http.get("/view", params=made).status_code == 404
        refused = http.post("/prompt", json={"prompt": prompt})
    assert refused.status_code == 400
    assert "Invalid image file" in refused.text
