"""Uploads and views: names, ranges, previews, and what is refused."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest
from tests.support.backends.engine_client import EngineClient

from comfyfleet.engine import DataFolder, Served
from comfyfleet.protocol.http import limit_body


def png(color: tuple[int, ...] = (255, 0, 0), mode: str = "RGB") -> bytes:
    buffer = BytesIO()
    PIL.Image.new(mode, (8, 6), color).save(buffer, "PNG")
    return buffer.getvalue()


def upload(talk: EngineClient, name: str, content: bytes, **fields: str) -> httpx.Response:
    files = {"image": (name, content, "image/png")}
    return talk.http.post("/upload/image", files=files, data=fields)


def view(
    talk: EngineClient, name: str, headers: dict[str, str] | None = None, **query: str
) -> httpx.Response:
    params = {"filename": name, "type": "input", **query}
    return talk.http.get("/view", params=params, headers=headers)


def test_the_same_bytes_keep_their_name_and_others_get_a_number(talk: EngineClient) -> None:
    names = [
        upload(talk, "a.png", content).json()["name"] for content in (b"1", b"1", b"2", b"2", b"3")
    ]
    assert names == ["a.png", "a.png", "a (1).png", "a (1).png", "a (2).png"]


@pytest.mark.parametrize(
    ("overwrite", "name"), [("true", "a.png"), ("1", "a.png"), ("no", "a (1).png")]
)
def test_overwriting_must_be_asked_for(talk: EngineClient, overwrite: str, name: str) -> None:
    upload(talk, "a.png", b"1")
    assert upload(talk, "a.png", b"2", overwrite=overwrite).json()["name"] == name
    assert view(talk, name).content == b"2"


def test_an_upload_goes_into_the_folder_that_is_named(talk: EngineClient, served: Served) -> None:
    answer = upload(talk, "a.txt", b"x", type="output", subfolder="deep/er")
    assert answer.json() == {"name": "a.txt", "subfolder": "deep/er", "type": "output"}
    assert (served.engine.folders.output / "deep" / "er" / "a.txt").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("name", "fields", "status"),
    [
        ("../a.png", {}, 400),
        ("/etc/a.png", {}, 400),
        ("a.png", {"subfolder": "../.."}, 400),
        ("a.png", {"subfolder": "/etc"}, 400),
        ("a.png", {"type": "nope"}, 500),
        ("nowhere/a.png", {}, 500),
    ],
)
def test_an_upload_that_leads_astray_is_refused(
    talk: EngineClient, name: str, fields: dict[str, str], status: int
) -> None:
    assert upload(talk, name, b"x", **fields).status_code == status


def test_an_upload_without_a_file_is_refused(talk: EngineClient) -> None:
    assert talk.http.post("/upload/image").status_code == 400
    assert talk.http.post("/upload/image", data={"image": "no file"}).status_code == 500


def test_a_body_that_is_too_long_is_refused(
    talk: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfyfleet.protocol.http.limit_body", _limited_to_1000_bytes)
    assert upload(talk, "a.png", b"x" * 2000).status_code == 413
    assert talk.http.post("/prompt", content=b"x" * 2000).status_code == 413


def _limited_to_1000_bytes(receive: Any, _bytes_max: int) -> Any:
    return limit_body(receive, 1000)


def test_a_mask_becomes_the_alpha_of_the_original(talk: EngineClient) -> None:
    upload(talk, "a.png", png((1, 2, 3)))
    original = json.dumps({"filename": "a.png", "type": "input"})
    mask = {"image": ("m.png", png((0, 0, 0, 77), "RGBA"), "image/png")}
    answer = talk.http.post("/upload/mask", files=mask, data={"original_ref": original})
    assert answer.json()["name"] == "m.png"
    with PIL.Image.open(BytesIO(view(talk, "m.png").content)) as combined:
        assert combined.getpixel((0, 0)) == (1, 2, 3, 77)


@pytest.mark.parametrize(
    ("reference", "status"),
    [({"filename": "nope.png"}, 200), ({"filename": "../x"}, 200), ({}, 500), (None, 500)],
)
def test_a_mask_without_its_original_writes_nothing(
    talk: EngineClient, reference: Any, status: int
) -> None:
    fields = {} if reference is None else {"original_ref": json.dumps(reference)}
    mask = {"image": ("m.png", png((0, 0, 0, 77), "RGBA"), "image/png")}
    assert talk.http.post("/upload/mask", files=mask, data=fields).status_code == status
    assert view(talk, "m.png").status_code == 404


@pytest.mark.parametrize(
    ("wanted", "status", "content", "place"),
    [
        (None, 200, b"0123456789", None),
        ("bytes=0-3", 206, b"0123", "bytes 0-3/10"),
        ("bytes=8-", 206, b"89", "bytes 8-9/10"),
        ("bytes=8-99", 206, b"89", "bytes 8-9/10"),
        ("bytes=-3", 206, b"789", "bytes 7-9/10"),
        ("bytes=-99", 206, b"0123456789", "bytes 0-9/10"),
        ("bytes=10-", 416, b"", "bytes */10"),
        ("bytes=5-2", 416, b"", "bytes */10"),
        ("bytes=0-1,3-4", 416, b"", "bytes */10"),
        ("bytes=-", 416, b"", "bytes */10"),
    ],
)
def test_a_part_of_a_file_can_be_had(
    talk: EngineClient, wanted: str | None, status: int, content: bytes, place: str | None
) -> None:
    upload(talk, "a.bin", b"0123456789")
    answer = view(talk, "a.bin", {"range": wanted} if wanted else {})
    assert (answer.status_code, answer.content) == (status, content)
    assert answer.headers.get("content-range") == place


def test_a_large_file_arrives_whole(talk: EngineClient) -> None:
    content = bytes(range(256)) * 4096
    upload(talk, "a.bin", content)
    assert view(talk, "a.bin").content == content
    assert (
        view(talk, "a.bin", {"range": "bytes=1000000-1000003"}).content == content[1000000:1000004]
    )


def test_who_has_a_file_is_not_sent_it_again(talk: EngineClient) -> None:
    upload(talk, "a.bin", b"x")
    first = view(talk, "a.bin")
    for name, value in (("if-none-match", "etag"), ("if-modified-since", "last-modified")):
        again = view(talk, "a.bin", {name: first.headers[value]})
        assert (again.status_code, again.content) == (304, b"")
    assert view(talk, "a.bin", {"if-none-match": '"other"'}).status_code == 200
    assert view(talk, "a.bin", {"if-match": '"other"'}).status_code == 412


def test_the_head_of_a_file_has_its_length(talk: EngineClient) -> None:
    upload(talk, "a.bin", b"0123456789")
    answer = talk.http.head("/view", params={"filename": "a.bin", "type": "input"})
    assert (answer.headers["content-length"], answer.content) == ("10", b"")


@pytest.mark.parametrize(
    ("name", "kind", "attached"),
    [
        ("x.html", "application/octet-stream", True),
        ("x.svg", "application/octet-stream", True),
        ("x.js", "application/octet-stream", True),
        ("x.css", "application/octet-stream", True),
        ("x.xml", "application/octet-stream", True),
        ("x.txt", "text/plain", False),
        ("x.mp4", "video/mp4", False),
        ("noext", "application/octet-stream", False),
        ("ü'\U0001f600.png", "image/png", False),
    ],
)
def test_what_a_browser_would_run_is_downloaded(
    talk: EngineClient, served: Served, name: str, kind: str, attached: bool
) -> None:
    (served.engine.folders.input / name).write_bytes(b"x")
    headers = view(talk, name).headers
    assert headers["content-type"] == kind
    assert headers["content-disposition"].startswith("attachment") is attached
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({}, 404),
        ({"filename": ""}, 400),
        ({"filename": "[input]"}, 400),
        ({"filename": "../a.png"}, 400),
        ({"filename": "/etc/passwd"}, 400),
        ({"filename": "a..png"}, 400),
        ({"filename": "a.png", "type": "nope"}, 400),
        ({"filename": "a.png", "subfolder": "../.."}, 403),
        ({"filename": "a.png", "subfolder": "/etc"}, 403),
        ({"filename": "a.png", "subfolder": "nope"}, 404),
        ({"filename": "a.png"}, 404),
        ({"filename": "a.png", "type": "input"}, 200),
        ({"filename": "a.png [input]"}, 200),
        ({"filename": "sub/a.png", "type": "input"}, 200),
        ({"filename": "a\0.png", "type": "input"}, 404),
    ],
)
def test_only_what_lies_in_the_folders_can_be_seen(
    talk: EngineClient, query: dict[str, str], status: int
) -> None:
    upload(talk, "a.png", png())
    assert talk.http.get("/view", params=query).status_code == status


@pytest.mark.parametrize(
    ("query", "kind", "mode"),
    [
        ({"preview": "webp;90"}, "WEBP", "RGBA"),
        ({"preview": "jpeg;50"}, "JPEG", "RGB"),
        ({"preview": "tiff"}, "WEBP", "RGBA"),
        ({"preview": "jpeg", "channel": "a"}, "WEBP", "RGBA"),
        ({"preview": "webp", "channel": "rgb"}, "WEBP", "RGB"),
        ({"channel": "rgb"}, "PNG", "RGB"),
        ({"channel": "a"}, "PNG", "RGBA"),
        ({"channel": "other"}, "PNG", "RGBA"),
    ],
)
def test_a_picture_can_be_seen_in_other_ways(
    talk: EngineClient, query: dict[str, str], kind: str, mode: str
) -> None:
    upload(talk, "a.png", png((1, 2, 3, 77), "RGBA"))
    answer = view(talk, "a.png", None, **query)
    assert answer.headers["content-type"] == f"image/{kind.lower()}"
    with PIL.Image.open(BytesIO(answer.content)) as shown:
        assert (shown.format, shown.mode) == (kind, mode)


@pytest.mark.parametrize("query", [{"preview": "webp"}, {"channel": "rgb"}, {"channel": "a"}])
def test_what_is_no_picture_can_not_be_seen_as_one(
    talk: EngineClient, query: dict[str, str]
) -> None:
    upload(talk, "a.png", b"no picture")
    assert view(talk, "a.png", None, **query).status_code == 500


def test_temporary_files_do_not_outlive_a_start(tmp_path: Path) -> None:
    for name in ("input", "output", "temp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").touch()
    folders = DataFolder(tmp_path).open()
    assert [path.name for path in tmp_path.glob("*/a")] == ["a", "a"]
    assert not list(folders.temp.iterdir())
