"""A signed URL opens one file, and not for ever."""

from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from tests.support.backends.comfy_cloud.cloud import URL_SECONDS, StorageUrlSigner

SIGNER = StorageUrlSigner(b"secret")
NOW = 1000.0


def parts(url: str) -> tuple[str, str, dict[str, str]]:
    split = urlsplit(url)
    _, _, kind, name = unquote(split.path).split("/", 3)
    return kind, name, dict(parse_qsl(split.query))


@pytest.mark.parametrize("name", ["a.png", "deep/er/a b.png", "ü?#.png"])
def test_it_opens_what_it_names(name: str) -> None:
    kind, found, query = parts(SIGNER.path("output", name, NOW))
    assert (kind, found) == ("output", name)
    assert SIGNER.is_valid(kind, found, query, NOW)


def test_it_expires() -> None:
    kind, name, query = parts(SIGNER.path("output", "a.png", NOW))
    assert SIGNER.is_valid(kind, name, query, NOW + URL_SECONDS)
    assert not SIGNER.is_valid(kind, name, query, NOW + URL_SECONDS + 1)


@pytest.mark.parametrize(
    "change", [{"expires": "99999"}, {"expires": ""}, {"signature": ""}, {"signature": "ü"}]
)
def test_it_can_not_be_changed(change: dict[str, str]) -> None:
    kind, name, query = parts(SIGNER.path("output", "a.png", NOW))
    assert not SIGNER.is_valid(kind, name, {**query, **change}, NOW)
    assert not SIGNER.is_valid("input", name, query, NOW)
    assert not StorageUrlSigner(b"other").is_valid(kind, name, query, NOW)
