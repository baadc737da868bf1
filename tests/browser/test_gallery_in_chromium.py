"""Pipelines and their galleries: made and started, judged by keys, followed back, retried, paused and exported."""

import json
import re
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.web import WebPage, WebServer, open_page

SECONDS_MAX = 30.0
LOOK_SECONDS = 0.05
SAVE = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "made"}}
PAINT = {
    "1": {
        "class_type": "EmptyImage",
        "inputs": {"width": 64, "height": 80, "batch_size": 1, "color": 0},
    },
    "2": SAVE,
}
LIGHT = {
    "3": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "1": {"class_type": "ImageInvert", "inputs": {"image": ["3", 0]}},
    "2": SAVE,
}
FRAIL = {
    **PAINT,
    "4": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": False, "message": "two lamps are broken", "after_ms": 0},
    },
}
PROMPT = {"name": "prompt", "type": "text", "binding": "2.filename_prefix", "default": "made"}
COLOUR = {"name": "colour", "type": "seed", "binding": "1.color", "minimum": 0, "maximum": 16777215}
EFFECTS: tuple[tuple[str, dict[str, Any], list[dict[str, Any]]], ...] = (
    ("paint", PAINT, [PROMPT, COLOUR]),
    ("light", LIGHT, [{"name": "input", "type": "image", "binding": "3.image"}, PROMPT]),
    ("frail", FRAIL, [COLOUR, {"name": "breaks", "type": "boolean", "binding": "4.fail"}]),
)
DRAWN = {"prompt": "{{ variables.prompt }}", "colour": "{{ seed }}"}
POSTER: dict[str, Any] = {
    "name": "Poster for the north",
    "steps": [
        {"name": "Composition", "effect": "paint", "properties": DRAWN},
        {
            "name": "Light",
            "effect": "light",
            "properties": {"input": "{{ parent.file }}", "prompt": "low sun"},
        },
    ],
}
JUDGED = {
    "name": "Judged",
    "steps": [{**POSTER["steps"][0], "name": "Base", "needs_approval": True}, POSTER["steps"][1]],
}
EXPOSED = {
    "name": "Exposed",
    "steps": [
        {
            "name": "Base",
            "effect": "paint",
            "properties": {"colour": "{{ variables.colour }}"},
            "judge": {"measure": "exposure", "approve_above": 0.8, "reject_below": 0.3},
        },
        {"name": "Light", "effect": "light", "properties": {"input": "{{ parent.file }}"}},
    ],
}
MEASURE_TAKES = [
    {"name": "image", "type": "image", "binding": "1.image", "required": True},
    {"name": "measure", "type": "text", "binding": "2.measure"},
]
BROKEN = {
    "name": "Broken",
    "steps": [
        {
            "name": "Base",
            "effect": "frail",
            "properties": {"breaks": "{{ variables.breaks }}", "colour": "{{ seed }}"},
        }
    ],
}
PHOTO = Path(__file__).parents[2] / "examples" / "inputs" / "photo.png"
ENGINE = Path(__file__).parents[2] / "examples" / "engine"
VALLEY = {"prompt": "a wide valley"}
Candidates = list[dict[str, Any]]


