"""My media, webhooks, the account and the palette: their main paths and main failures."""

import re
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect
from tests.support.server.gateway import GatewayUser
from tests.support.server.web import WAIT_MS_MAX, WebPage, WebServer, open_page

PHOTO = Path(__file__).parents[2] / "examples" / "inputs" / "photo.png"
NAME = "beach.png"


@pytest.fixture(scope="module")
def soft_photo(web: WebServer) -> dict[str, str]:
    """An upload with one result: the ids of its media and its job."""
    with web.customer.http() as http:
        return {"media": (media_id := upload(http)), "job": soften(http, media_id)}


def upload(http: httpx.Client) -> str:
    content = PHOTO.read_bytes()
    body = {"filename": NAME, "content_type": "image/png", "size": len(content)}
    told = http.post("/api/videos/uploads", json=body).json()
    slot = told["upload"]
    httpx.request(
        slot["method"], slot["url"], headers=slot["headers"], content=content
    ).raise_for_status()
    made: str = http.post("/api/videos", json={"file_id": told["file_id"]}).json()["id"]
    return made


def soften(http: httpx.Client, media_id: str) -> str:
    effects = http.get("/api/effects").json()["effects"]
    effect_id = next(each["id"] for each in effects if each["slug"] == "soften")
    body = {"effect_id": effect_id, "video_id": media_id}
    job = http.post("/api/ai-jobs", params={"wait": 60}, json=body).json()
    assert job["status"] == "completed", job
    job_id: str = job["id"]
    return job_id


def newcomer(web: WebServer) -> GatewayUser:
    return web.server.user()


def test_media_lie_on_a_sheet_and_are_marked_by_key(
    customer: WebPage, soft_photo: dict[str, str]
) -> None:
    page = customer.page
    customer.open("/media")
    one = page.locator(f"[data-media='{soft_photo['media']}']")
    expect(one.get_by_role("img", name="Softened photo")).to_be_visible()
    expect(one.locator(".pencil")).to_have_count(0)
    one.hover()
    page.keyboard.press("m")
    expect(one.locator(".pencil")).to_be_visible()
    customer.screenshot("media")
    page.reload()
    expect(one.locator(".pencil")).to_be_visible()
    page.get_by_role("radio", name="Marked").check(force=True)
    expect(one).to_be_visible()
    one.get_by_role("button", name="Unmark").click()
    expect(page.get_by_text("No marked media")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    # By keyboard alone: M marks what has the focus, and is a letter in a field.
    one.get_by_role("link").focus()
    page.mouse.move(0, 0)
    page.keyboard.press("m")
    expect(one.locator(".pencil")).to_be_visible()
    page.get_by_label("Find by name").fill("mountain")
    expect(page.get_by_text("No matches")).to_be_visible()
    page.get_by_label("Find by name").fill("beach")
    expect(one).to_be_visible()
    page.get_by_label("Type", exact=True).select_option("Videos")
    expect(one).to_have_count(0)


def test_all_results_of_a_media_are_on_its_page(
    customer: WebPage, web: WebServer, soft_photo: dict[str, str]
) -> None:
    page = customer.page
    customer.open("/media")
    page.locator(f"[data-media='{soft_photo['media']}'] a").click()
    expect(page.get_by_role("heading", name=NAME)).to_be_visible()
    expect(page.get_by_role("img", name=NAME)).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("Softened photo"))).to_have_count(1)
    # A second result comes while the page is open.
    with web.customer.http() as http:
        second = soften(http, soft_photo["media"])
    expect(page.locator(f"a[href='/results/{second}']")).to_contain_text(
        "Succeeded", timeout=WAIT_MS_MAX
    )
    expect(page.get_by_role("link", name=re.compile("Softened photo"))).to_have_count(2)
    customer.screenshot("one media")


def test_a_media_of_another_is_told_as_missing(
    browser: Browser, web: WebServer, soft_photo: dict[str, str]
) -> None:
    with open_page(browser, web.url, phone=True, theme="light") as tab:
        tab.sign_in(newcomer(web).key, "/media")
        expect(tab.page.get_by_text("No media yet")).to_be_visible()
        tab.expect_problem("404")
        tab.open(f"/media/{soft_photo['media']}")
        expect(tab.page.get_by_role("heading", name="File not found")).to_be_visible()


