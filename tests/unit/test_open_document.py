"""Whatever ComfyUI and its savers write opens with the workflow and the prompt that went in."""

import html
import json
import mmap
import struct
import tempfile
from typing import Any

import pytest
from tests.unit.saved_files import (
    PROMPT,
    SAVED,
    TEXTS,
    WORKFLOW,
    box,
    chunk,
    encoded,
    exif,
    glb,
    id3,
    jpeg,
    png,
    png_with,
    safetensors,
    saved,
    user_comment,
    video,
    webp,
)

from comfyfleet.errors import InvalidInput, NoWorkflowFound
from comfyfleet.workflow.embedded import Opened, open_document

BOTH = json.dumps({"prompt": PROMPT, "workflow": WORKFLOW})


def opened(data: Any) -> tuple[str, bool, bool]:
    found = open_document(data)
    assert found.notes == ()
    return found.kind, found.workflow == WORKFLOW, found.prompt == PROMPT


def opened_json(value: Any) -> Opened:
    return open_document(json.dumps(value).encode())


@pytest.mark.parametrize("name", SAVED)
def test_what_a_saver_wrote_opens_unchanged(name: str) -> None:
    kind = name.split(",")[0]
    assert opened(saved(name)) == (kind, True, True)


@pytest.mark.parametrize("name", SAVED)
def test_any_buffer_will_do(name: str) -> None:
    data = saved(name)
    assert open_document(memoryview(data)) == open_document(bytearray(data)) == open_document(data)


def test_an_mmap_can_be_closed_while_the_error_is_being_handled() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(png({"workflow": "{"}))
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with pytest.raises(InvalidInput), mapped:
            open_document(mapped)
        assert mapped.closed


# Where savers put the texts in EXIF


@pytest.mark.parametrize("save", [webp, jpeg])
def test_labels_may_be_capitalised_and_followed_by_a_space(save: Any) -> None:
    tags = exif(prompt_tag=0x010F, workflow_tag=0x010E, label="{}: {}")
    for tag in (0x010F, 0x010E):
        tags[tag] = tags[tag].capitalize()[:8] + tags[tag][8:]
    assert opened(save(tags))[1:] == (True, True)


@pytest.mark.parametrize("save", [webp, jpeg])
@pytest.mark.parametrize(
    "comment",
    [
        BOTH.encode(),
        b"ASCII\0\0\0" + BOTH.encode(),
        b"\0\0\0\0\0\0\0\0" + BOTH.encode(),
        b"UNICODE\0" + BOTH.encode("utf-16-be"),
        b"UNICODE\0" + BOTH.encode("utf-16-le"),
        b"UNICODE\0" + BOTH.encode("utf-16"),
        b"UNICODE\0" + BOTH.encode(),
    ],
)
def test_a_user_comment_opens_in_every_encoding(save: Any, comment: bytes) -> None:
    assert opened(save(user_comment(comment)))[1:] == (True, True)


def test_a_label_in_a_user_comment_opens_too() -> None:
    comment = b"UNICODE\0" + f"workflow:{TEXTS['workflow']}".encode("utf-16-be")
    assert opened(jpeg(user_comment(comment))) == ("jpeg", True, False)


def test_a_jpeg_comment_opens() -> None:
    assert opened(encoded("JPEG", comment=BOTH)) == ("jpeg", True, True)


@pytest.mark.parametrize(
    "xmp",
    [
        f"<comfy:workflow>{html.escape(TEXTS['workflow'])}</comfy:workflow>",
        f"<rdf:Description comfy:workflow='{html.escape(TEXTS['workflow'])}'/>",
    ],
)
def test_xmp_opens(xmp: str) -> None:
    packet = f"<x:xmpmeta>{xmp}</x:xmpmeta>".encode()
    assert opened(encoded("JPEG", xmp=packet)) == ("jpeg", True, False)
    assert opened(encoded("WEBP", xmp=packet)) == ("webp", True, False)


# Variants of containers


def test_a_latin1_text_in_a_png_is_read_as_the_standard_says() -> None:
    text = json.dumps({"nodes": [], "title": "Größe"}, ensure_ascii=False)
    data = png_with(chunk(b"tEXt", b"workflow\0" + text.encode("latin-1")))
    assert open_document(data).workflow == json.loads(text)


def test_of_two_texts_with_one_key_the_last_counts() -> None:
    first, last = (
        chunk(b"tEXt", b"workflow\0" + json.dumps({"nodes": [], "id": name}).encode())
        for name in "ab"
    )
    assert open_document(png_with(first, last)).workflow == {"nodes": [], "id": "b"}


def test_a_movie_opens_with_its_metadata_in_front_of_the_frames() -> None:
    data = saved("mp4")
    frames, metadata = data.index(b"free") - 4, data.index(b"moov") - 4
    assert opened(data[:frames] + data[metadata:] + data[frames:metadata]) == ("mp4", True, True)


