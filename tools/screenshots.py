"""Takes screenshots of every page with the demo's data, for the README and docs.

`make screenshots` updates all of them.

    python tools/screenshots.py [--only WORD] [--folder DIR] [--quick] [--quiet]

The list of pages is read from web/src/app/routes.tsx. Unfinished pages are reported and skipped.
"""

import argparse
import asyncio
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.content import Content, Demo
from demo.processes import Processes, control_plane
from PIL import Image
from playwright.async_api import Browser, BrowserContext, Page, async_playwright
from playwright.async_api import Error as BrowserError

ROOT = Path(__file__).parents[1]
WEB = ROOT / "web" / "src"
IMAGES = ROOT / "docs" / "images"
ALL_BYTES_MAX = 3_800_000
ONE_BYTES_MAX = 900_000
QUALITIES = (82, 74, 66, 58, 50, 40, 30)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
SIZES: Mapping[str, Any] = {"1440": {"width": 1440, "height": 900}, "390": {"width": 390, "height": 844}}  # fmt: skip
LOOKS = tuple((size, theme) for size in SIZES for theme in ("dark", "light"))
READY_MS_MAX = 20_000
CALM_MS = 350
CONCURRENT_LOOKS = 2
ROUTE = re.compile(r'page\("(?P<path>[^"]+)", "(?P<shell>\w+)", "(?P<needs>\w+)", \(\) => import\("@/pages/(?P<page>[\w-]+)"\)')  # fmt: skip
NOT_BUILT = re.compile(r"app/Soon\"")
IS_READY = """() => document.querySelector('main')
  && !document.querySelector('main [aria-busy=true]:not(button)')
  && document.fonts.status === 'loaded'
  && [...document.images].every(image => {
    const { top, bottom } = image.getBoundingClientRect()
    return image.complete || bottom < 0 || top > innerHeight
  })"""
# The sign-in page has the one-time secret in its URL.
SIGN_IN = """() => fetch('/api/session/local', {
  method: 'POST',
  headers: { 'Content-Type': 'application/json' },
  body: JSON.stringify({ secret: location.hash.replace('#secret=', '') }),
}).then(answer => answer.ok)"""


@dataclass(frozen=True)
class Shot:
    """A page to take a screenshot of. `name` is the name of the file."""

    name: str
    address: str
    is_signed_out: bool


def routes() -> Iterator[tuple[str, bool, str]]:
    """Yields the path of each page, whether it is for signed-out users, and its folder."""
    matches = list(ROUTE.finditer((WEB / "app" / "routes.tsx").read_text("utf-8")))
    if not matches:
        raise SystemExit("routes.tsx contains no route in the expected format; update ROUTE")
    for match in matches:
        yield match["path"], (match["shell"], match["needs"]) == ("bare", "anybody"), match["page"]


def is_built(page: str) -> bool:
    return not NOT_BUILT.search((WEB / "pages" / page / "index.tsx").read_text("utf-8"))


def addresses(content: Content) -> Mapping[str, Sequence[tuple[str, str]]]:
    """Returns the names and URLs of the screenshots of pages that have URL parameters or states."""
    pipeline = f"/pipelines/{content.pipeline_id}"
    run = f"{pipeline}/runs/{content.pipeline_run_id}"
    return {
        "shared": [("shared", f"/shared/{content.shared_url.rpartition('/')[2]}")],
        "effect": [("effect", "/effects/golden-hour"), ("effect-mask", "/effects/veil")],
        "result": [
            ("result", f"/results/{content.done_id}"),
            ("result-failed", f"/results/{content.failed_id}"),
            ("result-running", f"/results/{content.running_id}"),
        ],
        "one-media": [("one-media", f"/media/{content.media_id}")],
        "canvas": [("canvas", f"/graphs/{content.graph_id}")],
        "graph-run": [
            ("graph-run", f"/graph-runs/{content.graph_run_id}"),
            ("graph-run-asks", f"/graph-runs/{content.asking_run_id}"),
            ("graph-run-timeline", f"/graph-runs/{content.graph_run_id}?view=timeline"),
        ],
        "graph-compare": [
            (
                "graph-compare",
                f"/graph-runs/compare?a={content.graph_run_id}&b={content.asking_run_id}",
            )
        ],
        "pipeline": [("pipeline", pipeline)],
        "pipeline-run": [
            ("pipeline-run", run),
            ("pipeline-run-tree", f"{run}?view=tree"),
            ("pipeline-run-vote", f"{run}?view=vote"),
        ],
        "job": [
            ("job", f"/console/jobs/{content.done_id}"),
            ("job-failed", f"/console/jobs/{content.failed_id}"),
        ],
        "workers": [
            ("workers", "/console/workers"),
            ("workers-matrix", "/console/workers?view=matrix"),
        ],
        "worker": [("worker", "/console/workers/studio-1")],
        "workflow": [("workflow", "/console/workflows/golden-hour")],
        "one-effect": [("one-effect", "/console/effects/golden-hour")],
        "tenant": [("tenant", f"/console/tenants/{content.tenant_id}")],
    }


