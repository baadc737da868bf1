"""Errors of a file store that is not the control plane."""

from pathlib import Path

import httpx
import pytest

from comfyfleet.api.media import UploadSlot
from comfyfleet.client.files import download_file, upload_file, upload_source
from comfyfleet.client.transport import ApiCalls
from comfyfleet.errors import AccessDenied, FleetError, UnexpectedAnswer
from comfyfleet.transport.retry import RetryPolicy

STORE_URL = "http://bucket.example/photo.png?X-Amz-Credential=AKIA1"
S3_ERROR = "<Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>AKIA1</AWSAccessKeyId></Error>"
API_ERROR = {"error": {"code": AccessDenied.code, "message": "the URL has expired"}}


def calls_of(answer: httpx.Response) -> ApiCalls:
    transport = httpx.MockTransport(lambda _request: answer)
    return ApiCalls(
        "http://control.test", "cf_1", retry=RetryPolicy(attempts_max=1), transport=transport
    )


async def uploaded(answer: httpx.Response) -> FleetError:
    source = upload_source(b"abc", filename="photo.png")
    with pytest.raises(FleetError) as raised:
        await upload_file(calls_of(answer), UploadSlot(url=STORE_URL), source, None)
    return raised.value


async def test_a_refused_upload_names_the_store_and_hides_its_key() -> None:
    error = await uploaded(httpx.Response(403, text=S3_ERROR))
    assert isinstance(error, UnexpectedAnswer)
    assert "bucket.example refused the upload: 403 InvalidAccessKeyId" in error.message
    assert "AKIA1" not in error.message
    assert "control plane" in error.details["hint"]
    # The command line explains errors with a response as answers of the control plane.
    assert error.__cause__ is None


async def test_a_refused_download_names_the_store(tmp_path: Path) -> None:
    calls = calls_of(httpx.Response(404, text="gone"))
    with pytest.raises(UnexpectedAnswer, match="refused the download: 404 Not Found"):
        await download_file(calls, STORE_URL, tmp_path / "photo.png")


async def test_a_control_plane_that_stores_files_itself_explains_its_own_refusal() -> None:
    error = await uploaded(httpx.Response(403, json=API_ERROR))
    assert isinstance(error, AccessDenied)
    assert error.message == "the URL has expired"
