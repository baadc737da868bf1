"""One job from its submit to its end: while it is made, its result, its failure, and the link that shows it."""

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.support.server.customers import png
from tests.support.server.web import WebPage, WebServer, open_page

STEPS = {"steps": 2, "step_ms": 100, "previews": True}
SLOW = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "photo.png"}},
    "2": {"class_type": "ComfyfleetSteps", "inputs": {**STEPS, "image": ["1", 0]}},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}},
}
DRAWN = {
    "2": {"class_type": "ComfyfleetSteps", "inputs": STEPS},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "made"}},
}
FAILS = {
    "1": {
        "class_type": "ComfyfleetFail",
        "inputs": {"fail": True, "message": "no face was found in this photo", "after_ms": 0},
    },
}
COUNT = {"name": "steps", "type": "integer", "binding": "2.steps", "minimum": 1, "maximum": 500, "default": 2}  # fmt: skip
PHOTO = {"name": "input", "type": "image", "binding": "1.image"}
EFFECTS = (
    ("slow", "Slow photo", SLOW, (PHOTO, COUNT)),
    ("drawn", "Slow drawing", DRAWN, (COUNT,)),
    ("fails", "Two lamps", FAILS, ()),
)
LONG = 400


@pytest.fixture(scope="module")
def effects(web: WebServer) -> dict[str, str]:
    """Their ids by slug."""
    made = {}
    for slug, title, document, properties in EFFECTS:
        web.admin("/workflows", slug=slug, document=document, properties=properties)
        given = {"slug": slug, "workflow_slug": slug, "title": title, "price_tokens": 2}
        made[slug] = web.admin("/effects", **given, overrides={}, published=True)["id"]
    return made


def submit(web: WebServer, effect_id: str, wait: float = 0, **properties: Any) -> dict[str, Any]:
    with web.customer.http() as http:
        body = {"effect_id": effect_id, "properties": properties}
        made = http.post("/api/ai-jobs", json=body, params={"wait": wait} if wait else None)
        assert made.status_code == 201, made.text
        job: dict[str, Any] = made.json()
        return job


def cancel(web: WebServer, job_id: str) -> None:
    with web.customer.http() as http:
        http.delete(f"/api/ai-jobs/{job_id}")


def test_a_photo_is_uploaded_made_and_compared(
    customer: WebPage, effects: dict[str, str], tmp_path: Path
) -> None:
    page = customer.page
    photo = tmp_path / "photo.png"
    photo.write_bytes(png(64, 120, height=48))
    customer.open("/effects/slow")
    page.locator("input[type=file]").first.set_input_files(photo)
    page.get_by_label("Steps").fill("30")
    page.get_by_role("button", name="Apply effect").click()
    expect(page.get_by_role("heading", name="Slow photo: in progress")).to_be_visible()
    expect(page.get_by_role("img", name="Live preview")).to_be_visible()
    expect(page.get_by_text(re.compile(r"Step \d+ of 30"))).to_be_visible()
    expect(page.locator(".result-percent")).to_have_text(re.compile(r"\d+%"))
    customer.screenshot("making")
    assert customer.serious_findings() == []
    page.reload()
    expect(page.get_by_text("Ready", exact=True)).to_be_visible(timeout=30_000)
    grip = page.get_by_role("slider", name="Before/after slider")
    grip.press("End")
    expect(grip).to_have_attribute("aria-valuenow", "100")
    customer.screenshot("result")
    assert customer.serious_findings() == []
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename.endswith(".png")
    page.get_by_role("link", name="Change settings").first.click()
    expect(page.get_by_text("Your previous settings are loaded.")).to_be_visible()
    expect(page.get_by_label("Steps")).to_have_value("30")
    expect(page.get_by_text("From My media", exact=True)).to_be_visible()


def test_a_lost_connection_is_told_while_the_last_state_stays(
    customer: WebPage, web: WebServer, effects: dict[str, str]
) -> None:
    customer.expect_problem("Failed to load resource")
    page, job = customer.page, submit(web, effects["drawn"], steps=LONG)
    page.route("**/api/account/events*", lambda route: route.abort("internetdisconnected"))
    page.goto(f"{customer.url}/results/{job['id']}")
    expect(page.get_by_text("Connection lost")).to_be_visible()
    expect(page.get_by_role("heading", name="Slow drawing")).to_be_visible()
    customer.screenshot("making lost")
    page.unroute("**/api/account/events*")
    page.get_by_role("button", name="Retry now").click()
    expect(page.get_by_text("Connection lost")).to_have_count(0)
    expect(page.get_by_role("img", name="Live preview")).to_be_visible()
    cancel(web, job["id"])
    expect(page.get_by_role("heading", name="You cancelled this job.")).to_be_visible()