def test_a_movie_with_long_box_sizes_opens() -> None:
    data = saved("mp4")
    frames = data.index(b"free") - 4
    long_box = struct.pack(">I4sQ", 1, b"mdat", 16 + 100) + bytes(100)
    assert opened(data[:frames] + long_box + data[frames:]) == ("mp4", True, True)


def test_a_movie_with_named_items_opens() -> None:
    item = box(
        b"----",
        box(b"mean", bytes(4), b"com.apple.iTunes"),
        box(b"name", bytes(4), b"workflow"),
        box(b"data", struct.pack(">II", 2, 0), TEXTS["workflow"].encode("utf-16-be")),
    )
    handler = box(b"hdlr", bytes(8), b"mdirappl", bytes(9))
    meta = box(b"meta", bytes(4), handler, box(b"ilst", item))
    data = box(b"ftyp", b"M4V ") + box(b"moov", box(b"udta", meta, bytes(4)))
    assert opened(data) == ("mp4", True, False)


def test_a_webm_of_unknown_size_with_tags_behind_the_frames_opens() -> None:
    def element(identity: str, body: bytes) -> bytes:
        return bytes.fromhex(identity) + struct.pack(">Q", 1 << 56 | len(body)) + body

    simple = element(
        "67c8", element("45a3", b"WORKFLOW") + element("4487", TEXTS["workflow"].encode() + b"\0")
    )
    tags = element("1254c367", element("7373", simple))
    cluster = (
        bytes.fromhex("1f43b675 01ffffffffffffff") + element("e7", b"\0") + element("a3", bytes(50))
    )
    segment = bytes.fromhex("18538067 01ffffffffffffff") + cluster + tags
    assert opened(element("1a45dfa3", b"") + segment) == ("webm", True, False)


def frame_23(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">IH", len(body), 0) + body


def test_an_mp3_with_older_tags_opens() -> None:
    name, text = "workflow\0".encode("utf-16"), TEXTS["workflow"].encode("utf-16")
    named = frame_23(b"TXXX", b"\1" + name + text)
    comment = frame_23(b"COMM", b"\0eng\0" + json.dumps({"prompt": PROMPT}).encode("latin-1"))
    short = (
        b"TXX"
        + struct.pack(">I", 10 + len(TEXTS["workflow"]))[1:]
        + b"\0workflow\0"
        + TEXTS["workflow"].encode()
    )
    assert opened(id3(named)) == ("mp3", True, False)
    assert opened(id3(named.replace(b"\xff", b"\xff\0"), flags=0x80)) == ("mp3", True, False)
    assert opened(id3(comment, bytes(20))) == ("mp3", False, True)
    assert opened(id3(short, version=2)) == ("mp3", True, False)


def test_an_mp3_with_frame_flags_opens() -> None:
    body = b"\3workflow\0" + TEXTS["workflow"].encode()
    size = bytes(len(body) + 4 >> shift & 0x7F for shift in (21, 14, 7, 0))
    frame = b"TXXX" + size + b"\0\3" + bytes(4) + body
    extended = b"\0\0\0\6\1\0"
    assert opened(id3(extended, frame, version=4, flags=0x40)) == ("mp3", True, False)


def test_a_glb_may_have_objects_instead_of_texts() -> None:
    assert opened(glb({"prompt": PROMPT, "workflow": WORKFLOW})) == ("glb", True, True)


# JSON as people keep it


@pytest.mark.parametrize(
    "value",
    [
        WORKFLOW,
        {"workflow": WORKFLOW},
        {"workflow": TEXTS["workflow"]},
        {"input": {"workflow": WORKFLOW}},
        {"extra_data": {"extra_pnginfo": {"workflow": WORKFLOW}}},
        {"asset": {"extras": {"workflow": TEXTS["workflow"]}}, "nodes": [{"mesh": 0}]},
    ],
)
def test_a_workflow_opens_in_its_wrappers(value: Any) -> None:
    assert opened_json(value) == Opened("json", WORKFLOW, None)


@pytest.mark.parametrize(
    "value",
    [
        PROMPT,
        {"prompt": PROMPT, "client_id": "x"},
        {"input": {"workflow": PROMPT}},
        {"prompt": [0, "id", PROMPT, {"client_id": "x"}, ["9"]], "outputs": {}, "status": {}},
        {"some-id": {"prompt": [0, "id", PROMPT, {}, []], "outputs": {"9": {}}}},
        [0, "id", PROMPT, {}, []],
    ],
)
def test_a_prompt_opens_in_its_wrappers(value: Any) -> None:
    assert opened_json(value) == Opened("json", None, PROMPT)


@pytest.mark.parametrize(
    "value",
    [
        {"output": PROMPT, "workflow": WORKFLOW},
        {"prompt": [0, "id", PROMPT, {"extra_pnginfo": {"workflow": WORKFLOW}}, []], "outputs": {}},
        {
            "id": "x",
            "workflow": {"prompt": PROMPT, "extra_data": {"extra_pnginfo": {"workflow": WORKFLOW}}},
        },
    ],
)
def test_both_open_where_both_are(value: Any) -> None:
    assert opened_json(value) == Opened("json", WORKFLOW, PROMPT)


