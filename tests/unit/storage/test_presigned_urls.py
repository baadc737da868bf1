"""A signature holds for one grant, and for no other."""

from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from comfyfleet.errors import Forbidden
from comfyfleet.server.storage.local import OBJECTS_PATH, UrlGrant, UrlSigner

SIGNER = UrlSigner(b"k" * 32)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
GRANTS = st.builds(
    UrlGrant,
    method=st.sampled_from(["GET", "PUT"]),
    key=TEXTS,
    expires=st.integers(1, 10**10),
    content_type=TEXTS,
    size=st.none() | st.integers(0, 10**12),
    filename=TEXTS,
)


def read_back(url: str, method: str, *, now: float) -> UrlGrant:
    parts = urlsplit(url)
    key = unquote(parts.path.removeprefix(OBJECTS_PATH + "/"))
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return SIGNER.granted(method, key, query, now=now)


@given(GRANTS)
def test_a_url_carries_its_whole_grant(grant: UrlGrant) -> None:
    url = SIGNER.url("https://fleet.example/", grant)
    assert url.isascii()
    assert read_back(url, grant.method, now=grant.expires - 1) == grant


@given(GRANTS, GRANTS)
def test_no_two_grants_share_a_signature(one: UrlGrant, other: UrlGrant) -> None:
    assume(one != other)
    assert SIGNER.signature(one) != SIGNER.signature(other)


@given(GRANTS, st.sampled_from(["method", "key", "expires", "content_type", "size", "filename"]))
def test_every_part_of_a_grant_is_signed(grant: UrlGrant, name: str) -> None:
    numbers = {"expires": grant.expires + 1, "size": (grant.size or 0) + 1}
    value: Any = numbers.get(name, "other")
    changed = replace(grant, **{name: value})
    assume(changed != grant)
    assert SIGNER.signature(changed) != SIGNER.signature(grant)


def test_a_url_dies_at_its_last_second() -> None:
    url = SIGNER.url("http://c", UrlGrant("GET", "a", 100))
    assert read_back(url, "GET", now=99.9)
    with pytest.raises(Forbidden, match="expired"):
        read_back(url, "GET", now=100)


@pytest.mark.parametrize("expires", ["", "-1", "1e9", "٣", "9" * 16, "nan", " 1"])
def test_an_expiry_that_is_no_number_of_ours_is_refused(expires: str) -> None:
    with pytest.raises(Forbidden):
        SIGNER.granted("GET", "a", {"expires": expires, "signature": "é"}, now=0)


def test_the_public_url_may_have_a_path() -> None:
    url = SIGNER.url("https://example.org/fleet/", UrlGrant("GET", "a/ü b", 9))
    assert url.startswith("https://example.org/fleet/api/objects/a/%C3%BC%20b?expires=9&")


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        UrlSigner(b"short")
