"""Keys, content types and download names: what passes can do no harm."""

import re
from email.message import EmailMessage
from pathlib import PurePosixPath
from urllib.parse import unquote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from comfyfleet.errors import InvalidInput
from comfyfleet.server.storage.model import checked_content_type, checked_key, disposition

KEYISH = st.text(st.sampled_from("ab./\\\0 é\x7f\ud800") | st.characters(), max_size=30)


@given(KEYISH)
@example("a/..")
@example("a/.../b")
def test_a_key_that_passes_names_a_file_below_its_folder(key: str) -> None:
    try:
        checked_key(key)
    except InvalidInput:
        return
    path = PurePosixPath("/store/objects") / key
    assert path.parts[:3] == ("/", "store", "objects")
    assert len(path.parts) > 3
    assert ".." not in path.parts
    assert "\0" not in key
    assert path.relative_to("/store/objects").as_posix() == key
    key.encode()


def test_a_key_has_a_greatest_length() -> None:
    part = "é" * 127 + "x"
    assert checked_key(f"{part}/{part}/{part}/{part}"[:700])
    with pytest.raises(InvalidInput, match="at most"):
        checked_key("é" * 128)
    with pytest.raises(InvalidInput, match="at most"):
        checked_key("/".join(["a" * 200] * 6))


@given(st.text(max_size=40))
def test_a_download_name_stays_inside_its_header(filename: str) -> None:
    header = disposition("attachment", filename)
    assert re.fullmatch(r"[ -~]*", header)
    message = EmailMessage()
    message["Content-Disposition"] = header
    assert message.get_content_disposition() == "attachment"


@pytest.mark.parametrize("filename", ["cat.png", "a b;c.png"])
def test_a_plain_download_name_is_quoted(filename: str) -> None:
    message = EmailMessage()
    message["Content-Disposition"] = disposition("attachment", filename)
    assert message.get_filename() == filename


@pytest.mark.parametrize("filename", ["猫.png", 'say "hi" 50%.png', "a\\b.png"])
def test_any_other_download_name_is_encoded_for_those_who_can_read_it(filename: str) -> None:
    told = re.fullmatch(
        r"inline; filename=\"[^\"]+\"; filename\*=UTF-8''(\S+)", disposition("inline", filename)
    )
    assert told
    assert unquote(told[1]) == filename


@pytest.mark.parametrize("known", ["image/png", "image/svg+xml", "text/plain; charset=utf-8"])
def test_known_content_types_pass(known: str) -> None:
    assert checked_content_type(known) == known


@given(st.text(max_size=30))
def test_a_content_type_that_passes_is_one_line_of_ascii(text: str) -> None:
    try:
        checked_content_type(text)
    except InvalidInput:
        return
    assert re.fullmatch(r"[ -~]+/[ -~]+", text)
