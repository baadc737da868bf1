"""What goes wrong with a bucket is told in our words, with the bucket and the key."""

from collections.abc import Iterator

import pytest
from tests.support.databases.s3 import RunningS3, running_s3
from tests.support.server.asgi import free_listener, url_of

from comfyfleet.clock import utc_now
from comfyfleet.errors import AccessDenied, NotFound, Refused, Unavailable
from comfyfleet.server.storage import ObjectStore, open_store


@pytest.fixture(scope="module")
def s3() -> Iterator[RunningS3]:
    with running_s3() as running:
        yield running


@pytest.fixture(autouse=True)
def credentials(s3: RunningS3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)


def opened(url: str) -> ObjectStore:
    return open_store(url, public_url="", secret=b"", clock=utc_now)


async def test_a_missing_object_is_named_with_its_bucket(s3: RunningS3) -> None:
    store = opened(s3.url_of("pre"))
    with pytest.raises(NotFound, match="object s3://comfyfleet/pre/a/b"):
        await store.get("a/b")
    await store.aclose()


async def test_a_missing_bucket_is_named(s3: RunningS3) -> None:
    store = opened(s3.url.replace("//comfyfleet", "//elsewhere"))
    with pytest.raises(Refused, match="bucket 'elsewhere' doesn't exist"):
        await store.get("a/b")
    with pytest.raises((Refused, NotFound), match="elsewhere"):
        await store.check()
    await store.aclose()


async def test_a_wrong_secret_is_access_denied(
    s3: RunningS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    store = opened(s3.url)
    with pytest.raises(AccessDenied, match=r"s3://comfyfleet/a/b: S3 denied access \(Signature"):
        await store.put("a/b", b"", "text/plain")
    await store.aclose()


async def test_missing_credentials_are_told(
    s3: RunningS3, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    store = opened(s3.url)
    with pytest.raises(AccessDenied, match="no credentials") as denied:
        await store.url_to_get("a/b", seconds=60)
    assert "AWS_ACCESS_KEY_ID" in denied.value.details["hint"]
    await store.aclose()


async def test_a_bucket_that_does_not_answer_is_unavailable() -> None:
    with free_listener() as listener:
        endpoint = url_of(listener)
    store = opened(f"s3://media?endpoint={endpoint}")
    with pytest.raises(Unavailable, match="s3://media/a/b: S3 can't be reached"):
        await store.head("a/b")
    await store.aclose()


async def test_urls_are_signed_for_the_host_that_others_reach(s3: RunningS3) -> None:
    store = opened(s3.url + "&public_endpoint=https://files.example")
    await store.put("a/b", b"1", "text/plain")
    url = await store.url_to_get("a/b", seconds=60)
    assert url.startswith("https://files.example/comfyfleet/a/b?")
    await store.aclose()


async def test_on_aws_urls_name_the_host_of_the_region() -> None:
    store = opened("s3://media/pre?region=eu-central-1")
    url = await store.url_to_get("a/b", seconds=60)
    assert url.startswith("https://media.s3.eu-central-1.amazonaws.com/pre/a/b?")
    await store.aclose()
