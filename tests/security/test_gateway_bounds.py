"""What a user, or a backend that lies, can make the gateway say, keep and do is bounded."""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from tests.support.server.customers import Customer, EffectSetup, png
from tests.support.server.gateway import GatewayProcess, GatewayUser

from comfyfleet.comfy import calls
from comfyfleet.comfy.backend import OutputFile, ServerSettings
from comfyfleet.comfy.server import ComfyServer
from comfyfleet.errors import LimitExceeded, UnexpectedAnswer
from comfyfleet.protocol.payloads import UnforeseenInput
from comfyfleet.protocol.pictures import FORMATS, shown_picture
from comfyfleet.protocol.validation import SLOTS_MAX, declared_inputs
from comfyfleet.server.gateway import files, userdata
from comfyfleet.server.gateway.offers import CHOICES_MAX, merged
from comfyfleet.server.gateway.policy import ENDLESS_PATTERN, default_refusal
from comfyfleet.server.http.gateway.prompts import _ids_to_delete
from comfyfleet.server.run_log.model import REMOVED, record_from, reportable_events
from comfyfleet.worker.run_record import RunRecord

ANSWER_BYTES_MAX = 2_000_000


def blend(*sources: str, **more: Any) -> dict[str, Any]:
    links = {f"image{number}": [each, 0] for number, each in enumerate(sources, start=1)}
    return {"class_type": "ImageBatch", "inputs": {**links, **more}}


def save(source: str) -> dict[str, Any]:
    return {"class_type": "SaveImage", "inputs": {"images": [source, 0], "filename_prefix": "x"}}


