"""What an S3 server answers when it is full, by its codes: the same as a full disk."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from comfyfleet.clock import utc_now
from comfyfleet.errors import StoreFull, Unavailable
from comfyfleet.server.http.errors import response_to_error
from comfyfleet.server.storage import open_store

XML = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"


@contextmanager
def answering(status: int, code: str) -> Iterator[str]:
    """Serves S3 that answers everything with an error; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            body = XML.format(code=code).encode()
            self.send_response(status)
            self.send_header("content-type", "application/xml")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")


async def error_of_upload(status: int, code: str) -> Unavailable:
    with answering(status, code) as url:
        store = open_store(f"s3://bucket?endpoint={url}", public_url="", secret=b"", clock=utc_now)
        try:
            with pytest.raises(Unavailable) as caught:
                await store.put("a/b", b"data", "text/plain")
        finally:
            await store.aclose()
    return caught.value


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "QuotaExceeded"),
        (409, "XMinioAdminBucketQuotaExceeded"),
        (507, "XMinioStorageFull"),
        (507, "InsufficientStorage"),
        (507, "SomethingElse"),
        (500, "StorageFull"),
    ],
)
async def test_a_full_s3_server_is_answered_like_a_full_disk(status: int, code: str) -> None:
    error = await error_of_upload(status, code)
    assert isinstance(error, StoreFull), error
    answer = response_to_error(error, "/api/objects")
    assert (answer.status_code, answer.headers["retry-after"] != "") == (507, True)


async def test_a_busy_s3_server_is_not_full() -> None:
    error = await error_of_upload(503, "SlowDown")
    assert not isinstance(error, StoreFull)
    assert response_to_error(error, "/api/objects").status_code == 503
