"""The page of triggers: made by a schedule or a webhook, fired, paused and deleted; what is refused says why."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect
from tests.support.server.customers import png
from tests.support.server.web import WebPage, WebServer, open_page

GRAPH = {
    "name": "Square",
    "nodes": [
        {"id": "width", "type": "input", "value_type": "integer"},
        {"id": "draw", "type": "workflow", "effect": "negative", "properties": {"height": 32}},
        {"id": "picture", "type": "output"},
    ],
    "connections": [
        {"from": "width.value", "to": "draw.width"},
        {"from": "draw.output", "to": "picture.value"},
    ],
}


SHOWS = {
    "name": "Shows it",
    "nodes": [
        {"id": "photo", "type": "input", "value_type": "image"},
        {"id": "picture", "type": "output"},
    ],
    "connections": [{"from": "photo.value", "to": "picture.value"}],
}


@pytest.fixture(scope="module", autouse=True)
def graph(web: WebServer) -> None:
    with web.customer.http() as http:
        assert http.post("/api/graphs", json=GRAPH).status_code == 201
        assert http.post("/api/graphs", json=SHOWS).status_code == 201


@pytest.fixture
def phone(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url, phone=True, theme="light") as page:
        page.sign_in(web.customer.key)
        yield page


def new(customer: WebPage, name: str, runs: str = "Square", asks_for: str = "width") -> Locator:
    page = customer.page
    customer.open("/triggers")
    page.get_by_role("button", name="New trigger").first.click()
    dialog = page.get_by_role("dialog", name="New trigger")
    dialog.get_by_label("Name").fill(name)
    dialog.get_by_label("Graph or pipeline").select_option(label=runs)
    expect(dialog.get_by_text(asks_for, exact=True)).to_be_visible()
    return dialog


def fill(customer: WebPage, dialog: Locator) -> None:
    """A schedule, after all that can be wrong with it."""
    dialog.get_by_role("button", name="Create trigger").click()
    expect(dialog.get_by_text("width is required.")).to_be_visible()
    dialog.get_by_label("width").fill("48")
    dialog.get_by_label("Max. tokens per day").fill("-3")
    expect(dialog.get_by_text("A whole number, 0 or more.")).to_be_visible()
    dialog.get_by_label("Max. tokens per day").fill("3")
    customer.expect_problem("422")
    dialog.get_by_label("Time zone").fill("Mars")
    expect(dialog.get_by_text("Unknown time zone Mars.")).to_be_visible()
    expect(dialog.get_by_label("Time zone")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("Frequency").select_option("weekdays")
    dialog.get_by_label("Time", exact=True).fill("06:15")
    dialog.get_by_label("Time zone").fill("Europe/Berlin")
    expect(dialog.get_by_label("Cron schedule", exact=True)).to_have_value("15 6 * * MON-FRI")
    expect(dialog.get_by_text("on weekdays at 06:15")).to_be_visible()
    moments = dialog.get_by_label("Next runs").get_by_role("listitem")
    expect(moments).to_have_count(5)
    expect(moments.first).to_have_text(re.compile(r"^(Mon|Tue|Wed|Thu|Fri) .*06:15$"))
    customer.screenshot("triggers new")
    assert customer.serious_findings() == []
    customer.expect_problem("422")
    dialog.get_by_label("Cron schedule", exact=True).fill("15 66 * * *")
    expect(dialog.get_by_label("Cron schedule", exact=True)).to_have_attribute(
        "aria-invalid", "true"
    )
    expect(moments).to_have_count(0)
    dialog.get_by_label("Frequency").select_option("daily")
    dialog.get_by_role("button", name="Create trigger").click()


def trigger(page: Page, name: str) -> Locator:
    return page.get_by_role("region", name=name)


def test_a_schedule_is_made_fired_paused_and_deleted(customer: WebPage) -> None:
    page, dialog = customer.page, new(customer, "nightly")
    fill(customer, dialog)
    one = trigger(page, "nightly")
    expect(one.get_by_text("every day at 06:15")).to_be_visible()
    expect(one.get_by_text("Runs Square, latest version")).to_be_visible()
    one.get_by_role("button", name="Run now").click()
    row = one.get_by_role("row", name=re.compile("Started"))
    expect(row.get_by_role("link", name="Succeeded")).to_be_visible()
    expect(one.get_by_text("2 of 3 tokens today")).to_be_visible()
    one.get_by_role("button", name="Run now").click()
    refused = one.get_by_role("row", name=re.compile("Not started"))
    expect(refused).to_contain_text(re.compile("token", re.IGNORECASE))
    customer.screenshot("triggers fired")
    assert customer.serious_findings() == []
    one.get_by_role("button", name="Pause").click()
    expect(one.get_by_text("Paused", exact=True)).to_be_visible()
    one.get_by_role("button", name="Resume").click()
    expect(one.get_by_text("Paused", exact=True)).to_have_count(0)
    row.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"/graph-runs/"))
    page.go_back()
    one.get_by_role("button", name="Delete").click()
    confirm = page.get_by_role("dialog", name="Delete the trigger nightly?")
    confirm.get_by_role("button", name="Delete trigger").click()
    expect(one).to_have_count(0)


def test_a_webhook_shows_its_secret_once_and_answers_what_is_sent(
    customer: WebPage, web: WebServer
) -> None:
    page, dialog = customer.page, new(customer, "shop")
    dialog.get_by_label("By a webhook").check()
    dialog.get_by_label("width").fill("body.order.width")
    dialog.get_by_label("Max. tokens per day").fill("20")
    dialog.get_by_role("button", name="Create trigger").click()
    once = page.get_by_role("dialog", name="Webhook secret")
    secret = once.get_by_label("Secret", exact=True).inner_text()
    address = once.get_by_label("Webhook address").inner_text()
    curl = once.get_by_label("Example request").inner_text()
    assert secret.startswith("hook_")
    assert secret in curl
    assert '{"order":{"width":"…"}}' in curl
    customer.screenshot("triggers secret")
    assert customer.serious_findings() == []
    once.get_by_role("checkbox").check()
    once.get_by_role("button").last.click()
    one = trigger(page, "shop")
    expect(one.get_by_text(address)).to_be_visible()
    expect(page.get_by_text(secret)).to_have_count(0)
    sent = page.request.post(
        address, headers={"Authorization": f"Bearer {secret}"}, data={"order": {"width": 40}}
    )
    assert sent.status == 202
    expect(one.get_by_role("row", name=re.compile("Started.*webhook"))).to_be_visible()
    one.get_by_role("button", name="Run now").click()
    fire = page.get_by_role("dialog", name="Run shop now?")
    body = fire.get_by_label("Body (JSON)")
    body.fill("{")
    fire.get_by_role("button", name="Run now").click()
    expect(fire.get_by_text("Enter a valid JSON object.")).to_be_visible()
    body.fill('{"order": {}}')
    fire.get_by_role("button", name="Run now").click()
    expect(one.get_by_role("row", name=re.compile("Not started"))).to_contain_text("width")
    one.get_by_role("button", name="New secret").click()
    page.get_by_role("dialog").get_by_role("button", name="Create secret").click()
    expect(once.get_by_label("Secret", exact=True)).not_to_have_text(secret)


def test_triggers_are_made_on_a_phone_and_found_by_keys(phone: WebPage) -> None:
    page, dialog = phone.page, new(phone, "by phone")
    dialog.get_by_label("width").fill("32")
    dialog.get_by_label("Max. tokens per day").fill("4")
    phone.screenshot("triggers phone form")
    assert phone.pixels_too_wide() <= 0
    assert phone.serious_findings() == []
    dialog.get_by_role("button", name="Create trigger").click()
    one = trigger(page, "by phone")
    one.get_by_role("button", name="Run now").click()
    expect(one.get_by_role("link", name="Succeeded")).to_be_visible()
    phone.screenshot("triggers phone")
    assert phone.pixels_too_wide() <= 0
    assert phone.serious_findings() == []
    page.keyboard.press("Control+k")
    page.get_by_role("combobox").fill("trig")
    page.get_by_role("option", name="Triggers").click()
    expect(page).to_have_url(re.compile("/triggers$"))


def test_a_schedule_is_given_a_picture_by_choosing_it(customer: WebPage, tmp_path: Path) -> None:
    page, photo = customer.page, tmp_path / "photo.png"
    photo.write_bytes(png(64, 120, height=48))
    dialog = new(customer, "with a photo", "Shows it", "photo")
    dialog.get_by_label("Max. tokens per day").fill("3")
    dialog.get_by_role("button", name="Create trigger").click()
    expect(dialog.get_by_text("photo is required.")).to_be_visible()
    dialog.locator("input[type=file]").set_input_files(photo)
    expect(dialog.get_by_text("Uploaded")).to_be_visible()
    customer.screenshot("triggers photo")
    assert customer.serious_findings() == []
    dialog.get_by_role("button", name="Create trigger").click()
    one = trigger(page, "with a photo")
    one.get_by_role("button", name="Run now").click()
    expect(one.get_by_role("link", name="Succeeded")).to_be_visible()