def ring(length: int, id_length: int) -> dict[str, Any]:
    """Each node is fed by two of the ring, and all of them are told of."""
    ids = [f"{number:0{id_length}}" for number in range(length)]
    nodes = {each: blend(ids[at - 1], ids[at // 2]) for at, each in enumerate(ids)}
    return {**nodes, "save": save(ids[-1])}


def faulty(length: int) -> dict[str, Any]:
    """A chain in which each node lacks an input and has a long value in the other."""
    nodes = {str(at): blend(str(at - 1)) for at in range(1, length)}
    outputs = {f"{'s' * 190}{at}": save(str(length - 1)) for at in range(100)}
    return {"0": blend(), **nodes, **outputs}


WIDE = {"x" * 500_000: save("a"), **{str(at): save("a") for at in range(50)}, "a": blend()}


@pytest.mark.parametrize(
    "prompt",
    [ring(90, 190), ring(1_500, 190), faulty(1_500), WIDE],
    ids=["a ring", "a long ring", "faults", "a long id"],
)
def test_an_answer_is_not_hundreds_of_times_its_prompt(
    gateway: GatewayProcess, user: GatewayUser, prompt: dict[str, Any]
) -> None:
    with user.http() as mine:
        refused = mine.post("/prompt", json={"prompt": prompt})
    assert refused.status_code == 400
    assert len(refused.content) < ANSWER_BYTES_MAX
    assert refused.json()["error"]["type"]


def test_what_comes_with_a_prompt_is_not_larger_than_a_prompt(
    gateway: GatewayProcess, user: GatewayUser
) -> None:
    extra_data = {"extra_pnginfo": "x" * 5_000_000}
    with user.http() as mine:
        refused = mine.post("/prompt", json={"prompt": {"1": save("1")}, "extra_data": extra_data})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "extra_data is too large"


async def send_without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
            await writer.drain()


async def test_a_backend_that_sends_without_end_is_not_listened_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calls, "ANSWER_BYTES_MAX", 1_000)
    endless = await asyncio.start_server(send_without_end, "127.0.0.1", 0)
    port = endless.sockets[0].getsockname()[1]
    async with endless, ComfyServer(ServerSettings(base_url=f"http://127.0.0.1:{port}")) as backend:
        with pytest.raises(UnexpectedAnswer, match="more than 1,000 bytes"):
            await backend.describe()
        wanted = OutputFile("1", "images", "x.png")
        with pytest.raises(LimitExceeded):
            await backend.fetch(wanted, tmp_path / "x", bytes_max=5_000)
    assert os.listdir(tmp_path) == []


def test_a_lying_object_info_costs_little_and_does_not_speak_for_others() -> None:
    many = [[f"{each}.safetensors" for each in range(start, start + 100_000)] for start in (0, 7)]
    infos = [{"Load": {"input": {"required": {"name": [each, {}]}}}} for each in many]
    listed = merged(infos)["Load"]["input"]["required"]["name"][0]
    assert listed[:2] == ["0.safetensors", "1.safetensors"]
    assert len(listed) == CHOICES_MAX
    growing = {"template": {"input": {"required": {"x": ["INT", {}]}}, "prefix": "x", "min": 0, "max": 10**12}}  # fmt: skip
    grown = declared_inputs({"required": {"x": ["COMFY_AUTOGROW_V3", growing]}}, {})
    assert len(grown) == SLOTS_MAX


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "TGA", "ICO", "PCX", "SGI"])
def test_only_usual_pictures_are_decoded(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "picture"
    PIL.Image.new("RGB", (16, 16)).save(path, format=kind)
    for preview, channel in (("webp;50", None), (None, "rgb"), (None, "a")):
        with pytest.raises(UnforeseenInput):
            shown_picture(path, preview, channel, lambda size: None)


@pytest.mark.parametrize("kind", FORMATS)
def test_usual_pictures_are_shown(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "picture"
    PIL.Image.new("RGB", (16, 16)).save(path, format=kind)
    shown = shown_picture(path, f"jpeg;{'9' * 400}", None, lambda size: None)
    assert shown is not None
    assert shown[1] == "image/jpeg"


async def test_one_tenant_does_not_take_all_turns_of_decoding(effect_setup: EffectSetup) -> None:
    pictures = effect_setup.plane.pictures
    begun: list[str] = []

    async def decode(name: str, tenant: str) -> None:
        async with pictures.turn(tenant):
            begun.append(name)

    async with pictures.turn("ada"):
        async with pictures.turn("ada"):
            waiting = [asyncio.create_task(decode(f"ada's {each}", "ada")) for each in range(3)]
            await asyncio.sleep(0)
            waiting.append(asyncio.create_task(decode("bob's", "bob")))
            await asyncio.sleep(0)
            assert begun == []
        await asyncio.gather(*waiting)
    assert begun.index("bob's") <= 1


@pytest.mark.parametrize("name", ["RegexExtract", "RegexMatch", "RegexReplace"])
def test_no_stranger_gives_a_backend_a_pattern_that_never_ends(name: str) -> None:
    assert default_refusal(name, {}) == ENDLESS_PATTERN


def test_letters_are_no_ids_and_no_id_is_looked_for_twice() -> None:
    one = "11111111-1111-4111-8111-111111111111"
    assert list(_ids_to_delete({"delete": "x" * 5_000_000})) == []
    assert _ids_to_delete({"delete": [one, one, "a", one.upper().replace("1", "A"), 5]}) == [one]


async def test_settings_are_small(ada: Customer) -> None:
    big = "x" * userdata.SETTINGS_BYTES_MAX
    assert (await ada.client.post("/settings/a", json="small")).status_code == 200
    assert (await ada.client.post("/settings/b", json=big)).status_code == 413
    assert (await ada.client.get("/settings")).json() == {"a": "small"}
    # Each of two is small enough, and both together aren't.
    half = "x" * (userdata.SETTINGS_BYTES_MAX // 2)
    assert (await ada.client.post("/settings/b", json=half)).status_code == 200
    assert (await ada.client.post("/settings/c", json=half)).status_code == 413
    assert (await ada.client.get("/settings")).json() == {"a": "small", "b": half}
    # As a file they may be large, and are then none.
    name = f"/userdata/{userdata.SETTINGS}"
    written = await ada.client.post(name, content=json.dumps({"a": big}).encode())
    assert written.status_code == 200
    assert (await ada.client.get("/settings")).json() == {}


async def test_a_user_has_so_many_uploads(ada: Customer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "UPLOADS_MAX", 3)
    sent = [
        await ada.client.post("/upload/image", files={"image": (f"{each}.png", png(8, each), "image/png")})
        for each in range(3)
    ]  # fmt: skip
    assert {each.status_code for each in sent} == {200}
    for form in ({}, {"overwrite": "true"}):
        file = ("0.png", png(8, 77), "image/png")
        refused = await ada.client.post("/upload/image", files={"image": file}, data=form)
        assert refused.status_code in (409, 413, 422, 507), refused.status_code
        assert refused.json()["error"]["type"] == "storage_full"
    # The same bytes under the same name are no new upload.
    again = await ada.client.post(
        "/upload/image", files={"image": ("0.png", png(8, 0), "image/png")}
    )
    assert again.status_code == 200


def test_a_backend_can_not_speak_for_the_control_plane() -> None:
    lie = {"tells": 10**12, "count": 10**12}
    assert reportable_events([(REMOVED, lie), ("executing", {"node": "1"})]) == [
        ("executing", {"node": "1"})
    ]
    record = RunRecord({}, "folder")
    record.take(json.dumps({"type": REMOVED, "data": lie}))
    record.take(json.dumps({"type": "comfyfleet_picture", "data": {"base64": "!"}}))
    assert record.pop_all() == ()


@pytest.mark.parametrize(
    "history",
    [
        {"status": {"messages": 5}},
        {"status": {"messages": [5, ["x"], ["x", 1], ["x", {}], [{}, {}]]}},
        {"status": {}, "outputs": [1], "meta": "x"},
        {"status": {}, "outputs": {"1": 5, "2": {"images": []}}},
    ],
)
def test_an_entry_of_a_backend_that_lies_breaks_no_history(history: dict[str, Any]) -> None:
    record = record_from([], history, is_success=True)
    assert all(
        isinstance(kind, str) and isinstance(data, dict)
        for kind, data in record["status"]["messages"]
    )
    assert all(isinstance(each, dict) for each in record["outputs"].values())
    assert isinstance(record["meta"], dict)
