"""Wallet and keys: what was spent and came back, a key that is shown once, and programs that run as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, Route, expect
from tests.support.server.gateway import GatewayUser
from tests.support.server.web import EFFECTS, TOKENS, WebPage, WebServer, open_page

NOTHING_IN = "Picture out of nothing"
PHOTO_IN = "Softened photo"
PHOTO = Path(__file__).parents[2] / "examples" / "inputs" / "photo.png"
PROGRAM_SECONDS_MAX = 90
MINUS = "\N{MINUS SIGN}"


def apply_effect(user: GatewayUser, slug: str) -> str:
    """Returns the id of a job that has completed."""
    with user.http() as http:
        effects = http.get("/api/effects").json()["effects"]
        effect_id = next(each["id"] for each in effects if each["slug"] == slug)
        job = http.post("/api/ai-jobs", params={"wait": 60}, json={"effect_id": effect_id}).json()
    assert job["status"] == "completed", job
    job_id: str = job["id"]
    return job_id


def open_keys(tab: WebPage) -> Page:
    tab.open("/keys")
    return tab.page


def make_key(page: Page, name: str) -> str:
    """Up to the dialog that shows it."""
    page.get_by_role("button", name="New key").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Create key").click()
    key: str = page.get_by_label("The key", exact=True).inner_text().strip()
    return key


def test_the_wallet_tells_what_came_and_went(customer: WebPage, web: WebServer) -> None:
    page = customer.page
    customer.open("/wallet")
    expect(page.get_by_role("heading", name="Wallet")).to_be_visible()
    expect(page.get_by_role("row", name=re.compile("Top-up.*Added"))).to_contain_text(f"+{TOKENS}")
    expect(page.get_by_text("Ask your administrator for tokens")).to_be_visible()
    # A job that is paid for meanwhile is told by the stream.
    price = EFFECTS[0][2]
    apply_effect(web.customer, "negative")
    spent = page.get_by_role("row", name=re.compile(f"{NOTHING_IN}.*Spent"))
    expect(spent).to_contain_text(f"{MINUS}{price}")
    expect(page.get_by_role("link", name="Balance")).to_contain_text(str(TOKENS - price))
    expect(page.locator(".wallet-balance")).to_contain_text(str(TOKENS - price))
    page.get_by_role("radio", name="Added").check(force=True)
    expect(spent).to_have_count(0)
    expect(page.get_by_role("row", name=re.compile("Top-up"))).to_be_visible()
    page.get_by_role("radio", name="Refunded").check(force=True)
    expect(page.get_by_text("No transactions under “Refunded”")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    rows = download.value.path().read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("id,time,type,tokens")
    assert any("JOB_RESERVE" in each and NOTHING_IN in each for each in rows)
    customer.screenshot("wallet")


def test_a_wallet_that_cannot_be_read_says_so_and_can_be_tried_again(customer: WebPage) -> None:
    customer.expect_problem("503")
    page, down = customer.page, {"error": {"code": "unavailable", "message": "the ledger is away"}}
    # It does not try again by itself for as long.
    later = {"retry-after": "600"}
    page.route(
        "**/api/wallet/transactions*",
        lambda route: route.fulfill(status=503, json=down, headers=later),
    )
    page.goto(f"{customer.url}/wallet")
    expect(page.get_by_text("The ledger is away.")).to_be_visible()
    again = page.get_by_role("button", name="Retry", exact=True)
    expect(again).to_be_visible()
    page.unroute("**/api/wallet/transactions*")
    # The stream of events may have opened just now: then it was read again already, and the button is gone.
    for each in again.element_handles():
        each.evaluate("button => button.click()")
    expect(page.get_by_role("row", name=re.compile("Top-up"))).to_be_visible()


def test_a_key_is_shown_once_and_revoked(customer: WebPage, web: WebServer) -> None:
    page = open_keys(customer)
    page.get_by_role("button", name="New key").click()
    page.get_by_role("button", name="Create key").click()
    expect(page.get_by_text("Enter a name.")).to_be_visible()
    page.keyboard.press("Escape")
    key = make_key(page, "web-shop")
    assert key.startswith("cf_")
    page.get_by_role("button", name="Copy", exact=True).last.click()
    assert page.evaluate("navigator.clipboard.readText()") == key
    # Neither Escape nor the button closes it before it is stored.
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Done").click(force=True)
    expect(page.get_by_label("The key", exact=True)).to_be_visible()
    customer.screenshot("key once")
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done").click()
    expect(page.get_by_text(key)).to_have_count(0)
    row = page.get_by_role("row", name=re.compile("web-shop"))
    expect(row).to_contain_text("Read, Write")
    page.reload()
    expect(row).to_be_visible()
    assert key not in page.content()

    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{web.url}/api/wallet", headers=headers).status_code == 200
    row.get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("dialog")).to_contain_text("Revoke web-shop?")
    page.get_by_role("button", name="Revoke this key").click()
    expect(row).to_have_count(0)
    assert httpx.get(f"{web.url}/api/wallet", headers=headers).status_code == 401
    page.get_by_role("button", name=re.compile("Show .* revoked key")).click()
    expect(row).to_contain_text("Revoked")


def test_a_rotated_key_works_until_the_new_one_is_stored(customer: WebPage, web: WebServer) -> None:
    page = open_keys(customer)
    old = make_key(page, "archive-script")
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done").click()
    page.get_by_role("row", name=re.compile("archive-script")).get_by_role(
        "button", name="Rotate"
    ).click()
    new = page.get_by_label("The key", exact=True).inner_text().strip()

    def answer(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{web.url}/api/wallet", headers=headers).status_code

    assert (answer(old), answer(new)) == (200, 200)
    page.get_by_label("I have stored it").check()
    page.get_by_role("button", name="Done, revoke the old key").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert (answer(old), answer(new)) == (401, 200)


def test_a_key_that_may_not_make_keys_is_told_so(browser: Browser, web: WebServer) -> None:
    with web.customer.http() as http:
        key = http.post("/api/keys", json={"name": "reads", "scopes": ["read"]}).json()["key"]
    with open_page(browser, web.url, phone=True, theme="light") as tab:
        tab.sign_in(key, "/keys")
        expect(tab.page.get_by_text("This key can't manage keys").first).to_be_visible()
        assert tab.pixels_too_wide() <= 0


# What was moved by data that came, as the browser itself counts it; what somebody typed or tapped for is left out.
COUNT_SHIFTS = """window.shifts = 0
window.observer = new PerformanceObserver(list => add(list.getEntries()))
const add = entries => entries.forEach(each => { if (!each.hadRecentInput) window.shifts += each.value })
window.tellShifts = () => { add(window.observer.takeRecords()); return window.shifts }
window.observer.observe({ type: 'layout-shift', buffered: true })"""
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(tellShifts()))))"
SHIFT_MAX = 0.05


def shift_of(tab: WebPage, path: str, early: str, late: str) -> float:
    """What moves in a page that has the answer to one call before that to another."""
    page, held = tab.page, list[Route]()
    page.route(f"**{late}", lambda route: held.append(route))
    with page.expect_response(re.compile(rf"{early}(\?|$)")):
        page.goto(f"{tab.url}{path}")
    page.evaluate(DRAWN)
    for each in held:
        each.continue_()
    page.unroute(f"**{late}")
    tab.wait_until_ready()
    moved: float = page.evaluate(DRAWN)
    return moved


def test_nothing_jumps_on_a_phone_when_data_comes_late(browser: Browser, web: WebServer) -> None:
    user = web.server.user(tokens=TOKENS)
    apply_effect(user, "negative")
    with user.http() as http:
        for name in ("one", "two", "three"):
            http.post("/api/keys", json={"name": name, "scopes": ["read"]}).raise_for_status()
    with open_page(browser, web.url, phone=True) as tab:
        page = tab.page
        tab.sign_in(user.key, "/account")
        page.add_init_script(COUNT_SHIFTS)
        for path, early, late in (
            ("/keys", "/api/wallet", "/api/keys"),
            ("/results", "/api/ai-jobs", "/api/account/progress"),
            ("/wallet", "/api/wallet/transactions", "/api/wallet/summary"),
        ):
            moved = shift_of(tab, path, early, late)
            assert moved < SHIFT_MAX, (path, moved)
        # Nor is a program cut, or beside an empty column.
        tab.open("/keys")
        code = page.locator(".code pre")
        box, frame = code.bounding_box(), page.locator(".code").bounding_box()
        assert box is not None
        assert frame is not None
        assert box["width"] > 0.95 * frame["width"]
        assert code.evaluate("pre => pre.scrollWidth <= pre.clientWidth")


def test_programs_run_as_they_are_shown(customer: WebPage, web: WebServer, tmp_path: Path) -> None:
    page = open_keys(customer)
    shutil.copy(PHOTO, tmp_path)
    for effect, language in product((NOTHING_IN, PHOTO_IN), ("curl", "Python", "JavaScript")):
        if (language, effect) == ("curl", PHOTO_IN) and not shutil.which("jq"):
            continue
        page.get_by_label("Effect", exact=True).select_option(effect)
        page.get_by_role("tab", name=language).click()
        text = page.get_by_role("tabpanel").locator("code").inner_text()
        printed = run_program(language, text, tmp_path, web.customer.key)
        assert ("completed" if language == "curl" else ".png") in printed
    page.get_by_role("tab", name="ComfyUI clients").click()
    text = page.get_by_role("tabpanel").locator("code").inner_text()
    assert "queue_running" in run_program("curl", text, tmp_path, web.customer.key)
    customer.screenshot("keys")


def run_program(language: str, text: str, folder: Path, key: str) -> str:
    commands = {
        "curl": ["bash", "-euc", text],
        "Python": [sys.executable, "-c", text],
        "JavaScript": [shutil.which("node") or "node", "--input-type=module", "-e", text],
    }
    ran = subprocess.run(
        commands[language],
        cwd=folder,
        env={**os.environ, "COMFYFLEET_KEY": key},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout
