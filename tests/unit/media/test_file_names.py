"""Keys of files hold whatever name somebody thought of, made harmless."""

import re
import unicodedata
from datetime import UTC, datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comfyfleet.errors import InvalidInput
from comfyfleet.server.media.model import (
    SAFE_NAME_BYTES_MAX,
    File,
    check_file,
    output_key,
    safe_name,
    upload_key,
)
from comfyfleet.server.storage.model import checked_key

ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


@given(st.text(st.characters() | st.sampled_from("/\\.\0 \u202e"), max_size=400))
def test_a_safe_name_fits_everywhere(name: str) -> None:
    safe = safe_name(name)
    assert safe
    assert safe == safe.strip(" .")
    assert not set(safe) & set("/\\\0\n\r\"'`$&|;<>*?:#%")
    assert len(safe.encode()) <= SAFE_NAME_BYTES_MAX
    assert not [each for each in safe if unicodedata.category(each)[0] == "C"]
    assert safe_name(safe) == safe
    checked_key(upload_key(ONE, TWO, name))
    checked_key(output_key(ONE, TWO, THREE, name))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("cat.png", "cat.png"),
        ("C:\\photos\\Großmutter é.JPG", "Großmutter é.JPG"),
        ("../../etc/passwd", "passwd"),
        ("猫の写真.webp", "猫の写真.webp"),
        ("ไม้.png", "ไม้.png"),
        ("a\u202egnp.exe", "agnp.exe"),
        ("a<b>|c?.png", "a_b__c_.png"),
        (".hidden", "hidden"),
        ("...", "file"),
        ("", "file"),
        ("😀", "_"),
        ("x" * 300 + ".png", "x" * 146 + ".png"),
        ("é" * 100 + ".mp4", "é" * 73 + ".mp4"),
        ("no suffix." + "y" * 200, ("no suffix." + "y" * 200)[:150]),
    ],
)
def test_names_become_safe(name: str, safe: str) -> None:
    assert safe_name(name) == unicodedata.normalize("NFC", safe)


def test_both_spellings_of_an_accent_are_one_name() -> None:
    assert safe_name("e\u0301.png") == safe_name("\u00e9.png")


def test_keys_say_whose_and_of_which_lease() -> None:
    assert upload_key(ONE, TWO, "a.png") == f"tenants/{ONE}/uploads/{TWO}/a.png"
    key = output_key(ONE, TWO, THREE, "a.png")
    assert re.fullmatch(rf"tenants/{ONE}/ai-jobs/{TWO}/output-[0-9a-f-]{{36}}\.png", key)
    assert key == output_key(ONE, TWO, THREE, "a.png")
    assert key != output_key(ONE, TWO, ONE, "a.png")


@pytest.mark.parametrize(
    "changes",
    [
        {"size": -1},
        {"filename": ""},
        {"filename": "x" * 301},
        {"content_hash": "blake3:" + "0" * 64},
    ],
)
def test_a_file_that_can_not_be_is_refused(changes: dict[str, object]) -> None:
    fields: dict[str, object] = {"id": ONE, "tenant_id": TWO, "disk": "local", "path": "a"}
    fields |= {"filename": "a", "mime_type": "image/png", "created_at": datetime.now(UTC)}
    with pytest.raises(InvalidInput):
        check_file(File(**(fields | changes)))  # type: ignore[arg-type]
