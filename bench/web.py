"""Measures the web pages in a real Chromium: bytes, requests, time until a page is usable, and
frames per second. Compares them with the limits in the design.

    make bench        or        python bench/web.py [--quick] [--jobs 10000] [--rows 100000] [--nodes 300]

A browser without a cache opens the pages of a control plane with many ended jobs, which are copies
of a real job. A page is usable when nothing in it is marked as loading. The page counts its own
frames while it is scrolled or while a graph runs. `--quick` uses less data, and only checks the
limits of bytes, requests and rows, because times depend on the machine.
"""

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from rich.console import Console
from rich.table import Table

from comfyfleet.clock import utc_now
from comfyfleet.server.app import open_control_plane
from comfyfleet.server.sign_in_links import SignInLinks
from comfyfleet.settings import Settings
from service_load.server import UNLIMITED, running
from support import ADMIN_KEY, COMFYFLEET, ROOT, bearer, exit_on_sigterm, exit_status, wait_for

sys.path.append(str(ROOT))
from tests.support.databases.copies import copy_job

# The limits in the design.
USABLE_MS_MAX = 1_000
SCRIPT_KB_MAX = 100
FRAMES_MIN = 50
REQUESTS_MAX = 60
ROWS_DRAWN_MAX = 100
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
WAIT_MS_MAX = 120_000
SCROLL_TURNS, SCROLL_PIXELS, TURN_MS = 60, 900, 30
COUNTED_MS = 5_000
NODE = ".react-flow__node"
ROW_NODES = 3  # a row of the graph is a chain of this many workflows
KB = 1024
PAGES = {
    "catalogue": "/",
    "effect": "/effects/draw",
    "my media": "/media",
    "results": "/results",
    "wallet": "/wallet",
    "graphs": "/graphs",
    "overview": "/console",
    "jobs": "/console/jobs",
    "queue": "/console/queue",
    "workers": "/console/workers",
}
USABLE = """part => document.querySelector(part) && !document.querySelector('main [aria-busy=true]:not(button)')
  ? performance.now() : false"""
SIGN_IN = """() => fetch('/api/session/local', {
  method: 'POST',
  headers: { 'Content-Type': 'application/json' },
  body: JSON.stringify({ secret: location.hash.replace('#secret=', '') }),
}).then(answer => answer.ok)"""
# Counts frames until `stop` is set. A late frame is a hitch.
COUNT_FRAMES = """() => {
  const seen = window.seenFrames = { times: [], stop: false }
  const note = time => { seen.times.push(time); if (!seen.stop) requestAnimationFrame(note) }
  requestAnimationFrame(note)
}"""
TELL_FRAMES = """() => {
  const { times } = window.seenFrames
  window.seenFrames.stop = true
  const gaps = times.slice(1).map((time, place) => time - times[place]).sort((a, b) => a - b)
  const seconds = (times.at(-1) - times[0]) / 1000
  return { frames: gaps.length / seconds, late: gaps[Math.floor(gaps.length * 0.99)], worst: gaps.at(-1) }
}"""
STEPS_MAX = 10_000
DRAW = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 255}},
    "2": {"class_type": "ComfyfleetSteps", "inputs": {"steps": 1, "step_ms": 20, "previews": False, "image": ["1", 0]}},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "drawn"}},
}  # fmt: skip
TURN = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "turned"}},
}  # fmt: skip
STEPS = {"name": "steps", "type": "integer", "binding": "2.steps", "default": 1}
INPUT = {"name": "input", "type": "image", "binding": "1.image"}
console = Console(width=120)


@dataclass(frozen=True)
class Load:
    """The medians of several loads of the same page."""

    usable_ms: float
    requests: int
    bytes: int
    script_bytes: int


@dataclass(frozen=True)
class Verdict:
    what: str
    measured: float
    limit: float
    is_at_least: bool = False
    is_time: bool = False

    @property
    def ratio(self) -> float:
        return self.measured / self.limit

    @property
    def is_kept(self) -> bool:
        return self.ratio >= 1 if self.is_at_least else self.ratio <= 1


