"""Sign-in and sign-out, the catalogue, and the frame around all pages."""

import re

from playwright.sync_api import Browser, Page, expect
from tests.support.server.commands import comfyfleet
from tests.support.server.web import EFFECTS, TOKENS, WebPage, WebServer, open_page


def test_a_customer_signs_in_and_sees_effects_and_balance(customer: WebPage) -> None:
    page = customer.page
    expect(page.get_by_role("heading", name="Pick a look")).to_be_visible()
    for _, title, price, _ in EFFECTS:
        expect(
            page.get_by_role("link", name=re.compile(f"{title}.*{price} tokens"))
        ).to_be_visible()
    expect(page.get_by_role("link", name="Balance")).to_contain_text(str(TOKENS))


def test_a_visitor_looks_at_the_effects_and_signs_in_to_apply_one(
    stranger: WebPage, web: WebServer
) -> None:
    page = stranger.page
    stranger.open("/")
    page.get_by_role("link", name=re.compile("Softened photo.*3 tokens")).click()
    expect(page.get_by_role("heading", name="Softened photo")).to_be_visible()
    stranger.screenshot("effect of a visitor")
    assert stranger.serious_findings() == []
    page.get_by_role("link", name="Sign in to apply it").click()
    page.get_by_label("Key", exact=True).fill(web.customer.key)
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/effects/soften$"))
    expect(page.get_by_role("link", name="Balance")).to_be_visible()


def test_the_address_of_comfyfleet_open_makes_a_browser_the_owner_once(
    stranger: WebPage, browser: Browser, web: WebServer
) -> None:
    data = str(web.server.folder / "comfyfleet-data")
    link = comfyfleet("open", "--no-open", "--data", data).out.strip()
    page = stranger.page
    here = page.get_by_role("button", name="Continue on this machine")
    stranger.open("/sign-in")
    expect(page.get_by_text("comfyfleet open")).to_be_visible()
    expect(here).to_have_count(0)
    # Only the fragment differs: the browser would not load the page again.
    page.goto("about:blank")
    page.goto(link)
    page.reload()  # before its use the address stays valid
    here.click()
    expect(page).to_have_url(f"{web.url}/")
    page.goto(f"{web.url}/console")
    expect(page.get_by_role("navigation").first).to_be_visible()
    with open_page(browser, web.url) as other:
        other.expect_problem("403")
        other.page.goto(link)
        other.page.get_by_role("button", name="Continue on this machine").click()
        expect(
            other.page.get_by_text(re.compile("comfyfleet open.* for a new link"))
        ).to_be_visible()


def test_no_script_can_read_the_session_and_no_storage_holds_it(
    customer: WebPage, web: WebServer
) -> None:
    kept = customer.page.evaluate(
        "document.cookie + JSON.stringify({...localStorage}) + JSON.stringify({...sessionStorage})"
    )
    assert web.customer.key not in kept
    assert "comfyfleet" not in customer.page.evaluate("document.cookie")


def test_an_operator_gets_to_the_console(operator: WebPage) -> None:
    page = operator.page
    expect(page).to_have_url(re.compile("/console$"))
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page).to_have_url(re.compile("/console/jobs$"))
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_have_attribute(
        "aria-current", "page"
    )


def test_a_wrong_key_is_told_at_the_field_and_another_one_can_be_tried(
    stranger: WebPage, web: WebServer
) -> None:
    stranger.expect_problem("401")
    stranger.open("/sign-in")
    page = stranger.page
    page.get_by_role("button", name="Sign in", exact=True).click()
    expect(page.get_by_text("Enter a key.")).to_be_visible()
    page.get_by_label("Key", exact=True).fill("cf_wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_text("This key is unknown, expired or revoked.")).to_be_visible()
    expect(page.get_by_label("Key", exact=True)).to_have_attribute("aria-invalid", "true")
    page.get_by_label("Key", exact=True).fill(web.customer.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Balance")).to_be_visible()


def test_whoever_is_not_signed_in_is_led_to_the_sign_in_and_back(
    stranger: WebPage, web: WebServer
) -> None:
    page = stranger.page
    stranger.open("/wallet?type=refund")
    expect(page).to_have_url(re.compile(r"/sign-in\?next="))
    page.get_by_label("Key", exact=True).fill(web.customer.key)
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{web.url}/wallet?type=refund")


def test_a_customer_sees_no_console(customer: WebPage) -> None:
    customer.open("/console/jobs")
    expect(customer.page.get_by_text("This page is for operators")).to_be_visible()


def test_who_signs_out_is_out_in_every_tab(customer: WebPage) -> None:
    other = customer.page.context.new_page()
    other.goto(customer.url)
    expect(other.get_by_role("link", name="Balance")).to_be_visible()
    page = customer.page
    page.get_by_role("button", name=re.compile("Account of")).click()
    page.get_by_role("menuitem", name="Sign out").click()
    expect(page.get_by_role("link", name="Sign in").first).to_be_visible()
    other.goto(f"{customer.url}/wallet")
    expect(other).to_have_url(re.compile("/sign-in"))


def test_the_catalogue_is_searched(customer: WebPage) -> None:
    page = customer.page
    page.get_by_role("searchbox", name="Find an effect").fill("clip invert")
    expect(page.get_by_role("link", name=re.compile("Inverted clip"))).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("Softened photo"))).to_have_count(0)
    page.get_by_role("searchbox", name="Find an effect").fill("nothing like it")
    page.get_by_role("button", name="Show all").click()
    expect(page.get_by_role("link", name=re.compile("Softened photo"))).to_be_visible()