def test_a_webhook_is_made_its_deliveries_are_seen_and_sent_again(
    customer: WebPage, web: WebServer, soft_photo: dict[str, str]
) -> None:
    page = customer.page
    customer.expect_problem("422")
    customer.open("/webhooks")
    expect(page.get_by_text("No webhooks yet")).to_be_visible()
    page.get_by_role("button", name="New webhook").first.click()
    page.get_by_label("URL", exact=True).fill("shop")
    page.get_by_role("button", name="Create webhook").click()
    expect(page.get_by_text("Enter a URL that starts")).to_be_visible()
    page.get_by_label("URL", exact=True).fill("http://127.0.0.1/hook")
    page.get_by_role("button", name="Create webhook").click()
    expect(page.get_by_role("alert")).to_contain_text("no public address")
    page.get_by_label("URL", exact=True).fill("https://shop.invalid/hook")
    page.get_by_role("button", name="Create webhook").click()
    secret = page.get_by_label("Secret", exact=True).inner_text().strip()
    assert secret
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_text("No deliveries yet")).to_be_visible()

    with web.customer.http() as http:
        job_id = soften(http, soft_photo["media"])
    row = page.get_by_role("row", name=re.compile(job_id[:8]))
    expect(row).to_contain_text("can't be resolved", timeout=WAIT_MS_MAX)
    expect(row).to_contain_text("job.completed")
    customer.screenshot("webhooks")
    row.get_by_role("button", name="Payload").click()
    expect(page.get_by_role("dialog")).to_contain_text(job_id)
    page.keyboard.press("Escape")
    with page.expect_response(re.compile("/redeliver$")) as answer:
        row.get_by_role("button", name="Redeliver").click()
    assert answer.value.status == 200
    expect(page.get_by_text("Queued for redelivery")).to_be_visible()

    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete webhook").click()
    expect(page.get_by_text("No webhooks yet")).to_be_visible()


def test_the_account_says_who_and_how_much_and_signs_out(customer: WebPage, web: WebServer) -> None:
    page = customer.page
    customer.open("/account")
    expect(page.get_by_text("Ada").first).to_be_visible()
    expect(page.get_by_text("0 of 5 jobs")).to_be_visible()
    page.get_by_role("radio", name="Light").check(force=True)
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    customer.screenshot("account")
    page.locator("main").get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(re.compile("/sign-in"))


def test_the_palette_finds_and_acts_by_keyboard(
    customer: WebPage, soft_photo: dict[str, str]
) -> None:
    page = customer.page
    customer.open("/wallet")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search and commands")).to_be_focused()
    page.keyboard.type("beach")
    expect(page.get_by_role("option", name=re.compile(NAME))).to_have_attribute(
        "aria-selected", "true"
    )
    customer.screenshot("palette")
    assert customer.serious_findings() == []
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("option", name="Copy link")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Link copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()").endswith(f"/media/{soft_photo['media']}")
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search and commands")).to_be_focused()
    page.keyboard.type(soft_photo["job"][:8])
    expect(page.get_by_role("option", name=re.compile("Softened photo"))).to_be_visible()
    page.get_by_role("combobox", name="Search and commands").fill("")
    page.keyboard.type("keys")
    expect(page.get_by_role("option", name="Keys", exact=True)).to_be_visible()
    expect(page.get_by_role("option").first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/keys$"))
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search and commands")).to_be_focused()
    page.keyboard.type("zzzz")
    expect(page.get_by_text("No matches")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_the_palette_of_operators_leads_through_the_console(operator: WebPage) -> None:
    page = operator.page
    page.keyboard.press("Control+k")
    expect(page.get_by_role("combobox", name="Search and commands")).to_be_focused()
    page.keyboard.type("soften")
    page.get_by_role("option", name=re.compile("soften.*Workflow")).click()
    expect(page).to_have_url(re.compile("/console/workflows/soften$"))