def main() -> int:
    exit_on_sigterm()
    options = _options()
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        console.print("there is no browser; install one with `make browser`")
        return 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as pw:
        browser = pw.chromium.launch(executable_path=executable, args=[*FLAGS])
        try:
            verdicts = [*measure(browser, Path(folder), options)]
        finally:
            browser.close()
    status = judge(verdicts, times_count=not options.quick)
    return status if options.quick else exit_status(is_met=status == 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the pages against the design's limits.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if a limit is missed")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    usual = (200, 1_000, 30, 1) if options.quick else (10_000, 100_000, 300, 5)
    for name, value in zip(("jobs", "rows", "nodes", "rounds"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def measure(browser: Browser, folder: Path, options: argparse.Namespace) -> Iterator[Verdict]:
    data = folder / "data"
    with control_plane(data) as server:
        job_id = server.first_job()
        graph = server.running_graph(options.nodes)
        yield from canvas(browser, server, graph, options.nodes)
        server.call("POST", f"/api/graph-runs/{graph}/cancel")
    # The copies can only be created once in each database.
    shutil.copytree(data, folder / "many")
    fill(data, job_id, options.jobs)
    with control_plane(data) as server:
        yield from pages(browser, server, options)
    fill(folder / "many", job_id, options.rows)
    with control_plane(folder / "many") as server:
        yield from jobs_table(browser, server, options.rows)


@dataclass(frozen=True)
class Server:
    """`comfyfleet up` and its local user."""

    url: str
    key: str
    data: Path

    def call(self, method: str, path: str, **body: Any) -> Any:
        """Sends a request, as an operator under /api/admin and as a customer elsewhere."""
        headers = bearer(ADMIN_KEY if path.startswith("/api/admin") else self.key)
        answer = httpx.request(
            method, f"{self.url}{path}", json=body or None, headers=headers, timeout=60
        )
        assert answer.is_success, f"{path}: {answer.text}"
        return answer.json() if answer.content else None

    def first_job(self) -> str:
        """Runs a real job, and returns its id. The other jobs are its copies."""
        for slug, document, job_property in (("draw", DRAW, STEPS), ("turn", TURN, INPUT)):
            self.call("POST", "/api/admin/workflows", slug=slug, document=document, properties=[job_property], price_tokens=0)  # fmt: skip
        created = self.call("POST", "/api/admin/effects", slug="draw", workflow_slug="draw", title="Draw", price_tokens=0, overrides={}, published=True)  # fmt: skip
        assert created["slug"] == "draw"
        (effect,) = self.call("GET", "/api/effects")["effects"]
        job = self.call("POST", "/api/ai-jobs?wait=60", effect_id=effect["id"])
        assert job["status"] == "completed", job
        return str(job["id"])

    def running_graph(self, nodes: int) -> str:
        """Starts a graph with rows of workflows between an input and a merge. The first workflow of
        each row takes long."""
        rows = max(1, (nodes - 2) // ROW_NODES)
        run = self.call("POST", "/api/graph-runs", document=graph_of(rows))
        path = f"/api/graph-runs/{run['id']}"
        wait_for(lambda: self.call("GET", path)["status"] == "running")
        return str(run["id"])


def graph_of(rows: int) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    links: list[dict[str, str]] = []
    for row in range(rows):
        names = [f"step_{row}_{place}" for place in range(ROW_NODES)]
        first, *others = names
        nodes.append({"id": first, "type": "workflow", "workflow": "draw", "properties": {"steps": STEPS_MAX}})  # fmt: skip
        nodes += [{"id": name, "type": "workflow", "workflow": "turn"} for name in others]
        pairs = zip(names, others, strict=False)
        links += [{"from": f"{one}.output", "to": f"{other}.input"} for one, other in pairs]
        links.append({"from": f"{names[-1]}.output", "to": f"all.input_{row}"})
    ends = [{"id": "all", "type": "merge", "mode": "collect"}, {"id": "result", "type": "output"}]
    return {
        "name": f"{rows} rows",
        "nodes": [*nodes, *ends],
        "connections": [*links, {"from": "all.output", "to": "result.value"}],
    }


@contextmanager
def control_plane(data: Path) -> Iterator[Server]:
    command: list[str | Path] = [COMFYFLEET, "up", "--port", "0", "--data", data, "--no-open"]
    environ = {**UNLIMITED, "COMFYFLEET_ADMIN_KEY": ADMIN_KEY}
    with running(command, environ) as process:
        wait_for(lambda: _answers(process.url))
        yield Server(process.url, (data / "local.key").read_text().strip(), data)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def fill(data: Path, job_id: str, count: int) -> None:
    async def copied() -> None:
        async with open_control_plane(Settings(admin_key=ADMIN_KEY), data, utc_now) as plane:
            await copy_job(plane, UUID(job_id), count)

    # The browser's driver has its own event loop in this thread.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, copied()).result()


@contextmanager
def signed_in(browser: Browser, server: Server) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS_MAX)
    try:
        page = context.new_page()
        page.goto(SignInLinks(server.data).new_link(server.url))
        assert page.evaluate(SIGN_IN), "the address that signs in once is refused"
        page.close()
        yield context
    finally:
        context.close()


def usable(page: Page, part: str = "main") -> float:
    """Returns the milliseconds from the navigation until the element exists and nothing is
    loading."""
    milliseconds = page.wait_for_function(USABLE, arg=part, polling="raf").json_value()
    return float(milliseconds)


def load(context: BrowserContext, address: str) -> Load:
    """Opens a page without a cache."""
    page = context.new_page()
    cdp = context.new_cdp_session(page)
    sizes: dict[str, int] = {}
    kinds: dict[str, str] = {}
    cdp.on(
        "Network.responseReceived", lambda event: kinds.update({event["requestId"]: event["type"]})
    )
    cdp.on("Network.loadingFinished", lambda event: sizes.update({event["requestId"]: int(event["encodedDataLength"])}))  # fmt: skip
    cdp.send("Network.enable")
    cdp.send("Network.setCacheDisabled", {"cacheDisabled": True})
    try:
        page.goto(address, wait_until="commit")
        milliseconds = usable(page)
        script = sum(
            size for request_id, size in sizes.items() if kinds.get(request_id) == "Script"
        )
        return Load(milliseconds, len(kinds), sum(sizes.values()), script)
    finally:
        page.close()


def pages(browser: Browser, server: Server, options: argparse.Namespace) -> Iterator[Verdict]:
    table = Table("page", "usable", "requests", "KB", "script KB", title=f"{options.jobs:,} jobs")
    with signed_in(browser, server) as context:
        load(context, server.url)  # the control plane's first responses are slower
        for name, path in PAGES.items():
            loads = [load(context, f"{server.url}{path}") for _ in range(options.rounds)]
            median = _median(loads)
            table.add_row(
                name,
                f"{median.usable_ms:.0f} ms",
                str(median.requests),
                f"{median.bytes / KB:.0f}",
                f"{median.script_bytes / KB:.0f}",
            )
            yield Verdict(f"{name}: usable, ms", median.usable_ms, USABLE_MS_MAX, is_time=True)
            yield Verdict(f"{name}: requests", median.requests, REQUESTS_MAX)
            if path == "/":
                yield Verdict(f"{name}: script, KB", median.script_bytes / KB, SCRIPT_KB_MAX)
    console.print(table)


def _median(loads: Sequence[Load]) -> Load:
    return Load(
        statistics.median(item.usable_ms for item in loads),
        round(statistics.median(item.requests for item in loads)),
        round(statistics.median(item.bytes for item in loads)),
        round(statistics.median(item.script_bytes for item in loads)),
    )


def jobs_table(browser: Browser, server: Server, rows: int) -> Iterator[Verdict]:
    """Scrolls the table as fast as a user. The number of rendered rows must remain small."""
    with signed_in(browser, server) as context:
        page = context.new_page()
        page.goto(f"{server.url}/console/jobs", wait_until="commit")
        yield Verdict(f"jobs table, {rows:,} rows: usable, ms", usable(page), USABLE_MS_MAX, is_time=True)  # fmt: skip
        page.locator("main [role=grid]").hover()
        page.evaluate(COUNT_FRAMES)
        for _ in range(SCROLL_TURNS):
            page.mouse.wheel(0, SCROLL_PIXELS)
            page.wait_for_timeout(TURN_MS)
        frames = page.evaluate(TELL_FRAMES)
        drawn = page.locator("main [role=grid] [role=row]").count()
    yield from _frames(f"jobs table, {rows:,} rows, scrolled", frames)
    yield Verdict("jobs table: rows drawn", drawn, ROWS_DRAWN_MAX)


def canvas(browser: Browser, server: Server, run_id: str, nodes: int) -> Iterator[Verdict]:
    """Measures the canvas while the run sends progress, first without input and then while it is
    dragged."""
    with signed_in(browser, server) as context:
        load(context, server.url)  # as with pages
        page = context.new_page()
        page.goto(f"{server.url}/graph-runs/{run_id}", wait_until="commit")
        yield Verdict(f"canvas, {nodes} nodes: usable, ms", usable(page, NODE), USABLE_MS_MAX, is_time=True)  # fmt: skip
        page.evaluate(COUNT_FRAMES)
        page.wait_for_timeout(COUNTED_MS)
        yield from _frames(f"canvas, {nodes} nodes, running", page.evaluate(TELL_FRAMES))
        page.evaluate(COUNT_FRAMES)
        _move(page)
        yield from _frames(f"canvas, {nodes} nodes, running and moved", page.evaluate(TELL_FRAMES))


def _move(page: Page) -> None:
    """Drags the canvas back and forth by its background."""
    box = page.locator(".react-flow__pane").bounding_box()
    assert box
    x, y = box["x"] + 20, box["y"] + box["height"] - 20
    page.mouse.move(x, y)
    page.mouse.down()
    for turn in range(SCROLL_TURNS):
        page.mouse.move(x + 5 * (turn % 20), y - 3 * (turn % 20))
        page.wait_for_timeout(TURN_MS)
    page.mouse.up()


def _frames(what: str, frames: Mapping[str, float]) -> Iterator[Verdict]:
    console.print(f"{what}: {frames['frames']:.0f} frames a second, 99 % within {frames['late']:.0f} ms, the worst {frames['worst']:.0f} ms")  # fmt: skip
    yield Verdict(f"{what}: frames a second", frames["frames"], FRAMES_MIN, True, True)


def judge(verdicts: Sequence[Verdict], *, times_count: bool) -> int:
    table = Table("", "measured", "limit", "ratio", "", title="Compared with the design's limits")
    for verdict in verdicts:
        limit = f"{'≥' if verdict.is_at_least else '≤'} {verdict.limit:,.0f}"
        result = "kept" if verdict.is_kept else "[red]missed[/]"
        table.add_row(
            verdict.what, f"{verdict.measured:,.0f}", limit, f"{verdict.ratio:.2f}", result
        )
    console.print(table)
    missed = [
        verdict
        for verdict in verdicts
        if not verdict.is_kept and (times_count or not verdict.is_time)
    ]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