def test_several_at_once_are_followed_in_two_tabs_and_one_is_cancelled(
    customer: WebPage, web: WebServer, effects: dict[str, str]
) -> None:
    first = submit(web, effects["drawn"], steps=LONG)
    second = submit(web, effects["drawn"], steps=LONG)
    page, other = customer.page, customer.page.context.new_page()
    customer.open(f"/results/{second['id']}")
    other.goto(f"{customer.url}/results/{second['id']}")
    for tab in (page, other):
        expect(tab.get_by_role("heading", name=re.compile("Slow drawing"))).to_be_visible()
    expect(page.get_by_text("Waiting for a machine", exact=True)).to_be_visible()
    customer.screenshot("waiting")
    page.get_by_role("button", name="Cancel and refund 2 tokens").click()
    page.get_by_role("button", name="Cancel the job").click()
    for tab in (page, other):
        expect(tab.get_by_role("heading", name="You cancelled this job.")).to_be_visible()
    expect(page.get_by_text("Refunded: 2 tokens.")).to_be_visible()
    customer.open("/results")
    under_way = page.get_by_role("link", name=re.compile("Processing.*Slow drawing"))
    expect(under_way).to_have_count(1)
    assert customer.serious_findings() == []
    cancel(web, first["id"])
    expect(under_way).to_have_count(0)


def test_a_failure_says_why_what_came_back_and_how_to_go_on(
    browser: Browser, web: WebServer, effects: dict[str, str]
) -> None:
    job = submit(web, effects["fails"], wait=20)
    assert job["status"] == "failed", job
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(web.customer.key, f"/results/{job['id']}")
        page = opened.page
        expect(page.get_by_text("Failed", exact=True)).to_be_visible()
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        expect(page.get_by_text("Refunded: 2 tokens.")).to_be_visible()
        page.get_by_text("Details for support").click()
        expect(page.get_by_text(job["id"])).to_be_visible()
        opened.screenshot("failure phone")
        assert opened.serious_findings() == []
        assert opened.pixels_too_wide() <= 0
        page.get_by_role("button", name="Retry").click()
        page.wait_for_url(lambda address: "/results/" in address and job["id"] not in address)
        expect(page.get_by_text("Failed", exact=True)).to_be_visible()


def test_a_link_shows_a_result_to_anybody_until_it_is_revoked(
    customer: WebPage, stranger: WebPage, web: WebServer, effects: dict[str, str]
) -> None:
    stranger.expect_problem("404")
    job = submit(web, effects["drawn"], wait=20)
    page = customer.page
    customer.open(f"/results/{job['id']}")
    page.get_by_role("button", name="Share").click()
    page.get_by_role("button", name="Create link").click()
    expect(page.get_by_role("dialog")).to_contain_text("Expires in 7 days")
    link = page.get_by_label("Share link", exact=True).inner_text().strip()
    stranger.page.goto(link)
    shown = stranger.page.get_by_role("img", name="Slow drawing: the result")
    expect(shown).to_be_visible()
    expect(stranger.page.get_by_role("link", name="Download")).to_be_visible()
    stranger.screenshot("shared")
    assert stranger.serious_findings() == []
    page.get_by_role("button", name="Revoke link").click()
    expect(page.get_by_text("The link no longer works.")).to_be_visible()
    stranger.page.reload()
    expect(stranger.page.get_by_text(re.compile("expired|Link not found"))).to_be_visible()
    expect(shown).to_have_count(0)
    stranger.open("/shared/nothing")
    expect(stranger.page.get_by_text("Link not found")).to_be_visible()
    stranger.page.get_by_role("link", name="Explore effects").click()
    expect(stranger.page.get_by_role("heading", name="Pick a look")).to_be_visible()


def test_a_result_whose_files_are_gone_is_told_as_expired(
    customer: WebPage, web: WebServer, effects: dict[str, str]
) -> None:
    job = submit(web, effects["drawn"], wait=20)

    def without_files(route: Route) -> None:
        answer = httpx.get(route.request.url, headers=web.customer.headers).json()
        gone: dict[str, Any] = {"outputs": [], "original": None, "text": None, "values": []}
        route.fulfill(json={**answer, **gone})

    page: Page = customer.page
    page.route(f"**/api/ai-jobs/{job['id']}", without_files)
    customer.open(f"/results/{job['id']}")
    expect(page.get_by_role("heading", name="This result has expired.")).to_be_visible()
    page.get_by_role("link", name="Create it again").click()
    expect(page).to_have_url(re.compile("/effects/drawn"))