def test_a_prompt_opens_even_if_one_of_its_nodes_is_broken() -> None:
    prompt = {**PROMPT, "4": {"inputs": {}}}
    assert opened_json(prompt).prompt == prompt


def test_a_json_file_from_powershell_opens() -> None:
    assert open_document(json.dumps(WORKFLOW).encode("utf-16")).workflow == WORKFLOW


# Half of it


def test_a_broken_workflow_beside_a_good_prompt_is_noted() -> None:
    found = open_document(png({**TEXTS, "workflow": TEXTS["workflow"][:-5]}))
    assert (found.workflow, found.prompt) == (None, PROMPT)
    assert found.notes == (
        "The text 'workflow' is not valid JSON: it ends too early (was it cut short?).",
    )


def test_a_broken_workflow_alone_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="The text 'workflow' is not valid JSON") as caught:
        open_document(png({"workflow": "{'nodes': []}"}))
    assert not isinstance(caught.value, NoWorkflowFound)


@pytest.mark.parametrize("nothing", ["null", "{}", "", '""', "[]"])
def test_an_empty_workflow_beside_a_prompt_is_none(nothing: str) -> None:
    assert open_document(png({**TEXTS, "workflow": nothing})) == Opened("png", None, PROMPT)


def test_a_prompt_under_the_key_of_the_workflow_is_a_prompt() -> None:
    assert open_document(png({"workflow": TEXTS["prompt"]})) == Opened("png", None, PROMPT)


def test_a_file_cut_off_behind_its_metadata_opens_with_a_note() -> None:
    found = open_document(png()[:-20])
    assert (found.workflow, found.prompt) == (WORKFLOW, PROMPT)
    assert found.notes[0].startswith("The file is damaged or truncated at byte ")


# Nothing in it


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (png({"Software": "x", "parameters": "cat"}), "^PNG 8x6 without ComfyUI metadata; it has the text keys: "
         r"Software, parameters \(an AUTOMATIC1111 prompt\)\. It was saved without"),
        (png({}), "PNG 8x6 without ComfyUI metadata; it has no text metadata at all"),
        (png({"prompt": "a cat"}), r"prompt \(not ComfyUI's\)"),
        (png({"workflow": '{"a": 1}'}), r"workflow \(not ComfyUI's\)"),
        (png()[:40], "the file is damaged or truncated at byte 37.*Copy or download it again"),
        (png({"k\x07" + "x" * 60: "y"}), r"it has the text keys: k\?x{37}…"),
        (png({f"key{n}": "y" for n in range(15)}), "key11 and 3 more"),
        (jpeg(user_comment(b"UNICODE\0" + "cat\nSteps: 20, Sampler: Euler".encode("utf-16-be"))),
         r"JPEG image without.*parameters \(an AUTOMATIC1111"),
        (video("mp4", {}), "MP4 or MOV video without"),
        (video("webm", {"artist": "x"}), "WebM or Matroska video without.*keys: ARTIST"),
        (safetensors({"format": "pt"}), "Safetensors file without.*keys: format"),
        (b"\xff\xfb\x90\x00" + bytes(400), "MP3 sound without"),
        (b"<svg></svg>", "SVG drawing without"),
        (b"", "The file is empty"),
        (bytes(100), "only zero bytes"),
        (b"GIF89a" + bytes(10), "a GIF image"),
        (b"\n<!DOCTYPE html><html>", "a web page.*download link"),
        (b"<rss></rss>", "an XML document"),
        (b"\xef\xbf\xbdPNG", "ruined by treating it as text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"seed: 5\nsteps: 20", "neither JSON nor media; it begins with"),
        (b"\x01\0\x02", "in an unknown format"),
        (b"{}", "an empty JSON object"),
        (b"[1, 2]", "a list or a single value"),
        (b'{"templates": []}', "node templates"),
        (b'{"error": "bad", "node_errors": {}}', "a server's error response: bad"),
        (b'{"KSampler": {"input": {}, "output": []}}', "node definitions"),
        (b'{"name": "x", "version": 1}', "neither a workflow nor a prompt; it has the keys: name, version"),
        (json.dumps({n: {"prompt": [0], "outputs": {"a": 1}} for n in "ab"}).encode(), "a history of 2 runs"),
        (json.dumps({"asset": {"version": "2.0"}, "nodes": [{"mesh": 0}]}).encode(), "keys: asset, nodes"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "file",
)  # fmt: skip
def test_a_file_without_a_workflow_is_described(data: bytes, words: str) -> None:
    with pytest.raises(NoWorkflowFound, match=words) as caught:
        open_document(data)
    assert caught.value.message.isprintable()
