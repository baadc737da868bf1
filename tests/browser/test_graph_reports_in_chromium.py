"""The timeline of a run and the comparison of two, as people see them."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect
from tests.browser.test_graphs_in_chromium import DRAW, SLOW, graph, run
from tests.support.server.web import WebPage, WebServer, open_page

WIRES = (
    {"from": "draw.output", "to": "look.input"},
    {"from": "look.approved", "to": "picture.value"},
)
LOOK = {"id": "look", "type": "approve", "message": "Is it sharp?"}


@pytest.fixture(scope="module", autouse=True)
def workflows(web: WebServer) -> None:
    web.admin("/workflows", slug="slow", document=SLOW, properties=[], price_tokens=1)


@pytest.fixture
def phone(browser: Browser, web: WebServer) -> Iterator[WebPage]:
    with open_page(browser, web.url, phone=True, theme="light") as page:
        page.sign_in(web.customer.key)
        yield page


def finished(web: WebServer, graph_id: str) -> str:
    """A run that has been answered and is over."""
    run_id = run(web, graph_id)
    with (
        web.customer.http() as http,
        http.stream("GET", f"/api/graph-runs/{run_id}/events") as told,
    ):
        for line in told.iter_lines():
            if '"waiting_for_user"' in line:
                break
    with web.customer.http() as http:
        body = {"node": "look", "choice": "approve"}
        assert http.post(f"/api/graph-runs/{run_id}/answer", json=body).status_code == 200
    return run_id


def test_a_run_is_looked_at_as_a_timeline_while_it_goes_on_and_after(
    customer: WebPage, web: WebServer
) -> None:
    graph_id = graph(web, "Looked at", DRAW, LOOK, wires=WIRES)
    page = customer.page
    customer.open(f"/graphs/{graph_id}/runs/{run(web, graph_id)}")
    # The dialog covers the page as soon as the run asks.
    asks = page.get_by_role("dialog", name="look needs your approval")
    expect(asks).to_be_visible()
    asks.get_by_role("button", name="Later").click()
    page.get_by_role("button", name="Timeline").click()
    expect(page).to_have_url(re.compile(r"\?view=timeline$"))
    table = page.get_by_role("table", name="Timeline")
    row = table.get_by_role("row", name=re.compile("look, Needs your input"))
    expect(row.locator(".timeline-bar.is-asking")).to_be_visible()
    expect(row).to_contain_text("for a person")
    customer.screenshot("timeline asks")
    page.get_by_role("button", name="Answer").click()
    asks.get_by_role("button", name="Approve").first.click()
    expect(page.get_by_text("Succeeded", exact=True)).to_be_visible()
    expect(table.get_by_role("row", name=re.compile("draw, Done.*critical"))).to_be_visible()
    path = page.get_by_role("listitem").filter(has_text="look")
    expect(path.last).to_contain_text("for a person")
    customer.screenshot("timeline done")
    assert customer.serious_findings() == []
    table.get_by_role("button", name="draw, Done").focus()
    page.keyboard.press("Enter")
    panel = page.get_by_role("complementary", name="Details of draw")
    expect(panel.get_by_text("Attempts")).to_be_visible()
    customer.screenshot("timeline node")
    page.get_by_role("button", name="Timeline").click()
    expect(page.locator(".canvas-board")).to_be_visible()


def test_two_runs_are_compared_from_a_run_and_from_the_list(
    customer: WebPage, web: WebServer
) -> None:
    graph_id = graph(web, "Compared", DRAW, LOOK, wires=WIRES)
    other = {**DRAW, "priority": 5}
    one, two = finished(web, graph_id), finished(web, graph(web, "Other", other, LOOK, wires=WIRES))
    page = customer.page
    customer.open(f"/graphs/{graph_id}/runs/{one}")
    page.get_by_role("link", name="Compare").click()
    expect(page.get_by_text("Pick two runs").first).to_be_visible()
    page.get_by_label("Second run").select_option(two)
    expect(page).to_have_url(re.compile(f"a={one}&b={two}"))
    nodes = page.get_by_role("table", name="Nodes and properties")
    expect(nodes.get_by_role("row", name=re.compile("draw.priority"))).to_contain_text("5")
    expect(nodes.get_by_role("row")).to_have_count(2)
    customer.screenshot("compare")
    assert customer.serious_findings() == []
    page.get_by_role("radio", name="Everything").check()
    expect(page.get_by_role("table", name="Workflow versions")).to_contain_text("slow v1")
    customer.screenshot("compare everything")
    page.get_by_role("button", name="Swap").click()
    expect(page).to_have_url(re.compile(f"a={two}&b={one}"))
    three = finished(web, graph_id)
    customer.open(f"/graphs/{graph_id}/runs")
    page.get_by_role("link", name="Compare two runs").click()
    expect(page).to_have_url(re.compile(f"a={one}&b={three}"))
    expect(page.get_by_text(re.compile("different, .* the same"))).to_be_visible()


def test_both_fit_a_phone(phone: WebPage, web: WebServer) -> None:
    graph_id = graph(web, "On a phone", DRAW, LOOK, wires=WIRES)
    one, two = finished(web, graph_id), finished(web, graph_id)
    for address in (
        f"/graphs/{graph_id}/runs/{one}?view=timeline",
        f"/graph-runs/compare?a={one}&b={two}&show=all",
    ):
        phone.open(address)
        expect(phone.page.get_by_role("table").first).to_be_visible()
        phone.screenshot(f"phone {address.split('?')[0].rpartition('/')[2][:8]}")
        assert phone.serious_findings() == []
        assert phone.pixels_too_wide() <= 0


def test_a_run_of_somebody_else_is_unknown(customer: WebPage) -> None:
    customer.expect_problem("404")
    unknown = "00000000-0000-4000-8000-000000000000"
    customer.open(f"/graph-runs/compare?a={unknown}&b={unknown}")
    expect(customer.page.get_by_text("Run not found")).to_be_visible()