class Gallery:
    """Runs of a customer, by the API."""

    def __init__(self, web: WebServer) -> None:
        self.web = web

    def call(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        with self.web.customer.http() as http:
            answer = http.request(method, f"/api/{path}", **given)
            assert answer.status_code < 300, answer.text
            found: dict[str, Any] = answer.json()
            return found

    def start(
        self, document: dict[str, Any], variables: dict[str, Any], base: int, **limits: Any
    ) -> str:
        made = self.call("POST", "pipelines", json={"document": document})
        body = {
            "base_candidates": base,
            "variables": variables,
            "limits": {"concurrent_jobs": 2, **limits},
        }
        run = self.call("POST", f"pipelines/{made['id']}/runs", json=body)
        return f"pipeline-runs/{run['id']}"

    def wait(self, path: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS_MAX
        while not is_so(found := self.call("GET", path)):
            assert time.monotonic() < deadline, found
            time.sleep(LOOK_SECONDS)
        return found

    def made(self, document: dict[str, Any], variables: dict[str, Any], base: int) -> str:
        """A run that has nothing more to do."""
        run = self.start(document, variables, base)
        resting = ("complete", "waiting_for_judgement", "failed")
        self.wait(run, lambda found: found["reason"] in resting)
        return run

    def candidates(self, run: str, **wanted: Any) -> Candidates:
        found: Candidates = self.call("GET", f"{run}/candidates", params=wanted)["candidates"]
        return found

    def statuses(self, run: str, step: int) -> list[str]:
        return [each["status"] for each in self.candidates(run, step=step)]

    def page_of(self, run: str, **query: str) -> str:
        asked = "&".join(f"{name}={value}" for name, value in query.items())
        pipeline = self.call("GET", run)["pipeline_id"]
        return f"/pipelines/{pipeline}/runs/{run.rpartition('/')[2]}?{asked}"


@pytest.fixture(scope="module")
def gallery(web: WebServer) -> Gallery:
    for slug, document, properties in EFFECTS:
        web.admin("/workflows", slug=slug, document=document, properties=properties)
        given = {"slug": slug, "workflow_slug": slug, "title": slug.title(), "price_tokens": 1}
        web.admin("/effects", **given, overrides={}, published=True)
    measure = json.loads((ENGINE / "measure.json").read_text("utf-8"))
    web.admin(
        "/workflows",
        slug="measure",
        document=measure,
        properties=MEASURE_TAKES,
        output_node_id="2",
        price_tokens=0,
    )
    return Gallery(web)


@pytest.fixture(scope="module")
def signed_in(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    """Once for all tests: to sign in takes longer than most of them."""
    with open_page(browser, web.url) as page:
        page.sign_in(web.customer.key)
        yield page


@pytest.fixture
def customer(signed_in: WebPage) -> Iterator[WebPage]:
    yield signed_in
    problems, signed_in.problems[:] = [*signed_in.problems], []
    signed_in.expected.clear()
    assert problems == []


@pytest.fixture(scope="module")
def poster(gallery: Gallery) -> str:
    """Four compositions, and a child of each."""
    return gallery.made(POSTER, VALLEY, 4)


def print_of(page: Page, label: str) -> Locator:
    return page.get_by_role("button", name=re.compile(f"^{label},"))


def pair_of(page: Page) -> list[str]:
    """The labels of the two that are shown."""
    found = page.get_by_role("region", name="The pair").get_by_role("button")
    expect(found).to_have_count(2)
    names = [found.nth(at).get_attribute("aria-label") or "" for at in (0, 1)]
    return [re.findall(r"\d·\d\d", name)[0] for name in names]


@contextmanager
def next_pair(page: Page) -> Iterator[None]:
    """Until another pair has come."""
    before = pair_of(page)
    yield
    first = page.get_by_role("region", name="The pair").get_by_role("button")
    names = [re.compile(f"Choose {label}") for label in before]
    deadline = time.monotonic() + SECONDS_MAX
    while pair_of(page) == before:
        assert time.monotonic() < deadline, names
        page.wait_for_timeout(20)
    expect(first).to_have_count(2)


def test_two_are_compared_by_keys_alone(customer: WebPage, gallery: Gallery) -> None:
    run = gallery.made(POSTER, VALLEY, 4)
    page = customer.page
    customer.open(gallery.page_of(run, view="vote"))
    expect(page.get_by_text("0 of 6")).to_be_visible()
    expect(page.get_by_text("“low sun”")).to_be_visible()
    customer.screenshot("vote")
    assert customer.serious_findings() == []
    first = pair_of(page)
    with next_pair(page):
        page.keyboard.press("ArrowRight")
    expect(page.get_by_text("1 of 6")).to_be_visible()
    expect(page.get_by_text(f"{first[1]} over {first[0]}")).to_be_visible()
    second = pair_of(page)
    with next_pair(page):
        page.keyboard.press("=")
    expect(page.get_by_text("2 of 6")).to_be_visible()
    third = pair_of(page)
    with next_pair(page):
        page.keyboard.press("ArrowDown")
    expect(page.get_by_text("2 of 6")).to_be_visible()
    with next_pair(page):
        page.keyboard.press("u")
    assert pair_of(page) == third
    with next_pair(page):
        page.keyboard.press("u")
    assert pair_of(page) == second
    expect(page.get_by_text("1 of 6")).to_be_visible()
    scores = sorted(each["score"] for each in gallery.candidates(run, step=1))
    assert scores == [984.0, 1000.0, 1000.0, 1016.0]
    with next_pair(page):
        page.keyboard.press("ArrowLeft")
    lineage = gallery.call("GET", f"{run}/pair", params={"step": 1})
    assert lineage["votes"] == 2


def test_both_are_rejected_looked_at_whole_and_taken_back(
    customer: WebPage, gallery: Gallery
) -> None:
    run = gallery.made(POSTER, VALLEY, 4)
    page = customer.page
    customer.open(gallery.page_of(run, view="vote"))
    shown = pair_of(page)
    page.get_by_role("button", name=re.compile(f"Choose {shown[0]}")).focus()
    page.keyboard.press(" ")
    whole = page.get_by_role("dialog", name=f"Candidate {shown[0]}")
    expect(whole.get_by_role("img")).to_be_visible()
    page.keyboard.press("ArrowRight")
    other = page.get_by_role("dialog", name=f"Candidate {shown[1]}")
    expect(other).to_be_visible()
    page.keyboard.press(" ")
    expect(other).to_have_count(0)
    with next_pair(page):
        page.keyboard.press("x")
    assert gallery.statuses(run, 1).count("rejected") == 2
    expect(page.get_by_text(f"{shown[0]}, {shown[1]} rejected")).to_be_visible()
    with next_pair(page):
        page.keyboard.press("u")
    assert pair_of(page) == shown
    assert gallery.statuses(run, 1) == ["active"] * 4
    page.get_by_role("button", name=re.compile(f"Choose {shown[0]}")).click()
    expect(page.get_by_text("1 of 6")).to_be_visible()


def test_a_judge_says_what_it_found_and_a_person_overrules_it(
    customer: WebPage, gallery: Gallery
) -> None:
    run = gallery.start(EXPOSED, {"colour": 0x808080}, 1)
    # Grey is exposed well, black is not, and dark grey is unclear.
    for count, colour in ((1, 0x808080), (2, 0), (3, 0x404040)):
        changed = {"variables": {"colour": colour}, "base_candidates": count}
        gallery.call("PATCH", run, json=changed)
        gallery.wait(run, partial(is_judged, count))
    page = customer.page
    customer.open(gallery.page_of(run, view="grid"))
    heading = page.get_by_role("heading", name="Base 3 created")
    expect(heading).to_contain_text("exposure approves from 0.8, rejects below 0.3")
    good, bad, unclear = (print_of(page, label) for label in ("1·01", "1·02", "1·03"))
    expect(good).to_have_attribute("aria-label", re.compile("Approved by the judge.*score 0.99"))
    expect(bad).to_have_attribute("aria-label", re.compile("Rejected by the judge.*score 0$"))
    expect(unclear).to_have_attribute("aria-label", re.compile("to judge.*score 0.502"))
    card = page.locator(".pipeline-run-one", has=good)
    expect(card).to_contain_text("Approved by the judge")
    expect(card).to_contain_text("0.996")
    customer.screenshot("judged")
    assert customer.serious_findings() == []
    page.get_by_label("Order", exact=True).select_option("score")
    base = page.locator(".pipeline-run-sheet").first.get_by_role("button")
    expect(base.nth(1)).to_have_attribute("aria-label", re.compile("^1·03,"))
    expect(base.nth(2)).to_have_attribute("aria-label", re.compile("^1·02,"))
    bad.click()
    side = page.get_by_role("complementary", name="Candidate 1·02")
    expect(side).to_contain_text("Rejected by the judge")
    side.get_by_role("button", name="Approve", exact=True).click()
    expect(print_of(page, "1·02, Approved")).to_be_visible()
    expect(page.locator(".pipeline-run-one", has=bad)).not_to_contain_text("by the judge")
    expect(side).not_to_contain_text("Rejected by the judge")
    assert gallery.candidates(run, step=0)[1]["judged_by"] == "person"
    side.get_by_role("button", name="Undo", exact=True).click()
    expect(side).to_contain_text("Rejected by the judge")


def is_judged(count: int, run: dict[str, Any]) -> bool:
    """Whether so many were made and judged, and nothing else is under way."""
    base, is_busy = run["steps"][0], any(each["in_flight"] for each in run["steps"])
    return bool(base["made"] == count and not base["unjudged"] and not is_busy)


def test_prints_are_judged_by_keys_and_in_the_panel(
    customer: WebPage, gallery: Gallery, poster: str
) -> None:
    page = customer.page
    customer.open(gallery.page_of(poster, view="grid"))
    expect(page.get_by_role("heading", name="Composition 4 created")).to_be_visible()
    print_of(page, "2·01").focus()
    page.keyboard.press("w")
    expect(print_of(page, "2·01, Winner")).to_be_visible()
    print_of(page, "2·02").focus()
    page.keyboard.press("x")
    expect(print_of(page, "2·02, Rejected")).to_be_visible()
    toast = page.get_by_role("status").filter(has_text="2·02 rejected")
    toast.get_by_role("button", name="Undo").click()
    expect(print_of(page, "2·02, Open")).to_be_visible()
    print_of(page, "2·03").click()
    panel = page.get_by_role("complementary", name="Candidate 2·03")
    panel.get_by_role("button", name="Approve").click()
    expect(panel.get_by_text("Approved", exact=True)).to_be_visible()
    print_of(page, "2·04").focus()
    page.keyboard.press("x")
    expect(print_of(page, "2·04, Rejected")).to_be_visible()
    assert gallery.statuses(poster, 1) == ["winner", "active", "approved", "rejected"]
    customer.screenshot("grid")
    assert customer.serious_findings() == []
    page.get_by_role("radio", name="Chosen").check()
    expect(print_of(page, r"2·\d\d")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)


def test_a_picture_is_followed_back_to_its_base(
    customer: WebPage, gallery: Gallery, poster: str
) -> None:
    page = customer.page
    child = gallery.candidates(poster, step=1)[0]
    base = next(
        each for each in gallery.candidates(poster, step=0) if each["id"] == child["parent"]
    )
    customer.open(gallery.page_of(poster, view="tree"))
    board = page.get_by_role("region", name="Tree of candidates")
    expect(board.get_by_role("button")).to_have_count(8)
    print_of(page, "2·01").focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(f"[data-candidate='{base['id']}'] button")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(print_of(page, "2·01")).to_be_focused()
    page.keyboard.press("Enter")
    expect(board.locator("path.is-ink")).to_have_count(2)
    panel = page.get_by_role("complementary", name="Candidate 2·01")
    line = panel.get_by_role("listitem").filter(has=page.get_by_role("button"))
    expect(line).to_have_count(2)
    expect(line.nth(1)).to_contain_text("a wide valley")
    expect(line.nth(1)).to_contain_text(f"seed {base['seed']}")
    customer.screenshot("tree")
    assert customer.serious_findings() == []
    panel.get_by_role("button", name="Full size").click()
    expect(page.get_by_role("dialog", name="Candidate 2·01").get_by_role("img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(panel.get_by_role("button", name="Full size")).to_be_focused()
    line.nth(1).get_by_role("button").click()
    gallery.call("POST", f"{poster}/candidates/{base['id']}/winner")
    above = page.get_by_role("complementary", name=re.compile(r"Candidate 1·"))
    expect(above.get_by_text("Winner of Composition")).to_be_visible()
    expect(above.get_by_text("Children", exact=True)).to_be_visible()
    expect(above.get_by_role("definition").filter(has_text="a wide valley")).to_be_visible()


def test_failed_jobs_are_retried_one_and_all(customer: WebPage, gallery: Gallery) -> None:
    run = gallery.made(BROKEN, {"breaks": True}, 3)
    page = customer.page
    customer.open(gallery.page_of(run, view="failed"))
    expect(page.get_by_role("heading", name="3 failed jobs")).to_be_visible()
    expect(page.get_by_text("two lamps are broken").first).to_be_visible()
    customer.screenshot("failed")
    assert customer.serious_findings() == []
    gallery.call("PATCH", run, json={"variables": {"breaks": False}})
    page.get_by_role("button", name="Retry", exact=True).first.click()
    expect(page.get_by_role("heading", name="2 failed jobs")).to_be_visible()
    page.get_by_role("button", name="Retry all").click()
    expect(page.get_by_text("No failed jobs")).to_be_visible()
    page.get_by_role("link", name="Grid").click()
    expect(print_of(page, r"1·\d\d")).to_have_count(3)


def test_a_run_is_paused_resumed_and_cancelled(customer: WebPage, gallery: Gallery) -> None:
    run = gallery.start(JUDGED, VALLEY, 50, candidates=2)
    page = customer.page
    customer.open(gallery.page_of(run, view="grid"))
    expect(print_of(page, r"1·\d\d")).to_have_count(2)
    expect(page.get_by_text("Candidate limit reached").first).to_be_visible()
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("Paused", exact=True)).to_be_visible()
    assert gallery.call("GET", run)["status"] == "paused"
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Change limits").click()
    page.get_by_label("Max. candidates").fill("3")
    page.get_by_role("button", name="Save limits").click()
    page.get_by_role("button", name="Resume").click()
    expect(print_of(page, r"1·\d\d")).to_have_count(3)
    page.get_by_role("link", name="Judge 3").click()
    print_of(page, "1·02").focus()
    page.keyboard.press("a")
    expect(print_of(page, "1·02")).to_have_count(0)
    expect(page.get_by_text("3 candidates, 2 to judge")).to_be_visible()
    page.get_by_role("button", name="More", exact=True).click()
    page.get_by_role("menuitem", name="Cancel the run").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("Cancelled", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)


def test_candidates_are_exported_as_one_file(
    customer: WebPage, gallery: Gallery, poster: str, tmp_path: Path
) -> None:
    page = customer.page
    customer.open(gallery.page_of(poster, view="grid"))
    page.get_by_role("button", name="Export").click()
    page.get_by_role("dialog").get_by_role("radio", name="All", exact=True).check()
    expect(page.get_by_text("8 files")).to_be_visible()
    customer.screenshot("export")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download ZIP").click()
    assert download.value.suggested_filename.startswith("poster-for-the-north-")
    saved = tmp_path / "export.zip"
    download.value.save_as(saved)
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
        index = json.loads(archive.read("index.json"))
        pictures = [archive.read(each["file"]) for each in index["candidates"]]
        sheet = archive.read("contact-sheet.png")
    made = gallery.candidates(poster)
    assert names == {"index.json", "contact-sheet.png", *(each["path"] for each in made)}
    assert all(each.startswith(b"\x89PNG") for each in [*pictures, sheet])
    assert [each["seed"] for each in index["candidates"]] == [each["seed"] for each in made]


def test_a_pipeline_is_written_down_started_and_deleted(
    browser: Browser, web: WebServer, gallery: Gallery
) -> None:
    user = web.server.user(tokens=20)
    with open_page(browser, web.url, theme="light") as opened:
        opened.expect_problem("status of 422")
        opened.sign_in(user.key, "/pipelines")
        page = opened.page
        opened.screenshot("galleries none")
        page.get_by_role("button", name="New pipeline").click()
        page.get_by_label("Pipeline in YAML or JSON").fill(
            "name: Mine\nsteps:\n  - {name: Base, effect: nothing}"
        )
        page.get_by_role("button", name="Create pipeline").click()
        expect(page.get_by_role("alert")).to_contain_text("Base.effect")
        page.get_by_label("Pipeline in YAML or JSON").fill(json.dumps({**JUDGED, "name": "Mine"}))
        page.get_by_role("button", name="Create pipeline").click()
        expect(page.get_by_role("heading", name="Mine", exact=True)).to_be_visible()
        expect(page.get_by_text("needs your approval")).to_be_visible()
        opened.screenshot("pipeline")
        assert opened.serious_findings() == []
        page.get_by_role("button", name="Start a run").click()
        page.get_by_label("Base candidates").fill("2")
        page.get_by_label("Variable prompt").fill("a lake")
        page.get_by_role("button", name="Start the run").click()
        expect(print_of(page, r"1·\d\d")).to_have_count(2)
        expect(page.get_by_text("Needs your judgment").first).to_be_visible()
        opened.open("/pipelines")
        strip = page.get_by_role("link", name=re.compile("Mine.*Needs your judgment"))
        expect(strip.locator("img")).to_have_count(2)
        opened.screenshot("galleries")
        assert opened.serious_findings() == []
        page.get_by_role("link", name=re.compile("^Mine Base")).click()
        page.get_by_role("button", name="More", exact=True).click()
        page.get_by_role("menuitem", name="Delete the pipeline").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete the pipeline").click()
        expect(page.get_by_text("No pipelines yet")).to_be_visible()


def test_a_phone_shows_all_of_it(
    browser: Browser, web: WebServer, gallery: Gallery, poster: str
) -> None:
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(web.customer.key, "/wallet")
        for view in ("vote", "tree", "failed", "grid"):
            opened.open(gallery.page_of(poster, view=view))
            opened.screenshot(f"phone {view}")
            assert opened.serious_findings() == []
            assert opened.pixels_too_wide() <= 0
        print_of(opened.page, "1·01").click()
        panel = opened.page.get_by_role("complementary")
        expect(panel.get_by_text("Origin", exact=True)).to_be_visible()
        opened.screenshot("phone candidate")
        panel.get_by_role("button", name="Close").click()
        expect(panel).to_have_count(0)


def test_upright_pictures_have_the_room_of_a_phone_and_only_whole_ones_are_chosen(
    browser: Browser, web: WebServer, gallery: Gallery, poster: str
) -> None:
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(web.customer.key, gallery.page_of(poster, view="vote"))
        page = opened.page
        first, other = (page.locator(".pipeline-run-cell .print").nth(at) for at in (0, 1))
        expect(other).to_be_visible()
        opened.screenshot("vote upright phone")
        box, edge = first.bounding_box(), other.bounding_box()
        assert box
        assert edge
        assert box["width"] > 280
        assert 0 < 390 - edge["x"] < 100, edge  # of the other one the edge is seen
        # By its place: a click on the element would bring it into view first.
        page.mouse.click(edge["x"] + 20, edge["y"] + 50)
        expect(other).to_be_in_viewport(ratio=0.9)
        expect(page.get_by_role("button", name="Undo")).to_be_disabled()
        other.click()
        expect(page.get_by_role("button", name="Undo")).to_be_enabled()
        page.get_by_role("button", name="Undo").click()
        assert opened.pixels_too_wide() <= 0


def test_a_phone_starts_a_run_with_a_photo_and_votes_by_thumb(
    browser: Browser, web: WebServer, gallery: Gallery
) -> None:
    step = {**POSTER["steps"][1], "needs_approval": True}
    step["properties"] = {"input": "{{ variables.photo }}", "prompt": "low sun"}
    made = gallery.call(
        "POST", "pipelines", json={"document": {"name": "Of mine", "steps": [step]}}
    )
    with open_page(browser, web.url, phone=True) as opened:
        opened.sign_in(web.customer.key, f"/pipelines/{made['id']}")
        page = opened.page
        page.get_by_role("button", name="Start a run").click()
        act = page.get_by_role("button", name="Start the run")
        expect(act).to_be_disabled()
        page.get_by_label("Base candidates").fill("2")
        page.locator("input[type=file]").set_input_files(PHOTO)
        expect(page.get_by_text("Uploaded")).to_be_visible()
        opened.screenshot("start a run phone")
        assert opened.serious_findings() == []
        act.click()
        expect(print_of(page, r"1·\d\d")).to_have_count(2)
        page.get_by_role("link", name="Vote", exact=True).click()
        pictures = page.locator(".pipeline-run-cell .print")
        expect(pictures).to_have_count(2)
        expect(
            page.get_by_role("button", name=re.compile("Choose .*, the upper one"))
        ).to_be_visible()
        opened.screenshot("vote phone")
        boxes = [each.bounding_box() for each in pictures.all()]
        assert all(each and each["width"] * each["height"] > 200 * 150 for each in boxes), boxes
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        page.get_by_role("button", name="Full size").click()
        page.get_by_role("button", name="Show the other one").click()
        page.get_by_role("button", name="This one is better").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(page.get_by_role("button", name="Undo")).to_be_enabled()


def test_a_vote_that_does_not_arrive_is_told_and_given_again(
    customer: WebPage, gallery: Gallery, poster: str
) -> None:
    customer.expect_problem("Failed to load resource")
    page = customer.page
    customer.open(gallery.page_of(poster, view="vote"))
    shown = pair_of(page)
    page.route("**/vote", lambda route: route.abort("internetdisconnected"))
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("alert")).to_contain_text("can't be reached")
    assert pair_of(page) == shown
    page.unroute("**/vote")
    with next_pair(page):
        page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_text(f"{shown[0]} over {shown[1]}")).to_be_visible()


def test_a_run_of_nobody_says_so(customer: WebPage) -> None:
    customer.expect_problem("status of 404")
    customer.open("/pipelines/none/runs/00000000-0000-0000-0000-000000000000")
    expect(customer.page.get_by_text("Run not found").last).to_be_visible()
    customer.open("/pipelines/none")
    expect(customer.page.get_by_text("Pipeline not found").last).to_be_visible()
    assert customer.serious_findings() == []
