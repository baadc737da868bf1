"""Every page: no serious finding of axe-core, nothing too wide for a phone, nothing wrong on the console."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, expect
from tests.support.server.web import WebPage, WebServer, open_page

# A page builder adds the addresses of each page here. Anybody may see the first ones.
PUBLIC = ("/", "/sign-in", "/media/a/b")
CUSTOMERS = (
    "/effects/soften",
    "/",
    "/media",
    "/wallet",
    "/keys",
    "/webhooks",
    "/triggers",
    "/account",
    "/results",
    "/graphs",
    "/graphs/new",
    "/graph-runs",
    "/graph-runs/compare",
    "/pipelines",
)
OPERATORS = (
    "/console",
    "/console/queue",
    "/console/jobs",
    "/console/workers",
    "/console/workers?view=all",
    "/console/workers?view=matrix",
    "/console/fleets",
    "/console/workflows",
    "/console/workflows/soften",
    "/console/workflows/soften?part=versions",
    "/console/effects",
    "/console/effects/soften",
    "/console/tenants",
    "/console/audit",
    "/console/settings",
)
ROUTES = [
    *(("nobody", path) for path in PUBLIC),
    *(("customer", path) for path in CUSTOMERS),
    *(("operator", path) for path in OPERATORS),
]
Tabs: TypeAlias = dict[tuple[str, str], WebPage]
LOOKS = {"desktop, dark": (False, "dark"), "phone, light": (True, "light")}


@pytest.fixture(scope="module")
def tabs(browser: Browser, web: WebServer) -> Iterator[Tabs]:
    """Signed in once for each kind of person and look: to sign in takes longer than to look."""
    keys = {"nobody": None, "customer": web.customer.key, "operator": web.operator_key}
    with ExitStack() as stack:
        opened: Tabs = {}
        for (look, (phone, theme)), (person, key) in product(LOOKS.items(), keys.items()):
            page = stack.enter_context(open_page(browser, web.url, phone=phone, theme=theme))
            opened[person, look] = page
            if key:
                page.sign_in(key)
        yield opened


@pytest.mark.parametrize(("person", "path"), ROUTES)
@pytest.mark.parametrize("look", LOOKS)
def test_a_page_is_for_everybody(tabs: Tabs, person: str, path: str, look: str) -> None:
    page = tabs[person, look]
    page.open(path)
    page.screenshot(f"{person}{path.replace('/', '-')} {look}")
    assert page.serious_findings() == []
    assert page.pixels_too_wide() <= 0
    problems, page.problems[:] = [*page.problems], []
    assert problems == []


def test_an_unknown_address_says_so_and_leads_on(stranger: WebPage) -> None:
    stranger.expect_problem("404")
    page = stranger.page
    stranger.open("/no/such/page")
    expect(page.get_by_text("Page not found")).to_be_visible()
    assert page.title().startswith("Page not found")
    page.get_by_role("link", name="Go to effects").click()
    expect(page.get_by_role("heading", name="Pick a look")).to_be_visible()
    icon = page.request.get(f"{stranger.url}/favicon.ico")
    assert (icon.status, icon.body()[:4]) == (200, b"\0\0\1\0")


def test_the_content_policy_is_kept_by_a_page_that_breaks_it(stranger: WebPage) -> None:
    """Or the other tests would see nothing."""
    stranger.open("/sign-in")
    stranger.page.evaluate(
        "() => { const made = document.createElement('script'); made.textContent = 'window.ran = 1'; document.body.append(made) }"
    )
    stranger.page.evaluate("fetch('https://elsewhere.invalid/').catch(() => 0)")
    assert stranger.page.evaluate("window.ran") is None
    assert any("script" in each for each in stranger.problems)
    assert any("elsewhere.invalid" in each for each in stranger.problems)
    stranger.problems.clear()
