"""The web pages in a real Chromium, on a control plane with sample data.

A test fails if its page logs an error on the console, throws an exception, or sends a request to
another host.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, expect
from tests.support.server.commands import EXAMPLES
from tests.support.server.gateway import (
    GatewayProcess,
    GatewayUser,
    serving_engines,
    up_with_engines,
)

ROOT = Path(__file__).parents[3]
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
WAIT_MS_MAX = 30_000
# The usual 5 s are too short on a busy machine.
expect.set_options(timeout=WAIT_MS_MAX)
TOKENS = 240
SIZE = {"type": "integer", "minimum": 16, "maximum": 1024}
# Slug, title, price, properties.
EFFECTS: tuple[tuple[str, str, int, tuple[Mapping[str, Any], ...]], ...] = (
    (
        "negative",
        "Picture out of nothing",
        2,
        ({"name": "width", "binding": "2.width", **SIZE}, {"name": "height", "binding": "2.height", **SIZE}),
    ),
    (
        "soften",
        "Softened photo",
        3,
        (
            {"name": "input", "type": "image", "binding": "1.image"},
            {"name": "size", "type": "integer", "binding": "6.resize_type.longer_size", "default": 256},
        ),
    ),
    ("video", "Inverted clip", 10, ({"name": "input", "type": "video", "binding": "1.file"},)),
)  # fmt: skip
# Pages are usable once nothing in them is marked as on its way.
ON_ITS_WAY = "main [aria-busy=true]:not(button)"
AXE_RUN = """async () => {
  const found = await axe.run(document, { resultTypes: ['violations'] })
  return found.violations
    .filter(each => ['serious', 'critical'].includes(each.impact))
    .map(each => `${each.id}: ${each.nodes.slice(0, 3).map(node => node.html).join(' | ')}`)
}"""


@cache
def build_pages() -> None:
    """Once in each process; takes no time where they are up to date. Checks need axe-core, too."""
    tool = [sys.executable, str(ROOT / "tools" / "web_build.py")]
    for arguments in ([], ["install"]):
        ran = subprocess.run([*tool, *arguments], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


@dataclass(frozen=True)
class WebServer:
    """`comfyfleet up` with one engine, effects and a customer with tokens."""

    server: GatewayProcess
    customer: GatewayUser

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def operator_key(self) -> str:
        return self.server.admin_key

    def admin(self, path: str, **body: Any) -> dict[str, Any]:
        return self.server.admin(path, **body)


@contextlib.contextmanager
def serving_pages(folder: Path, **environ: str) -> Iterator[WebServer]:
    build_pages()
    with (
        serving_engines(1, folder) as engines,
        up_with_engines(folder, engines, port=0, **environ) as server,
    ):
        publish_effects(server)
        yield WebServer(server, server.user(tokens=TOKENS))


def publish_effects(server: GatewayProcess) -> None:
    for slug, title, price, properties in EFFECTS:
        document = json.loads((EXAMPLES / "workflows" / f"{slug}.json").read_text())
        server.admin("/workflows", slug=slug, document=document, properties=properties)
        server.admin(
            "/effects",
            slug=slug,
            workflow_slug=slug,
            title=title,
            price_tokens=price,
            overrides={},
            published=True,
        )


@dataclass
class WebPage:
    """A browser tab, and the errors that occurred in it."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)
    expected: list[re.Pattern[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(WAIT_MS_MAX)
        self.page.on("console", self._note_message)
        self.page.on("pageerror", lambda error: self._note(f"uncaught: {error}"))
        self.page.on("request", lambda request: self._note_address(request.url))

    def expect_problem(self, pattern: str) -> None:
        """For tests of failures: browsers tell refused calls on the console."""
        self.expected.append(re.compile(pattern))

    def _note(self, problem: str) -> None:
        if not any(each.search(problem) for each in self.expected):
            self.problems.append(problem)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._note(f"{message.text} ({message.location.get('url')})")

    def _note_address(self, address: str) -> None:
        if not address.startswith((self.url, "data:", "blob:")):
            self._note(f"a request to {address}")

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}{path}")
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        self.page.locator("main").wait_for()
        expect(self.page.locator(ON_ITS_WAY)).to_have_count(0, timeout=WAIT_MS_MAX)

    def sign_in(self, key: str, path: str = "/") -> None:
        self.page.goto(f"{self.url}/sign-in?next={path}")
        self.page.get_by_label("Key", exact=True).fill(key)
        self.page.get_by_role("button", name="Sign in", exact=True).click()
        self.page.wait_for_url(lambda address: "/sign-in" not in address)
        self.wait_until_ready()

    def serious_findings(self) -> list[str]:
        """Of axe-core. Given to the debugger: no policy of the page keeps it out, and none has to allow it."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found: list[str] = self.page.evaluate(AXE_RUN)
        return found

    def screenshot(self, name: str) -> None:
        """For people who look at what tests see: COMFYFLEET_TEST_SCREENSHOTS names a folder."""
        if folder := os.environ.get("COMFYFLEET_TEST_SCREENSHOTS"):
            self.page.screenshot(path=Path(folder) / f"{name}.png")

    def pixels_too_wide(self) -> int:
        """By how much one would have to scroll sideways."""
        found: int = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        return found


@contextlib.contextmanager
def open_page(
    browser: Browser, url: str, *, phone: bool = False, theme: str = "dark"
) -> Iterator[WebPage]:
    """In a context of its own. Fails at its end where something went wrong in it."""
    context = browser.new_context(
        viewport=PHONE if phone else DESKTOP,
        has_touch=phone,
        is_mobile=phone,
        color_scheme="light" if theme == "light" else "dark",
        reduced_motion="reduce",
        locale="en-US",
        permissions=["clipboard-read", "clipboard-write"],
    )
    try:
        opened = WebPage(context.new_page(), url)
        yield opened
        assert not opened.problems
    finally:
        context.close()
