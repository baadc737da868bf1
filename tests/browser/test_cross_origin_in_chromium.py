"""A front end on another origin: it uploads, submits, follows and shows a result with a bearer key only."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from tests.support.server.customers import png
from tests.support.server.web import WebServer, serving_pages

# Written from the description of the life of a job: upload by XHR with its progress, then the video, then
# the job, then polls by setTimeout until the video has ended.
FRONT_END = """
async function call(base, key, method, path, body) {
  const headers = { Authorization: `Bearer ${key}` };
  if (body) headers["Content-Type"] = "application/json";
  const answer = await fetch(base + path, { method, headers, body: body && JSON.stringify(body) });
  const said = await answer.json();
  if (!answer.ok) throw new Error(`${answer.status} ${said.error.code} ${answer.headers.get("x-request-id")}`);
  return said;
}
function send(slot, data, progress) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open(slot.method || "PUT", slot.url);
    for (const [name, value] of Object.entries(slot.headers)) request.setRequestHeader(name, value);
    request.upload.onprogress = event => progress.push(event.loaded / event.total);
    request.onload = () => (request.status < 300 ? resolve() : reject(new Error(`PUT ${request.status}`)));
    request.onerror = () => reject(new Error("PUT failed"));
    request.send(data);
  });
}
async function apply(base, key, slug, bytes) {
  const progress = [], statuses = [];
  const effect = await call(base, key, "GET", `/api/effects/${slug}`);
  const data = new Uint8Array(bytes);
  const announced = await call(base, key, "POST", "/api/videos/uploads",
    { filename: "photo.png", content_type: "image/png", size: data.length });
  await send(announced.upload, data, progress);
  const video = await call(base, key, "POST", "/api/videos", { original_file_id: announced.file_id });
  const job = await call(base, key, "POST", "/api/ai-jobs",
    { effect_id: effect.id, video_id: video.id, idempotency_key: crypto.randomUUID() });
  const ended = await new Promise((resolve, reject) => {
    const look = () => call(base, key, "GET", `/api/videos/${video.id}`).then(seen => {
      statuses.push(seen.status);
      if (["completed", "failed", "expired"].includes(seen.status)) resolve(seen);
      else setTimeout(look, 200);
    }, reject);
    look();
  });
  const result = await fetch(ended.processed_file_url);
  return { progress, statuses, job: job.id, size: (await result.blob()).size, ended };
}
async function follow(base, key, job) {
  const answer = await fetch(`${base}/api/ai-jobs/${job}/events`, { headers: { Authorization: `Bearer ${key}` } });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return text;
    text += value;
  }
}
async function attempt(base, key, method, path, credentials) {
  try {
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const answer = await fetch(base + path, { method, headers, credentials });
    return answer.status;
  } catch (error) {
    return "blocked";
  }
}
"""


class FrontEnd(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_script = self.path == "/front-end.js"
        page = "<!doctype html><title>Shop</title><script src='/front-end.js'></script>"
        body = (FRONT_END if is_script else page).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/javascript" if is_script else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    """The address of a front end of somebody else."""
    with ServingFrontEnd() as url:
        yield url


class ServingFrontEnd:
    def __enter__(self) -> str:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), FrontEnd)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def web(shop: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    folder = tmp_path_factory.mktemp("web")
    with serving_pages(folder, COMFYFLEET_CORS_ORIGINS=shop) as server:
        yield server


@pytest.fixture
def page(browser: Browser, shop: str) -> Iterator[Page]:
    context = browser.new_context()
    page = context.new_page()
    page.goto(shop)
    yield page
    context.close()


def test_a_front_end_elsewhere_takes_a_job_from_its_upload_to_its_result(
    page: Page, web: WebServer
) -> None:
    given = [web.url, web.customer.key, "soften", list(png(64, 90, height=48))]
    found = page.evaluate("given => apply(...given)", given)
    assert found["statuses"][-1] == "completed", found
    assert found["progress"][-1] == 1
    assert found["size"] > 0
    events = page.evaluate("given => follow(...given)", [web.url, web.customer.key, found["job"]])
    assert '"completed"' in events


def attempt(page: Page, web: WebServer, key: str | None, *given: str) -> Any:
    return page.evaluate("given => attempt(...given)", [web.url, key, *given])


def test_errors_are_readable_and_credentials_are_not_sent(page: Page, web: WebServer) -> None:
    assert attempt(page, web, "cf_wrong", "GET", "/api/effects", "omit") == 401
    key = web.customer.key
    assert attempt(page, web, key, "GET", "/api/ai-jobs/none", "omit") in (404, 422)
    assert attempt(page, web, key, "GET", "/api/effects", "include") == "blocked"


@pytest.mark.parametrize(
    "path", ["/api/admin/workflows", "/api/worker/poll", "/api/session", "/prompt"]
)
def test_other_routes_are_blocked_by_the_browser(page: Page, web: WebServer, path: str) -> None:
    assert attempt(page, web, web.operator_key, "GET", path, "omit") == "blocked"
    assert attempt(page, web, None, "GET", path, "omit") == "blocked"


def test_a_front_end_that_is_not_listed_is_blocked(browser: Browser, web: WebServer) -> None:
    with ServingFrontEnd() as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        assert attempt(page, web, web.customer.key, "GET", "/api/effects", "omit") == "blocked"
        context.close()
