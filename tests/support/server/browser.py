"""ComfyUI's editor in a real Chromium.

Without a browser, its tests are skipped. In CI, they fail.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_SECONDS_MAX = 30.0
LOOK_MS = 50
VIEWPORT = {"width": 1280, "height": 800}
IS_READY = (
    "!!window.app?.graph && !!app.extensionManager && !document.querySelector('#splash-loader')"
)
UPLOAD_BUTTON = """type => {
  const node = app.graph.nodes.find(node => node.type === type)
  const button = node.widgets.find(widget => widget.name === 'upload')
  const place = [node.pos[0] + node.size[0] / 2, node.pos[1] + button.last_y + 10]
  const [x, y] = app.canvas.ds.convertOffsetToCanvas(place)
  const canvas = app.canvasEl.getBoundingClientRect()
  return [canvas.x + x, canvas.y + y]
}"""
T = TypeVar("T")


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_executable(), args=[*FLAGS])
        try:
            yield browser
        finally:
            browser.close()


def _executable() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        reason = (
            f"no browser: none of {', '.join(NAMES)} is on the PATH (make browser installs one)"
        )
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@dataclass
class EditorPage:
    """The editor's page, and the errors that occurred in it."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        self.page.on("request", lambda request: self._note_address(request.url))
        self.page.on("websocket", lambda socket: self._note_address(socket.url))

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.problems.append(f"{message.text} ({message.location.get('url')})")

    def _note_address(self, address: str) -> None:
        own = (self.url, self.url.replace("http", "ws", 1), "data:", "blob:")
        if not address.startswith(own):
            self.problems.append(f"a request to {address}")

    def open(self) -> None:
        self.page.goto(f"{self.url}/editor/")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self.page.wait_for_url(re.compile(r"/editor/(#.*)?$"))
        self.wait_for(lambda: self.js(IS_READY), "the editor")

    def js(self, expression: str, argument: Any = None) -> Any:
        """By the debugger, which no policy of the page keeps out."""
        return self.page.evaluate(expression, argument)

    def wait_for(self, look: Callable[[], T], what: str) -> T:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (found := look()):
            assert time.monotonic() < deadline, f"{what} did not come; {self.problems}"
            self.page.wait_for_timeout(LOOK_MS)
        return found

    def close_first_dialog(self) -> None:
        """Templates are shown to those who come for the first time."""
        self.page.get_by_role("button", name="All Templates", exact=True).wait_for()
        self.page.keyboard.press("Escape")
        self.page.get_by_test_id("dialog-overlay").wait_for(state="hidden")

    def load(self, workflow: Path) -> None:
        """As by the menu: a file of the user's own machine."""
        self.page.set_input_files("#comfy-file-input", workflow)

    def upload(self, node_type: str, file: Path) -> None:
        """By the button on the node, which is drawn on the canvas."""
        with self.page.expect_file_chooser() as chooser:
            x, y = self.js(UPLOAD_BUTTON, node_type)
            self.page.mouse.click(x, y)
        chooser.value.set_files(file)
        self.wait_for(lambda: self.picture_sizes(node_type), "the upload")

    def run(self) -> None:
        self.page.get_by_test_id("queue-button").click()

    def save_as(self, name: str) -> None:
        self.page.keyboard.press("Control+s")
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill(name)
        self.page.keyboard.press("Enter")
        dialog.wait_for(state="hidden")

    def open_saved(self, name: str) -> None:
        self.page.get_by_test_id("workflows-tab-button").click()
        self.page.get_by_role("treeitem", name=name).first.click()

    def log_in(self, key: str) -> None:
        self.page.goto(f"{self.url}/editor/login")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()

    def node_types(self) -> list[str]:
        found: list[str] = self.js("app.graph.nodes.map(n => n.type)")
        return found

    def progress_of(self, node_type: str) -> float:
        """Of 1, as the node shows it."""
        found = self.js(
            "type => app.graph.nodes.find(n => n.type === type)?.progress ?? 0", node_type
        )
        return float(found)

    def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.js(
            "async () => (await (await app.api.fetchApi('/jobs')).json()).jobs"
        )
        return found

    def saved_names(self) -> list[str]:
        found: list[str] = self.js(
            "async () => (await (await app.api.fetchApi('/userdata?dir=workflows')).json())"
        )
        return found

    def forget_drafts(self) -> None:
        """What the browser keeps of work that nobody has saved."""
        self.page.goto(f"{self.url}/editor/login")
        self.js("localStorage.clear(); sessionStorage.clear()")

    def kept_keys(self) -> list[str]:
        """Names of what the browser keeps for this site."""
        found: list[str] = self.js("[...Object.keys(localStorage), ...Object.keys(sessionStorage)]")
        return found

    def picture_sizes(self, node_type: str) -> list[int]:
        """Widths of the pictures that are shown on the first node of this type."""
        found: list[int] = self.js(
            "type => (app.graph.nodes.find(n => n.type === type)?.imgs ?? []).map(i => i.naturalWidth)",
            node_type,
        )
        return found

    def screenshot(self, name: str) -> None:
        """For people who look at what tests see: COMFYFLEET_TEST_SCREENSHOTS names a folder."""
        if folder := os.environ.get("COMFYFLEET_TEST_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png")


def new_editor_page(browser: Browser, url: str) -> EditorPage:
    """In a context of its own: nothing is kept of other pages."""
    context: BrowserContext = browser.new_context(viewport=VIEWPORT, locale="en-US")
    return EditorPage(context.new_page(), url)