def shots(content: Content) -> Iterator[Shot]:
    """Yields each page once, or once for each of its states, even if it has several routes."""
    filled, seen = addresses(content), set()
    for path, is_signed_out, page in routes():
        if page in seen or (":" in path and page not in filled):
            continue
        seen.add(page)
        if not is_built(page):
            print(f"skipped: {path} is not built yet")  # noqa: T201
            continue
        for name, address in filled.get(page, [(page, path)]):
            yield Shot(name, address, is_signed_out)
    for path, _, page in routes():
        if page not in seen:
            print(f"skipped: {path} has no URL in tools/screenshots.py")  # noqa: T201


async def take(
    browser: Browser,
    server: Processes,
    content: Content,
    pages: Sequence[Shot],
    looks: Sequence[tuple[str, str]],
) -> dict[str, bytes]:
    """Returns the screenshots as PNG, by name."""
    room = asyncio.Semaphore(CONCURRENT_LOOKS)

    async def look(size: str, theme: str) -> dict[str, bytes]:
        async with room:
            return await _take_look(browser, server, content, pages, size, theme)

    results = await asyncio.gather(*(look(size, theme) for size, theme in looks))
    return {name: picture for result in results for name, picture in result.items()}


async def _take_look(
    browser: Browser,
    server: Processes,
    content: Content,
    pages: Sequence[Shot],
    size: str,
    theme: str,
) -> dict[str, bytes]:
    screenshots: dict[str, bytes] = {}
    context = await browser.new_context(
        viewport=SIZES[size],
        is_mobile=size == "390",
        has_touch=size == "390",
        color_scheme="light" if theme == "light" else "dark",
        reduced_motion="reduce",
        locale="en-US",
    )
    try:
        # Pages for signed-out users come first, because signed-in users can't open them.
        for page in sorted(pages, key=lambda page: not page.is_signed_out):
            if not page.is_signed_out:
                await _sign_in(context, server)
            screenshots[f"{page.name}-{theme}-{size}"] = await _shoot(context, content.url, page)
    finally:
        await context.close()
    print(f"{len(pages)} screenshots taken ({theme}, {size} px wide)")  # noqa: T201
    return screenshots


async def _sign_in(context: BrowserContext, server: Processes) -> None:
    if await context.cookies():
        return
    page = await context.new_page()
    await page.goto(server.sign_in_link())
    if not await page.evaluate(SIGN_IN):
        raise SystemExit("the control plane refused the sign-in link")
    await page.close()


async def _shoot(context: BrowserContext, url: str, shot: Shot) -> bytes:
    page: Page = await context.new_page()
    try:
        await page.goto(f"{url}{shot.address}", wait_until="domcontentloaded")
        with suppress(BrowserError):  # a slow page is captured in its current state
            await page.wait_for_function(IS_READY, timeout=READY_MS_MAX)
        await page.wait_for_timeout(CALM_MS)
        return await page.screenshot()
    finally:
        await page.close()


def write_images(screenshots: Mapping[str, bytes], folder: Path) -> int:
    """Writes the screenshots in the best quality that meets the size limits. Returns their size."""
    for quality in QUALITIES:
        images = {name: _webp(content, quality) for name, content in screenshots.items()}
        total = sum(map(len, images.values()))
        if total <= ALL_BYTES_MAX and max(map(len, images.values())) <= ONE_BYTES_MAX:
            break
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in images.items():
        (folder / f"{name}.webp").write_bytes(content)
    return total


def _webp(content: bytes, quality: int) -> bytes:
    target = io.BytesIO()
    with Image.open(io.BytesIO(content)) as picture:
        picture.convert("RGB").save(target, "WEBP", quality=quality, method=4)
    return target.getvalue()


async def run(options: argparse.Namespace, folder: Path) -> int:
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        print("No browser was found. Run `make browser` to install one.", file=sys.stderr)  # noqa: T201
        return 1
    with control_plane(folder) as processes:
        say = (lambda _: None) if options.quiet else print
        async with Demo(processes, say).opened() as demo, async_playwright() as playwright:
            content = await demo.make()
            busy = asyncio.create_task(demo.keep_busy())
            browser = await playwright.chromium.launch(executable_path=executable, args=[*FLAGS])
            try:
                pages = [shot for shot in shots(content) if options.only in shot.name]
                looks = LOOKS[: 1 if options.quick else None]
                screenshots = await take(browser, processes, content, pages, looks)
            finally:
                busy.cancel()
                await browser.close()
    total = write_images(screenshots, options.folder)
    print(f"{len(screenshots)} screenshots ({total:,} bytes) in {options.folder}")  # noqa: T201
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes screenshots of every page.")
    parser.add_argument("--only", default="", help="only pages with this word in their name")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    parser.add_argument("--quick", action="store_true", help="only the dark theme at desktop width")
    parser.add_argument("--quiet", action="store_true")
    with tempfile.TemporaryDirectory(prefix="comfyfleet-", ignore_cleanup_errors=True) as folder:
        return asyncio.run(run(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