def test_a_control_plane_that_is_gone_is_told_and_the_page_stays(
    customer: WebPage, web: WebServer
) -> None:
    customer.expect_problem("Failed to load resource")
    page = customer.page
    page.route("**/api/**", lambda route: route.abort())
    page.evaluate("window.dispatchEvent(new Event('online'))")
    expect(page.get_by_text("can't be reached").first).to_be_visible()
    expect(page.get_by_role("link", name=re.compile("Softened photo"))).to_be_visible()
    page.unroute("**/api/**")
    page.get_by_role("button", name="Retry", exact=True).first.click()
    expect(page.get_by_text("can't be reached")).to_have_count(0)


def test_it_works_on_a_phone(browser: Browser, web: WebServer) -> None:
    with open_page(browser, web.url, phone=True, theme="light") as opened:
        opened.sign_in(web.customer.key)
        page = opened.page
        assert opened.pixels_too_wide() <= 0
        page.get_by_role("navigation", name="Main").get_by_role("link", name="Wallet").click()
        expect(page).to_have_url(re.compile("/wallet$"))
        find_all_on_a_phone(page)
        opened.sign_in(web.operator_key, "/console")
        page.get_by_role("button", name="More").click()
        page.get_by_role("dialog").get_by_role("link", name="Audit").click()
        expect(page).to_have_url(re.compile("/console/audit$"))
        expect(page.get_by_role("dialog")).to_have_count(0)


def find_all_on_a_phone(page: Page) -> None:
    """The person's menu and their page lead to the same places, each by one word; a finger hits them."""
    places = ["Results", "Pipelines", "Graphs", "Triggers", "Wallet", "Keys", "Webhooks"]
    page.get_by_role("button", name=re.compile("^Account of")).click()
    items = page.get_by_role("menuitem")
    assert [each for each in items.all_inner_texts() if each in places] == places
    assert all(box["height"] >= 44 for each in items.all() if (box := each.bounding_box()))
    icons = [each.inner_html() for each in items.locator("svg").all()]
    assert len(icons) == len(set(icons))
    page.keyboard.press("Escape")
    page.get_by_role("navigation", name="Main").get_by_role("link", name="Account").click()
    links = page.get_by_role("navigation", name="More").locator("b")
    expect(links).to_have_text(places)
    for name in ("Pipelines", "Graphs", "Triggers"):
        more = page.get_by_role("navigation", name="More")
        more.get_by_role("link", name=re.compile(f"^{name}")).click()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        page.go_back()


def test_the_theme_is_the_systems_until_one_is_chosen(browser: Browser, web: WebServer) -> None:
    for theme, background in (("dark", "rgb(16, 16, 16)"), ("light", "rgb(242, 242, 242)")):
        with open_page(browser, web.url, theme=theme) as opened:
            opened.open("/sign-in")
            expect(opened.page.locator("body")).to_have_css("background-color", background)
    with open_page(browser, web.url, theme="dark") as opened:
        opened.open("/")
        opened.page.get_by_role("button", name="Theme").click()
        opened.page.get_by_role("menuitemcheckbox", name="Light").click()
        opened.page.reload()
        expect(opened.page.locator("html")).to_have_attribute("data-theme", "light")


def test_the_keyboard_alone_is_enough(stranger: WebPage, web: WebServer) -> None:
    stranger.open("/sign-in")
    page = stranger.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    for _ in range(10):
        if page.evaluate("document.activeElement.name") == "key":
            break
        page.keyboard.press("Tab")
    page.keyboard.type(web.customer.key)
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="Balance")).to_be_visible()
    page.keyboard.press("Control+k")
    page.get_by_role("combobox", name="Search and commands").press_sequentially("wall")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/wallet$"))
    expect(page.locator("#content")).to_be_focused()
