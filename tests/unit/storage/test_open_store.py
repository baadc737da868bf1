"""A store by its URL, and the secret of the local one."""

import sys
from pathlib import Path

import pytest

from comfyfleet.clock import utc_now
from comfyfleet.errors import InvalidInput
from comfyfleet.server.storage import (
    BucketUrl,
    LocalStore,
    ObjectStore,
    open_store,
    parse_store_url,
)


def opened(url: str) -> ObjectStore:
    return open_store(url, public_url="http://c", secret=b"s" * 32, clock=utc_now)


def test_a_folder_is_opened_by_its_url(tmp_path: Path) -> None:
    folder = tmp_path / "with space é"
    assert isinstance(opened(folder.as_uri()), LocalStore)
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("url", "bucket"),
    [
        ("s3://media", BucketUrl("media")),
        ("s3://media/", BucketUrl("media")),
        ("s3://my.media/a/b%20c/", BucketUrl("my.media", "a/b c")),
        (
            "s3://m/p?endpoint=http://minio:9000&region=eu-west-1&public_endpoint=https://f.example",
            BucketUrl("m", "p", "http://minio:9000", "https://f.example", "eu-west-1"),
        ),
        ("s3://m?endpoint=https%3A%2F%2Fx.example", BucketUrl("m", endpoint="https://x.example")),
    ],
)
def test_a_bucket_is_read_from_its_url(url: str, bucket: BucketUrl) -> None:
    assert parse_store_url(url) == bucket


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "must be file:///folder or s3://"),
        ("/var/data", "must be file:///folder or s3://"),
        ("gs://bucket", "must be file:///folder or s3://"),
        ("http://[", "must be file:///folder or s3://"),
        ("file://data/objects", "three slashes"),
        ("file:///", "three slashes"),
        ("s3:///prefix", "s3://bucket/prefix"),
        ("s3://key:secret@bucket", "AWS_ACCESS_KEY_ID"),
        ("s3://bucket?regoin=x", "unknown option 'regoin'"),
        ("s3://bucket?endpoint=minio:9000", "must begin with http"),
        ("s3://bucket/a/../b", "isn't a valid key"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        parse_store_url(url)


def test_a_refused_url_does_not_show_its_credentials() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_store_url("s3://key:hush@bucket")
    assert "hush" not in refused.value.message


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "comfyfleet.server.storage.s3", raising=False)
    with pytest.raises(InvalidInput, match="boto3") as refused:
        opened("s3://bucket")
    assert "comfyfleet[s3]" in refused.value.details["hint"]


def test_the_prefix_counts_towards_the_length_of_a_key() -> None:
    with pytest.raises(InvalidInput, match="at most"):
        BucketUrl("m", "p" * 200).key("/".join(["a" * 200] * 5))
